"""Gradients over packed sequences: those of each sequence alone, and nothing for whom there is none."""

import ml_dtypes
import numpy as np
import pytest

from cupyfa.oracles import backward, backward_online, dense, packed, packed_backward

CU_Q, CU_K = np.int32([1, 4, 4, 9]), np.int32([0, 6, 9, 14])


def arrays(dtype=np.float64):
    rng = np.random.default_rng(0)
    shapes = [(11, 4, 6), (11, 4, 8), (15, 2, 8), (15, 2, 6)]
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def test_sequences_one_by_one():
    do, q, k, v = arrays()
    dlse, sink = np.random.default_rng(1).standard_normal((4, 11)), np.float64([1, 0, -np.inf, 2])
    slopes, bias = np.full((3, 4), 0.25) * [[1], [2], [3]], np.random.default_rng(2).standard_normal((4, 6, 6))
    options = {"causal": True, "softcap": 3.0}
    got = packed_backward.attention_backward(
        do, q, k, v, None, None, CU_Q, CU_K, dlse=dlse, sink=sink, alibi_slopes=slopes, bias=bias, **options
    )
    dsink, dbias, untouched = 0, np.zeros_like(bias), [np.ones(n, bool) for n in (11, 15)]
    for i in range(3):
        rows, keys = slice(CU_Q[i], CU_Q[i + 1]), slice(CU_K[i], CU_K[i + 1])
        part = np.s_[:, : rows.stop - rows.start, : keys.stop - keys.start]
        one = backward.attention_backward(
            *(x[None, y] for x, y in zip((do, q, k, v), (rows, rows, keys, keys), strict=True)),
            dlse=dlse[None, :, rows], sink=sink, alibi_slopes=slopes[i], bias=bias[part], **options,
        )  # fmt: skip
        for x, y, place in zip(got[:3], one[:3], (rows, keys, keys), strict=True):
            np.testing.assert_array_equal(x[place], y[0])
        dsink += one.dsink
        dbias[part] += one.dbias
        untouched[0][rows] = untouched[1][keys] = False
    np.testing.assert_allclose(got.dsink, dsink, atol=1e-14)
    np.testing.assert_allclose(got.dbias, dbias, atol=1e-14)
    for x, nobodys in zip(got[:3], (untouched[0], untouched[1], untouched[1]), strict=True):
        assert not x[nobodys].any()


def test_what_nobody_uses_does_not_matter():
    do, q, k, v = arrays()
    lengths = {"seqused_q": np.int32([2, 0, 5]), "seqused_k": np.int32([6, 1, 0])}
    options = {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, **lengths, "causal": True}
    clean = packed_backward.attention_backward(do, q, k, v, None, None, **options)
    rows, keys = np.ones(11, bool), np.ones(15, bool)
    rows[1:3] = rows[4:9] = keys[0:6] = keys[6:7] = False
    for x, nobodys in zip((do, q, k, v), (rows, rows, keys, keys), strict=True):
        x[nobodys] = np.nan
    for x, y in zip(packed_backward.attention_backward(do, q, k, v, None, None, **options)[:3], clean[:3], strict=True):
        np.testing.assert_array_equal(x, y)
        assert np.isfinite(x).all()
    assert not clean.dq[4:].any()  # sequences without rows, or keys
    assert not clean.dk[6:].any()


@pytest.mark.parametrize("of_sequence", [backward.same_precision, backward_online.attention_backward])
def test_other_oracles_give_their_own_types(of_sequence):
    do, q, k, v = arrays(ml_dtypes.bfloat16)
    bias, sink = np.random.default_rng(2).standard_normal((1, 6)).astype(ml_dtypes.bfloat16), np.zeros(4, np.float32)
    result = packed.attention(q, k, v, CU_Q, CU_K, bias=bias, sink=sink, of_sequence=dense.same_precision)
    got = packed_backward.attention_backward(
        do, q, k, v, *result, CU_Q, CU_K, bias=bias, sink=sink, of_sequence=of_sequence
    )
    exact = packed_backward.attention_backward(do, q, k, v, None, None, CU_Q, CU_K, bias=bias, sink=sink)
    assert [x.dtype for x in got] == [ml_dtypes.bfloat16] * 3 + [np.float32, ml_dtypes.bfloat16]
    for x, y in zip(got, exact, strict=True):
        assert x.shape == y.shape
        np.testing.assert_allclose(x.astype(float), y, atol=0.03)
