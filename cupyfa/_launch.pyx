# distutils: language = c++
# cython: language_level=3, boundscheck=False, wraparound=False
"""Tensor maps, parameter packing and kernel launches.

The structs come from ``cuda/params.h``, the file that the kernels read, so host and device cannot disagree. The
functions of the driver are looked up in libcuda at the first launch: this module builds and packs without CUDA.
"""

from libc.stdint cimport uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset

from cupyfa.errors import LaunchError

cdef extern from "<dlfcn.h>" nogil:
    void *dlopen(const char *filename, int flags)
    void *dlsym(void *handle, const char *symbol)
    int RTLD_NOW

cdef extern from "params.h" namespace "cupyfa" nogil:
    int packed_rows

    cdef cppclass TensorMap:
        unsigned long long opaque[16]

    cdef cppclass FwdParams:
        TensorMap q, k, v, o
        float *lse
        long long lse_stride_batch, lse_stride_head, lse_stride_row
        const float *sink
        const float *alibi_slopes
        long long sink_stride, alibi_stride_batch, alibi_stride_head
        float scale_log2, softcap_slope, softcap
        int seqlen_q, seqlen_k, q_step, o_shift, last_diagonal, first_diagonal
        unsigned heads_q, heads_per_kv, heads_total, tiles_m, tiles, heads_per_section
        const Plan *plan
        unsigned *tile_counter
        TensorMap bias
        const void *bias_data
        long long bias_stride_batch, bias_stride_head, bias_stride_row, bias_stride_key
        int bias_rows, bias_keys
        float scale

    cdef cppclass PackedTile:
        pass

    cdef cppclass Plan:
        PackedTile tiles[1]

    cdef cppclass PlanParams:
        const int *cu_seqlens_q
        const int *cu_seqlens_k
        const int *seqused_q
        const int *seqused_k
        Plan *plan
        unsigned sequences
        int rows_q, rows_k, q_step, k_step, total_q, total_k, tile_m, tile_n, window
        unsigned heads_q, heads_per_kv, keys_in_l2, multiprocessors
        int tiles_grow, longest_first

    cdef cppclass KernelTraits:
        int threads, shared_bytes, cluster_size, tile_m, tile_n, box_cols, bias_box_cols, bias_box_rows
        int bias_swizzle
        int persistent, dynamic
        int producer_registers, consumer_registers

cdef extern from "_driver.h" namespace "cupyfa::driver" nogil:
    ctypedef int Result
    ctypedef void *Stream
    ctypedef void *DriverFunction "cupyfa::driver::Function"
    unsigned cluster_dimension, programmatic_stream_serialization
    int max_dynamic_shared_size_bytes, tensor_map_float16, tensor_map_float32, tensor_map_bfloat16
    int tensor_map_interleave_none, tensor_map_swizzle_none, tensor_map_swizzle_32b
    int tensor_map_swizzle_64b, tensor_map_swizzle_128b
    int tensor_map_l2_promotion_128b, tensor_map_l2_promotion_256b
    int tensor_map_oob_fill_zeros

    cdef union LaunchAttributeValue "decltype(cupyfa::driver::LaunchAttribute::value)":
        unsigned cluster[3]
        int flag

    cdef cppclass LaunchAttribute:
        unsigned id
        LaunchAttributeValue value

    cdef cppclass LaunchConfig:
        unsigned grid[3]
        unsigned block[3]
        unsigned shared_bytes
        Stream stream
        LaunchAttribute *attributes
        unsigned attribute_count

    ctypedef Result (*GetErrorName)(Result, const char **)
    ctypedef void *Context
    ctypedef Result (*CtxGetCurrent)(Context *)
    ctypedef Result (*CtxSetCurrent)(Context)
    ctypedef Result (*StreamIsCapturing)(Stream, int *)
    ctypedef Result (*StreamGetId)(Stream, unsigned long long *)
    ctypedef Result (*FuncSetAttribute)(DriverFunction, int, int)
    ctypedef Result (*LaunchKernelEx)(const LaunchConfig *, DriverFunction, void **, void **)
    ctypedef Result (*TensorMapEncodeTiled)(
        TensorMap *, int, uint32_t, void *, const uint64_t *, const uint64_t *, const uint32_t *, const uint32_t *,
        int, int, int, int)

cdef GetErrorName cu_get_error_name = NULL
cdef CtxGetCurrent cu_ctx_get_current = NULL
cdef CtxSetCurrent cu_ctx_set_current = NULL
cdef StreamIsCapturing cu_stream_is_capturing = NULL
cdef StreamGetId cu_stream_get_id = NULL
cdef FuncSetAttribute cu_func_set_attribute = NULL
cdef LaunchKernelEx cu_launch_kernel_ex = NULL
cdef TensorMapEncodeTiled cu_tensor_map_encode_tiled = NULL

PACKED_ROWS = packed_rows
PARAMETER_SIZES = {
    "TensorMap": sizeof(TensorMap),
    "FwdParams": sizeof(FwdParams),
    "PackedTile": sizeof(PackedTile),
    "Plan": sizeof(Plan),
    "PlanParams": sizeof(PlanParams),
    "KernelTraits": sizeof(KernelTraits),
    "LaunchAttribute": sizeof(LaunchAttribute),
    "LaunchConfig": sizeof(LaunchConfig),
}


cdef void *_driver_function(void *library, bytes name) except NULL:
    cdef void *function = dlsym(library, name)
    if function == NULL:
        raise LaunchError(f"the CUDA driver has no {name.decode()}; update the driver to CUDA 12 or newer")
    return function


cdef int _load_driver() except -1:
    """Look the driver's functions up, once. Safe to run twice, should two threads come here together."""
    global cu_get_error_name, cu_ctx_get_current, cu_ctx_set_current, cu_stream_is_capturing, cu_func_set_attribute
    global cu_launch_kernel_ex, cu_tensor_map_encode_tiled, cu_stream_get_id
    if cu_launch_kernel_ex != NULL:
        return 0
    cdef void *library = dlopen(b"libcuda.so.1", RTLD_NOW)
    if library == NULL:
        raise LaunchError("libcuda.so.1 was not found: a launch needs an NVIDIA driver")
    cu_get_error_name = <GetErrorName>_driver_function(library, b"cuGetErrorName")
    cu_ctx_get_current = <CtxGetCurrent>_driver_function(library, b"cuCtxGetCurrent")
    cu_ctx_set_current = <CtxSetCurrent>_driver_function(library, b"cuCtxSetCurrent")
    cu_stream_is_capturing = <StreamIsCapturing>_driver_function(library, b"cuStreamIsCapturing")
    cu_stream_get_id = <StreamGetId>_driver_function(library, b"cuStreamGetId")
    cu_func_set_attribute = <FuncSetAttribute>_driver_function(library, b"cuFuncSetAttribute")
    cu_tensor_map_encode_tiled = <TensorMapEncodeTiled>_driver_function(library, b"cuTensorMapEncodeTiled")
    cu_launch_kernel_ex = <LaunchKernelEx>_driver_function(library, b"cuLaunchKernelEx")
    return 0


cdef str _result_name(Result result):
    cdef const char *name = NULL
    if cu_get_error_name(result, &name) != 0 or name == NULL:
        return f"CUresult {result}"
    return name.decode()


cdef class TensorMapGeometry:
    """A tensor as TMA sees it, except for its address.

    Parameters
    ----------
    dtype : str
        ``"float16"``, ``"bfloat16"`` or ``"float32"``.
    shape : tuple of int
        Up to five dimensions, innermost first, none of them 0; see ``FwdParams``.
    strides : tuple of int
        Bytes from one index to the next along the dimensions but the first; multiples of 16.
    box : tuple of int
        Columns and rows of one copy.
    swizzle : {128, 64, 32, 0}
        Bytes of the swizzle span; 0: rows are written as they are.
    l2_promotion : {256, 128}
        Bytes that L2 reads from memory for a request.
    """

    cdef readonly str dtype
    cdef readonly tuple shape, strides, box
    cdef readonly int swizzle, l2_promotion
    cdef int _type, _swizzle
    cdef uint32_t _rank
    cdef uint64_t _shape[5]
    cdef uint64_t _strides[4]
    cdef uint32_t _box[5]
    cdef dict _encoded  # address -> 128 bytes: the rest of the key is this object

    def __init__(self, str dtype, tuple shape, tuple strides, tuple box, int swizzle=128,
                 int l2_promotion=256):
        if not 2 <= len(shape) <= 5 or len(strides) != len(shape) - 1:
            raise ValueError(f"a tensor map has 2 to 5 dimensions and a stride less, got {shape} and {strides}")
        self.dtype, self.shape, self.strides, self.box = dtype, shape, strides, box
        self.swizzle, self.l2_promotion = swizzle, l2_promotion
        self._type = {
            "float16": tensor_map_float16, "bfloat16": tensor_map_bfloat16, "float32": tensor_map_float32,
        }[dtype]
        self._swizzle = {
            0: tensor_map_swizzle_none, 32: tensor_map_swizzle_32b, 64: tensor_map_swizzle_64b,
            128: tensor_map_swizzle_128b,
        }[swizzle]
        self._rank = len(shape)
        for i in range(self._rank):
            self._shape[i] = shape[i]
            self._box[i] = box[i] if i < 2 else 1
            if i > 0:
                self._strides[i - 1] = strides[i - 1]
        self._encoded = {}

    cdef int _encode(self, uintptr_t address, TensorMap *map) except -1:
        """Fill ``map`` for an array at this address."""
        cdef uint32_t element_strides[5]
        cdef Result result
        cdef bytes cached = self._encoded.get(address)
        if cached is not None:
            memcpy(map, <const char *>cached, sizeof(TensorMap))
            return 0
        element_strides = [1, 1, 1, 1, 1]
        result = cu_tensor_map_encode_tiled(
            map, self._type, self._rank, <void *>address, self._shape, self._strides, self._box, element_strides,
            tensor_map_interleave_none, self._swizzle,
            tensor_map_l2_promotion_256b if self.l2_promotion == 256 else tensor_map_l2_promotion_128b,
            tensor_map_oob_fill_zeros)
        if result != 0:
            raise LaunchError(
                f"cuTensorMapEncodeTiled: {_result_name(result)} for {self.dtype} at {address:#x}, shape {self.shape}, "
                f"strides {self.strides} bytes, box {self.box}")
        if len(self._encoded) >= 32:  # a program that never reuses its arrays must not grow
            self._encoded.clear()
        self._encoded[address] = (<const char *>map)[:sizeof(TensorMap)]
        return 0

    def encode(self, uintptr_t address):
        """Return the driver's 128-byte tensor map for an array at this address.

        Parameters
        ----------
        address : int
            Device pointer, 16-byte aligned.

        Returns
        -------
        bytes
            The CUtensorMap.
        """
        cdef TensorMap map
        _load_driver()
        self._encode(address, &map)
        return (<const char *>&map)[:sizeof(TensorMap)]


cdef bint _is_capturing(Stream stream) noexcept:
    cdef int status = 0
    return cu_stream_is_capturing(stream, &status) == 0 and status != 0


cdef class Function:
    """A kernel's CUfunction.

    Parameters
    ----------
    pointer : int
        CUfunction; 0 where only packing is wanted.

    Attributes
    ----------
    launched : bool
        Whether it has been launched in this process, other than into a graph under capture.
    """

    cdef readonly uintptr_t pointer
    cdef readonly bint launched
    cdef Context _context  # in which the kernel was loaded

    def __init__(self, uintptr_t pointer):
        self.pointer = pointer

    cdef int _bind_context(self) except -1:
        """Give a thread that has no current context the kernel's, as calls of the CUDA runtime would."""
        cdef Context current = NULL
        cu_ctx_get_current(&current)
        if current == NULL and self._context != NULL:
            cu_ctx_set_current(self._context)
        return 0

    def allow_shared_memory(self, int shared_bytes):
        """Let the kernel use more than 48 KiB of dynamic shared memory.

        Parameters
        ----------
        shared_bytes : int
            Bytes of a CTA.
        """
        _load_driver()
        cu_ctx_get_current(&self._context)
        cdef Result result = cu_func_set_attribute(
            <DriverFunction>self.pointer, max_dynamic_shared_size_bytes, shared_bytes)
        if result != 0:
            raise LaunchError(f"cuFuncSetAttribute: {_result_name(result)} for {shared_bytes} bytes of shared memory")


cdef enum:
    per_thread_stream = 2  # CU_STREAM_PER_THREAD


cdef class TileCounters:
    """The counters from which the CTAs of a launch draw their tiles: launches that may run together have their own.

    A counter is 0 between launches. All launches on a stream share one. A launch under capture gets one of its own, as
    its graph may run beside anything but itself: of two executables of one graph, one has to wait for the other. They
    are not given back. Once there are no more, and on per-thread default streams, whose handle is the same for all
    threads, launches go without, and their tiles are dealt out.

    Parameters
    ----------
    pointer : int
        Device address of an array of 32-bit zeros.
    count : int
        Its length.
    owner : object
        Keeps the array alive.
    """

    cdef uintptr_t _pointer
    cdef readonly unsigned free
    cdef object _owner
    cdef dict _of_stream

    def __init__(self, uintptr_t pointer, unsigned count, owner=None):
        self._pointer, self.free, self._owner = pointer, count, owner
        self._of_stream = {}

    cdef uintptr_t _take(self) noexcept:
        if self.free == 0:
            return 0
        self.free -= 1
        return self._pointer + 4 * self.free

    cdef uintptr_t _of(self, Stream stream) except? 1:
        """Return the address of the counter for a launch on this stream, 0 for none."""
        cdef unsigned long long identity = 0
        if <uintptr_t>stream == per_thread_stream:
            return 0
        if _is_capturing(stream):
            return self._take()
        cdef Result result = cu_stream_get_id(stream, &identity)  # a handle is used again, its number is not
        if result != 0:
            raise LaunchError(f"cuStreamGetId: {_result_name(result)}")
        counter = self._of_stream.get(identity)
        if counter is None:
            counter = self._of_stream[identity] = self._take()
        return counter


cdef class LaunchGeometry:
    """How a kernel is launched.

    Parameters
    ----------
    grid, threads, shared_bytes : int
        CTAs, threads of a CTA and dynamic shared memory of a CTA.
    cluster_size : int
        CTAs of a cluster along x; 1 for none.
    programmatic : bool
        Programmatic dependent launch: the kernel may start before its predecessor in the stream has finished, and must
        wait for it itself.
    """

    cdef readonly unsigned grid, threads, shared_bytes, cluster_size
    cdef readonly bint programmatic

    def __init__(self, *, unsigned grid, unsigned threads, unsigned shared_bytes, unsigned cluster_size=1,
                 bint programmatic=False):
        self.grid, self.threads, self.shared_bytes = grid, threads, shared_bytes
        self.cluster_size, self.programmatic = cluster_size, programmatic

    def __repr__(self):
        return (f"LaunchGeometry(grid={self.grid}, threads={self.threads}, shared_bytes={self.shared_bytes}, "
                f"cluster_size={self.cluster_size}, programmatic={self.programmatic})")

    cdef int _launch(self, Function function, uintptr_t stream, void *params) except -1:
        cdef LaunchAttribute attributes[2]
        cdef LaunchConfig config
        cdef void *arguments[1]
        cdef DriverFunction pointer = <DriverFunction>function.pointer
        cdef Result result
        memset(&config, 0, sizeof(config))
        memset(attributes, 0, sizeof(attributes))
        config.grid = [self.grid, 1, 1]
        config.block = [self.threads, 1, 1]
        config.shared_bytes = self.shared_bytes
        config.stream = <Stream>stream
        config.attributes = attributes
        if self.cluster_size > 1:
            attributes[config.attribute_count].id = cluster_dimension
            attributes[config.attribute_count].value.cluster = [self.cluster_size, 1, 1]
            config.attribute_count += 1
        if self.programmatic:
            attributes[config.attribute_count].id = programmatic_stream_serialization
            attributes[config.attribute_count].value.flag = 1
            config.attribute_count += 1
        arguments[0] = params
        with nogil:
            result = cu_launch_kernel_ex(&config, pointer, arguments, NULL)
        if result != 0:
            raise LaunchError(f"cuLaunchKernelEx: {_result_name(result)} for {self!r}")
        if not function.launched and not _is_capturing(<Stream>stream):  # a captured launch has not run
            function.launched = True
        return 0


def launch(Function function not None, LaunchGeometry geometry not None, uintptr_t stream, bytes params not None):
    """Launch a kernel whose only parameter is the struct ``params``.

    Parameters
    ----------
    function : Function
        The kernel.
    geometry : LaunchGeometry
        Grid, block and attributes.
    stream : int
        CUstream.
    params : bytes
        The packed struct.
    """
    _load_driver()
    function._bind_context()
    geometry._launch(function, stream, <void *><char *>params)


def unpack_traits(bytes data):
    """Return the fields of a ``KernelTraits`` object by name.

    Parameters
    ----------
    data : bytes
        The object as it lies in the kernel's constant memory.

    Returns
    -------
    dict of str to int
        Field names and values.
    """
    if len(data) != sizeof(KernelTraits):
        raise ValueError(f"KernelTraits has {sizeof(KernelTraits)} bytes, got {len(data)}")
    cdef KernelTraits t
    memcpy(&t, <const char *>data, sizeof(t))
    return {
        "threads": t.threads, "shared_bytes": t.shared_bytes, "cluster_size": t.cluster_size, "tile_m": t.tile_m,
        "tile_n": t.tile_n, "box_cols": t.box_cols, "bias_box_cols": t.bias_box_cols,
        "bias_box_rows": t.bias_box_rows, "bias_swizzle": t.bias_swizzle, "persistent": t.persistent,
        "dynamic": t.dynamic,
        "producer_registers": t.producer_registers, "consumer_registers": t.consumer_registers,
    }


cdef class ForwardLauncher:
    """A forward kernel prepared for one problem: only addresses and the stream are missing.

    Parameters
    ----------
    function : Function
        The kernel.
    geometry : LaunchGeometry
        Grid, block and attributes.
    q, k, v, o : TensorMapGeometry
        The four tensors.
    lse_strides : tuple of int
        Elements, along batch, head and row.
    sink_stride : int
        Elements.
    alibi_strides : tuple of int
        Elements, along batch and head.
    bias_strides : tuple of int
        Elements, along batch, head, row and key.
    bias_rows, bias_keys : int
        As in ``FwdParams``.
    scale, scale_log2, softcap_slope, softcap : float
        As in ``FwdParams``.
    seqlen_q, seqlen_k, q_step, o_shift, last_diagonal, first_diagonal : int
        As in ``FwdParams``.
    heads_q, heads_per_kv, heads_total, tiles_m, tiles, heads_per_section : int
        As in ``FwdParams``.
    bias : TensorMapGeometry, optional
        None if TMA does not copy one.
    counters : TileCounters, optional
        Of the kernel; None if its tiles are dealt out.
    """

    cdef readonly Function function
    cdef readonly TileCounters counters
    cdef readonly LaunchGeometry geometry
    cdef readonly TensorMapGeometry q, k, v, o, bias
    cdef FwdParams *_params  # not a member: it is 64-byte aligned, which Python objects are not

    def __cinit__(self):
        self._params = new FwdParams()

    def __dealloc__(self):
        del self._params

    def __init__(self, *, Function function not None, LaunchGeometry geometry not None,
                 TensorMapGeometry q not None, TensorMapGeometry k not None, TensorMapGeometry v not None,
                 TensorMapGeometry o not None, tuple lse_strides, long long sink_stride, tuple alibi_strides,
                 tuple bias_strides, int bias_rows, int bias_keys, float scale, float scale_log2,
                 float softcap_slope, float softcap, int seqlen_q, int seqlen_k,
                 int q_step, int o_shift, int last_diagonal, int first_diagonal, unsigned heads_q,
                 unsigned heads_per_kv,
                 unsigned heads_total, unsigned tiles_m, unsigned tiles, unsigned heads_per_section,
                 TensorMapGeometry bias=None, TileCounters counters=None):
        cdef FwdParams *p = self._params
        self.function, self.geometry, self.counters = function, geometry, counters
        self.q, self.k, self.v, self.o, self.bias = q, k, v, o, bias
        p.lse_stride_batch, p.lse_stride_head, p.lse_stride_row = lse_strides
        p.sink_stride = sink_stride
        p.alibi_stride_batch, p.alibi_stride_head = alibi_strides
        p.bias_stride_batch, p.bias_stride_head, p.bias_stride_row, p.bias_stride_key = bias_strides
        p.bias_rows, p.bias_keys = bias_rows, bias_keys
        p.scale, p.scale_log2, p.softcap_slope, p.softcap = scale, scale_log2, softcap_slope, softcap
        p.seqlen_q, p.seqlen_k = seqlen_q, seqlen_k
        p.q_step, p.o_shift = q_step, o_shift
        p.last_diagonal, p.first_diagonal = last_diagonal, first_diagonal
        p.heads_q, p.heads_per_kv, p.heads_total = heads_q, heads_per_kv, heads_total
        p.tiles_m, p.tiles, p.heads_per_section = tiles_m, tiles, heads_per_section

    def __call__(self, addresses, uintptr_t stream, uintptr_t plan=0):
        """Launch on a stream.

        Parameters
        ----------
        addresses : sequence of int
            Of q, k, v, o, lse, sink, alibi_slopes and bias; 0 for one that the problem does not have. More are ignored.
        stream : int
            CUstream.
        plan : int
            Address of the plan of packed sequences.
        """
        cdef FwdParams p = self._params[0]
        cdef uintptr_t q, k, v, o, lse, sink, alibi_slopes, bias
        q, k, v, o, lse, sink, alibi_slopes, bias = addresses[:8]
        _load_driver()
        self.function._bind_context()
        self.q._encode(q, &p.q)
        self.k._encode(k, &p.k)
        self.v._encode(v, &p.v)
        self.o._encode(o, &p.o)
        if self.bias is not None:
            self.bias._encode(bias, &p.bias)
        p.lse, p.sink, p.alibi_slopes = <float *>lse, <const float *>sink, <const float *>alibi_slopes
        p.bias_data = <const void *>bias
        p.plan = <const Plan *>plan
        if self.counters is not None:
            p.tile_counter = <unsigned *>self.counters._of(<Stream>stream)
        self.geometry._launch(self.function, stream, &p)

    def pack(self, encode, addresses, uintptr_t tile_counter=0, uintptr_t plan=0):
        """Return the packed ``FwdParams`` without a launch, and without a driver.

        Parameters
        ----------
        encode : callable
            ``encode(geometry, address)`` returns the 128 bytes of a tensor map.
        addresses : sequence of int
            As for a launch.
        tile_counter, plan : int
            Addresses.

        Returns
        -------
        bytes
            The struct.
        """
        cdef FwdParams p = self._params[0]
        cdef uintptr_t q, k, v, o, lse, sink, alibi_slopes, bias
        q, k, v, o, lse, sink, alibi_slopes, bias = addresses[:8]
        _fill(&p.q, encode(self.q, q))
        _fill(&p.k, encode(self.k, k))
        _fill(&p.v, encode(self.v, v))
        _fill(&p.o, encode(self.o, o))
        if self.bias is not None:
            _fill(&p.bias, encode(self.bias, bias))
        p.lse, p.sink, p.alibi_slopes = <float *>lse, <const float *>sink, <const float *>alibi_slopes
        p.bias_data = <const void *>bias
        p.tile_counter, p.plan = <unsigned *>tile_counter, <const Plan *>plan
        return (<const char *>&p)[:sizeof(FwdParams)]


cdef int _fill(TensorMap *map, bytes encoded) except -1:
    if len(encoded) != sizeof(TensorMap):
        raise ValueError(f"a tensor map has {sizeof(TensorMap)} bytes, got {len(encoded)}")
    memcpy(map, <const char *>encoded, sizeof(TensorMap))
    return 0


def plan_bytes(tiles):
    """Return the size of a plan in memory.

    Parameters
    ----------
    tiles : int
        The most that it may list.

    Returns
    -------
    int
        Bytes.
    """
    return sizeof(Plan) + tiles * sizeof(PackedTile)


def pack_plan(addresses, uintptr_t plan, *, unsigned sequences, int rows_q, int rows_k, int q_step, int k_step,
              int total_q, int total_k, int tile_m, int tile_n, int window, unsigned heads_q, unsigned heads_per_kv,
              unsigned keys_in_l2, unsigned multiprocessors, bint tiles_grow, bint longest_first):
    """Return the packed ``PlanParams``.

    Parameters
    ----------
    addresses : sequence of int
        Of cu_seqlens_q, cu_seqlens_k, seqused_q and seqused_k; 0 for one that was not passed.
    plan : int
        Where the plan goes.
    sequences, rows_q, rows_k, q_step, k_step, total_q, total_k, tile_m, tile_n, window : int
        As in ``PlanParams``.
    heads_q, heads_per_kv, keys_in_l2, multiprocessors : int
        As in ``PlanParams``.
    tiles_grow, longest_first : bool
        As in ``PlanParams``.

    Returns
    -------
    bytes
        The struct.
    """
    cdef PlanParams p
    cdef uintptr_t cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    memset(&p, 0, sizeof(p))
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = addresses
    p.cu_seqlens_q, p.cu_seqlens_k = <const int *>cu_seqlens_q, <const int *>cu_seqlens_k
    p.seqused_q, p.seqused_k, p.plan = <const int *>seqused_q, <const int *>seqused_k, <Plan *>plan
    p.sequences, p.total_q, p.total_k = sequences, total_q, total_k
    p.rows_q, p.rows_k, p.q_step, p.k_step = rows_q, rows_k, q_step, k_step
    p.tile_m, p.tile_n, p.window = tile_m, tile_n, window
    p.heads_q, p.heads_per_kv, p.keys_in_l2 = heads_q, heads_per_kv, keys_in_l2
    p.multiprocessors, p.tiles_grow, p.longest_first = multiprocessors, tiles_grow, longest_first
    return (<const char *>&p)[:sizeof(PlanParams)]
