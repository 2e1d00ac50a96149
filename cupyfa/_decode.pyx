# distutils: language = c++
# cython: language_level=3, boundscheck=False, wraparound=False
"""Parameter packing of the kernels that read and write key/value caches.

The structs come from ``cuda/decode_params.h``, the file that the kernels read. What a problem fixes is packed once; a
call adds its addresses.
"""

from libc.stdint cimport uintptr_t
from libc.string cimport memcpy, memset

cdef extern from "decode_params.h" namespace "cupyfa" nogil:
    cdef cppclass TensorMap:
        unsigned long long opaque[16]

    cdef cppclass Divisor:
        unsigned divisor, multiplier, shift

    cdef cppclass Strides:
        long long batch, row, head, column

    cdef cppclass CachePlaces:
        const int *cache_seqlens
        const int *page_table
        const int *cache_batch_idx
        long long seqlens_stride, table_stride_batch, table_stride_page, batch_idx_stride
        int cache_seqlen
        Divisor page_size
        int pages, capacity, appended

    cdef cppclass Rotary:
        const void *cos
        const void *sin
        long long cos_stride, sin_stride
        int dim, positions, interleaved

    cdef cppclass DecodeParams:
        TensorMap k, v
        CachePlaces places
        Rotary rotary
        const void *q
        void *out
        float *lse
        float *partial_out
        float *partial_lse
        const int *cu_seqlens_q
        const float *sink
        const float *alibi_slopes
        Strides q_strides, out_strides, lse_strides
        long long cu_seqlens_stride, sink_stride, alibi_stride_batch, alibi_stride_head
        float scale_log2, softcap_slope, softcap
        int negate_scores, q_vectors, head_dim, head_dim_v, seqlen_q, total_q, left, right, rotate_by_row
        int batch, heads_q
        Divisor heads_kv, group, tiles_m, splits
        int blocks_per_split, box_rows

    cdef cppclass AppendParams:
        CachePlaces places
        Rotary rotary
        const void *k
        const void *v
        void *k_cache
        void *v_cache
        Strides k_strides, v_strides, k_cache_strides, v_cache_strides
        int batch, heads_kv, head_dim, head_dim_v

    cdef cppclass CombineParams:
        const float *partial_out
        const float *partial_lse
        void *out
        float *lse
        const int *cu_seqlens_q
        const float *sink
        Strides out_strides, lse_strides
        long long cu_seqlens_stride, sink_stride
        int parts, batch, heads_q, seqlen_q, total_q, head_dim_v

PARAMETER_SIZES = {
    "CachePlaces": sizeof(CachePlaces),
    "Rotary": sizeof(Rotary),
    "DecodeParams": sizeof(DecodeParams),
    "AppendParams": sizeof(AppendParams),
    "CombineParams": sizeof(CombineParams),
}


cdef Divisor _divisor(unsigned divisor):
    """The multiplier is rounded up, and has 32 bits: exact for all numbers below 2**31."""
    cdef Divisor d
    cdef unsigned bits = 0
    while (<unsigned long long>1 << bits) < divisor:
        bits += 1
    d.divisor, d.shift = divisor, 31 + bits
    d.multiplier = <unsigned>(((<unsigned long long>1 << d.shift) + divisor - 1) // divisor)
    return d


cdef int _fill_strides(Strides *s, tuple strides) except -1:
    s.batch, s.row, s.head, s.column = strides
    return 0


cdef class CacheGeometry:
    """Where keys are in caches, and how they are rotated: all but the addresses.

    Parameters
    ----------
    page_size, pages, capacity, appended : int
        As in ``CachePlaces``.
    seqlens_stride, table_stride_batch, table_stride_page, batch_idx_stride : int
        Elements.
    cos_stride, sin_stride : int
        Elements.
    rotary_dim, positions : int
        As in ``Rotary``.
    interleaved : bool
        As in ``Rotary``.
    """

    cdef CachePlaces _places
    cdef Rotary _rotary

    def __init__(self, *, int page_size, int pages, int capacity, int appended, long long seqlens_stride,
                 long long table_stride_batch, long long table_stride_page, long long batch_idx_stride,
                 long long cos_stride, long long sin_stride, int rotary_dim, int positions, bint interleaved):
        memset(&self._places, 0, sizeof(CachePlaces))
        memset(&self._rotary, 0, sizeof(Rotary))
        self._places.page_size, self._places.pages = _divisor(page_size), pages
        self._places.capacity, self._places.appended = capacity, appended
        self._places.seqlens_stride, self._places.batch_idx_stride = seqlens_stride, batch_idx_stride
        self._places.table_stride_batch, self._places.table_stride_page = table_stride_batch, table_stride_page
        self._rotary.cos_stride, self._rotary.sin_stride = cos_stride, sin_stride
        self._rotary.dim, self._rotary.positions, self._rotary.interleaved = rotary_dim, positions, interleaved

    cdef int _place(self, CachePlaces *places, Rotary *rotary, tuple addresses) except -1:
        cdef uintptr_t cache_seqlens, page_table, cache_batch_idx, cos, sin
        cdef int cache_seqlen
        cache_seqlens, page_table, cache_batch_idx, cos, sin, cache_seqlen = addresses
        places[0], rotary[0] = self._places, self._rotary
        places.cache_seqlen = cache_seqlen
        places.cache_seqlens, places.page_table = <const int *>cache_seqlens, <const int *>page_table
        places.cache_batch_idx = <const int *>cache_batch_idx
        rotary.cos, rotary.sin = <const void *>cos, <const void *>sin
        return 0


cdef class DecodePacking:
    """``DecodeParams`` of a problem: only addresses are missing.

    Parameters
    ----------
    cache : CacheGeometry
        Of the caches.
    q_strides, out_strides, lse_strides : tuple of int
        Elements: batch, row, head and column.
    cu_seqlens_stride, sink_stride, alibi_stride_batch, alibi_stride_head : int
        Elements.
    scale_log2, softcap_slope, softcap : float
        As in ``DecodeParams``.
    negate_scores, q_vectors, rotate_by_row : bool
        As in ``DecodeParams``.
    head_dim, head_dim_v, seqlen_q, total_q, left, right, batch, heads_q, heads_kv, group : int
        As in ``DecodeParams``.
    tiles_m, splits, blocks_per_split, box_rows : int
        As in ``DecodeParams``.
    """

    cdef DecodeParams *_params  # not a member: it is 64-byte aligned, which Python objects are not
    cdef CacheGeometry _cache

    def __cinit__(self):
        self._params = new DecodeParams()

    def __dealloc__(self):
        del self._params

    def __init__(self, *, CacheGeometry cache not None, tuple q_strides, tuple out_strides, tuple lse_strides,
                 long long cu_seqlens_stride, long long sink_stride, long long alibi_stride_batch,
                 long long alibi_stride_head, float scale_log2, float softcap_slope, float softcap,
                 bint negate_scores, bint q_vectors, bint rotate_by_row, int head_dim, int head_dim_v, int seqlen_q,
                 int total_q, int left, int right, int batch, int heads_q, int heads_kv, int group, int tiles_m,
                 int splits, int blocks_per_split, int box_rows):
        cdef DecodeParams *p = self._params
        memset(p, 0, sizeof(DecodeParams))
        self._cache = cache
        _fill_strides(&p.q_strides, q_strides)
        _fill_strides(&p.out_strides, out_strides)
        _fill_strides(&p.lse_strides, lse_strides)
        p.cu_seqlens_stride, p.sink_stride = cu_seqlens_stride, sink_stride
        p.alibi_stride_batch, p.alibi_stride_head = alibi_stride_batch, alibi_stride_head
        p.scale_log2, p.softcap_slope, p.softcap = scale_log2, softcap_slope, softcap
        p.negate_scores, p.q_vectors, p.rotate_by_row = negate_scores, q_vectors, rotate_by_row
        p.head_dim, p.head_dim_v, p.seqlen_q, p.total_q = head_dim, head_dim_v, seqlen_q, total_q
        p.left, p.right = left, right
        p.batch, p.heads_q, p.blocks_per_split, p.box_rows = batch, heads_q, blocks_per_split, box_rows
        p.heads_kv, p.group = _divisor(heads_kv), _divisor(group)
        p.tiles_m, p.splits = _divisor(tiles_m), _divisor(splits)

    def pack(self, bytes k, bytes v, tuple places, tuple addresses):
        """Return the packed ``DecodeParams``.

        Parameters
        ----------
        k, v : bytes
            Tensor maps of the caches.
        places : tuple of int
            Addresses of cache_seqlens, page_table, cache_batch_idx, cos and sin, 0 for one that the problem does not
            have; and how many keys all sequences have, without cache_seqlens.
        addresses : tuple of int
            Of q, out, lse, partial_out, partial_lse, cu_seqlens_q, sink and alibi_slopes, likewise.

        Returns
        -------
        bytes
            The struct.
        """
        cdef DecodeParams p = self._params[0]
        cdef uintptr_t q, out, lse, partial_out, partial_lse, cu_seqlens_q, sink, alibi_slopes
        if len(k) != sizeof(TensorMap) or len(v) != sizeof(TensorMap):
            raise ValueError(f"a tensor map has {sizeof(TensorMap)} bytes, got {len(k)} and {len(v)}")
        memcpy(&p.k, <const char *>k, sizeof(TensorMap))
        memcpy(&p.v, <const char *>v, sizeof(TensorMap))
        self._cache._place(&p.places, &p.rotary, places)
        q, out, lse, partial_out, partial_lse, cu_seqlens_q, sink, alibi_slopes = addresses
        p.q, p.out, p.lse = <const void *>q, <void *>out, <float *>lse
        p.partial_out, p.partial_lse = <float *>partial_out, <float *>partial_lse
        p.cu_seqlens_q = <const int *>cu_seqlens_q
        p.sink, p.alibi_slopes = <const float *>sink, <const float *>alibi_slopes
        return (<const char *>&p)[:sizeof(DecodeParams)]


cdef class AppendPacking:
    """``AppendParams`` of a problem: only addresses are missing.

    Parameters
    ----------
    cache : CacheGeometry
        Of the caches.
    k_strides, v_strides, k_cache_strides, v_cache_strides : tuple of int
        Elements: batch or page, row, head and column.
    batch, heads_kv, head_dim, head_dim_v : int
        As in ``AppendParams``.
    """

    cdef AppendParams _params
    cdef CacheGeometry _cache

    def __init__(self, *, CacheGeometry cache not None, tuple k_strides, tuple v_strides, tuple k_cache_strides,
                 tuple v_cache_strides, int batch, int heads_kv, int head_dim, int head_dim_v):
        cdef AppendParams *p = &self._params
        memset(p, 0, sizeof(AppendParams))
        self._cache = cache
        _fill_strides(&p.k_strides, k_strides)
        _fill_strides(&p.v_strides, v_strides)
        _fill_strides(&p.k_cache_strides, k_cache_strides)
        _fill_strides(&p.v_cache_strides, v_cache_strides)
        p.batch, p.heads_kv, p.head_dim, p.head_dim_v = batch, heads_kv, head_dim, head_dim_v

    def pack(self, tuple places, tuple addresses):
        """Return the packed ``AppendParams``.

        Parameters
        ----------
        places : tuple of int
            As for `DecodePacking.pack`.
        addresses : tuple of int
            Of k, v, k_cache and v_cache.

        Returns
        -------
        bytes
            The struct.
        """
        cdef AppendParams p = self._params
        cdef uintptr_t k, v, k_cache, v_cache
        self._cache._place(&p.places, &p.rotary, places)
        k, v, k_cache, v_cache = addresses
        p.k, p.v, p.k_cache, p.v_cache = <const void *>k, <const void *>v, <void *>k_cache, <void *>v_cache
        return (<const char *>&p)[:sizeof(AppendParams)]


cdef class CombinePacking:
    """``CombineParams`` of a problem: only addresses are missing.

    Parameters
    ----------
    out_strides, lse_strides : tuple of int
        Elements: batch, row, head and column.
    cu_seqlens_stride, sink_stride : int
        Elements.
    parts, batch, heads_q, seqlen_q, total_q, head_dim_v : int
        As in ``CombineParams``.
    """

    cdef CombineParams _params

    def __init__(self, *, tuple out_strides, tuple lse_strides, long long cu_seqlens_stride, long long sink_stride,
                 int parts, int batch, int heads_q, int seqlen_q, int total_q, int head_dim_v):
        cdef CombineParams *p = &self._params
        memset(p, 0, sizeof(CombineParams))
        _fill_strides(&p.out_strides, out_strides)
        _fill_strides(&p.lse_strides, lse_strides)
        p.cu_seqlens_stride, p.sink_stride = cu_seqlens_stride, sink_stride
        p.parts, p.batch, p.heads_q, p.seqlen_q, p.total_q = parts, batch, heads_q, seqlen_q, total_q
        p.head_dim_v = head_dim_v

    def pack(self, tuple addresses):
        """Return the packed ``CombineParams``.

        Parameters
        ----------
        addresses : tuple of int
            Of partial_out, partial_lse, out, lse, cu_seqlens_q and sink; 0 for one that the problem does not have.

        Returns
        -------
        bytes
            The struct.
        """
        cdef CombineParams p = self._params
        cdef uintptr_t partial_out, partial_lse, out, lse, cu_seqlens_q, sink
        partial_out, partial_lse, out, lse, cu_seqlens_q, sink = addresses
        p.partial_out, p.partial_lse = <const float *>partial_out, <const float *>partial_lse
        p.out, p.lse, p.cu_seqlens_q = <void *>out, <float *>lse, <const int *>cu_seqlens_q
        p.sink = <const float *>sink
        return (<const char *>&p)[:sizeof(CombineParams)]
