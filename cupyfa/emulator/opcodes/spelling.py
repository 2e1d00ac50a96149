"""An opcode's spelling: its first word and modifiers, which a family takes off one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cupyfa.emulator.isa import FLAGS, ORDERS, ROUNDINGS, SCOPES, SPACES, TYPES
from cupyfa.emulator.syntax import UnsupportedInstruction

__all__ = ["Spelling"]

_FLAG_NAMES = {"NaN": "nan"} | {name: name for name in FLAGS if name not in ("nan",)}
_SPACE_NAMES = {
    **{name: name for name in ("global", "shared", "local", "param")},
    "shared::cta": "shared",
    "shared::cluster": "shared",
    "param::entry": "param",
    "const": "constant",
}
_SCOPE_NAMES = ("cta", "cluster", "gpu", "sys")
_CACHE_HINTS = ("L2::cache_hint", "nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "L2::64B", "L2::128B", "L2::256B")


class Spelling:
    """What is left of a spelling.

    Parameters
    ----------
    text : str
        Such as ``ld.global.v2.b64``.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.base, *self.rest = text.split(".")

    def flag(self, *names: str) -> bool:
        """Take off a modifier; return whether it, or another one of that meaning, was there."""
        found = False
        for name in names:
            if name in self.rest:
                self.rest.remove(name)
                found = True
        return found

    def require(self, *names: str) -> None:
        """Take off modifiers that must be there."""
        for name in names:
            if not self.flag(name):
                raise UnsupportedInstruction(f"{self.text} without .{name}")

    def one_of(self, names: Iterable[str], default: str | None = None) -> str:
        """Take off the first modifier that is among the names."""
        known = set(names)
        for index, part in enumerate(self.rest):
            if part in known:
                del self.rest[index]
                return part
        if default is None:
            raise UnsupportedInstruction(f"{self.text} needs one of " + ", ".join(f".{name}" for name in sorted(known)))
        return default

    def number(self, names: Mapping[str, int], default: int | None = None) -> int:
        """Take off the first modifier that is among the names, and return its number."""
        name = self.one_of(names, None if default is None else "")
        return names[name] if name else default or 0

    def types(self, count: int, allowed: str = "") -> tuple[str, ...]:
        """Take off the types, exactly so many, each among the allowed ones (separated by spaces)."""
        found = tuple(part for part in self.rest if part in TYPES and part != "none")
        self.rest = [part for part in self.rest if part not in found]
        known = allowed.split()
        if len(found) != count or (known and any(kind not in known for kind in found)):
            names = ", ".join(f".{kind}" for kind in found) or "none"
            raise UnsupportedInstruction(f"{self.text}: types are {names}, not {count} of {allowed or 'any'}")
        return found

    def type(self, allowed: str = "") -> str:
        """Take off the only type."""
        return self.types(1, allowed)[0]

    def flags(self, *allowed: str) -> int:
        """Take off arithmetic flags as a bit set."""
        return sum(FLAGS[_FLAG_NAMES[name]] for name in allowed if self.flag(name))

    def rounding(self, allowed: str, default: str | None) -> int:
        """Take off the rounding."""
        return ROUNDINGS[self.one_of(allowed.split(), default)]

    def space(self, default: str = "generic") -> int:
        """Take off a state space."""
        name = self.one_of(_SPACE_NAMES, "")
        return SPACES[_SPACE_NAMES[name] if name else default]

    def scope(self, default: str = "none") -> int:
        """Take off a scope."""
        return SCOPES[self.one_of(_SCOPE_NAMES, default)]

    def order(self, names: str, default: str) -> int:
        """Take off a memory order."""
        name = self.one_of(names.split(), default)
        return ORDERS[name if name in ORDERS else name + "_"]

    def vector(self) -> int:
        """Take off the number of elements."""
        return int(self.one_of(("v2", "v4", "v8"), "v1")[1:])

    def cache_hints(self) -> None:
        """Take off what only a cache would notice; return whether a cache policy is an operand."""
        self.rest = [
            part
            for part in self.rest
            if part not in _CACHE_HINTS and not part.startswith(("L1::", "L2::evict", "level::"))
        ]

    def end(self) -> None:
        """Refuse what is left."""
        if self.rest:
            unknown = ", ".join(f".{part}" for part in self.rest)
            raise UnsupportedInstruction(f"{self.text}: unknown or unsupported here: {unknown}")
