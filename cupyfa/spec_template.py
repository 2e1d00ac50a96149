"""What all compile keys have in common: a spec is the argument of a kernel template, and writes itself in C++."""

from __future__ import annotations

import dataclasses
import enum
from typing import ClassVar, Protocol

__all__ = ["Bias", "DType", "OfDType", "Template", "head_dims"]


class DType(enum.Enum):
    """Element type of the matrices."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class Bias(enum.Enum):
    """How the additive bias of scores reaches the kernel's threads."""

    NONE = "none"
    TILE = "tile"
    ROW = "row"
    GATHER = "gather"
    COLUMN = "column"


def _render(value: object) -> str:
    """Return a field's value in C++."""
    if isinstance(value, enum.Enum):
        return f"cupyfa::{type(value).__name__}::{value.value}"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


@dataclasses.dataclass(frozen=True)
class Template:
    """A spec that is the argument of a kernel template; ``kernel`` and ``traits`` name it and its traits in C++."""

    entry: ClassVar[str]
    arch: ClassVar[str] = "sm_90a"
    kernel: ClassVar[str]
    traits: ClassVar[str]

    @property
    def template_argument(self) -> str:
        """The spec as a C++ expression."""
        fields = ", ".join(f".{f.name}={_render(getattr(self, f.name))}" for f in dataclasses.fields(self))
        return f"cupyfa::{type(self).__name__}{{{fields}}}"

    @property
    def name_expression(self) -> str:
        """The kernel's name expression."""
        return f"cupyfa::{self.kernel}<{self.template_argument}>"

    @property
    def traits_expression(self) -> str:
        """The name expression of the kernel's ``KernelTraits`` object."""
        return f"cupyfa::{self.traits}<{self.template_argument}>"


class _HasHeadDims(Protocol):
    @property
    def head_dim(self) -> int: ...
    @property
    def head_dim_v(self) -> int: ...


def head_dims(spec: _HasHeadDims) -> str:
    """Return the head dimensions as they are read: one number if they are equal.

    Parameters
    ----------
    spec : object
        With ``head_dim`` and ``head_dim_v``.

    Returns
    -------
    str
        Such as ``d128`` or ``d192/128``.
    """
    return f"d{spec.head_dim}" if spec.head_dim == spec.head_dim_v else f"d{spec.head_dim}/{spec.head_dim_v}"


@dataclasses.dataclass(frozen=True)
class OfDType(Template):
    """A kernel of which nothing but the type is chosen.

    Attributes
    ----------
    dtype : DType
        Of the matrices.
    """

    dtype: DType

    @property
    def template_argument(self) -> str:
        """The type in C++."""
        return _render(self.dtype)

    def __str__(self) -> str:
        """Return the spec on one short line."""
        return f"{self.traits.removesuffix('_traits')} {self.arch} {self.dtype.value}"
