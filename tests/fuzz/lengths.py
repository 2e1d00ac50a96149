"""Random problems with lengths: packed sequences for `cupyfa.attention_varlen`, and batches that are used in part."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np

import cupyfa
from cupyfa.operand import Arrays, Operand
from cupyfa.options import check_options, with_max_seqlen
from cupyfa.oracles import packed
from cupyfa.problem import Problem
from cupyfa.select import CANDIDATES, H200, select
from cupyfa.spec import Bias, FwdSpec
from cupyfa.testing import as_bshd
from fuzz import dense
from fuzz.compare import compare
from fuzz.places import Place, draw_place
from fuzz.values import Values, draw_values

_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
_TRIES = 10_000
_APART = {(row.head_dim, row.head_dim_v, row.bias) for row in CANDIDATES if row.packed}
#: Those that such calls can have.
_ROWS = tuple(row for row in CANDIDATES if row.packed or (row.head_dim, row.head_dim_v, row.bias) not in _APART)


@dataclasses.dataclass(frozen=True)
class Sequences:
    """The lengths of a call."""

    packed: bool
    lengths_q: tuple[int, ...]  # packed; of a batch, the same for all
    lengths_k: tuple[int, ...]
    gaps: tuple[int, int, int, int]  # rows before the first sequence and behind the last one, of q and of k
    used_q: tuple[int, ...] | None
    used_k: tuple[int, ...] | None
    longest: tuple[int | None, int | None]  # what the caller says of the longest sequence

    @property
    def totals(self) -> tuple[int, int]:
        """Rows of the packed arrays."""
        return sum(self.lengths_q) + sum(self.gaps[:2]), sum(self.lengths_k) + sum(self.gaps[2:])

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Those that the call is passed."""
        given: dict[str, Any] = {"seqused_q": self.used_q, "seqused_k": self.used_k}
        if self.packed:
            for side, lengths, begin in (("q", self.lengths_q, self.gaps[0]), ("k", self.lengths_k, self.gaps[2])):
                given[f"cu_seqlens_{side}"] = np.cumsum([begin, *lengths])
        return {name: np.asarray(given[name], np.int32) for name in _LENGTHS if given.get(name) is not None}


@dataclasses.dataclass(frozen=True)
class LengthsProblem:
    """A call with all that makes it."""

    shape: dense.Shape  # as if all sequences were as long as the longest
    sequences: Sequences
    spec: FwdSpec | None
    places: dict[str, Place]
    values: Values
    return_lse: bool

    packed_function = staticmethod(cupyfa.attention_varlen)
    used_function = staticmethod(cupyfa.attention)
    written = dense.WRITTEN

    @property
    def function(self) -> Callable[..., Any]:
        """What is called."""
        return self.packed_function if self.sequences.packed else self.used_function

    @property
    def problem(self) -> Problem:
        """As the checks of a GPU call see it."""
        return _problem(self.shape, self.sequences, self.places)

    @property
    def warm_call(self) -> dict[str, Any] | None:
        """For `cupyfa.warmup`, if a contiguous bias has its kernel."""
        biases = {} if self.shape.template.bias is Bias.NONE else self.shape.warm_bias()
        if biases is None:
            return None
        shapes = _shapes(self.shape, self.sequences)
        lengths: dict[str, Any] = dict.fromkeys(self.sequences.arrays(), True) | {"layout": self.shape.layout}
        if self.sequences.packed:
            lengths = {"sequences": self.shape.batch, "max_seqlen_q": self.sequences.longest[0]}
        return (
            biases
            | lengths
            | {
                **{name: shapes[name] for name in ("q", "k", "v")},
                **dict.fromkeys(self.shape.of_heads, True),
                **self.shape.options,
                "dtype": self.shape.dtypes()["q"],
                "config": dict(self.shape.template.config),
            }
        )

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the call that are no arrays."""
        config = dict(self.shape.template.config)
        options = self.shape.options | ({"config": config} if config else {}) | {"return_lse": self.return_lse}
        if self.sequences.packed:
            return options | dict(zip(("max_seqlen_q", "max_seqlen_k"), self.sequences.longest, strict=True))
        return options | {"layout": self.shape.layout}

    def buffers(self) -> dict[str, np.ndarray[Any, Any]]:
        """Of each array that is passed, between canaries; outputs are poisoned."""
        lengths = self.sequences.arrays()
        others = {name: place.shape for name, place in self.places.items() if name not in lengths}
        made = self.values.make(others, self.shape.dtypes()) | lengths
        return {name: place.fill(made[name]) for name, place in self.places.items()}

    def results(self, returned: Any) -> dict[str, Any]:
        """What the function has returned."""
        return dense.results_of(returned, self.return_lse)

    def check(self, arrays: dict[str, Any], results: dict[str, Any], *, by_kernel: bool) -> None:
        """Hold the outputs of each sequence to the oracles, and those of no sequence to what they must be."""
        q, k, v, out, lse = (*(arrays[name] for name in "qkv"), results["out"], results.get("lse"))
        tile = (self.spec.tile_m, self.spec.tile_n) if by_kernel and self.spec else None
        lengths = {name: arrays.get(name) for name in _LENGTHS}
        if self.sequences.packed:
            rows_of = list(packed.sequences(**lengths))
            parts = [(0, i, rows, keys) for i, (rows, keys) in enumerate(rows_of)]
            q, k, v, out, lse = (None if x is None else x[None] for x in (q, k, v, out, lse))
        else:
            q, k, v, out = (as_bshd(x, self.shape.layout) for x in (q, k, v, out))
            of_q, of_k = (np.int32([0, x.shape[1]]) for x in (q, k))
            parts = []
            for i in range(q.shape[0]):
                used = [None if x is None else x[i : i + 1] for x in (lengths["seqused_q"], lengths["seqused_k"])]
                parts += [(i, i, *part) for part in packed.sequences(of_q, of_k, *used)]
        unused = np.ones(q.shape[:2], np.bool_)
        for batch, i, rows, keys in parts:
            unused[batch, rows] = False
            options = self.shape.options | self._of_sequence(arrays, i, rows, keys)
            of_batch = slice(batch, batch + 1)
            lse_of = None if lse is None else lse[of_batch, :, rows]
            if rows.stop > rows.start:
                compare(q[of_batch, rows], k[of_batch, keys], v[of_batch, keys], out[of_batch, rows], lse_of,
                        options=options, tile=tile)  # fmt: skip
        assert not out[unused].astype(np.float32).any(), "out is not 0 in a row of no sequence"
        if lse is not None:
            sink = arrays.get("sink", np.full(lse.shape[1], -np.inf, np.float32))
            expected = np.broadcast_to(sink[None, :, None], lse.shape)
            where = np.broadcast_to(unused[:, None], lse.shape)
            cap = self.shape.softcap or 0.0  # is added to the lse
            near = np.allclose(lse[where], expected[where], rtol=1e-6, atol=1e-6 * cap)
            assert near, "lse is not the sink in a row of no sequence"

    def _of_sequence(self, arrays: dict[str, Any], i: int, rows: slice, keys: slice) -> dict[str, Any]:
        """The arrays that go into the scores of a sequence."""
        found = {name: arrays[name] for name in self.shape.of_scores}
        if "alibi_slopes" in found and found["alibi_slopes"].ndim == 2:
            found["alibi_slopes"] = found["alibi_slopes"][i]
        if "bias" in found:
            bias = found["bias"]
            sizes = (self.shape.batch, self.shape.heads_q, self.shape.seqlen_q, self.shape.seqlen_k)
            whole = np.broadcast_to(bias, sizes)
            found["bias"] = whole[i : i + 1, :, : rows.stop - rows.start, : keys.stop - keys.start]
        return found


def _shapes(shape: dense.Shape, sequences: Sequences) -> dict[str, tuple[int, ...]]:
    """Of all arrays that a call can have, but for the lengths."""
    shapes = shape.shapes()
    if sequences.packed:
        total_q, total_k = sequences.totals
        shapes |= {
            "q": (total_q, shape.heads_q, shape.head_dim),
            "k": (total_k, shape.heads_kv, shape.head_dim),
            "v": (total_k, shape.heads_kv, shape.head_dim_v),
            "out": (total_q, shape.heads_q, shape.head_dim_v),
            "lse": (shape.heads_q, total_q),
        }
    return shapes


def _problem(shape: dense.Shape, sequences: Sequences, places: dict[str, Place] | None = None) -> Problem:
    """The problem as the checks of a GPU call see it; with contiguous inputs, if there are no places."""
    lengths = {name: Operand.contiguous(name, x.shape, x.dtype, 0) for name, x in sequences.arrays().items()}
    if places is None:
        shapes, dtypes = _shapes(shape, sequences), shape.dtypes()
        given = ("q", "k", "v", *shape.of_heads)
        operands = {name: Operand.contiguous(name, shapes[name], dtypes[name], 0) for name in given}
        if shape.template.bias is not Bias.NONE:
            operands["bias"] = shape.simple_bias(dtypes["bias"])
    else:
        operands = {
            name: Operand(name, place.shape, place.strides, place.dtype, 0, place.offset % 16 == 0)
            for name, place in places.items()
            if name not in lengths
        }
    layout = "BSHD" if sequences.packed else shape.layout
    checked = check_options(layout=layout, **shape.options)
    if sequences.packed:
        checked = with_max_seqlen(checked, *sequences.longest, shape.template.bias is not Bias.NONE)
    return Problem.from_operands(Arrays(**operands, **lengths), checked, want_lse=True, current_device=0)


def _spec(shape: dense.Shape, sequences: Sequences) -> FwdSpec | None:
    """The kernel on Hopper; None: there is nothing to launch."""
    problem = _problem(shape, sequences)
    return None if problem.is_empty else select(problem, H200, dict(shape.template.config)).spec


def draw_templates(choice: random.Random, count: int) -> dict[FwdSpec, dense.Template]:
    """Templates of different kernels; every row of the table has its share."""
    found: dict[FwdSpec, dense.Template] = {}
    while len(found) < count:
        row = _ROWS[len(found) % len(_ROWS)]
        template = dense.draw_template(choice, row.head_dim, row.head_dim_v)
        shape, sequences = _draw(choice, template)
        spec = _spec(shape, sequences)
        # A window that hides nothing of the longest sequence may be one to packed arrays: too rarely to be drawn again.
        if spec is None or (spec.bias, spec.window, spec.causal) != (template.bias, template.left, template.right):
            continue
        problem = _problem(shape, sequences)
        if next(row for row in CANDIDATES if row.objection(problem) is None) is row:
            found.setdefault(spec, template)
    return found


def _draw(choice: random.Random, template: dense.Template) -> tuple[dense.Shape, Sequences]:
    shape = dense.draw_shape(choice, template)
    packs = choice.random() < 0.6
    if packs and template.bias is not Bias.NONE:  # it has a row and a key, however long the sequences are
        longest_of_bias = {name: max(1, getattr(shape, name)) for name in ("seqlen_q", "seqlen_k")}
        shape = dataclasses.replace(shape, **longest_of_bias)
    batch = 0 if packs and choice.random() < 0.03 else 1 if template.long else choice.randint(1, 5)

    def lengths(longest: int) -> tuple[int, ...]:
        if not packs:
            return (longest,) * batch
        kinds = (0, longest, None, None)  # None: any
        drawn = (choice.choice(kinds) for _ in range(batch))
        return tuple(choice.randint(0, longest) if n is None else n for n in drawn)

    def used(of: tuple[int, ...], likely: float) -> tuple[int, ...] | None:
        if choice.random() >= likely:
            return None
        return tuple(choice.choice((0, n, choice.randint(0, n), choice.randint(0, n))) for n in of)

    lengths_q, lengths_k = lengths(shape.seqlen_q), lengths(shape.seqlen_k)
    likely = 0.3 if packs else 0.7
    used_q, used_k = used(lengths_q, likely), used(lengths_k, likely)
    if not packs and used_q is None and used_k is None:
        used_k = tuple(choice.randint(0, n) for n in lengths_k)
    gaps = tuple(choice.choice((0, 0, choice.randint(0, 70))) for _ in range(4)) if packs else (0, 0, 0, 0)
    said = template.bias is not Bias.NONE or template.long or choice.random() < 0.5
    longest = (shape.seqlen_q, shape.seqlen_k) if packs and said else (None, None)
    sizes = batch, shape.heads_q, shape.seqlen_q, shape.seqlen_k
    shape = dataclasses.replace(shape, batch=batch, bias_shape=dense.draw_bias_shape(choice, template.bias, sizes))
    return shape, Sequences(packs, lengths_q, lengths_k, gaps, used_q, used_k, longest)  # type: ignore[arg-type]


def draw_problem(choice: random.Random, template: dense.Template, spec: FwdSpec) -> LengthsProblem:
    """Draw a problem of a kernel, or one with nothing to launch."""
    wanted = None if choice.random() < 0.04 else spec
    for _ in range(_TRIES):
        shape, sequences = _draw(choice, template)
        limit = dense.MAX_SCORES_IF_LONG if template.long else dense.MAX_SCORES
        found = _spec(shape, sequences)
        if shape.scores <= limit and found == wanted:
            break
    else:
        raise RuntimeError(f"no problem of {_TRIES} has the kernel {spec} of {template}")
    given = {"q", "k", "v", *shape.of_scores} | {name for name in ("out", "lse") if choice.random() < 0.8}
    shapes, dtypes = _shapes(shape, sequences), shape.dtypes()
    places = {}
    for name in (name for name in shapes if name in given and name != "bias"):
        places[name] = draw_place(
            choice,
            shapes[name],
            dtypes[name],
            for_tma=name in ("q", "k", "v", "out") and choice.random() < 0.9,
            may_repeat=name not in ("out", "lse"),
            reverse=choice.random() < 0.03,
        )
    for name, array in sequences.arrays().items():
        places[name] = Place(array.shape, array.dtype, array.strides, 512, 1024 + 4 * array.size)
    if "bias" in given:
        places["bias"] = dense.draw_place_of_bias(choice, shape, functools.partial(_problem, shape, sequences), places)
    scale = 1.0 if shape.softmax_scale is None else shape.softmax_scale * math.sqrt(shape.head_dim)
    empty = found is None or 0 in shapes["q"] or 0 in shapes["k"]
    values = draw_values(choice, template.dtype, scale, empty=empty)
    return LengthsProblem(shape, sequences, found, places, values, choice.random() < 0.5)
