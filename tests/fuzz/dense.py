"""Random problems for `cupyfa.attention`."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

import cupyfa
from cupyfa.operand import Arrays, Operand
from cupyfa.options import check_options
from cupyfa.problem import Problem
from cupyfa.select import CANDIDATES, H200, Candidate, select
from cupyfa.spec import Bias, FwdSpec
from cupyfa.testing import as_bshd
from fuzz.compare import compare
from fuzz.places import Place, draw_place
from fuzz.values import Values, draw_values

_DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
#: Of a problem: what the oracles take their time for.
MAX_SCORES, MAX_SCORES_IF_LONG = 400_000, 1_500_000
_TRIES = 10_000
_BIASES = ((Bias.NONE, False), *itertools.product((Bias.TILE, Bias.ROW, Bias.GATHER), (False, True)))
_ROWS = tuple(row for row in CANDIDATES if not row.packed)
MAX_BIAS = 2**24  # bytes, with what lies between
#: By a forward function.
WRITTEN = ("out", "lse")
#: Kernels that no row of the table makes.
_CONFIGS: tuple[dict[str, Any], ...] = (
    {"speculative": False},
    {"scheduler": "persistent"},
    {"scheduler": "one_tile", "longest_first": False},
    {"tile_m": 64, "setmaxnreg": False},
    {"stages": 1, "q_stages": 1},
)


#: seqlen_q, seqlen_k, batch, heads_kv and query heads to each of them.
Sizes = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class Template:
    """What decides about a kernel; the problems of a template differ in all else."""

    dtype: str
    head_dim: int  # the largest that has this kernel, and that of v
    head_dim_v: int
    long: bool  # more query rows than the tiles for short sequences are for
    left: bool  # which sides of the window are bounded
    right: bool
    softcap: bool
    sink: bool
    alibi: bool
    bias: Bias
    bias_float32: bool
    negative: bool  # softmax_scale
    config: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Shape:
    """Sizes and options of a call: all but its arrays."""

    template: Template
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    layout: str
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int | None, int | None]
    softcap: float | None
    slopes_of_batch: bool
    bias_shape: tuple[int, ...]

    @property
    def options(self) -> dict[str, Any]:
        """Those that the oracles take."""
        names = ("softmax_scale", "causal", "window_size", "softcap")
        return {name: getattr(self, name) for name in names}

    @property
    def scores(self) -> int:
        """How many there are, masked ones included."""
        return self.batch * self.heads_q * self.seqlen_q * self.seqlen_k

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all arrays that a call can have, in its layout."""

        def matrix(seqlen: int, heads: int, columns: int) -> tuple[int, ...]:
            middle = (seqlen, heads) if self.layout == "BSHD" else (heads, seqlen)
            return (self.batch, *middle, columns)

        return {
            "q": matrix(self.seqlen_q, self.heads_q, self.head_dim),
            "k": matrix(self.seqlen_k, self.heads_kv, self.head_dim),
            "v": matrix(self.seqlen_k, self.heads_kv, self.head_dim_v),
            "out": matrix(self.seqlen_q, self.heads_q, self.head_dim_v),
            "lse": (self.batch, self.heads_q, self.seqlen_q),
            "sink": (self.heads_q,),
            "alibi_slopes": (self.batch, self.heads_q) if self.slopes_of_batch else (self.heads_q,),
            "bias": self.bias_shape,
        }

    def dtypes(self) -> dict[str, np.dtype[Any]]:
        """Of all arrays that a call can have."""
        matrices = dict.fromkeys(("q", "k", "v", "out"), _DTYPES[self.template.dtype])
        of_bias = np.dtype(np.float32) if self.template.bias_float32 else _DTYPES[self.template.dtype]
        return matrices | dict.fromkeys(("lse", "sink", "alibi_slopes"), np.dtype(np.float32)) | {"bias": of_bias}

    def problem(self, places: dict[str, Place] | None = None) -> Problem:
        """The problem as the checks of a GPU call see it; with contiguous inputs, if there are no places."""
        if places is None:
            given = {"q", "k", "v", *self.of_heads}
            shapes, dtypes = self.shapes(), self.dtypes()
            operands = {name: Operand.contiguous(name, shapes[name], dtypes[name], 0) for name in given}
            if self.template.bias is not Bias.NONE:
                operands["bias"] = self.simple_bias(dtypes["bias"])
        else:
            operands = {
                name: Operand(name, place.shape, place.strides, place.dtype, 0, place.offset % 16 == 0)
                for name, place in places.items()
            }
        checked = check_options(layout=self.layout, **self.options)
        return Problem.from_operands(Arrays(**operands), checked, want_lse=True, current_device=0)

    def simple_bias(self, dtype: np.dtype[Any]) -> Operand:
        """One that has the template's kernel."""
        row = 0 if self.template.bias is Bias.ROW else -(-self.seqlen_k * dtype.itemsize // 16) * 16
        aligned = self.template.bias is not Bias.GATHER
        return Operand("bias", (self.seqlen_q, self.seqlen_k), (row, dtype.itemsize), dtype, 0, aligned)

    @property
    def of_scores(self) -> list[str]:
        """Which of the arrays there are that go into the scores, beside q and k."""
        return self.of_heads + ["bias"] * (self.template.bias is not Bias.NONE)

    @property
    def of_heads(self) -> list[str]:
        """Which of the arrays with a number for each head there are."""
        return [
            name for name, is_there in (("sink", self.template.sink), ("alibi_slopes", self.template.alibi)) if is_there
        ]

    def warm_bias(self) -> dict[str, Any] | None:
        """For `cupyfa.warmup`, if a contiguous bias of some shape has the template's kernel."""
        dtype = self.dtypes()["bias"]
        rows, keys = self.seqlen_q, self.seqlen_k
        shape, fits = {
            Bias.TILE: ((rows, keys), keys * dtype.itemsize % 16 == 0),
            Bias.ROW: ((1, keys), keys * dtype.itemsize % 16 == 0),
            Bias.GATHER: ((rows, 1), keys > 1),
        }[self.template.bias]
        return {"bias": shape, "bias_dtype": dtype} if fits else None

    def spec(self) -> FwdSpec | None:
        """Its kernel on Hopper; None: there is nothing to launch."""
        problem = self.problem()
        return None if problem.is_empty else select(problem, H200, dict(self.template.config)).spec


def results_of(returned: Any, return_lse: bool) -> dict[str, Any]:
    """What a forward function has returned, by the names of the outputs."""
    return dict(zip(WRITTEN, returned, strict=True)) if return_lse else {"out": returned}


@dataclass(frozen=True)
class DenseProblem:
    """A call with all that makes it."""

    shape: Shape
    spec: FwdSpec | None
    places: dict[str, Place]  # of the arrays that are passed
    values: Values
    return_lse: bool

    function = staticmethod(cupyfa.attention)
    written = WRITTEN

    @property
    def problem(self) -> Problem:
        """As the checks of a GPU call see it."""
        return self.shape.problem(self.places)

    @property
    def warm_call(self) -> dict[str, Any] | None:
        """For `cupyfa.warmup`, if a dense bias of some shape has its kernel."""
        shapes = self.shape.shapes()
        biases = {} if self.shape.template.bias is Bias.NONE else self.shape.warm_bias()
        if biases is None:
            return None
        return biases | {
            **{name: shapes[name] for name in ("q", "k", "v")},
            **dict.fromkeys(self.shape.of_heads, True),
            **self.shape.options,
            "layout": self.shape.layout,
            "dtype": _DTYPES[self.shape.template.dtype],
            "config": dict(self.shape.template.config),
        }

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the call that are no arrays."""
        config = dict(self.shape.template.config)
        others = {"config": config} if config else {}
        return self.shape.options | others | {"layout": self.shape.layout, "return_lse": self.return_lse}

    def buffers(self) -> dict[str, np.ndarray[Any, Any]]:
        """Of each array that is passed, between canaries; outputs are poisoned."""
        made = self.values.make({name: place.shape for name, place in self.places.items()}, self.shape.dtypes())
        return {name: place.fill(made[name]) for name, place in self.places.items()}

    def results(self, returned: Any) -> dict[str, Any]:
        """What the function has returned."""
        return results_of(returned, self.return_lse)

    def check(self, arrays: dict[str, Any], results: dict[str, Any], *, by_kernel: bool) -> None:
        """Hold outputs to the oracles."""
        out, lse = results["out"], results.get("lse")
        matrices = [as_bshd(x, self.shape.layout) for x in (arrays["q"], arrays["k"], arrays["v"], out)]
        options = self.shape.options | {name: arrays[name] for name in self.shape.of_scores}
        tile = (self.spec.tile_m, self.spec.tile_n) if by_kernel and self.spec else None
        compare(*matrices, lse, options=options, tile=tile)


def draw_templates(choice: random.Random, count: int) -> dict[FwdSpec, Template]:
    """Templates of different kernels; every row of the table has its share."""
    found: dict[FwdSpec, Template] = {}
    while len(found) < count:
        row = _ROWS[len(found) % len(_ROWS)]
        template = draw_template(choice, row.head_dim, row.head_dim_v)
        shape = draw_shape(choice, template)
        spec = shape.spec()
        if spec is not None and spec.bias is template.bias and _row_of(shape) is row:
            found.setdefault(spec, template)
    return found


def _row_of(shape: Shape) -> Candidate:
    problem = shape.problem()
    return next(row for row in CANDIDATES if row.objection(problem) is None)


def draw_template(choice: random.Random, widest: int, widest_v: int) -> Template:
    """Draw what decides about a kernel, of a row of the table that is for head dimensions of up to these."""

    def chance(probability: float) -> bool:
        return choice.random() < probability

    head_dim = widest - 32 * choice.randrange(2)
    bias, bias_float32 = choice.choice(_BIASES)
    mask = choice.choice(("none", "causal", "causal", "left", "right", "both", "both"))
    return Template(
        dtype=choice.choice(tuple(_DTYPES)),
        head_dim=head_dim,
        head_dim_v=choice.randrange(32, widest_v + 1, 32) if chance(0.2) else min(head_dim, widest_v),
        long=chance(0.5 if widest == 64 else 0.03),
        left=mask in ("left", "both"),
        right=mask in ("causal", "right", "both"),
        softcap=chance(0.25),
        sink=chance(0.35),
        alibi=chance(0.25),
        bias=bias,
        bias_float32=bias_float32,
        negative=chance(0.15),
        config=tuple(choice.choice(_CONFIGS).items()) if chance(0.1) else (),
    )


def draw_problem(choice: random.Random, template: Template, spec: FwdSpec) -> DenseProblem:
    """Draw a problem of a kernel, or one with nothing to launch."""
    for _ in range(_TRIES):
        shape = draw_shape(choice, template)
        limit = MAX_SCORES_IF_LONG if template.long else MAX_SCORES
        if shape.scores <= limit and (found := shape.spec()) in (None, spec):
            break
    else:
        raise RuntimeError(f"no problem of {_TRIES} has the kernel {spec} of {template}")
    given = {"q", "k", "v", *shape.of_scores} | {name for name in ("out", "lse") if choice.random() < 0.8}
    shapes, dtypes = shape.shapes(), shape.dtypes()
    names = [name for name in shapes if name in given]
    places = {}
    for name in names:
        if name == "bias":
            continue
        places[name] = draw_place(
            choice,
            shapes[name],
            dtypes[name],
            for_tma=name in ("q", "k", "v", "out") and choice.random() < 0.9,
            may_repeat=name not in ("out", "lse"),
            reverse=choice.random() < 0.03,
        )
    if "bias" in given:
        places["bias"] = draw_place_of_bias(choice, shape, shape.problem, places)
    scale = 1.0 if shape.softmax_scale is None else shape.softmax_scale * math.sqrt(shape.head_dim)
    values = draw_values(choice, template.dtype, scale, empty=found is None)
    return DenseProblem(shape, found, places, values, choice.random() < 0.5)


def draw_place_of_bias(
    choice: random.Random, shape: Shape, problem_of: Callable[[dict[str, Place]], Problem], others: dict[str, Place]
) -> Place:
    """Draw places until one has the kernel. `problem_of`: the problem with arrays in some places."""
    by_tma = shape.template.bias is not Bias.GATHER
    for _ in range(_TRIES):
        place = draw_place(
            choice,
            shape.bias_shape,
            shape.dtypes()["bias"],
            for_tma=by_tma,
            may_repeat=True,
            reverse=choice.random() < 0.1,
        )
        problem = problem_of(others | {"bias": place})
        if place.size <= MAX_BIAS and (problem.is_empty or problem.bias_access is shape.template.bias):
            return place
    raise RuntimeError(f"no place of {_TRIES} for a bias of {shape.bias_shape} has {shape.template.bias}")


def draw_bias_shape(choice: random.Random, bias: Bias, sizes: tuple[int, int, int, int]) -> tuple[int, ...]:
    """Draw which axes it has, of batch, heads, rows and keys."""
    has = [choice.random() < 0.7 for _ in sizes]
    if bias is not Bias.GATHER:
        has[2:] = bias is Bias.TILE or choice.random() < 0.2, True
    shape = [size if there else 1 for size, there in zip(sizes, has, strict=True)]
    while len(shape) > 2 and not has[-len(shape)] and choice.random() < 0.5:
        del shape[0]
    return tuple(shape)


def draw_shape(choice: random.Random, template: Template, draw_sizes: Callable[..., Sizes] | None = None) -> Shape:
    """Draw sizes and options, of which the kernel of a template is likely the kernel."""
    causal = template.right and (not template.left or choice.random() < 0.4)
    seqlen_q, seqlen_k, batch, heads_kv, ratio = (draw_sizes or _draw_sizes)(choice, template.long)
    window = tuple(
        _draw_side(choice, seqlen_k, bounded and not (causal and right))
        for right, bounded in enumerate((template.left, template.right))
    )
    scale: float | None = None
    if template.negative or choice.random() < 0.5:
        scale = 0.0 if not template.negative and choice.random() < 0.2 else 10 ** choice.uniform(-2.5, 0.3)
    sizes = batch, heads_kv * ratio, seqlen_q, seqlen_k
    return Shape(
        template=template,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads_q=heads_kv * ratio,
        heads_kv=heads_kv,
        head_dim=template.head_dim - 8 * choice.randrange(4),
        head_dim_v=template.head_dim_v - 8 * choice.randrange(4),
        layout=choice.choice(("BSHD", "BHSD")),
        softmax_scale=-scale if template.negative and scale is not None else scale,
        causal=causal,
        window_size=(window[0], window[1]),
        softcap=2 ** choice.uniform(-1, 9.9) if template.softcap else None,
        slopes_of_batch=choice.random() < 0.5,
        bias_shape=draw_bias_shape(choice, template.bias, sizes),
    )


def _draw_sizes(choice: random.Random, long: bool) -> Sizes:
    if long:
        return choice.randint(1025, 1200), choice.choice((draw_length(choice), choice.randint(1028, 1300))), 1, 1, 1
    if choice.random() < 0.1:  # more tiles than multiprocessors
        short = choice.randint(1, 60), choice.randint(1, 60)
        return *short, choice.randint(3, 10), choice.randint(3, 8), choice.randint(3, 8)
    sizes = draw_length(choice), draw_length(choice)
    batch = 0 if choice.random() < 0.01 else choice.randint(1, 3)
    return *sizes, batch, choice.randint(1, 4), choice.choice((1, 1, 2, 3, 4, 7, 8))


def draw_length(choice: random.Random) -> int:
    kind = choice.random()
    if kind < 0.1:
        return choice.choice((0, 1, 1, 1, 2, 3))
    if kind < 0.4:  # around the edges of tiles
        return choice.choice((64, 80, 96, 112, 128, 192)) * choice.randint(1, 3) + choice.randint(-1, 1)
    return choice.randint(2, 400)


def _draw_side(choice: random.Random, seqlen: int, bounded: bool) -> int | None:
    if bounded:
        return choice.choice((0, 1, choice.randint(0, 100), choice.randint(0, seqlen), choice.randint(0, seqlen)))
    # The last of these often hides nothing, so that the kernel is that of no bound.
    return choice.choice((None, None, -1, seqlen + choice.randint(0, 2000)))
