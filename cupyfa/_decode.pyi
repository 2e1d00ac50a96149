PARAMETER_SIZES: dict[str, int]

Strides = tuple[int, ...]  # of batch, row, head and column

class CacheGeometry:
    def __init__(
        self,
        *,
        page_size: int,
        pages: int,
        capacity: int,
        appended: int,
        seqlens_stride: int,
        table_stride_batch: int,
        table_stride_page: int,
        batch_idx_stride: int,
        cos_stride: int,
        sin_stride: int,
        rotary_dim: int,
        positions: int,
        interleaved: bool,
    ) -> None: ...

class DecodePacking:
    def __init__(
        self,
        *,
        cache: CacheGeometry,
        q_strides: Strides,
        out_strides: Strides,
        lse_strides: Strides,
        cu_seqlens_stride: int,
        sink_stride: int,
        alibi_stride_batch: int,
        alibi_stride_head: int,
        scale_log2: float,
        softcap_slope: float,
        softcap: float,
        negate_scores: bool,
        q_vectors: bool,
        rotate_by_row: bool,
        head_dim: int,
        head_dim_v: int,
        seqlen_q: int,
        total_q: int,
        left: int,
        right: int,
        batch: int,
        heads_q: int,
        heads_kv: int,
        group: int,
        tiles_m: int,
        splits: int,
        blocks_per_split: int,
        box_rows: int,
    ) -> None: ...
    def pack(self, k: bytes, v: bytes, places: tuple[int, ...], addresses: tuple[int, ...]) -> bytes: ...

class AppendPacking:
    def __init__(
        self,
        *,
        cache: CacheGeometry,
        k_strides: Strides,
        v_strides: Strides,
        k_cache_strides: Strides,
        v_cache_strides: Strides,
        batch: int,
        heads_kv: int,
        head_dim: int,
        head_dim_v: int,
    ) -> None: ...
    def pack(self, places: tuple[int, ...], addresses: tuple[int, ...]) -> bytes: ...

class CombinePacking:
    def __init__(
        self,
        *,
        out_strides: Strides,
        lse_strides: Strides,
        cu_seqlens_stride: int,
        sink_stride: int,
        parts: int,
        batch: int,
        heads_q: int,
        seqlen_q: int,
        total_q: int,
        head_dim_v: int,
    ) -> None: ...
    def pack(self, addresses: tuple[int, ...]) -> bytes: ...
