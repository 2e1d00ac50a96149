"""From a problem and a device to a kernel: a pure function over a table of candidates."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Mapping
from typing import Any

import numpy as np

from cupyfa.errors import UnsupportedError
from cupyfa.problem import Problem
from cupyfa.spec import Bias, FwdSpec, Scheduler

__all__ = ["CANDIDATES", "Candidate", "Config", "Device", "Selection", "Verdict", "config_items", "select"]

Config = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Device:
    """What selection and launch need to know about a GPU.

    Attributes
    ----------
    compute_capability : tuple of int
        (major, minor).
    multiprocessors : int
        Number of SMs.
    l2_bytes : int
        Size of the L2 cache.
    """

    compute_capability: tuple[int, int]
    multiprocessors: int
    l2_bytes: int

    @classmethod
    def current(cls) -> Device:
        """Return CuPy's current device."""
        import cupy  # noqa: PLC0415 - imported where a GPU is used

        return _device(cupy.cuda.runtime.getDevice())


@functools.cache
def _device(index: int) -> Device:
    import cupy  # noqa: PLC0415

    p = cupy.cuda.runtime.getDeviceProperties(index)
    return Device((p["major"], p["minor"]), p["multiProcessorCount"], p["l2CacheSize"])


#: An H200: for :func:`cupyfa.explain` on a machine without a GPU.
H200 = Device((9, 0), 132, 60 * 2**20)


#: Options by another name than their field of a problem.
_OPTION = {"left": "a window"}

#: The biases that need tiles of their own: those that TMA copies take shared memory, the others registers.
_NO_BIAS, _BIAS_16, _BIAS_32, _BIAS_GATHERED = "no bias", "a bias of 16 bits", "a bias of float32", "a gathered bias"


def _kind_of_bias(problem: Problem) -> str:
    if problem.bias is None:
        return _NO_BIAS
    if problem.bias_access is Bias.GATHER:
        return _BIAS_GATHERED
    return _BIAS_32 if problem.bias.dtype == np.float32 else _BIAS_16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A row of the table: one way to tile heads of up to ``head_dim`` and ``head_dim_v``.

    Attributes
    ----------
    head_dim, head_dim_v : int
        The largest that fit; the kernel's are the problem's, rounded up to a multiple of 32.
    tile_m, tile_n, stages, q_stages
        As in :class:`cupyfa.spec.FwdSpec`.
    max_seqlen_q, max_window : float
        The row is only for problems with at most so many query rows, or a window of at most so many keys.
    narrow : bool
        The row is only for windows of which blocks of 128 keys would cover a fifth more keys than its own.
    bias : tuple of str
        What biases the row is for.
    spills_with : tuple of tuple of str
        The row is not for problems that have all options of one of these: the kernel would not fit the registers.
    reason : str
        Why the row is in the table.
    """

    head_dim: int
    head_dim_v: int
    tile_m: int
    tile_n: int
    stages: int
    q_stages: int
    max_seqlen_q: float = math.inf
    max_window: float = 0
    narrow: bool = False
    bias: tuple[str, ...] = (_NO_BIAS,)
    spills_with: tuple[tuple[str, ...], ...] = ()
    reason: str

    @property
    def name(self) -> str:
        """head_dim, and that of V if it is another one."""
        return f"d{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")

    def objection(self, problem: Problem) -> str | None:
        """Return why the row does not suit a problem, or None."""
        for name in ("head_dim", "head_dim_v"):
            if getattr(self, name) < getattr(problem, name):
                return f"holds {name} up to {getattr(self, name)}, the problem has {getattr(problem, name)}"
        if _kind_of_bias(problem) not in self.bias:
            return f"is for {' or '.join(self.bias)}, the problem has {_kind_of_bias(problem)}"
        if problem.max_seqlen_q > self.max_seqlen_q and problem.window > self.max_window:
            return f"is for seqlen_q up to {self.max_seqlen_q}, or windows of up to {self.max_window} keys"
        if self.narrow and self._keys(problem, 128) < 1.2 * self._keys(problem, self.tile_n):
            return "is for windows that blocks of 128 keys cover badly"
        for names in self.spills_with:
            if all(getattr(problem, name) is not None for name in names):
                return f"spills registers with {' and '.join(_OPTION.get(name, name) for name in names)}"
        return None

    def _keys(self, problem: Problem, tile_n: int) -> int:
        """Return how many keys a tile in the middle of a long problem walks over, in blocks of `tile_n`."""
        if problem.left is None or problem.right is None:
            return problem.seqlen_k
        # The diagonal of its first row is at the beginning of a block: it usually is, bottom-right or not.
        before, behind = -(-problem.left // tile_n), -(-(self.tile_m + problem.right) // tile_n)
        return (before + behind) * tile_n

    def spec(self, problem: Problem) -> FwdSpec:
        """Return the kernel for a problem."""
        return FwdSpec(
            dtype=problem.dtype,
            head_dim=-(-problem.head_dim // 32) * 32,
            head_dim_v=-(-problem.head_dim_v // 32) * 32,
            tile_m=self.tile_m,
            tile_n=self.tile_n,
            stages=self.stages,
            q_stages=self.q_stages,
            varlen=problem.packed is not None,
            causal=problem.right is not None,
            window=problem.left is not None,
            sink=problem.sink is not None,
            softcap=problem.softcap is not None,
            alibi=problem.alibi_slopes is not None,
            bias=problem.bias_access,
            bias_float32=problem.bias is not None and problem.bias.dtype == np.float32,
            negate_scores=problem.softmax_scale < 0,
            overlap=True,
            three_stage=False,
            speculative=True,
            rescale_threshold=0,
            exp2_fma=0,
            pingpong=False,
            warp_specialized=True,
            scheduler=Scheduler.DYNAMIC,
            longest_first=True,
            setmaxnreg=True,
        )


#: In order of preference: the first row without an objection is taken. The measurements are in
#: docs/notes/hopper_forward.md.
CANDIDATES = (
    Candidate(
        head_dim=64,
        head_dim_v=64,
        tile_m=128,
        tile_n=64,
        stages=4,
        q_stages=3,
        narrow=True,
        reason="windows that blocks of 128 keys cover badly",
    ),
    Candidate(
        head_dim=64,
        head_dim_v=64,
        tile_m=128,
        tile_n=128,
        stages=3,
        q_stages=3,
        max_seqlen_q=1024,
        max_window=1025,
        reason="short sequences and windows: 128 rows waste less than 192",
    ),
    Candidate(
        head_dim=64,
        head_dim_v=64,
        tile_m=192,
        tile_n=96,
        stages=3,
        q_stages=2,
        spills_with=(("softcap",), ("left", "alibi_slopes")),
        reason="three warpgroups hide the exponentials, which take as long as the products at head_dim 64",
    ),
    Candidate(
        head_dim=64,
        head_dim_v=64,
        tile_m=192,
        tile_n=64,
        stages=4,
        q_stages=2,
        reason="softcap, or ALiBi in a window: more keys would spill registers",
    ),
    Candidate(
        head_dim=128,
        head_dim_v=128,
        tile_m=128,
        tile_n=64,
        stages=3,
        q_stages=2,
        narrow=True,
        reason="windows that blocks of 128 keys cover badly",
    ),
    Candidate(
        head_dim=128,
        head_dim_v=128,
        tile_m=128,
        tile_n=128,
        stages=2,
        q_stages=2,
        spills_with=(("softcap", "alibi_slopes"),),
        reason="O, S and two P just fit the registers, two Q and two stages the shared memory",
    ),
    Candidate(
        head_dim=128,
        head_dim_v=128,
        tile_m=128,
        tile_n=112,
        stages=2,
        q_stages=2,
        reason="softcap and ALiBi: more keys would spill registers",
    ),
    Candidate(
        head_dim=192,
        head_dim_v=128,
        tile_m=128,
        tile_n=96,
        stages=2,
        q_stages=2,
        reason="the most keys that two stages leave room for beside two Q",
    ),
    Candidate(
        head_dim=192,
        head_dim_v=192,
        tile_m=128,
        tile_n=80,
        stages=2,
        q_stages=2,
        reason="the most keys that two stages leave room for beside two Q",
    ),
    Candidate(
        head_dim=256,
        head_dim_v=256,
        tile_m=128,
        tile_n=64,
        stages=2,
        q_stages=1,
        reason="O, S and two P just fit the registers",
    ),
    Candidate(
        head_dim=64,
        head_dim_v=64,
        tile_m=128,
        tile_n=128,
        stages=2,
        q_stages=3,
        bias=(_BIAS_16,),
        reason="with three warpgroups, the producer's registers do not hold one more ring",
    ),
    Candidate(
        head_dim=64,
        head_dim_v=64,
        tile_m=128,
        tile_n=64,
        stages=3,
        q_stages=3,
        bias=(_BIAS_32,),
        reason="memory is the limit: three blocks of the bias are under way",
    ),
    Candidate(
        head_dim=64,
        head_dim_v=64,
        tile_m=128,
        tile_n=64,
        stages=4,
        q_stages=3,
        bias=(_BIAS_GATHERED,),
        reason="the most keys without spills",
    ),
    Candidate(
        head_dim=128,
        head_dim_v=128,
        tile_m=128,
        tile_n=96,
        stages=2,
        q_stages=2,
        bias=(_BIAS_16,),
        reason="the most keys that two stages of K, V and the bias leave room for beside two Q",
    ),
    Candidate(
        head_dim=128,
        head_dim_v=128,
        tile_m=128,
        tile_n=64,
        stages=2,
        q_stages=2,
        bias=(_BIAS_32,),
        reason="the most keys that two stages of K, V and the bias leave room for beside two Q",
    ),
    Candidate(
        head_dim=128,
        head_dim_v=128,
        tile_m=128,
        tile_n=64,
        stages=3,
        q_stages=2,
        bias=(_BIAS_GATHERED,),
        reason="the most keys without spills",
    ),
    Candidate(
        head_dim=192,
        head_dim_v=128,
        tile_m=128,
        tile_n=96,
        stages=2,
        q_stages=1,
        bias=(_BIAS_16,),
        reason="the most keys that two stages of K, V and the bias leave room for",
    ),
    Candidate(
        head_dim=192,
        head_dim_v=192,
        tile_m=128,
        tile_n=80,
        stages=2,
        q_stages=1,
        bias=(_BIAS_16,),
        reason="the most keys that two stages of K, V and the bias leave room for",
    ),
    Candidate(
        head_dim=192,
        head_dim_v=192,
        tile_m=128,
        tile_n=64,
        stages=2,
        q_stages=1,
        bias=(_BIAS_32,),
        reason="the most keys that two stages of K, V and the bias leave room for",
    ),
    Candidate(
        head_dim=192,
        head_dim_v=192,
        tile_m=128,
        tile_n=64,
        stages=2,
        q_stages=2,
        bias=(_BIAS_GATHERED,),
        reason="the most keys without spills",
    ),
    Candidate(
        head_dim=256,
        head_dim_v=256,
        tile_m=128,
        tile_n=48,
        stages=2,
        q_stages=1,
        bias=(_BIAS_16, _BIAS_32),
        reason="the most keys that two stages of K, V and the bias leave room for",
    ),
    Candidate(
        head_dim=256,
        head_dim_v=256,
        tile_m=128,
        tile_n=32,
        stages=2,
        q_stages=1,
        bias=(_BIAS_GATHERED,),
        reason="the most keys without spills",
    ),
)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a candidate.

    Attributes
    ----------
    candidate : Candidate
        The row.
    chosen : bool
        Whether it is the one.
    reason : str
        Why, or why not.
    """

    candidate: Candidate
    chosen: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class Selection:
    """The chosen kernel and the fate of every candidate.

    Attributes
    ----------
    spec : FwdSpec
        The kernel.
    verdicts : tuple of Verdict
        In the order of the table.
    overrides : Mapping
        What ``config=`` changed.
    """

    spec: FwdSpec
    verdicts: tuple[Verdict, ...]
    overrides: Config


def select(problem: Problem, device: Device, config: Config | None = None) -> Selection:
    """Choose a kernel.

    Parameters
    ----------
    problem : Problem
        The checked problem.
    device : Device
        The GPU.
    config : Mapping, optional
        Fields of :class:`cupyfa.spec.FwdSpec` that override the chosen candidate's.

    Returns
    -------
    Selection
        The spec and the reasons.

    Raises
    ------
    UnsupportedError
        No kernel fits the device.
    TypeError, ValueError
        ``config`` names a field that a spec does not have, or that the problem decides, or has a value of another type.
    """
    if device.compute_capability != (9, 0):
        major, minor = device.compute_capability
        raise UnsupportedError(
            f"attention: the GPU has compute capability {major}.{minor}; there are kernels for 9.0 (Hopper: H100, "
            "H200). NumPy arrays run on the CPU"
        )
    best = next(row for row in CANDIDATES if row.objection(problem) is None)
    verdicts = tuple(Verdict(row, row is best, _reason(row, best, problem)) for row in CANDIDATES)
    overrides = {} if config is None else dict(config_items(config))
    spec = dataclasses.replace(best.spec(problem), **overrides)
    _check_combination(spec)
    return Selection(spec, verdicts, types.MappingProxyType(overrides))


def _reason(row: Candidate, best: Candidate, problem: Problem) -> str:
    if row is best:
        return row.reason
    if objection := row.objection(problem):
        return objection
    return f"{best.name} {best.tile_m}x{best.tile_n} comes before it"


_SWITCHES = ("overlap", "three_stage", "speculative", "pingpong", "warp_specialized", "longest_first", "setmaxnreg")
_SIZES = {
    "tile_m": (64, 128, 192),
    "tile_n": (32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 256),  # the shapes of cuda/ptx/wgmma.cuh
    "stages": range(1, 9),
    "q_stages": range(1, 9),
    "rescale_threshold": range(9),  # P reaches 2**8, and its sum over a row no more than float32 holds
    "exp2_fma": range(9),
}


def config_items(config: Config) -> tuple[tuple[str, Any], ...]:
    """Check ``config=`` and return its items, sorted, so that equal configurations are equal keys.

    Parameters
    ----------
    config : Mapping
        Fields of :class:`cupyfa.spec.FwdSpec`; a scheduler may be given by name.

    Returns
    -------
    tuple
        Pairs of name and value.

    Raises
    ------
    TypeError, ValueError
        A name is not a field that can be overridden, or no kernel has the value.
    """
    if not isinstance(config, Mapping):
        raise TypeError(f"attention: config is {config!r}; it must be a mapping of FwdSpec fields or None")
    return tuple(sorted((name, _config_value(name, value)) for name, value in config.items()))


def _config_value(name: str, value: Any) -> Any:
    what = f"attention: config[{name!r}] is {value!r}; it must be"
    if name in _SWITCHES:
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(f"{what} True or False")
        return bool(value)
    if name in _SIZES:
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
            raise TypeError(f"{what} an integer")
        if value not in _SIZES[name]:
            raise ValueError(f"{what} one of {', '.join(str(size) for size in _SIZES[name])}")
        return int(value)
    if name == "scheduler":
        if value not in [choice for member in Scheduler for choice in (member, member.value)]:
            raise ValueError(f"{what} one of {', '.join(repr(member.value) for member in Scheduler)}")
        return Scheduler(value)
    free = ", ".join((*_SIZES, *_SWITCHES, "scheduler"))
    raise ValueError(f"attention: config has the field {name!r}; it can override {free}")


#: What the kernel without warp specialization is written for, beside two stages or more.
_UNSPECIALIZED: dict[str, Any] = {
    "q_stages": 1,
    "overlap": True,
    "three_stage": False,
    "pingpong": False,
    "scheduler": Scheduler.ONE_TILE,
    "setmaxnreg": False,
}


def _listed(fields: Config) -> str:
    return ", ".join(f"{name}={getattr(value, 'value', value)!r}" for name, value in fields.items())


def _check_combination(spec: FwdSpec) -> None:
    """Refuse what the schedule cannot do; what exceeds shared memory is refused by the compiler."""
    if spec.varlen or spec.window or spec.softcap or spec.alibi or spec.bias is not Bias.NONE:
        for name, value in (("warp_specialized", False), ("three_stage", True)):
            if getattr(spec, name) is value:
                raise ValueError(
                    f"attention: config has {name}={value}; that kernel is for comparisons, and has no packed "
                    f"sequences, no left side of a window, no softcap, no ALiBi and no bias: set {name}={not value}"
                )
    if not spec.warp_specialized:
        needed = {"stages": max(2, spec.stages)} | _UNSPECIALIZED
        changes = {name: value for name, value in needed.items() if getattr(spec, name) != value}
        if changes:
            raise ValueError(
                f"attention: config has warp_specialized=False with {_listed({n: getattr(spec, n) for n in changes})}; "
                "without a producer a CTA computes one tile, and copies under the products of its next block: set "
                f"{_listed(changes)}"
            )
    if spec.speculative and not spec.overlap:
        raise ValueError(
            "attention: config has speculative=True with overlap=False; a speculative softmax runs under the product "
            "of the block before: set overlap=True, or speculative=False"
        )
    if spec.rescale_threshold and spec.speculative:
        raise ValueError(
            f"attention: config has rescale_threshold {spec.rescale_threshold} with speculative=True; a speculative "
            "softmax has a range of its own: set speculative=False, or rescale_threshold to 0"
        )
    if spec.exp2_fma and not spec.speculative:
        raise ValueError(
            f"attention: config has exp2_fma {spec.exp2_fma} with speculative=False; what the polynomial makes of a "
            "NaN is seen by a speculative softmax only: set speculative=True, or exp2_fma to 0"
        )
    if spec.three_stage:
        for name, value, why in (
            ("overlap", False, "the scores of two blocks are under way while a softmax runs"),
            ("speculative", True, "its softmax is the exact one"),
            ("pingpong", True, "its warpgroups take no turns"),
        ):
            if getattr(spec, name) is value:
                raise ValueError(
                    f"attention: config has three_stage=True with {name}={value}; {why}: set {name}={not value}, or "
                    "three_stage=False"
                )
        if spec.stages < 2:
            raise ValueError(
                "attention: config has three_stage=True with stages 1; it waits for the next K while one is read: set "
                "stages to 2 or more, or three_stage=False"
            )
    if spec.tile_m == 64:
        for name in ("pingpong", "setmaxnreg"):
            if getattr(spec, name):
                raise ValueError(
                    f"attention: config has tile_m 64 with {name}=True; {name} needs two consumer warpgroups: set "
                    f"{name}=False, or tile_m to 128 or 192"
                )
