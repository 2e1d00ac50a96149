"""What the stages of the loop keep alive in registers: O, the next S and the current P (specification 0x05).

Payloads computed from the tile; what the compiler makes of them only the compiled kernel says.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from cupyfa.oracles.hopper.ledger import WARPGROUP, tile_bytes

__all__ = ["LiveWords", "live_words", "third_stage_bytes", "two_stage_bytes"]


@dataclass(frozen=True)
class LiveWords:
    """32-bit words per consumer thread that live at once, on average over the tile's owners (0x05)."""

    output: Fraction
    scores: Fraction
    probabilities: Fraction

    @property
    def total(self) -> Fraction:
        """O, the next S and the current P coexist in a two-stage loop with P in registers."""
        return self.output + self.scores + self.probabilities


def live_words(tile_m: int, tile_n: int, head_dim_v: int, consumers: int, p_itemsize: int) -> LiveWords:
    """Return the register payload of the two-stage loop (specification 0x05).

    ``O: B_M d_v / (128 G)``, ``S: B_M B_N / (128 G)``, ``P: B_M B_N b / (4 * 128 G)``.

    Parameters
    ----------
    tile_m, tile_n, head_dim_v : int
        ``B_M``, ``B_N`` and ``d_v``.
    consumers : int
        ``G``.
    p_itemsize : int
        Bytes of an element of P.

    Returns
    -------
    LiveWords
        Averages of the payload: no row state, addresses, masks or temporaries.

    Examples
    --------
    >>> words = live_words(128, 128, 128, consumers=2, p_itemsize=2)
    >>> int(words.output), int(words.scores), int(words.probabilities), int(words.total)
    (64, 64, 32, 160)
    """
    if min(tile_m, tile_n, head_dim_v, consumers, p_itemsize) < 1:
        raise ValueError("register ledger: tile, consumers and element size start at 1")
    threads = WARPGROUP * consumers
    return LiveWords(
        Fraction(tile_m * head_dim_v, threads),
        Fraction(tile_m * tile_n, threads),
        Fraction(tile_m * tile_n * p_itemsize, 4 * threads),
    )


def two_stage_bytes(tile_m: int, tile_n: int) -> int:
    """Return what the second stage costs: one more float32 score tile (specification 0x05).

    Parameters
    ----------
    tile_m, tile_n : int
        ``B_M`` and ``B_N``.

    Returns
    -------
    int
        ``4 B_M B_N`` bytes of registers over the CTA.

    Examples
    --------
    >>> two_stage_bytes(128, 128)
    65536
    """
    return tile_bytes(tile_m, tile_n, 4)


def third_stage_bytes(tile_m: int, tile_n: int, p_itemsize: int) -> int:
    """Return what a third stage would add: another P and a row scale (specification 0x05).

    Parameters
    ----------
    tile_m, tile_n : int
        ``B_M`` and ``B_N``.
    p_itemsize : int
        Bytes of an element of P.

    Returns
    -------
    int
        ``B_M B_N b + 4 B_M`` bytes of registers over the CTA.

    Examples
    --------
    >>> third_stage_bytes(128, 128, 2) / 1024
    32.5
    """
    return tile_bytes(tile_m, tile_n, p_itemsize) + tile_bytes(tile_m, 1, 4)
