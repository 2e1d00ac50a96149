"""Random problems for `cupyfa.attention_backward`.

No value is NaN or infinite: what such a one becomes is a matter of the forward pass, and every gradient has it then.
"""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import numpy as np

import cupyfa
from cupyfa.backward_problem import BackwardArrays, BackwardProblem
from cupyfa.backward_select import BWD_CANDIDATES, BackwardSelection, BwdCandidate, backward_config, select_backward
from cupyfa.operand import Operand
from cupyfa.options import check_options
from cupyfa.oracles import dense as oracle
from cupyfa.select import H200
from cupyfa.spec import Bias, BwdSpec
from cupyfa.testing import as_bshd, assert_close
from cupyfa.testing.gradients import expected_of
from fuzz import dense
from fuzz.compare import row_factor
from fuzz.places import Place, draw_place
from fuzz.values import Values, draw_values

_TRIES = 10_000
_MAX_SCORES = 100_000  # of a problem: what the oracles take their time for, three times that of a forward pass
_MATRICES = ("q", "k", "v", "dout", "out", "dq", "dk", "dv")
_WRITTEN = ("dq", "dk", "dv", "dsink", "dbias")
#: What has the shape and the type of what.
_LIKE = {"dout": "out", "dlse": "lse", "dq": "q", "dk": "k", "dv": "v", "dsink": "sink", "dbias": "bias"}
#: Whose rows are added up to each.
_ROWS_OF = {"dq": "k", "dk": "q", "dv": "dout"}
#: Of rows of the table by what they take: other head dimensions that need them, too.
_OTHERS = {"d256": ((192, 192), (192, 128))}
#: Which sides of the window are.
_BOUNDED = ((False, False), (False, False), (False, True), (False, True), (True, False), (True, True))
#: Kernels that no row of the table makes.
_CONFIGS: tuple[dict[str, Any], ...] = ({"setmaxnreg": False}, {"q_stages": 2}, {"dout_stages": 1})


@dataclasses.dataclass(frozen=True)
class Template:
    """What decides about a kernel; the problems of a template differ in all else."""

    forward: dense.Template
    partial: bool  # whether CTAs share the query heads of a key head
    deterministic: bool


@dataclasses.dataclass(frozen=True)
class GradientsProblem:
    """A call with all that makes it."""

    shape: dense.Shape
    deterministic: bool
    spec: BwdSpec | None
    places: dict[str, Place]  # of the arrays that are passed
    values: Values

    function = staticmethod(cupyfa.attention_backward)
    written = _WRITTEN

    @property
    def problem(self) -> BackwardProblem:
        """As the checks of a GPU call see it."""
        return _problem(self.shape, self.deterministic, self.places)

    @property
    def warm_call(self) -> dict[str, Any]:
        """For `cupyfa.warmup`."""
        shapes = _shapes(self.shape)
        dtypes = self.shape.dtypes()
        bias = {"bias": shapes["bias"], "bias_dtype": dtypes["bias"]} if "bias" in self.shape.of_scores else {}
        return bias | {
            **{name: shapes[name] for name in ("q", "k", "v", "dout")},
            **dict.fromkeys(self.shape.of_heads, True),
            **self.options,
            "dtype": dtypes["q"],
        }

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the call that are no arrays."""
        config = dict(self.shape.template.config)
        others = {"config": config} if config else {}
        return self.shape.options | others | {"layout": self.shape.layout, "deterministic": self.deterministic}

    def buffers(self) -> dict[str, np.ndarray[Any, Any]]:
        """Of each array that is passed, between canaries: out and lse of the others, and poisoned gradients."""
        shapes, dtypes = _shapes(self.shape), _dtypes(self.shape)
        drawn = [name for name in self.places if name not in ("out", "lse", *_WRITTEN)]
        made = self.values.make({name: shapes[name] for name in drawn}, dtypes)
        made |= {name: np.full(shapes[name], np.nan, dtypes[name]) for name in self.places if name in _WRITTEN}
        found = {name: self.places[name].fill(made[name]) for name in made}
        there = {name: self.places[name].view(found[name]) for name in drawn}  # repeated along strides of 0
        matrices = [as_bshd(there[name], self.shape.layout) for name in "qkv"]
        out, lse = oracle.attention(*matrices, **self._oracle_options(there))
        for name, x in (("out", as_bshd(out, self.shape.layout)), ("lse", lse)):
            found[name] = self.places[name].fill(x.astype(dtypes[name]))
        return {name: found[name] for name in self.places}

    def results(self, returned: Any) -> dict[str, Any]:
        """What the function has returned."""
        return {name: x for name, x in returned._asdict().items() if x is not None}

    def check(self, arrays: dict[str, Any], results: dict[str, Any], *, by_kernel: bool) -> None:
        """Hold gradients to the oracles, by the rule of `cupyfa.testing.assert_gradients_close`."""
        for gradient, of in (("dsink", "sink"), ("dbias", "bias")):
            found = f"{gradient} belongs to {of}; the call has returned {', '.join(results)}"
            assert (gradient in results) is (of in arrays), found
        layout = self.shape.layout
        given = {
            name: as_bshd(x, layout) if name in _MATRICES else x
            for name, x in arrays.items()
            if name not in (*_WRITTEN, *self.shape.of_scores)
        }
        exact, plain, floor = (x._asdict() for x in expected_of(given, self._oracle_options(arrays)))
        for name, x in results.items():
            have = as_bshd(x, layout) if name in _MATRICES else x
            factor = _row_factor(given[_ROWS_OF[name]]) if name in _ROWS_OF else None
            assert_close(have, exact[name], plain[name], floor=floor[name], row_factor=factor, what=name)

    def _oracle_options(self, arrays: dict[str, Any]) -> dict[str, Any]:
        return self.shape.options | {name: arrays[name] for name in self.shape.of_scores}


def _row_factor(x: Any) -> float | None:
    """How far beyond the same precision's largest error in a row of a sum of rows of x another one may be.

    None where that says too little, because the elements of a row have one error between them: what rows of x have in
    common is multiplied by the sum of their factors, and those of dS cancel where their roundings do not.
    """
    rows = x.astype(np.float32)
    common = (rows.mean(axis=1) ** 2).sum(axis=-1) if x.size else np.zeros(1)
    whole = (rows**2).sum(axis=-1).mean(axis=1) if x.size else np.zeros(1)
    return None if (common > whole / 4).any() else row_factor(x)


def _shapes(shape: dense.Shape) -> dict[str, tuple[int, ...]]:
    """Of all arrays that a call can have, in its layout."""
    shapes = shape.shapes()
    return shapes | {name: shapes[other] for name, other in _LIKE.items()}


def _dtypes(shape: dense.Shape) -> dict[str, np.dtype[Any]]:
    """Of all arrays that a call can have."""
    dtypes = shape.dtypes()
    return dtypes | {name: dtypes[other] for name, other in _LIKE.items()}


def _problem(shape: dense.Shape, deterministic: bool, places: dict[str, Place] | None = None) -> BackwardProblem:
    """The problem as the checks of a GPU call see it; of contiguous arrays, if there are no places."""
    if places is None:
        shapes, dtypes = _shapes(shape), _dtypes(shape)
        given = ("dout", "q", "k", "v", "out", "lse", *shape.of_scores)
        operands = {name: Operand.contiguous(name, shapes[name], dtypes[name], 0) for name in given}
    else:
        operands = {
            name: Operand(name, x.shape, x.strides, x.dtype, 0, x.offset % 16 == 0) for name, x in places.items()
        }
    checked = check_options(layout=shape.layout, **shape.options)
    return BackwardProblem.of(BackwardArrays(**operands), checked, deterministic=deterministic, current_device=0)


def _selection(shape: dense.Shape, deterministic: bool) -> BackwardSelection | None:
    """Its kernel on Hopper; None: there is nothing to launch."""
    problem = _problem(shape, deterministic)
    return None if problem.is_empty else select_backward(problem, H200, backward_config(dict(shape.template.config)))


def draw_templates(choice: random.Random, count: int) -> dict[BwdSpec, Template]:
    """Templates of different kernels; every row of the table has its share."""
    found: dict[BwdSpec, Template] = {}
    while len(found) < count:
        row = BWD_CANDIDATES[len(found) % len(BWD_CANDIDATES)]
        template = _draw_template(choice, row)
        shape = _draw_shape(choice, template)
        selection = _selection(shape, template.deterministic)
        if selection is not None and selection.candidate is row and selection.spec.partial is template.partial:
            found.setdefault(selection.spec, template)
    return found


def _draw_shape(choice: random.Random, template: Template) -> dense.Shape:
    def draw_sizes(choice: random.Random, long: bool) -> dense.Sizes:
        assert not long
        if choice.random() < 0.15:  # so many key tiles that a CTA walks several query heads, or all
            short = choice.randint(1, 40), choice.randint(1, 40)
            return *short, choice.randint(3, 10), choice.randint(3, 8), choice.randint(2, 8)
        batch = 0 if choice.random() < 0.02 else choice.choice((1, 1, 1, 2))
        sizes = dense.draw_length(choice), dense.draw_length(choice)
        return *sizes, batch, choice.choice((1, 1, 2)), choice.choice((1, 1, 2, 3, 5))

    return dense.draw_shape(choice, template.forward, draw_sizes)


def _draw_template(choice: random.Random, row: BwdCandidate) -> Template:
    widest, widest_v = choice.choice([(row.head_dim, row.head_dim_v), *_OTHERS.get(row.widest, ())])
    config = tuple(choice.choice(_CONFIGS).items()) if choice.random() < 0.15 else ()
    left, right = choice.choice(_BOUNDED)
    drawn = dense.draw_template(choice, widest, widest_v)
    negative = choice.random() < 0.3
    forward = dataclasses.replace(drawn, long=False, left=left, right=right, negative=negative, config=config)
    if choice.random() < 0.5:
        forward = dataclasses.replace(forward, bias=Bias.NONE, bias_float32=False)
    return Template(forward, choice.random() < 0.4, choice.random() < 0.5)


def draw_problem(choice: random.Random, template: Template, spec: BwdSpec) -> GradientsProblem:
    """Draw a problem of a kernel, or one with nothing to launch."""
    wanted = None if choice.random() < 0.04 else spec
    for _ in range(_TRIES):
        shape = _draw_shape(choice, template)
        if shape.scores > _MAX_SCORES:
            continue
        selection = _selection(shape, template.deterministic)
        found = None if selection is None else selection.spec
        if found == wanted:
            break
    else:
        raise RuntimeError(f"no problem of {_TRIES} has the kernel {spec} of {template}")
    given = {"q", "k", "v", "dout", "out", "lse", *shape.of_scores, *["dlse"] * (choice.random() < 0.4)}
    given |= {f"d{name}" for name in ("q", "k", "v", "sink", "bias") if name in given and choice.random() < 0.8}
    shapes, dtypes = _shapes(shape), _dtypes(shape)
    places = {
        name: draw_place(
            choice,
            shapes[name],
            dtypes[name],
            for_tma=name in _MATRICES and choice.random() < 0.85,
            may_repeat=name not in ("out", "lse", *_WRITTEN),
            reverse=choice.random() < 0.03,
        )
        for name in shapes
        if name in given and name != "bias"
    }
    if "bias" in given:
        places["bias"] = _draw_place_of_bias(choice, shape, template.deterministic, found, places)
    scale = 1.0 if shape.softmax_scale is None else shape.softmax_scale * math.sqrt(shape.head_dim)
    values = draw_values(choice, template.forward.dtype, scale, empty=True)
    return GradientsProblem(shape, template.deterministic, found, places, values)


def _draw_place_of_bias(
    choice: random.Random, shape: dense.Shape, deterministic: bool, spec: BwdSpec | None, others: dict[str, Place]
) -> Place:
    """Draw places until one has the kernel: not all can be read by TMA, and memory is limited."""
    config = backward_config(dict(shape.template.config))
    for _ in range(_TRIES):
        place = draw_place(
            choice,
            shape.bias_shape,
            shape.dtypes()["bias"],
            for_tma=choice.random() < 0.7,
            may_repeat=False,  # else its gradient would have another shape
            reverse=choice.random() < 0.1,
        )
        problem = _problem(shape, deterministic, others | {"bias": place})
        if place.size <= dense.MAX_BIAS and (spec is None or select_backward(problem, H200, config).spec == spec):
            return place
    raise RuntimeError(f"no place of {_TRIES} for a bias of {shape.bias_shape} has the kernel {spec}")
