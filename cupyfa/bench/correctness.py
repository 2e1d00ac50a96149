"""Before a contestant is timed its result is judged: against float64, and against the other contestants."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from cupyfa.bench.harness import Contestant, first_line
from cupyfa.bench.problems import Inputs
from cupyfa.oracles import dense

__all__ = ["LIMIT", "LIMIT_TEXT", "Agreement", "Check", "agree", "check_all", "judge_all"]

#: Two results agree if no element differs by more than LIMIT times the unit roundoff of the output type times the
#: largest magnitude in its row. Rounding an output costs one of these units at most, rounding P less than another;
#: correct implementations come to about half of the limit.
LIMIT = 4

LIMIT_TEXT = f"{LIMIT} * 2^-8 (bfloat16) or 2^-11 (float16) of the largest magnitude in the row"

_UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
_BLOCK = 64  # query rows of a block that is checked against float64


@dataclasses.dataclass(frozen=True)
class Check:
    """How a contestant did before it was timed.

    Attributes
    ----------
    passed : bool
        Whether it may be timed.
    float64 : float or None
        Largest difference from the float64 oracle, over the sampled rows.
    peer : float or None
        Largest difference from the result of ``reference``, over everything.
    reference : str
        The contestant that it was compared with; empty for that one.
    share : float or None
        Largest difference as a share of the limit of its row; at most 1 when passed.
    message : str
        What went wrong.
    refused : bool
        Whether it raised an error in place of a result.
    """

    passed: bool
    float64: float | None = None
    peer: float | None = None
    reference: str = ""
    share: float | None = None
    message: str = ""
    refused: bool = False


#: Whether results agree, their largest difference, and its largest share of the limit.
Agreement = tuple[bool, float | None, float | None]


def agree(actual: Any, expected: Any, dtype: str, axis: int | tuple[int, ...] = -1) -> Agreement:
    """Compare two results.

    Parameters
    ----------
    actual, expected : array
        (..., head_dim), of one library.
    dtype : str
        The output type, which sets the limit.
    axis : int or tuple of int
        The axes of elements that have a limit in common: by default those of a row.

    Returns
    -------
    tuple
        Whether every element is within its limit; the largest difference; the largest share of the limit. The
        last two are None if an element is not finite.
    """
    expected = expected.astype(np.float32)
    difference = abs(actual.astype(np.float32) - expected)
    unit = LIMIT * _UNIT[dtype]
    limit = abs(expected).max(axis=axis, keepdims=True) * np.float32(unit) + np.float32(1e-30)
    passed = bool((difference <= limit).all())  # False for a NaN
    largest, share = float(difference.max()), float((difference / limit).max())
    if not (np.isfinite(largest) and np.isfinite(share)):
        return False, None, None
    return passed, largest, share


def _to_numpy(array: Any) -> Any:
    return array.get() if hasattr(array, "get") else array


def _float64_blocks(inputs: Inputs) -> Iterator[tuple[slice, Any]]:
    """Rows at the start, in the middle and at the end of the last head of the last batch, in float64.

    Rows up to ``end`` are the bottom-right aligned problem of those rows and ``end`` keys, if they see no key beyond.
    """
    cell = inputs.cell
    size, (left, right) = cell.seqlen, cell.bounds
    anywhere = left is None and right is None and not cell.alibi and "q" not in cell.bias  # no row knows its place
    heads = {name: _to_numpy(inputs.options[name][-1:]) for name in ("sink", "alibi_slopes") if name in inputs.options}
    for stop in sorted({min(_BLOCK, size), (size + _BLOCK) // 2 if size > _BLOCK else size, size}):
        rows = slice(max(0, stop - _BLOCK), stop)
        end = size if right is None else min(size, stop + right)
        q = _to_numpy(inputs.q[-1:, rows.start : stop if anywhere else end, -1:])
        k, v = (_to_numpy(x[-1:, :end, -1:]) for x in (inputs.k, inputs.v))
        options = inputs.options | heads
        if inputs.bias is not None:
            of_rows = slice(None) if inputs.bias.shape[2] == 1 else slice(rows.start, rows.start + q.shape[1])
            options["bias"] = _to_numpy(inputs.bias[-1:, -1:, of_rows, :end])
        exact, _ = dense.attention(q, k, v, **options)
        yield rows, exact[:, : stop - rows.start]


def check_all(contestants: Sequence[Contestant], inputs: Inputs) -> dict[str, Check]:
    """Run every contestant once and judge its result.

    Sampled rows are compared with float64, so that the judgment does not rest on a peer. The first contestant that
    passes is then the reference of the others, on everything.

    Parameters
    ----------
    contestants : sequence of Contestant
        In the order of preference as a reference.
    inputs : Inputs
        Their arrays.

    Returns
    -------
    dict
        Name to Check.
    """
    blocks = list(_float64_blocks(inputs))
    dtype = inputs.cell.dtype
    return judge_all(
        contestants,
        lambda out: [agree(_to_numpy(out[-1:, rows, -1:]), exact, dtype) for rows, exact in blocks],
        lambda out, reference: agree(out, reference, dtype),
    )


def judge_all(
    contestants: Sequence[Contestant],
    sample: Callable[[Any], Sequence[Agreement]],
    compare: Callable[[Any, Any], Agreement],
) -> dict[str, Check]:
    """Run every contestant once and judge its result by some measure.

    Parameters
    ----------
    contestants : sequence of Contestant
        In the order of preference as a reference.
    sample : callable
        ``sample(result)`` compares parts of a result with float64.
    compare : callable
        ``compare(result, reference)`` compares two results.

    Returns
    -------
    dict
        Name to Check.
    """
    checks: dict[str, Check] = {}
    reference: Any = None
    reference_name = ""
    for contestant in contestants:
        try:
            out = contestant.output()
            samples = sample(out)
            whole = None if reference is None else compare(out, reference)
        except Exception as error:  # a peer may raise anything; the others go on
            checks[contestant.name] = Check(False, message=first_line(error), refused=True)
            continue
        verdict = _judge(samples, whole, reference_name)
        checks[contestant.name] = verdict
        if verdict.passed and reference is None:
            reference, reference_name = out, contestant.name
    return checks


def _judge(
    samples: Sequence[Agreement],
    whole: Agreement | None,
    reference_name: str,
) -> Check:
    results = [*samples] if whole is None else [*samples, whole]
    if any(largest is None for _, largest, _ in results):
        return Check(False, reference=reference_name, message="the result has NaN or infinite elements")
    passed = all(good for good, _, _ in results)
    share = max(share or 0.0 for _, _, share in results)
    others = f"float64 or {reference_name}" if reference_name else "float64"
    return Check(
        passed,
        float64=max(largest or 0.0 for _, largest, _ in samples),
        peer=None if whole is None else whole[1],
        reference=reference_name,
        share=share,
        message="" if passed else f"differs from {others} by {share:.2f} times the limit",
    )
