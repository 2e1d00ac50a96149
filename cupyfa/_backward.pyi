PARAMETER_SIZES: dict[str, int]

Strides = tuple[int, ...]  # of batch, row, head and column

class BackwardPacking:
    def __init__(
        self,
        *,
        alibi_stride_batch: int,
        alibi_stride_head: int,
        bias_strides: Strides,
        scale_log2: float,
        scale: float,
        softcap_slope: float,
        softcap_log2: float,
        logit_scale: float,
        softcap: float,
        seqlen_q: int,
        seqlen_k: int,
        last_diagonal: int,
        first_diagonal: int,
        heads_q: int,
        heads_kv: int,
        heads_per_part: int,
        parts: int,
        tiles_m: int,
        tiles_n: int,
        heads_per_section: int,
    ) -> None: ...
    def pack(self, maps: tuple[bytes, ...], addresses: tuple[int, ...]) -> bytes: ...

class BiasGradientPacking:
    def __init__(self, *, strides: Strides, batches: int, heads: int, rows: int, keys: int, batch: int) -> None: ...
    def pack(self, scores: bytes, dbias: int) -> bytes: ...

class PreprocessPacking:
    def __init__(
        self,
        *,
        out_strides: Strides,
        dout_strides: Strides,
        lse_strides: Strides,
        dlse_strides: Strides,
        bias_strides: Strides,
        sink_stride: int,
        dq_head: int,
        turns_head: int,
        tile_m: int,
        lse_factor: float,
        bias_float32: bool,
        seqlen_q: int,
        rows: int,
        head_dim_v: int,
        heads_q: int,
    ) -> None: ...
    def pack(self, addresses: tuple[int, ...], vectors: bool) -> bytes: ...

class PostprocessPacking:
    def __init__(
        self,
        *,
        out_strides: Strides,
        scale: float,
        parts: int,
        part_stride: int,
        seqlen: int,
        head_dim: int,
        heads: int,
        tiles: int,
    ) -> None: ...
    def pack(self, addresses: tuple[int, ...], vectors: bool) -> bytes: ...

class SinkPacking:
    def __init__(self, *, dsink_stride: int, batch: int, parts_head: int) -> None: ...
    def pack(self, parts: int, dsink: int) -> bytes: ...
