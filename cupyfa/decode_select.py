"""Which decode kernel computes a problem, and into how many splits its keys are cut: a pure function of sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from cupyfa.cache_problem import CacheProblem
from cupyfa.errors import UnsupportedError
from cupyfa.select import Config, Device
from cupyfa.spec import DecodeSpec

__all__ = ["DecodeSelection", "decode_config", "select_decode"]

_BLOCK = 64  # keys: splits are cut at multiples of it
_PANEL_BYTES = 64 * 128  # 64 rows of 64 columns
_LARGE_BLOCK = 128  # keys of a step, for two warpgroups of rows: their products are what takes long
_LARGE_WIDEST = 128  # head_dim and head_dim_v with which registers and shared memory hold such blocks
_SHARED_BYTES = 228 * 1024  # of a multiprocessor; each CTA takes 1 KiB more than it has
_WIDEST = 192  # head_dim_v of two warpgroups of a multiprocessor: beyond, O does not fit into their registers
_MOST_STAGES = 8
#: What a call may override.
_FIELDS = ("tile_m", "stages", "key_groups", "residents")


@dataclasses.dataclass(frozen=True)
class DecodeSelection:
    """A kernel and how the keys are cut.

    Attributes
    ----------
    spec : DecodeSpec
        The compile key.
    splits : int
        Parts of the keys of a sequence.
    blocks_per_split : int
        Blocks of 64 keys of a part; 0: all parts of a sequence are alike.
    cluster : int
        CTAs that merge their parts through shared memory.
    reason : str
        Why so many splits.
    """

    spec: DecodeSpec
    splits: int
    blocks_per_split: int
    cluster: int
    reason: str

    @property
    def parts(self) -> int:
        """How many partial results another kernel merges; 0: there is none."""
        return 0 if self.splits == self.cluster else self.splits * self.spec.key_groups


def decode_config(config: Config | None) -> tuple[tuple[str, int], ...]:
    """Check ``config=`` and return its items, sorted.

    Parameters
    ----------
    config : Mapping or None
        Fields of :class:`cupyfa.spec.DecodeSpec`.

    Returns
    -------
    tuple
        Pairs of name and value.

    Raises
    ------
    TypeError, ValueError
        A name is not a field that can be overridden, or its value no positive integer.
    """
    if config is None:
        return ()
    if not isinstance(config, Mapping):
        raise TypeError(f"attention: config is {config!r}; it must be a mapping of DecodeSpec fields or None")
    for name, value in config.items():
        if name not in _FIELDS:
            raise ValueError(f"attention: config has {name!r}; a cache has {', '.join(_FIELDS)}")
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
            raise TypeError(f"attention: config[{name!r}] is {value!r}; it must be a positive integer")
    return tuple(sorted((name, int(value)) for name, value in config.items()))


def select_decode(problem: CacheProblem, device: Device, config: tuple[tuple[str, int], ...] = ()) -> DecodeSelection:
    """Choose the kernel of a problem.

    With ``num_splits`` or ``split_size`` the choice depends on no other sequence: each has the same bits in any batch.

    Parameters
    ----------
    problem : CacheProblem
        With no empty output.
    device : Device
        The GPU.
    config : tuple
        From `decode_config`.

    Returns
    -------
    DecodeSelection
        The kernel.

    Raises
    ------
    UnsupportedError
        The device is no Hopper GPU, or head_dim too large.
    """
    if device.compute_capability != (9, 0):
        major, minor = device.compute_capability
        raise UnsupportedError(f"attention: no kernel for a cache on compute capability {major}.{minor}; it needs 9.0")
    for name, head_dim in (("k_cache", problem.head_dim), ("v_cache", problem.head_dim_v)):
        if head_dim % 8 or head_dim > 256:
            raise UnsupportedError(
                f"attention: {name} has head_dim {head_dim}; kernels for a cache take multiples of 8 up to 256"
            )
    overrides = dict(config)
    rows = problem.seqlen_q * (problem.heads_q // problem.heads_kv)
    fits = _padded(problem.head_dim_v) <= _WIDEST
    tile_m = overrides.get("tile_m", 128 if rows > 64 and fits else 64)
    tiles = problem.batch * problem.heads_kv * -(-rows // tile_m)
    fixed = problem.split_size is not None or problem.num_splits is not None
    # Not where the caller cuts the keys, as with the groups below: the steps of a sum would depend on the longest q.
    # Nor where a second CTA or group shall have half of the registers, or of the rings.
    alone = overrides.get("residents", 1) == overrides.get("key_groups", 1) == 1
    large = tile_m == 2 * _BLOCK and alone and not fixed and max(problem.head_dim, problem.head_dim_v) <= _LARGE_WIDEST
    tile_n = _LARGE_BLOCK if large else _BLOCK
    blocks = -(-problem.capacity // tile_n)
    if problem.split_size is not None:
        per_split = problem.split_size // _BLOCK
        splits, reason = max(1, -(-blocks // per_split)), f"split_size {problem.split_size}"
    elif problem.num_splits is not None:
        per_split, splits, reason = 0, problem.num_splits, f"num_splits {problem.num_splits}"
    else:
        per_split, splits = 0, _choose_splits(tiles, blocks, device.multiprocessors)
        reason = f"{tiles} tiles on {device.multiprocessors} multiprocessors, at most {blocks} blocks of {tile_n} keys"
    # Two CTAs of a multiprocessor, which begin and end at different times, or two warpgroups of one. Not where the
    # caller cuts the keys: with tile_m, the number of groups would depend on the longest q of the batch.
    twice = fits and tile_m == 64
    residents = overrides.get("residents", 2 if twice and _stages(problem, tile_m, tile_n, 2) >= 2 else 1)
    key_groups = overrides.get("key_groups", 2 if twice and residents == 1 and not fixed else 1)
    spec = DecodeSpec(
        dtype=problem.dtype,
        head_dim=_padded(problem.head_dim),
        head_dim_v=_padded(problem.head_dim_v),
        tile_m=tile_m,
        tile_n=tile_n,
        stages=overrides.get("stages", _stages(problem, tile_m, tile_n, residents) // key_groups * key_groups),
        key_groups=key_groups,
        residents=residents,
        softcap=problem.softcap is not None,
        alibi=problem.alibi_slopes is not None,
    )
    # A split_size makes as many parts as the capacity needs; those with keys are merged alike, however many they are.
    cluster = 2 if splits == 2 and problem.split_size is None else 1
    return DecodeSelection(spec, splits, per_split, cluster, reason)


def _choose_splits(tiles: int, blocks: int, multiprocessors: int) -> int:
    """As many splits as fill the multiprocessors once, each of two blocks or more."""
    return max(1, min(multiprocessors // max(1, tiles), -(-blocks // 2)))


def _padded(head_dim: int) -> int:
    return -(-head_dim // 32) * 32


def _stages(problem: CacheProblem, tile_m: int, tile_n: int, residents: int) -> int:
    """Return how many slots of K and V shared memory has room for, beside Q and 1 KiB of barriers."""
    panels = [-(-head_dim // 64) for head_dim in (problem.head_dim, problem.head_dim_v)]
    room = _SHARED_BYTES // residents - 2 * 1024 - panels[0] * _PANEL_BYTES * tile_m // 64
    return min(_MOST_STAGES, room // (sum(panels) * _PANEL_BYTES * tile_n // _BLOCK))
