"""A case of attention: its shape, its options, and the arrays that go with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from cupyfa.testing.inputs import random_array

__all__ = ["DTYPES", "Case", "as_bshd", "random_bias"]

DTYPES: dict[str, np.dtype[Any]] = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def as_bshd(array: Any, layout: str) -> Any:
    """View an array of either layout as ``(batch, seqlen, heads, head_dim)``.

    Parameters
    ----------
    array : numpy.ndarray or cupy.ndarray
        Four axes in the order of `layout`.
    layout : {"BSHD", "BHSD"}
        Order of the axes.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        A view, never a copy.

    Examples
    --------
    >>> as_bshd(np.empty((2, 3, 5, 8)), "BHSD").shape
    (2, 5, 3, 8)
    """
    return array if layout == "BSHD" else array.swapaxes(1, 2)


def random_bias(axes: str, sizes: dict[str, int], dtype: npt.DTypeLike, *, lowest: bool) -> npt.NDArray[Any]:
    """Make numbers as large as scores, with hidden keys among them, a row that sees none, and one of the lowest.

    Parameters
    ----------
    axes : str
        Those that the bias has, of "bhqk"; it is the same along the others.
    sizes : dict
        Of all of them.
    dtype : data-type
        Of the bias.
    lowest : bool
        Whether to have the row of the lowest; beside a sink, its keys would vanish.

    Returns
    -------
    numpy.ndarray
        Of at least two axes.
    """
    shape = [size if axis in axes else 1 for axis, size in sizes.items()]
    while len(shape) > 2 and "bhqk"[-len(shape)] not in axes:
        del shape[0]
    bias: npt.NDArray[Any] = random_array(shape, dtype, seed=3, amplitude=2.0)
    bias[bias > 3.0] = -np.inf
    if "q" in axes and sizes["q"] > 8:
        bias[..., 7, :] = -np.inf
        if lowest:
            bias[..., 8, :] = ml_dtypes.finfo(dtype).min  # type: ignore[no-untyped-call]
    return bias


@dataclass(frozen=True)
class Case:
    """One attention problem of the test table.

    Attributes
    ----------
    group : str
        The group of the table; the function of that name says which fault it would show.
    batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim : int
        The shape.
    dtype : {"bfloat16", "float16"}
        Type of q, k, v and out.
    causal : bool
        Bottom-right aligned causal mask.
    softmax_scale : float or None
        None is ``1 / sqrt(head_dim)``.
    layout : {"BSHD", "BHSD"}
        Order of the axes in memory.
    amplitude : float
        Standard deviation of q and k; v always has 1.
    head_dim_v : int or None
        head_dim of v and out; None is that of q and k.
    window_size : tuple of int or None
        How many keys left and right of its diagonal a query sees; None for no bound.
    softcap : float or None
        What scores are capped at; None for no cap.
    sink, alibi : bool
        Whether heads have a further logit, or slopes; `options` has the values.
    bias : str
        The axes that an additive bias has, of "bhqk"; it is the same along the others, and empty for none. `options`
        has the values.
    bias_dtype : {"float32", "same"}
        Type of the bias; "same" is that of q.
    options : dict
        The keyword arguments that the oracles take: softmax_scale and causal, and those of window_size, softcap, sink,
        alibi_slopes and bias that are set.
    np_dtype : numpy.dtype
        The data type as an object.
    id : str
        A readable name, unique in the table.
    """

    group: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    dtype: str = "bfloat16"
    causal: bool = False
    softmax_scale: float | None = None
    layout: str = "BSHD"
    amplitude: float = 1.0
    head_dim_v: int | None = None
    window_size: tuple[int | None, int | None] = (None, None)
    softcap: float | None = None
    sink: bool = False
    alibi: bool = False
    bias: str = ""
    bias_dtype: str = "float32"

    @property
    def id(self) -> str:
        """The readable name."""
        parts = [
            f"{self.group}-b{self.batch}-q{self.seqlen_q}-k{self.seqlen_k}-h{self.heads_q}x{self.heads_kv}",
            f"d{self.head_dim}" + ("" if self.head_dim_v is None else f"x{self.head_dim_v}"),
            "bf16" if self.dtype == "bfloat16" else "fp16",
            "causal" if self.causal else "",
            "" if self.softmax_scale is None else f"scale{self.softmax_scale:g}",
            "" if self.amplitude == 1.0 else f"amp{self.amplitude:g}",
            "" if self.layout == "BSHD" else self.layout,
            "" if self.window_size == (None, None) else "w{},{}".format(*self._window_name),
            "" if self.softcap is None else f"cap{self.softcap:g}",
            "sink" if self.sink else "",
            "alibi" if self.alibi else "",
            f"bias_{self.bias}_{self.bias_dtype}" if self.bias else "",
        ]
        return "-".join(part for part in parts if part)

    @property
    def _window_name(self) -> list[str]:
        """The sides of the window, as they are read."""
        return ["inf" if side is None else str(side) for side in self.window_size]

    @property
    def np_dtype(self) -> np.dtype[Any]:
        """The data type as an object."""
        return DTYPES[self.dtype]

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that the oracles take."""
        options: dict[str, Any] = {"softmax_scale": self.softmax_scale, "causal": self.causal}
        if self.window_size != (None, None):
            options["window_size"] = self.window_size
        if self.softcap is not None:
            options["softcap"] = self.softcap
        if self.sink:
            options["sink"] = self._sink()
        if self.alibi:
            options["alibi_slopes"] = self._slopes()
        if self.bias:
            sizes = {"b": self.batch, "h": self.heads_q, "q": self.seqlen_q, "k": self.seqlen_k}
            dtype = np.float32 if self.bias_dtype == "float32" else self.np_dtype
            options["bias"] = random_bias(self.bias, sizes, dtype, lowest=not self.sink)
        return options

    def options_on(self, xp: Any) -> dict[str, Any]:
        """Return `options` for a kernel.

        Parameters
        ----------
        xp : module
            ``numpy`` or ``cupy``.

        Returns
        -------
        dict
            `options`, with arrays of `xp`.
        """
        return {
            name: xp.asarray(value) if isinstance(value, np.ndarray) else value for name, value in self.options.items()
        }

    def _sink(self) -> npt.NDArray[np.float32]:
        """Return a logit for each head: some beside which keys count little, and one that is none."""
        logits: npt.NDArray[np.float32] = random_array((self.heads_q,), np.float32, seed=1)
        logits[1::3] = 6.0
        if self.heads_q >= 4:
            logits[3] = -np.inf
        return logits

    def _slopes(self) -> npt.NDArray[np.float32]:
        """Return the customary slopes; with an even number of batches each has its own: those of the next head."""
        slopes = np.exp2(-8.0 * np.arange(1, self.heads_q + 1) / self.heads_q).astype(np.float32)
        if self.batch % 2 or not self.batch:
            return slopes
        return np.stack([np.roll(slopes, -b) for b in range(self.batch)])

    def make_inputs(self, seed: int = 0, xp: Any = np) -> tuple[Any, Any, Any]:
        """Make q, k and v, contiguous in the order of `layout`.

        Parameters
        ----------
        seed : int, optional
            Seed of the three arrays.
        xp : module, optional
            ``numpy`` or ``cupy``; both give the same bits.

        Returns
        -------
        q, k, v : numpy.ndarray or cupy.ndarray
            Arrays in `layout`; `as_bshd` turns them for the oracles.
        """
        arrays = []
        keys = (self.seqlen_k, self.heads_kv)
        for n, (seqlen, heads) in enumerate(((self.seqlen_q, self.heads_q), keys, keys)):
            middle = (seqlen, heads) if self.layout == "BSHD" else (heads, seqlen)
            columns = self.head_dim if n < 2 or self.head_dim_v is None else self.head_dim_v
            shape = (self.batch, *middle, columns)
            amplitude = self.amplitude if n < 2 else 1.0
            arrays.append(random_array(shape, self.np_dtype, 4 * seed + n, xp=xp, amplitude=amplitude))
        return arrays[0], arrays[1], arrays[2]
