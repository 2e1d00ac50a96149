"""Which kernel computes the gradients of a problem: a pure function over a table of candidates."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from cupyfa.backward_problem import BackwardProblem
from cupyfa.errors import UnsupportedError
from cupyfa.select import Config, Device
from cupyfa.spec import Bias, BiasGradientSpec, BwdSpec

__all__ = [
    "BWD_CANDIDATES",
    "BackwardSelection",
    "BwdCandidate",
    "backward_config",
    "bias_gradient_spec",
    "select_backward",
]

_KEYS = 128  # of a tile, 64 for each warpgroup
_STAGES = {"q_stages": range(2, 5), "dout_stages": range(1, 5)}


class BwdCandidate(NamedTuple):
    """A row of the table.

    Attributes
    ----------
    head_dim, head_dim_v : int
        The widest of Q and K, and of V.
    softcap, deterministic : bool
        Whether it has room for the slopes of a softcap, and for a dQ that waits for its turn.
    bias_bytes : int
        For how large elements of a bias with rows and columns it has room.
    tile_m, tile_n, q_stages, dout_stages : int
        As in :class:`cupyfa.spec.BwdSpec`.
    reason : str
        Why.
    """

    head_dim: int
    head_dim_v: int
    softcap: bool
    deterministic: bool
    bias_bytes: int
    tile_m: int
    tile_n: int
    q_stages: int
    dout_stages: int
    reason: str

    @property
    def widest(self) -> str:
        """The head dimensions that it takes, as specs write them."""
        both = self.head_dim == self.head_dim_v
        return f"d{self.head_dim}" if both else f"d{self.head_dim}/{self.head_dim_v}"

    def columns(self, head_dim: int) -> int:
        """Return the columns of the tiles of a head dimension: what two warpgroups can share.

        Parameters
        ----------
        head_dim : int
            Of the user's arrays.

        Returns
        -------
        int
            64, or 96 where warpgroups have keys of their own, or a larger multiple of 64.
        """
        multiple = 32 if self.tile_n == _KEYS else 64
        return max(64, -(-head_dim // multiple) * multiple)

    def objection(self, problem: BackwardProblem) -> str | None:
        """Return why it is not for a problem.

        Parameters
        ----------
        problem : BackwardProblem
            The problem.

        Returns
        -------
        str or None
            None: it is.
        """
        forward = problem.forward
        for name in ("head_dim", "head_dim_v"):
            if getattr(forward, name) > getattr(self, name):
                return f"{name} {getattr(forward, name)} exceeds {getattr(self, name)}"
        if forward.softcap is not None and not self.softcap:
            return "it has no room for the slopes of a softcap"
        if problem.deterministic and not self.deterministic:
            return "it has no room for a dQ that waits for its turn"
        if forward.bias is not None and problem.bias_kind is Bias.TILE:
            itemsize = forward.bias.dtype.itemsize
            if itemsize > self.bias_bytes:
                return f"it has no room for a bias of {8 * itemsize} bits"
        return None


#: In the order of preference; the last one takes every problem. What fits is a matter of registers and shared memory,
#: which the compiler checks.
BWD_CANDIDATES = (
    BwdCandidate(64, 64, False, True, 0, 128, 128, 2, 2, "128 queries a step: least shared memory for a product"),
    BwdCandidate(64, 64, True, True, 4, 64, 128, 2, 2, "the slopes of 64 queries, or a bias, fit beside the rings"),
    BwdCandidate(128, 128, False, False, 0, 64, 128, 3, 3, "dK and dV leave registers for 64 queries a step"),
    BwdCandidate(128, 128, False, False, 4, 64, 128, 2, 2, "a bias has the room of the third slots"),
    BwdCandidate(128, 128, False, True, 2, 64, 128, 2, 2, "so has a dQ that waits, and a bias of 16 bits what is left"),
    BwdCandidate(128, 128, False, True, 4, 64, 128, 2, 1, "one of float32 has that of the second dO, too"),
    BwdCandidate(128, 128, True, True, 0, 128, 64, 2, 1, "the slopes leave registers for 64 keys, which are shared"),
    BwdCandidate(192, 128, False, False, 0, 128, 64, 2, 1, "warpgroups share 64 keys, and 128 queries a step fit"),
    BwdCandidate(256, 256, True, True, 4, 64, 64, 2, 1, "64 queries a step leave registers and room for all else"),
)


@dataclasses.dataclass(frozen=True)
class BackwardSelection:
    """The chosen kernel and the fate of every candidate.

    Attributes
    ----------
    spec : BwdSpec
        The kernel.
    candidate : BwdCandidate
        The row.
    objections : tuple of str or None
        Why each row is not the one, in their order; None where it would do.
    heads_per_part : int
        How many of the query heads that share a key/value head a CTA walks.
    parts : int
        How many CTAs share a key tile: their sums of dK and dV are added afterwards, in a fixed order. One for packed
        sequences, whose key tiles nobody has counted.
    """

    spec: BwdSpec
    candidate: BwdCandidate
    objections: tuple[str | None, ...]
    heads_per_part: int
    parts: int


def backward_config(config: Config | None) -> tuple[tuple[str, Any], ...]:
    """Check ``config=`` and return its items, sorted.

    Parameters
    ----------
    config : Mapping or None
        Fields of :class:`cupyfa.spec.BwdSpec`: ``q_stages``, ``dout_stages``, ``setmaxnreg``.

    Returns
    -------
    tuple
        Pairs of name and value.

    Raises
    ------
    TypeError, ValueError
        A name is not a field that can be overridden, or no kernel has the value.
    """
    if config is None:
        return ()
    if not isinstance(config, Mapping):
        raise TypeError(f"attention: config is {config!r}; it must be a mapping of BwdSpec fields or None")
    items: list[tuple[str, Any]] = []
    for name, value in config.items():
        what = f"attention: config[{name!r}] is {value!r}; it must be"
        if name == "setmaxnreg":
            if not isinstance(value, (bool, np.bool_)):
                raise TypeError(f"{what} True or False")
            items.append((name, bool(value)))
        elif name in _STAGES:
            if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
                raise TypeError(f"{what} an integer")
            if value not in _STAGES[name]:
                raise ValueError(f"{what} one of {', '.join(map(str, _STAGES[name]))}")
            items.append((name, int(value)))
        else:
            raise ValueError(
                f"attention: config has the field {name!r}; gradients can override q_stages, dout_stages, setmaxnreg"
            )
    return tuple(sorted(items))


def select_backward(
    problem: BackwardProblem, device: Device, config: tuple[tuple[str, Any], ...] = ()
) -> BackwardSelection:
    """Choose the kernel of a problem.

    Parameters
    ----------
    problem : BackwardProblem
        The checked problem.
    device : Device
        The GPU.
    config : tuple
        From `backward_config`.

    Returns
    -------
    BackwardSelection
        The spec and the reasons.

    Raises
    ------
    UnsupportedError
        No kernel fits the device or the problem.
    """
    forward = problem.forward
    if device.compute_capability != (9, 0):
        major, minor = device.compute_capability
        raise UnsupportedError(
            f"attention: the GPU has compute capability {major}.{minor}; gradients have kernels for 9.0 (Hopper: H100, "
            "H200). NumPy arrays run on the CPU"
        )
    if forward.bias is not None and forward.packed is not None:
        raise UnsupportedError(
            "attention: no kernel computes the gradients of packed sequences with a bias yet; call attention_backward "
            "for each sequence, or pass NumPy arrays"
        )
    objections = tuple(row.objection(problem) for row in BWD_CANDIDATES)
    best = BWD_CANDIDATES[objections.index(None)]
    heads_per_part, parts = max(1, forward.heads_q // max(1, forward.heads_kv)), 1  # arrays may have no head
    if forward.packed is None:  # else only the device knows how many key tiles there are
        key_tiles = forward.batch * forward.heads_kv * -(-forward.seqlen_k // best.tile_n)
        heads_per_part, parts = _share(heads_per_part, key_tiles, device.multiprocessors)
    spec = BwdSpec(
        dtype=forward.dtype,
        head_dim=best.columns(forward.head_dim),
        head_dim_v=best.columns(forward.head_dim_v),
        tile_m=best.tile_m,
        tile_n=best.tile_n,
        q_stages=best.q_stages,
        dout_stages=best.dout_stages,
        varlen=forward.packed is not None,
        causal=forward.right is not None,
        window=forward.left is not None,
        softcap=forward.softcap is not None,
        alibi=forward.alibi_slopes is not None,
        bias=problem.bias_kind,
        bias_float32=forward.bias is not None and forward.bias.dtype == np.float32,
        partial=parts > 1,
        deterministic=problem.deterministic,
        setmaxnreg=True,
    )
    return BackwardSelection(dataclasses.replace(spec, **dict(config)), best, objections, heads_per_part, parts)


def bias_gradient_spec(spec: BwdSpec) -> BiasGradientSpec:
    """Return the kernel of the gradient of a bias.

    Parameters
    ----------
    spec : BwdSpec
        That of the other gradients.

    Returns
    -------
    BiasGradientSpec
        For the same scores, with as many tiles under way as fit.
    """
    widest = max(spec.head_dim, spec.head_dim_v)
    return BiasGradientSpec(
        dtype=spec.dtype,
        head_dim=spec.head_dim,
        head_dim_v=spec.head_dim_v,
        stages=3 if widest <= 64 else 2 if widest <= 128 else 1,
        causal=spec.causal,
        window=spec.window,
        softcap=spec.softcap,
        alibi=spec.alibi,
        bias=spec.bias,
        bias_float32=spec.bias_float32,
    )


def _share(group: int, key_tiles: int, multiprocessors: int) -> tuple[int, int]:
    """Return how many query heads a CTA walks, and how many CTAs share a key tile: one, unless that leaves SMs idle."""
    wanted = max(1, min(group, multiprocessors // max(1, key_tiles)))
    heads_per_part = -(-group // wanted)
    return heads_per_part, -(-group // heads_per_part)
