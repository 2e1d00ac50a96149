"""When the reference implementation takes the two-CTA forward path, and what its interface admits (0x07, 0x0C).

The predicates are behaviour of one pinned release, fa4-v4.0.0.beta23. Neither the paper nor the instruction set asks
for them, and a later release may differ. A call that is *eligible* has not been *dispatched*: see `..evidence`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = [
    "Call",
    "backward_objections",
    "forward_objections",
    "padded",
    "q_stages",
    "static_persistent",
    "two_cta",
    "two_cta_objections",
]

#: First digits of the compute capability (10 * major + minor, divided by 10).
FORWARD_FAMILIES = (8, 9, 10, 11, 12)
BACKWARD_FAMILIES = (9, 10, 11, 12)
_SM100_SM110 = (10, 11)


@dataclass(frozen=True)
class Call:
    """What the predicates look at (specification 0x07).

    Attributes
    ----------
    arch : int
        10 * major + minor of the compute capability: 90, 100, 103, 110, 120.
    head_dim, head_dim_v : int
        Of Q and K, and of V.
    seqlen_q : int
        Query rows per sequence.
    q_heads_per_kv_head : int
        Heads that share a key/value head.
    tile_m : int
        Query rows per CTA.
    pack_gqa : bool
        True if the heads that share keys are packed into the rows of a tile.
    causal, local : bool
        Masks.
    split_kv : bool
        True if the keys are split over several CTAs with partial outputs.
    varlen_q : bool
        True with ``cu_seqlens_q`` or ``seqused_q``.
    block_sparse : bool
        True with block sparsity.
    page_size : int or None
        Of a paged K/V cache.
    two_cta_disabled : bool
        True if the caller or the environment switches it off.
    fp8 : bool
        True for FP8 inputs.
    deterministic : bool
        True if the backward pass must be.
    """

    arch: int = 100
    head_dim: int = 128
    head_dim_v: int = 128
    seqlen_q: int = 4096
    q_heads_per_kv_head: int = 1
    tile_m: int = 128
    pack_gqa: bool = False
    causal: bool = False
    local: bool = False
    split_kv: bool = False
    varlen_q: bool = False
    block_sparse: bool = False
    page_size: int | None = None
    two_cta_disabled: bool = False
    fp8: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name in ("arch", "head_dim", "head_dim_v", "q_heads_per_kv_head", "tile_m"):
            if getattr(self, name) <= 0:
                raise ValueError(f"Call: {name} is {getattr(self, name)}; it must be positive")
        if self.seqlen_q < 0:
            raise ValueError(f"Call: seqlen_q is {self.seqlen_q}; it must not be negative")
        if self.page_size is not None and self.page_size < 1:
            raise ValueError(f"Call: page_size is {self.page_size}; it must be positive, or None")

    @property
    def family(self) -> int:
        """``arch // 10``."""
        return self.arch // 10

    @property
    def packed_seqlen_q(self) -> int:
        """Query rows of one key/value head: of all heads that share it if they are packed, else of one."""
        return self.seqlen_q * (self.q_heads_per_kv_head if self.pack_gqa else 1)


def padded(head_dim: int) -> int:
    """Round a head dimension up to the multiple of 16 that the instruction needs (specification 0x07).

    Examples
    --------
    >>> padded(120), padded(128)
    (128, 128)
    """
    if head_dim < 1:
        raise ValueError(f"padded: head_dim is {head_dim}; it must be positive")
    return math.ceil(head_dim / 16) * 16


def q_stages(call: Call) -> int:
    """Query tiles in flight per CTA: 2 if the packed queries fill more than one tile, else 1 (0x07).

    Examples
    --------
    >>> q_stages(Call(seqlen_q=128)), q_stages(Call(seqlen_q=129))
    (1, 2)
    """
    return 2 if call.packed_seqlen_q > call.tile_m else 1


def two_cta_objections(call: Call) -> tuple[str, ...]:
    """List why a call does not take the two-CTA path (specification 0x07).

    Parameters
    ----------
    call : Call
        The call.

    Returns
    -------
    tuple of str
        Empty if every condition holds: SM100 or SM110 family, not disabled, neither causal nor local, no split, fixed
        query length, no block sparsity, page size absent or 128, padded d in {128, 192}, padded d_v = 128, packed
        queries beyond two tiles, whole groups of packed heads per tile. Exactly (256, 256) has a kernel of its own,
        which works in pairs whatever the other conditions say.

    Examples
    --------
    >>> two_cta_objections(Call())
    ()
    >>> two_cta_objections(Call(causal=True, seqlen_q=256))
    ('causal', 'packed query length 256 is not beyond 2 * 128')
    """
    d, d_v = padded(call.head_dim), padded(call.head_dim_v)
    family = (call.family in _SM100_SM110, f"architecture {call.arch} is not of the SM100 or SM110 family")
    if (call.head_dim, call.head_dim_v) == (256, 256):
        return _failing(family)
    return _failing(
        family,
        (not call.two_cta_disabled, "disabled by the caller"),
        (not call.causal, "causal"),
        (not call.local, "local window"),
        (not call.split_kv, "split keys"),
        (not call.varlen_q, "queries of variable length"),
        (not call.block_sparse, "block sparsity"),
        (call.page_size in (None, 128), f"page size {call.page_size} is not 128"),
        (d in (128, 192), f"padded head_dim {d} is neither 128 nor 192"),
        (d_v == 128, f"padded head_dim_v {d_v} is not 128"),
        (
            call.packed_seqlen_q > 2 * call.tile_m,
            f"packed query length {call.packed_seqlen_q} is not beyond 2 * {call.tile_m}",
        ),
        (
            not call.pack_gqa or call.tile_m % call.q_heads_per_kv_head == 0,
            f"a tile of {call.tile_m} rows does not hold whole groups of {call.q_heads_per_kv_head} packed heads",
        ),
    )


def _failing(*rows: tuple[bool, str]) -> tuple[str, ...]:
    """Return the texts of the rows that do not hold."""
    return tuple(text for holds, text in rows if not holds)


def two_cta(call: Call) -> bool:
    """Tell whether a call is eligible for the two-CTA path: source eligibility, not proof that it ran (0x07).

    Examples
    --------
    >>> two_cta(Call(head_dim=192)), two_cta(Call(head_dim=64, head_dim_v=64))
    (True, False)
    """
    return not two_cta_objections(call)


def static_persistent(call: Call) -> bool:
    """Tell whether the forward pass gets the static persistent scheduler, not the dynamic ones (specification 0x07).

    Examples
    --------
    >>> static_persistent(Call()), static_persistent(Call(causal=True))
    (True, False)
    """
    uneven = call.causal or call.local or call.varlen_q or call.split_kv
    return call.family in _SM100_SM110 and not uneven


def _aligned(*head_dims: int, limit: int) -> bool:
    return all(d % 8 == 0 and 8 <= d <= limit for d in head_dims)


def _head_dims_admitted(call: Call) -> bool:
    """Head dimensions by family; those of the other families are not part of the pinned extract."""
    pair = (call.head_dim, call.head_dim_v)
    if call.family == 9:
        return _aligned(*pair, limit=256)
    if call.family in _SM100_SM110:
        return _aligned(*pair, limit=128) or pair in {(192, 128), (64, 512), (256, 256)}
    return True


def forward_objections(call: Call) -> tuple[str, ...]:
    """List why the pinned interface refuses a forward call (specification 0x0C).

    Parameters
    ----------
    call : Call
        The call.

    Returns
    -------
    tuple of str
        Empty if the call is admitted, which says nothing about whether it compiles, which kernel is chosen, or whether
        the result is right.

    Examples
    --------
    >>> forward_objections(Call(arch=120, page_size=64))
    ('paged keys on architecture 120',)
    """
    return _failing(
        (call.family in FORWARD_FAMILIES, f"no forward kernel for architecture {call.arch}"),
        (
            _head_dims_admitted(call),
            f"head dimensions ({call.head_dim}, {call.head_dim_v}) on architecture {call.arch}",
        ),
        (not call.fp8 or call.family == 10, f"FP8 on architecture {call.arch}"),
        (not call.split_kv or call.family in _SM100_SM110, f"split keys on architecture {call.arch}"),
        (call.page_size is None or call.family in (9, *_SM100_SM110), f"paged keys on architecture {call.arch}"),
    )


def backward_objections(call: Call) -> tuple[str, ...]:
    """List why the pinned interface refuses a backward call (specification 0x0C).

    Parameters
    ----------
    call : Call
        The call.

    Returns
    -------
    tuple of str
        Empty if the call is admitted. The forward pass runs on one family more than the backward pass.

    Examples
    --------
    >>> backward_objections(Call(arch=80)), forward_objections(Call(arch=80))
    (('no backward kernel for architecture 80',), ())
    """
    return _failing(
        (call.family in BACKWARD_FAMILIES, f"no backward kernel for architecture {call.arch}"),
        (not call.fp8, "FP8 gradients"),
        (not call.deterministic or call.family in (9, *_SM100_SM110), f"deterministic on architecture {call.arch}"),
    )
