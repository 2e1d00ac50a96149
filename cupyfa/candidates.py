"""The table of candidates: how heads of each size are tiled, and for which problems a row is not."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from cupyfa.problem import Problem
from cupyfa.spec import Bias, FwdSpec, Scheduler

__all__ = ["CANDIDATES", "Candidate"]

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
    packed : bool
        The row is only for sequences whose lengths are arrays: packed ones, or those of which a part is used.
    bias : tuple of str
        What biases the row is for.
    bias_stages : int
        As in :class:`cupyfa.spec.FwdSpec`.
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
    packed: bool = False
    bias: tuple[str, ...] = (_NO_BIAS,)
    bias_stages: int = 0
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
        if self.packed and not problem.planned:
            return "is for sequences whose lengths are arrays"
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
            varlen=problem.planned,
            causal=problem.right is not None,
            window=problem.left is not None,
            sink=problem.sink is not None,
            softcap=problem.softcap is not None,
            alibi=problem.alibi_slopes is not None,
            bias=problem.bias_access,
            bias_float32=problem.bias is not None and problem.bias.dtype == np.float32,
            bias_stages=self.bias_stages,
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
        bias_stages=2,
        reason="the most keys that two stages leave room for beside three Q",
    ),
    Candidate(
        head_dim=64,
        head_dim_v=64,
        tile_m=128,
        tile_n=64,
        stages=3,
        q_stages=3,
        bias=(_BIAS_32,),
        bias_stages=3,
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
        bias_stages=2,
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
        bias_stages=3,
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
        bias_stages=2,
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
        bias_stages=2,
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
        bias_stages=2,
        reason="the most keys that two stages of K, V and the bias leave room for",
    ),
    Candidate(
        head_dim=192,
        head_dim_v=192,
        tile_m=128,
        tile_n=48,
        stages=2,
        q_stages=2,
        packed=True,
        bias=(_BIAS_GATHERED,),
        reason="lengths that are arrays take registers: more keys would spill",
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
        bias_stages=2,
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
