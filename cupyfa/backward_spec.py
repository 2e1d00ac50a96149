"""Compile keys of the kernels that compute gradients; `cupyfa.spec` has the others, and says what a spec is."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from cupyfa.spec_template import Bias, DType, OfDType, Template, head_dims

__all__ = ["BiasGradientSpec", "BwdSpec", "PostprocessSpec", "PreprocessSpec", "SinkSpec"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BwdSpec(Template):
    """A Hopper kernel of gradients: dK and dV of a key tile, and its part of dQ.

    Attributes
    ----------
    dtype : DType
        Of Q, K, V, dO and the gradients; accumulation is float32.
    head_dim, head_dim_v : int
        Of the tiles of Q and K, and of V and dO: 64, 96 or a larger multiple of 64, filled up with zeros by TMA.
    tile_m : int
        Query rows of one step of the mainloop.
    tile_n : int
        Keys of a CTA: 128, or 64 where a head dimension exceeds 128.
    q_stages, dout_stages : int
        Slots of the Q ring and of the dO ring.
    varlen : bool
        Sequences are packed, and a plan lists their key tiles.
    causal, window, softcap, alibi : bool
        As in `FwdSpec`.
    bias : Bias
        Whether there is an additive bias, and whether it has rows and columns, or one of them for all.
    bias_float32 : bool
        As in `FwdSpec`.
    partial : bool
        dK and dV are of some of the query heads that share the keys, and left in float32.
    deterministic : bool
        dQ is summed in a fixed order of the key tiles: from the last one to the first.
    setmaxnreg : bool
        As in `FwdSpec`.

    Examples
    --------
    >>> spec = BwdSpec(
    ...     dtype=DType.BFLOAT16, head_dim=128, head_dim_v=128, tile_m=64, tile_n=128, q_stages=3, dout_stages=3,
    ...     varlen=False, causal=True, window=False, softcap=False, alibi=False, bias=Bias.NONE, bias_float32=False,
    ...     partial=False, deterministic=False, setmaxnreg=True,
    ... )
    >>> spec.name_expression[:40]
    'cupyfa::hopper::backward<cupyfa::BwdSpec'
    """

    dtype: DType
    head_dim: int
    head_dim_v: int
    tile_m: int
    tile_n: int
    q_stages: int
    dout_stages: int
    varlen: bool
    causal: bool
    window: bool
    softcap: bool
    alibi: bool
    bias: Bias
    bias_float32: bool
    partial: bool
    deterministic: bool
    setmaxnreg: bool

    entry: ClassVar[str] = "hopper/bwd.cu"
    kernel: ClassVar[str] = "hopper::backward"
    traits: ClassVar[str] = "hopper::backward_traits"

    def __str__(self) -> str:
        """Return the spec on one short line."""
        of_scores = ("varlen", "causal", "window", "softcap", "alibi", "bias_float32")
        names = (*of_scores, "partial", "deterministic", "setmaxnreg")
        switches = [name for name in names if getattr(self, name)]
        if self.bias is not Bias.NONE:
            switches.append(f"bias {self.bias.value}")
        tiles = f"{head_dims(self)} {self.tile_m}x{self.tile_n} stages {self.q_stages}, {self.dout_stages}"
        return f"backward {self.arch} {self.dtype.value} {tiles} {' '.join(switches)}".rstrip()


class PreprocessSpec(OfDType):
    """Compile key of the kernel that prepares query rows for their gradients.

    Attributes
    ----------
    dtype : DType
        Of the output and its gradient.

    Examples
    --------
    >>> PreprocessSpec(DType.FLOAT16).name_expression
    'cupyfa::preprocess<cupyfa::DType::float16>'
    """

    entry: ClassVar[str] = "bwd_preprocess.cu"
    kernel: ClassVar[str] = "preprocess"
    traits: ClassVar[str] = "preprocess_traits"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PostprocessSpec(Template):
    """Compile key of the kernel that rounds sums of gradients.

    Attributes
    ----------
    dtype : DType
        Of the gradient.
    head_dim : int
        Padded, as in `BwdSpec`.
    tile_m : int
        Rows of a tile of sums.

    Examples
    --------
    >>> str(PostprocessSpec(dtype=DType.FLOAT16, head_dim=128, tile_m=64))
    'postprocess sm_90a float16 d128 64 rows'
    """

    dtype: DType
    head_dim: int
    tile_m: int

    entry: ClassVar[str] = "bwd_postprocess.cu"
    kernel: ClassVar[str] = "postprocess"
    traits: ClassVar[str] = "postprocess_traits"

    def __str__(self) -> str:
        """Return the spec on one short line."""
        return f"postprocess {self.arch} {self.dtype.value} d{self.head_dim} {self.tile_m} rows"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BiasGradientSpec(Template):
    """Compile key of the Hopper kernel of the gradient of a bias.

    Attributes
    ----------
    dtype : DType
        Of Q, K, V and dO; accumulation is float32.
    head_dim, head_dim_v : int
        As in `BwdSpec`.
    stages : int
        Slots of the ring of tiles, each of which has K, V, Q and dO.
    causal, window, softcap, alibi, bias, bias_float32
        As in `BwdSpec`; the gradient has the type of the bias.

    Examples
    --------
    >>> spec = BiasGradientSpec(
    ...     dtype=DType.BFLOAT16, head_dim=128, head_dim_v=128, stages=2, causal=True, window=False, softcap=False,
    ...     alibi=False, bias=Bias.TILE, bias_float32=True,
    ... )
    >>> spec.name_expression[:54]
    'cupyfa::hopper::bias_gradient<cupyfa::BiasGradientSpec'
    """

    dtype: DType
    head_dim: int
    head_dim_v: int
    stages: int
    causal: bool
    window: bool
    softcap: bool
    alibi: bool
    bias: Bias
    bias_float32: bool

    tile_m: ClassVar[int] = 64
    tile_n: ClassVar[int] = 128
    entry: ClassVar[str] = "hopper/bwd_bias.cu"
    kernel: ClassVar[str] = "hopper::bias_gradient"
    traits: ClassVar[str] = "hopper::bias_gradient_traits"

    def __str__(self) -> str:
        """Return the spec on one short line."""
        names = ("causal", "window", "softcap", "alibi", "bias_float32")
        switches = [
            f"stages {self.stages}",
            *(name for name in names if getattr(self, name)),
            f"bias {self.bias.value}",
        ]
        return f"gradient of a bias {self.arch} {self.dtype.value} {head_dims(self)} {' '.join(switches)}"


@dataclasses.dataclass(frozen=True)
class SinkSpec:
    """Compile key of the kernel that sums the gradient of the sinks: there is one.

    Examples
    --------
    >>> SinkSpec().name_expression
    'cupyfa::sum_sink'
    """

    entry: ClassVar[str] = "bwd_sink.cu"
    arch: ClassVar[str] = "sm_90a"
    name_expression: ClassVar[str] = "cupyfa::sum_sink"
    traits_expression: ClassVar[str] = "cupyfa::sink_traits"

    def __str__(self) -> str:
        """Return the spec on one short line."""
        return f"sink {self.arch}"
