"""The adapter of flex_attention: its functions of indices, and the call, with a torch that is none."""

import dataclasses
import sys
import types

import numpy as np
import pytest

from cupyfa.bench import flex
from cupyfa.bench.correctness import check_all
from cupyfa.bench.peers import enter
from cupyfa.bench.problems import Cell, make_inputs
from cupyfa.oracles import dense
from cupyfa.oracles.mask import visible

CELL = Cell(head_dim=16, seqlen=80, batch=1, heads=4, causal=False, heads_kv=2)
OPTIONS = [
    {},
    {"causal": True},
    {"window_size": (9, 0)},
    {"window_size": (5, 7)},
    {"window_size": (6, None)},
    {"softcap": 0.5},
    {"alibi": True},
    {"softcap": 1.0, "alibi": True, "window_size": (30, 0)},
    {"bias": "bhqk"},
    {"bias": "qk", "bias_dtype": "same", "causal": True},
    {"bias": "bk", "softcap": 1.0, "alibi": True},
    {"bias": "hq"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_functions_of_indices_are_those_of_the_oracle(options):
    cell = dataclasses.replace(CELL, **options)
    inputs = make_inputs(cell, np)
    row, key = np.arange(cell.seqlen)[:, None], np.arange(cell.seqlen)
    mask = flex.mask_mod(cell)
    if mask is not None:
        assert np.array_equal(mask(0, 0, row, key), visible(80, 80, cell.causal, window_size=cell.window_size))
    assert (mask is None) == (cell.bounds == (None, None))
    modify = flex.score_mod(cell, np.tanh, inputs.alibi_slopes, inputs.bias)
    assert (modify is None) == (cell.softcap is None and not cell.alibi and not cell.bias)


class Tensor(np.ndarray):
    """What the adapter asks of a tensor."""

    device = "cpu"

    def transpose(self, first, second):
        return self.swapaxes(first, second)


def flex_attention(q, k, v, *, score_mod, block_mask, enable_gqa):
    """The definition, on (batch, heads, seqlen, head_dim) in float64."""
    assert enable_gqa
    group = q.shape[1] // k.shape[1]
    q, k, v = (np.asarray(x, np.float64) for x in (q, k.repeat(group, axis=1), v.repeat(group, axis=1)))
    scores = np.einsum("bhid,bhjd->bhij", q, k) / np.sqrt(q.shape[-1])
    b, h, i, j = np.ogrid[tuple(map(slice, scores.shape))]
    if score_mod is not None:
        scores = score_mod(scores, b, h, i, j)
    if block_mask is not None:
        scores = np.where(block_mask(b, h, i, j), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True) @ v).view(Tensor)


@pytest.fixture
def compiled(monkeypatch):
    """Put a fake torch into place; returns what it was asked to compile."""
    functions = []

    def compile_(function, *, fullgraph, dynamic):
        assert (fullgraph, dynamic) == (True, False)
        functions.append(function)
        return function

    def create_block_mask(mask, *, B, H, Q_LEN, KV_LEN, device):
        assert (B, H, Q_LEN, KV_LEN, device) == (None, None, CELL.seqlen, CELL.seqlen, "cpu")
        return mask

    modules = {
        "torch": types.SimpleNamespace(compile=compile_, tanh=np.tanh),
        "torch.nn.attention.flex_attention": types.SimpleNamespace(
            create_block_mask=create_block_mask, flex_attention=flex_attention
        ),
    }
    monkeypatch.setattr(flex, "importlib", types.SimpleNamespace(import_module=modules.__getitem__))
    monkeypatch.setattr(flex, "tensors", lambda inputs: [x.view(Tensor) for x in (inputs.q, inputs.k, inputs.v)])
    monkeypatch.setattr(flex, "to_torch", lambda array: array)
    monkeypatch.setattr(flex, "from_torch", lambda tensor, dtype: np.asarray(tensor).astype(dtype))
    return functions


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_peer_computes_the_problem(compiled, options):
    inputs = make_inputs(dataclasses.replace(CELL, **options), np)
    contestants, failed = enter(inputs, [flex.FLEX])
    assert ([contestant.name for contestant in contestants], failed) == (["flex", "cupyfa"], {})
    checks = check_all(contestants, inputs)
    assert all(check.passed for check in checks.values()), checks
    exact, _ = dense.attention(inputs.q, inputs.k, inputs.v, **inputs.options)
    assert np.allclose(contestants[0].output().astype(np.float64), exact, atol=0.02)
    assert len(compiled) == 1


def test_each_problem_has_code_of_its_own(compiled):
    for _ in range(2):
        enter(make_inputs(CELL, np), [flex.FLEX])
    assert compiled[0].__code__ is not compiled[1].__code__


def test_a_sink_is_nothing_for_it(compiled):
    contestants, failed = enter(make_inputs(dataclasses.replace(CELL, sink=True), np), [flex.FLEX])
    assert ([contestant.name for contestant in contestants], failed) == (["cupyfa"], {})
    assert compiled == []


def test_it_is_absent_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    found = flex.FLEX.probe()
    assert found.version is None
    assert "torch" in found.reason
