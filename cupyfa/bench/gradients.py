"""Problems of gradients: their operation counts, their arrays, who computes them, and how results are judged.

Rows of gradients may cancel: under a causal mask the first one of dq is exactly 0, and rounding errors are not.
So the limit of an element follows the largest magnitude in a block of rows of its head, and not that in its row.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

import cupyfa
from cupyfa.bench.correctness import LIMIT_TEXT, Agreement, Check, agree, judge_all
from cupyfa.bench.harness import Contestant
from cupyfa.bench.peers import Peer
from cupyfa.bench.problems import Cell, Inputs, make_inputs, poisoned
from cupyfa.bench.torch_arrays import from_torch, tensors, to_torch
from cupyfa.testing import random_array

__all__ = [
    "DETERMINISTIC",
    "GRADIENT_LIMIT_TEXT",
    "GRADIENT_PEERS",
    "BackwardCell",
    "BackwardInputs",
    "Triple",
    "check_gradients",
    "float64_gradients",
    "make_backward_inputs",
    "own_contestant",
]

#: The contestant that adds up in one order.
DETERMINISTIC = "deterministic"

_ROWS = 64  # that have a limit in common
_CHUNK = 1024  # query rows whose scores are in memory at a time, in float64

GRADIENT_LIMIT_TEXT = LIMIT_TEXT.replace("in the row", f"in {_ROWS} rows of the head")


class Triple(NamedTuple):
    """The gradients of q, k and v.

    Attributes
    ----------
    dq, dk, dv : array
        Shapes of q, k and v.
    """

    dq: Any
    dk: Any
    dv: Any


@dataclasses.dataclass(frozen=True)
class BackwardCell(Cell):
    """A problem of gradients; the attributes are those of the forward pass."""

    #: S = Q K', dQ = dS K and dK = dS' Q; dP = dO V' and dV = P' dO.
    PRODUCTS: ClassVar[tuple[int, int]] = (3, 2)

    @property
    def flops_per_pair(self) -> int:
        """2.5 times as many as those of the forward pass: five products where that has two."""
        return 5 * super().flops_per_pair // 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardInputs(Inputs):
    """The arrays that all contestants share; ``out`` is that of cupyfa's forward pass.

    Attributes
    ----------
    dout : array
        Of the shape of the output, nearly N(0, 1).
    lse : array
        (batch, heads, seqlen), float32; of cupyfa's forward pass.
    """

    dout: Any
    lse: Any


def make_backward_inputs(cell: BackwardCell, xp: Any) -> BackwardInputs:
    """Make the arrays of a problem.

    Parameters
    ----------
    cell : BackwardCell
        The problem.
    xp : module
        ``cupy`` or ``numpy``.

    Returns
    -------
    BackwardInputs
        Random q, k, v and dout; out and lse as cupyfa computes them.
    """
    inputs = make_inputs(cell, xp)
    _, lse = cupyfa.attention(inputs.q, inputs.k, inputs.v, out=inputs.out, return_lse=True, **inputs.options)
    dout = random_array(cell.shape_out, inputs.q.dtype, 6, xp=xp)
    return BackwardInputs(**vars(inputs), dout=dout, lse=lse)


# ----------------------------------------------------------------------------------------------------------------------
# Contestants


def own_contestant(inputs: BackwardInputs, xp: Any, deterministic: bool, workspace: Any) -> Contestant:
    """Prepare cupyfa.

    Parameters
    ----------
    inputs : BackwardInputs
        The arrays.
    xp : module
        Of the arrays.
    deterministic : bool
        Whether it adds up in one order.
    workspace : array or None
        As much memory as the call needs.

    Returns
    -------
    Contestant
        It writes into gradients of its own, full of NaN at first.
    """
    of = (inputs.q, inputs.k, inputs.v)
    gradients = {f"d{name}": poisoned(x.shape, x.dtype, xp) for name, x in zip("qkv", of, strict=True)}
    options: dict[str, Any] = {**inputs.options, **gradients, "deterministic": deterministic, "workspace": workspace}
    return Contestant(
        DETERMINISTIC if deterministic else "cupyfa",
        call=lambda: cupyfa.attention_backward(inputs.dout, *of, inputs.out, inputs.lse, **options),
        convert=lambda result: Triple(*result[:3]),
    )


def _prepare_sdpa(inputs: BackwardInputs, name: str, backend: str) -> Contestant:
    """PyTorch's function: its forward pass is made here, and the graph that it leaves is walked again and again."""
    torch = importlib.import_module("torch")
    sdpa = importlib.import_module("torch.nn.functional").scaled_dot_product_attention
    attention = importlib.import_module("torch.nn.attention")
    q, k, v = leaves = [tensor.transpose(1, 2).detach().requires_grad_() for tensor in tensors(inputs)]
    dout = to_torch(inputs.dout).transpose(1, 2)
    with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)):
        out = sdpa(q, k, v, is_causal=inputs.cell.causal, enable_gqa=inputs.cell.heads_kv is not None)
    return Contestant(
        name,
        call=lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
        convert=lambda result: Triple(*(from_torch(x.transpose(1, 2), inputs.q.dtype) for x in result)),
    )


def _prepare_cudnn(inputs: BackwardInputs) -> Contestant:
    return _prepare_sdpa(inputs, "cuDNN", "CUDNN_ATTENTION")


def _prepare_flash(inputs: BackwardInputs) -> Contestant:
    return _prepare_sdpa(inputs, "flash", "FLASH_ATTENTION")


_MODULES, _DIMS = ("torch.nn.attention", "torch"), frozenset({"head_dim_v"})

#: As the others are in :data:`cupyfa.bench.peers.PEERS`; they take BackwardInputs.
GRADIENT_PEERS = (
    Peer("cuDNN", "torch SDPA, cuDNN back end", _MODULES, ("torch",), _prepare_cudnn, _DIMS),
    Peer("flash", "torch SDPA, flash back end", _MODULES, ("torch",), _prepare_flash, _DIMS),
)


# ----------------------------------------------------------------------------------------------------------------------
# Judgment


def float64_gradients(inputs: BackwardInputs, xp: Any) -> Triple:
    """Compute the gradients of the last head of the last sequence in float64, from q, k, v and dout alone.

    Parameters
    ----------
    inputs : BackwardInputs
        Of a problem with as many key/value heads as query heads, no window and no modifier of scores.
    xp : module
        Of the arrays.

    Returns
    -------
    Triple
        (1, seqlen, 1, head_dim).
    """
    cell = inputs.cell
    q, k, v, dout = (
        x[-1, :, -1].astype(np.float32).astype(np.float64) for x in (inputs.q, inputs.k, inputs.v, inputs.dout)
    )
    scale = cell.head_dim**-0.5
    dq, dk, dv = xp.zeros_like(q), xp.zeros_like(k), xp.zeros_like(v)
    for begin in range(0, cell.seqlen, _CHUNK):
        rows = slice(begin, min(cell.seqlen, begin + _CHUNK))
        seen = slice(0, rows.stop if cell.causal else cell.seqlen)
        scores = q[rows] @ k[seen].T * scale
        if cell.causal:
            scores[xp.arange(seen.stop)[None] > xp.arange(rows.start, rows.stop)[:, None]] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        slopes = dout[rows] @ v[seen].T
        slopes = weights * (slopes - (weights * slopes).sum(axis=1, keepdims=True)) * scale
        dq[rows] = slopes @ k[seen]
        dk[seen] += slopes.T @ q[rows]
        dv[seen] += weights.T @ dout[rows]
    return Triple(*(x[None, :, None] for x in (dq, dk, dv)))


def _agree_in_blocks(actual: Any, expected: Any, dtype: str) -> list[Agreement]:
    starts = range(0, expected.shape[1], _ROWS)
    rows = [slice(start, start + _ROWS) for start in starts]
    return [agree(actual[:, part], expected[:, part], dtype, axis=(1, 3)) for part in rows]


def _worst(results: Sequence[Agreement]) -> Agreement:
    largest, shares = [result[1] for result in results], [result[2] for result in results]
    if None in largest or None in shares:
        return False, None, None
    return all(result[0] for result in results), max(x or 0.0 for x in largest), max(x or 0.0 for x in shares)


def check_gradients(contestants: Sequence[Contestant], inputs: BackwardInputs, xp: Any) -> dict[str, Check]:
    """Run every contestant once and judge its gradients.

    Parameters
    ----------
    contestants : sequence of Contestant
        In the order of preference as a reference.
    inputs : BackwardInputs
        Their arrays.
    xp : module
        Of the arrays.

    Returns
    -------
    dict
        Name to Check: against float64 for one head, and against the reference for everything.
    """
    exact, dtype = float64_gradients(inputs, xp), inputs.cell.dtype

    def sample(result: Triple) -> list[Agreement]:
        pairs = zip(result, exact, strict=True)
        return [_worst(_agree_in_blocks(x[-1:, :, -1:], expected, dtype)) for x, expected in pairs]

    def compare(result: Triple, reference: Triple) -> Agreement:
        pairs = zip(result, reference, strict=True)
        return _worst([part for x, expected in pairs for part in _agree_in_blocks(x, expected, dtype)])

    return judge_all(contestants, sample, compare)
