from collections.abc import Callable, Sequence

PACKED_ROWS: int
PARAMETER_SIZES: dict[str, int]

class TensorMapGeometry:
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, int]
    swizzle: int
    l2_promotion: int
    def __init__(
        self,
        dtype: str,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        box: tuple[int, int],
        swizzle: int = 128,
        l2_promotion: int = 256,
    ) -> None: ...
    def encode(self, address: int) -> bytes: ...

class Function:
    pointer: int
    launched: bool
    def __init__(self, pointer: int) -> None: ...
    def allow_shared_memory(self, shared_bytes: int) -> None: ...

class TileCounters:
    free: int
    def __init__(self, pointer: int, count: int, owner: object = None) -> None: ...

class LaunchGeometry:
    grid: int
    threads: int
    shared_bytes: int
    cluster_size: int
    programmatic: bool
    def __init__(
        self, *, grid: int, threads: int, shared_bytes: int, cluster_size: int = 1, programmatic: bool = False
    ) -> None: ...

class ForwardLauncher:
    function: Function
    geometry: LaunchGeometry
    counters: TileCounters | None
    q: TensorMapGeometry
    k: TensorMapGeometry
    v: TensorMapGeometry
    o: TensorMapGeometry
    bias: TensorMapGeometry | None
    def __init__(
        self,
        *,
        function: Function,
        geometry: LaunchGeometry,
        q: TensorMapGeometry,
        k: TensorMapGeometry,
        v: TensorMapGeometry,
        o: TensorMapGeometry,
        lse_strides: tuple[int, ...],
        sink_stride: int,
        alibi_strides: tuple[int, ...],
        bias_strides: tuple[int, ...],
        bias_rows: int,
        bias_keys: int,
        scale: float,
        scale_log2: float,
        softcap_slope: float,
        softcap: float,
        seqlen_q: int,
        seqlen_k: int,
        q_step: int,
        o_shift: int,
        last_diagonal: int,
        first_diagonal: int,
        heads_q: int,
        heads_per_kv: int,
        heads_total: int,
        tiles_m: int,
        tiles: int,
        heads_per_section: int,
        bias: TensorMapGeometry | None = None,
        counters: TileCounters | None = None,
    ) -> None: ...
    def __call__(self, addresses: Sequence[int], stream: int, plan: int = 0) -> None: ...
    def pack(
        self,
        encode: Callable[[TensorMapGeometry, int], bytes],
        addresses: Sequence[int],
        tile_counter: int = 0,
        plan: int = 0,
    ) -> bytes: ...

def launch(function: Function, geometry: LaunchGeometry, stream: int, params: bytes) -> None: ...
def unpack_traits(data: bytes) -> dict[str, int]: ...
def plan_bytes(tiles: int) -> int: ...
def pack_plan(
    addresses: Sequence[int],
    plan: int,
    *,
    sequences: int,
    rows_q: int,
    rows_k: int,
    q_step: int,
    k_step: int,
    total_q: int,
    total_k: int,
    tile_m: int,
    tile_n: int,
    window: int,
    heads_q: int,
    heads_per_kv: int,
    keys_in_l2: int,
    multiprocessors: int,
    tiles_grow: bool,
    longest_first: bool,
) -> bytes: ...
