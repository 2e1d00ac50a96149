"""The compile key: frozen dataclasses that mirror ``cuda/spec.cuh``.

A spec names everything that changes the instructions of a kernel, and nothing else. It renders itself as the C++ name
expression that the compiler is asked for, so a compiler error prints it, and two kernels are the same exactly when
their specs are equal.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import ClassVar

from cupyfa.backward_spec import BiasGradientSpec, BwdSpec, PostprocessSpec, PreprocessSpec, SinkSpec
from cupyfa.spec_template import Bias, DType, OfDType, Template, head_dims

__all__ = [
    "AppendSpec",
    "Bias",
    "BiasGradientSpec",
    "BwdSpec",
    "CombineSpec",
    "DType",
    "DecodeSpec",
    "FwdSpec",
    "PlanSpec",
    "PostprocessSpec",
    "PreprocessSpec",
    "Scheduler",
    "SinkSpec",
    "Spec",
]


class Scheduler(enum.Enum):
    """How query tiles reach the CTAs."""

    ONE_TILE = "one_tile"
    PERSISTENT = "persistent"
    DYNAMIC = "dynamic"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FwdSpec(Template):
    """A Hopper forward kernel.

    Attributes
    ----------
    dtype : DType
        Of Q, K, V and O; accumulation is float32.
    head_dim : int
        Of the tiles of Q and K: a multiple of 32; a smaller head_dim of the problem is filled up with zeros by TMA.
    head_dim_v : int
        Of the tiles of V and O, likewise.
    tile_m : int
        Query rows of a CTA, 64 for each of one to three consumer warpgroups.
    tile_n : int
        Keys of one step of the mainloop, a multiple of 16.
    stages : int
        Slots of the K ring and of the V ring.
    q_stages : int
        Slots of the Q ring.
    varlen : bool
        The lengths of sequences are arrays, and a plan lists their tiles: they are packed, or a part of each is used.
    causal : bool
        Keys end at a diagonal: a bottom-right aligned causal mask, or the right side of a window.
    window : bool
        Keys begin at a diagonal: the left side of a window.
    sink : bool
        Each head has a learnable logit without a value.
    softcap : bool
        Scores are capped by a hyperbolic tangent.
    alibi : bool
        Scores fall with the distance between query and key.
    bias : Bias
        Whether there is an additive bias, and whether TMA copies it by blocks, or by rows that all queries share, or
        each thread loads its own elements.
    bias_float32 : bool
        The bias is float32; otherwise of `dtype`.
    bias_stages : int
        Slots of the ring of the bias; 0 where TMA does not copy one.
    negate_scores : bool
        ``softmax_scale`` is negative.
    overlap : bool
        Overlap of softmax and matrix products within a warpgroup (specification 0x05).
    three_stage : bool
        Scores of the block after the next are under way beside them: another S in registers. Needs overlap, an exact
        softmax, no turns and two stages; for comparisons.
    speculative : bool
        Softmax against a retained maximum, checked afterwards (specification 0x09); needs overlap.
    rescale_threshold : int
        An exact softmax keeps the frame of O while no maximum of the warp's rows grows by more than this, in base 2
        (specification 0x09); 0: it always moves.
    exp2_fma : int
        Of eight groups of eight keys, so many have their speculative exponentials computed by a polynomial on the FMA
        units (specification 0x09).
    pingpong : bool
        Consumer warpgroups take turns to issue (specification 0x04).
    warp_specialized : bool
        A warpgroup of its own issues the copies (specification 0x02). Without it all warps compute, and one of their
        threads copies; for measurements.
    scheduler : Scheduler
        One CTA per tile, or persistent CTAs whose tiles are dealt out or drawn from a counter (specification 0x0B).
    longest_first : bool
        Tiles come in sections of heads that fit into L2, the longest of a section first; otherwise head by head
        (specification 0x0B).
    setmaxnreg : bool
        Register reallocation between the roles (specification 0x02). Instrumented kernels can hang on it, so sanitizer
        runs switch it off.

    Examples
    --------
    >>> spec = FwdSpec(
    ...     dtype=DType.BFLOAT16, head_dim=128, head_dim_v=128, tile_m=128, tile_n=128, stages=2, q_stages=2,
    ...     varlen=False, causal=True, window=False, sink=False, softcap=False, alibi=False, bias=Bias.NONE,
    ...     bias_float32=False, bias_stages=0, negate_scores=False, overlap=True, three_stage=False, speculative=True,
    ...     rescale_threshold=0, exp2_fma=0, pingpong=False, warp_specialized=True, scheduler=Scheduler.DYNAMIC,
    ...     longest_first=True, setmaxnreg=True,
    ... )
    >>> spec.name_expression[:69]
    'cupyfa::hopper::forward<cupyfa::FwdSpec{.dtype=cupyfa::DType::bfloat1'
    """

    dtype: DType
    head_dim: int
    head_dim_v: int
    tile_m: int
    tile_n: int
    stages: int
    q_stages: int
    varlen: bool
    causal: bool
    window: bool
    sink: bool
    softcap: bool
    alibi: bool
    bias: Bias
    bias_float32: bool
    bias_stages: int
    negate_scores: bool
    overlap: bool
    three_stage: bool
    speculative: bool
    rescale_threshold: int
    exp2_fma: int
    pingpong: bool
    warp_specialized: bool
    scheduler: Scheduler
    longest_first: bool
    setmaxnreg: bool

    entry: ClassVar[str] = "hopper/fwd.cu"
    kernel: ClassVar[str] = "hopper::forward"
    traits: ClassVar[str] = "hopper::forward_traits"

    def __str__(self) -> str:
        """Return the spec on one short line, for tables and error messages."""
        names = (
            *("varlen", "causal", "window", "sink", "softcap", "alibi", "bias_float32", "negate_scores"),
            *("overlap", "three_stage", "speculative", "pingpong", "setmaxnreg"),
        )
        switches = [name for name in names if getattr(self, name)]
        if self.bias is not Bias.NONE:
            switches.append(f"bias {self.bias.value}")
        numbers = ("bias_stages", "rescale_threshold", "exp2_fma")
        switches += [f"{name} {getattr(self, name)}" for name in numbers if getattr(self, name)]
        switches += [f"not {name}" for name in ("warp_specialized", "longest_first") if not getattr(self, name)]
        tiles = f"{head_dims(self)} {self.tile_m}x{self.tile_n} stages {self.stages} q_stages {self.q_stages}"
        return f"forward {self.arch} {self.dtype.value} {tiles} {self.scheduler.value} {' '.join(switches)}".rstrip()


@dataclasses.dataclass(frozen=True)
class PlanSpec:
    """Compile key of the kernel that plans packed sequences: there is one.

    Examples
    --------
    >>> PlanSpec().name_expression
    'cupyfa::make_plan'
    """

    entry: ClassVar[str] = "plan.cu"
    arch: ClassVar[str] = "sm_90a"
    name_expression: ClassVar[str] = "cupyfa::make_plan"
    traits_expression: ClassVar[str] = "cupyfa::plan_traits"

    def __str__(self) -> str:
        """Return the spec on one short line."""
        return f"plan {self.arch}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSpec(Template):
    """A Hopper decode kernel: few queries over long caches.

    Attributes
    ----------
    dtype : DType
        Of Q, K, V and O; accumulation is float32.
    head_dim, head_dim_v : int
        Of the tiles of Q and K, and of V and O, as in `FwdSpec`.
    tile_m : int
        Rows of a CTA, 64 for each of one or two consumer warpgroups: the query heads of a key/value head, for each
        query.
    tile_n : int
        Keys of one step of the mainloop.
    stages : int
        Slots of the K ring and of the V ring.
    key_groups : int
        Groups of consumer warpgroups, which take the blocks of keys in turn.
    residents : int
        CTAs that a multiprocessor holds.
    softcap : bool
        Scores are capped by a hyperbolic tangent.
    alibi : bool
        Scores fall with the distance between query and key.

    Examples
    --------
    >>> spec = DecodeSpec(
    ...     dtype=DType.BFLOAT16, head_dim=128, head_dim_v=128, tile_m=64, tile_n=64, stages=3, key_groups=1,
    ...     residents=2, softcap=False, alibi=False,
    ... )
    >>> spec.name_expression[:48]
    'cupyfa::hopper::decode_attention<cupyfa::DecodeS'
    """

    dtype: DType
    head_dim: int
    head_dim_v: int
    tile_m: int
    tile_n: int
    stages: int
    key_groups: int
    residents: int
    softcap: bool
    alibi: bool

    entry: ClassVar[str] = "hopper/decode.cu"
    kernel: ClassVar[str] = "hopper::decode_attention"
    traits: ClassVar[str] = "hopper::decode_traits"

    def __str__(self) -> str:
        """Return the spec on one short line."""
        switches = [name for name in ("softcap", "alibi") if getattr(self, name)]
        tiles = f"{head_dims(self)} {self.tile_m}x{self.tile_n} stages {self.stages} key_groups {self.key_groups}"
        tiles += f" residents {self.residents}"
        return f"decode {self.arch} {self.dtype.value} {tiles} {' '.join(switches)}".rstrip()


class AppendSpec(OfDType):
    """Compile key of the kernel that writes new keys and values into caches.

    Attributes
    ----------
    dtype : DType
        Of the caches.

    Examples
    --------
    >>> AppendSpec(DType.FLOAT16).name_expression
    'cupyfa::append_kv<cupyfa::DType::float16>'
    """

    entry: ClassVar[str] = "append.cu"
    kernel: ClassVar[str] = "append_kv"
    traits: ClassVar[str] = "append_traits"


class CombineSpec(OfDType):
    """Compile key of the kernel that merges the partial results of splits.

    Attributes
    ----------
    dtype : DType
        Of the output.

    Examples
    --------
    >>> CombineSpec(DType.FLOAT16).name_expression
    'cupyfa::combine<cupyfa::DType::float16>'
    """

    entry: ClassVar[str] = "combine.cu"
    kernel: ClassVar[str] = "combine"
    traits: ClassVar[str] = "combine_traits"


#: The compile key of any kernel.
Spec = (
    FwdSpec
    | PlanSpec
    | DecodeSpec
    | AppendSpec
    | CombineSpec
    | BwdSpec
    | BiasGradientSpec
    | PreprocessSpec
    | PostprocessSpec
    | SinkSpec
)
