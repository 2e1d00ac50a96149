# distutils: language = c++
# cython: language_level=3, boundscheck=False, wraparound=False
"""Parameter packing of the kernels that compute gradients.

The structs come from ``cuda/bwd_params.h``, the file that the kernels read. What a problem fixes is packed once; a
call adds its addresses.
"""

from libc.stdint cimport uintptr_t
from libc.string cimport memcpy, memset

cdef extern from "bwd_params.h" namespace "cupyfa" nogil:
    cdef cppclass TensorMap:
        unsigned long long opaque[16]

    cdef cppclass Strides:
        long long batch, row, head, column

    cdef cppclass Plan:
        pass

    cdef cppclass BwdParams:
        TensorMap q, k, v, dout, dk, dv, bias
        float *dk_parts
        float *dv_parts
        const float *lse_log2
        const float *delta
        float *dq
        unsigned *turns
        const float *alibi_slopes
        const Plan *plan
        long long alibi_stride_batch, alibi_stride_head
        const void *bias_data
        Strides bias_strides
        const float *bias_rows
        float scale_log2, scale, softcap_slope, softcap_log2, logit_scale, softcap
        int seqlen_q, seqlen_k, last_diagonal, first_diagonal
        unsigned heads_q, heads_kv, heads_per_kv, heads_per_part, parts, tiles_m, tiles_n, heads_per_section

    cdef cppclass BiasGradientParams:
        BwdParams scores
        void *dbias
        Strides strides
        int batches, heads, rows, keys, batch

    cdef cppclass PreprocessParams:
        const void *out
        const void *dout
        const float *lse
        const float *dlse
        const float *sink
        Strides out_strides, dout_strides, lse_strides, dlse_strides
        long long sink_stride
        float *lse_log2
        float *delta
        float *dsink
        const void *bias
        Strides bias_strides
        float *bias_rows
        float *dq
        long long dq_head
        unsigned *turns
        const int *cu_seqlens_q
        const int *seqused_q
        const Plan *plan
        unsigned turns_head
        int tile_m
        float lse_factor
        int bias_float32, seqlen_q, rows, head_dim_v
        unsigned heads_q
        int vectors

    cdef cppclass SinkParams:
        const float *parts
        float *dsink
        long long dsink_stride
        int batch, parts_head

    cdef cppclass PostprocessParams:
        const float *sums
        long long part_stride
        void *out
        Strides out_strides
        const int *cu_seqlens
        const int *seqused
        const Plan *plan
        float scale
        int parts, seqlen, head_dim
        unsigned heads, tiles
        int vectors

PARAMETER_SIZES = {
    "BwdParams": sizeof(BwdParams),
    "BiasGradientParams": sizeof(BiasGradientParams),
    "PreprocessParams": sizeof(PreprocessParams),
    "SinkParams": sizeof(SinkParams),
    "PostprocessParams": sizeof(PostprocessParams),
}


cdef int _fill_strides(Strides *s, tuple strides) except -1:
    s.batch, s.row, s.head, s.column = strides
    return 0


cdef class BackwardPacking:
    """``BwdParams`` of a problem: only addresses are missing.

    Parameters
    ----------
    alibi_stride_batch, alibi_stride_head : int
        Elements.
    bias_strides : tuple of int
        Elements from one batch, row, head and key to the next; 0 where the bias is the same for all.
    scale_log2, scale, softcap_slope, softcap_log2, logit_scale, softcap : float
        As in ``BwdParams``, as all the following.
    seqlen_q, seqlen_k, last_diagonal, first_diagonal : int
        Lengths and diagonals.
    heads_q, heads_kv, heads_per_part, parts, tiles_m, tiles_n, heads_per_section : int
        Heads and tiles.
    """

    cdef BwdParams _params

    def __init__(self, *, long long alibi_stride_batch, long long alibi_stride_head, tuple bias_strides,
                 float scale_log2, float scale, float softcap_slope, float softcap_log2, float logit_scale,
                 float softcap, int seqlen_q, int seqlen_k, int last_diagonal,
                 int first_diagonal, unsigned heads_q, unsigned heads_kv, unsigned heads_per_part, unsigned parts,
                 unsigned tiles_m, unsigned tiles_n, unsigned heads_per_section):
        cdef BwdParams *p = &self._params
        memset(p, 0, sizeof(BwdParams))
        p.alibi_stride_batch, p.alibi_stride_head = alibi_stride_batch, alibi_stride_head
        _fill_strides(&p.bias_strides, bias_strides)
        p.scale_log2, p.scale, p.softcap_slope, p.softcap_log2 = scale_log2, scale, softcap_slope, softcap_log2
        p.logit_scale, p.softcap = logit_scale, softcap
        p.seqlen_q, p.seqlen_k, p.last_diagonal, p.first_diagonal = seqlen_q, seqlen_k, last_diagonal, first_diagonal
        p.heads_q, p.heads_kv, p.heads_per_kv = heads_q, heads_kv, heads_q // heads_kv
        p.heads_per_part, p.parts = heads_per_part, parts
        p.tiles_m, p.tiles_n, p.heads_per_section = tiles_m, tiles_n, heads_per_section

    def pack(self, tuple maps, tuple addresses):
        """Return the struct.

        Parameters
        ----------
        maps : tuple of bytes
            The 128-byte tensor maps of q, k, v, dout, dk, dv and bias.
        addresses : tuple of int
            Of lse_log2, delta, dq, turns, alibi_slopes, dk_parts, dv_parts, the plan, bias_data and bias_rows; 0 for
            null.

        Returns
        -------
        bytes
            ``BwdParams``.
        """
        cdef BwdParams p = self._params
        cdef TensorMap *targets[7]
        cdef bytes encoded
        cdef uintptr_t lse_log2, delta, dq, turns, alibi_slopes, dk_parts, dv_parts, plan, bias_data, bias_rows
        targets = [&p.q, &p.k, &p.v, &p.dout, &p.dk, &p.dv, &p.bias]
        if [len(x) for x in maps] != 7 * [sizeof(TensorMap)]:
            raise ValueError(f"seven tensor maps have {sizeof(TensorMap)} bytes each, got {[len(x) for x in maps]}")
        for i in range(7):
            encoded = maps[i]
            memcpy(targets[i], <const char *>encoded, sizeof(TensorMap))
        lse_log2, delta, dq, turns, alibi_slopes, dk_parts, dv_parts, plan, bias_data, bias_rows = addresses
        p.bias_data, p.bias_rows = <const void *>bias_data, <const float *>bias_rows
        p.dk_parts, p.dv_parts = <float *>dk_parts, <float *>dv_parts
        p.lse_log2, p.delta, p.dq = <const float *>lse_log2, <const float *>delta, <float *>dq
        p.turns, p.alibi_slopes, p.plan = <unsigned *>turns, <const float *>alibi_slopes, <const Plan *>plan
        return (<const char *>&p)[:sizeof(BwdParams)]


cdef class BiasGradientPacking:
    """``BiasGradientParams`` of a problem: only ``BwdParams`` and the address of the gradient are missing.

    Parameters
    ----------
    strides : tuple of int
        Elements from one batch, row, head and key to the next.
    batches, heads, rows, keys, batch : int
        As in ``BiasGradientParams``.
    """

    cdef BiasGradientParams _params

    def __init__(self, *, tuple strides, int batches, int heads, int rows, int keys, int batch):
        cdef BiasGradientParams *p = &self._params
        memset(p, 0, sizeof(BiasGradientParams))
        _fill_strides(&p.strides, strides)
        p.batches, p.heads, p.rows, p.keys, p.batch = batches, heads, rows, keys, batch

    def pack(self, bytes scores, uintptr_t dbias):
        """Return the struct.

        Parameters
        ----------
        scores : bytes
            ``BwdParams``, of `BackwardPacking`.
        dbias : int
            Address.

        Returns
        -------
        bytes
            ``BiasGradientParams``.
        """
        cdef BiasGradientParams p = self._params
        if len(scores) != sizeof(BwdParams):
            raise ValueError(f"BwdParams have {sizeof(BwdParams)} bytes, got {len(scores)}")
        memcpy(&p.scores, <const char *>scores, sizeof(BwdParams))
        p.dbias = <void *>dbias
        return (<const char *>&p)[:sizeof(BiasGradientParams)]


cdef class PreprocessPacking:
    """``PreprocessParams`` of a problem: only addresses are missing.

    Parameters
    ----------
    out_strides, dout_strides, lse_strides, dlse_strides : tuple of int
        Elements from one batch, row, head and column to the next; 0 where there is no such axis.
    bias_strides : tuple of int
        As of `BackwardPacking`.
    sink_stride : int
        Elements.
    dq_head, turns_head : int
        Floats and counters of a head.
    lse_factor : float
        As in ``PreprocessParams``, as all the following.
    tile_m, bias_float32, seqlen_q, rows, head_dim_v, heads_q : int
        Type, sizes and heads.
    """

    cdef PreprocessParams _params

    def __init__(self, *, tuple out_strides, tuple dout_strides, tuple lse_strides, tuple dlse_strides,
                 tuple bias_strides, long long sink_stride, long long dq_head, unsigned turns_head, int tile_m,
                 float lse_factor, bint bias_float32, int seqlen_q, int rows, int head_dim_v, unsigned heads_q):
        cdef PreprocessParams *p = &self._params
        memset(p, 0, sizeof(PreprocessParams))
        _fill_strides(&p.out_strides, out_strides)
        _fill_strides(&p.dout_strides, dout_strides)
        _fill_strides(&p.lse_strides, lse_strides)
        _fill_strides(&p.dlse_strides, dlse_strides)
        _fill_strides(&p.bias_strides, bias_strides)
        p.sink_stride, p.dq_head, p.turns_head = sink_stride, dq_head, turns_head
        p.tile_m, p.lse_factor, p.bias_float32 = tile_m, lse_factor, bias_float32
        p.seqlen_q, p.rows, p.head_dim_v, p.heads_q = seqlen_q, rows, head_dim_v, heads_q

    def pack(self, tuple addresses, bint vectors):
        """Return the struct.

        Parameters
        ----------
        addresses : tuple of int
            Of out, dout, lse, dlse, sink, lse_log2, delta, dsink, bias, bias_rows, dq, turns, cu_seqlens_q,
            seqused_q and the plan; 0 for null.
        vectors : bool
            Whether rows of out and dout can be loaded by 16 bytes.

        Returns
        -------
        bytes
            ``PreprocessParams``.
        """
        cdef PreprocessParams p = self._params
        cdef uintptr_t out, dout, lse, dlse, sink, lse_log2, delta, dsink, bias, bias_rows, dq, turns
        cdef uintptr_t cu_seqlens_q, seqused_q, plan
        (out, dout, lse, dlse, sink, lse_log2, delta, dsink, bias, bias_rows, dq, turns, cu_seqlens_q, seqused_q,
         plan) = addresses
        p.out, p.dout = <const void *>out, <const void *>dout
        p.lse, p.dlse, p.sink = <const float *>lse, <const float *>dlse, <const float *>sink
        p.lse_log2, p.delta, p.dsink, p.dq = <float *>lse_log2, <float *>delta, <float *>dsink, <float *>dq
        p.turns, p.vectors = <unsigned *>turns, vectors
        p.cu_seqlens_q, p.seqused_q = <const int *>cu_seqlens_q, <const int *>seqused_q
        p.plan = <const Plan *>plan
        p.bias, p.bias_rows = <const void *>bias, <float *>bias_rows
        return (<const char *>&p)[:sizeof(PreprocessParams)]


cdef class PostprocessPacking:
    """``PostprocessParams`` of a gradient: only addresses are missing.

    Parameters
    ----------
    out_strides : tuple of int
        Elements from one batch, row, head and column to the next.
    scale : float
        Factor of the sum.
    parts, part_stride, seqlen, head_dim, heads, tiles : int
        As in ``PostprocessParams``.
    """

    cdef PostprocessParams _params

    def __init__(self, *, tuple out_strides, float scale, int parts, long long part_stride, int seqlen, int head_dim,
                 unsigned heads, unsigned tiles):
        cdef PostprocessParams *p = &self._params
        memset(p, 0, sizeof(PostprocessParams))
        _fill_strides(&p.out_strides, out_strides)
        p.scale, p.parts, p.part_stride, p.seqlen, p.head_dim = scale, parts, part_stride, seqlen, head_dim
        p.heads, p.tiles = heads, tiles

    def pack(self, tuple addresses, bint vectors):
        """Return the struct.

        Parameters
        ----------
        addresses : tuple of int
            Of the sums, of the user's array, and of cu_seqlens, seqused and the plan; 0 for null.
        vectors : bool
            Whether rows of it can be stored by 16 bytes.

        Returns
        -------
        bytes
            ``PostprocessParams``.
        """
        cdef PostprocessParams p = self._params
        cdef uintptr_t sums, out, cu_seqlens, seqused, plan
        sums, out, cu_seqlens, seqused, plan = addresses
        p.sums, p.out, p.vectors = <const float *>sums, <void *>out, vectors
        p.cu_seqlens, p.seqused, p.plan = <const int *>cu_seqlens, <const int *>seqused, <const Plan *>plan
        return (<const char *>&p)[:sizeof(PostprocessParams)]


cdef class SinkPacking:
    """``SinkParams`` of a problem: only addresses are missing.

    Parameters
    ----------
    dsink_stride : int
        Elements.
    batch, parts_head : int
        As in ``SinkParams``.
    """

    cdef SinkParams _params

    def __init__(self, *, long long dsink_stride, int batch, int parts_head):
        memset(&self._params, 0, sizeof(SinkParams))
        self._params.dsink_stride, self._params.batch, self._params.parts_head = dsink_stride, batch, parts_head

    def pack(self, uintptr_t parts, uintptr_t dsink):
        """Return the struct.

        Parameters
        ----------
        parts, dsink : int
            Addresses.

        Returns
        -------
        bytes
            ``SinkParams``.
        """
        cdef SinkParams p = self._params
        p.parts, p.dsink = <const float *>parts, <float *>dsink
        return (<const char *>&p)[:sizeof(SinkParams)]
