"""The resource model of one forward tile (specification 0x01): the longest engine, or the sum of all.

A tile is loaded, multiplied (QK), normalised, multiplied again (PV) and stored. If every engine overlaps every other,
the tile takes as long as the busiest; if none does, as long as all together. What lies between is all that a schedule
can win.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["TileTime"]


@dataclass(frozen=True)
class TileTime:
    """Time that one tile needs on each engine, in any one unit (0x01).

    Attributes
    ----------
    load, qk, softmax, pv, store : float
        Not negative.

    Examples
    --------
    >>> tile = TileTime(load=1, qk=4, softmax=3, pv=4, store=0)
    >>> tile.overlapped, tile.serial, tile.gain, tile.bottlenecks
    (4, 12, 3.0, ('qk', 'pv'))
    """

    load: float
    qk: float
    softmax: float
    pv: float
    store: float

    def __post_init__(self) -> None:
        for name, value in self._items():
            if not value >= 0:
                raise ValueError(f"tile time: {name} is {value}; it must not be negative")

    def _items(self) -> list[tuple[str, float]]:
        return [(field.name, getattr(self, field.name)) for field in fields(self)]

    @property
    def overlapped(self) -> float:
        """Lower bound with perfect overlap: ``max(load, qk, softmax, pv, store)``.

        It takes QK and PV for different engines. On one tensor core they add up; see `on_one_tensor_core`.
        """
        return max(value for _, value in self._items())

    @property
    def serial(self) -> float:
        """Time without any overlap: the sum."""
        return sum(value for _, value in self._items())

    @property
    def on_one_tensor_core(self) -> float:
        """The bound where QK and PV share the matrix unit: ``max(load, qk + pv, softmax, store)``."""
        return max(self.load, self.qk + self.pv, self.softmax, self.store)

    @property
    def gain(self) -> float:
        """``serial / overlapped``: no schedule can win more."""
        return self.serial / self.overlapped if self.overlapped else 1.0

    @property
    def bottlenecks(self) -> tuple[str, ...]:
        """The engines that take as long as the bound."""
        return tuple(name for name, value in self._items() if value == self.overlapped)
