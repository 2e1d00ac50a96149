"""Number formats: what a float of a few bits can hold, and how a value is rounded to it (specification 0x06).

One description covers every format of the kernels: a sign, ``e`` exponent bits, ``f`` fraction bits. A code with
exponent field ``E`` and fraction field ``F`` means

    E > 0:   (1 + F / 2**f) * 2**(E - bias)        normal
    E == 0:  F * 2**(1 - bias - f)                 subnormal, zero included

The highest exponent field is where formats differ. In an IEEE format (float16, bfloat16, E5M2) it holds infinity
(F = 0) and NaN. In E4M3FN ("finite, NaN") it holds ordinary numbers, and only F = 7 is NaN: there is no infinity.

Conversion rounds to nearest, ties to even. Beyond the largest finite value it saturates for FP8, as the
``.satfinite`` of the hardware conversion does, and overflows for the 16-bit formats; `Format.encode` can do either.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["BFLOAT16", "E4M3FN", "E5M2", "FLOAT16", "FORMATS", "Format", "format_of"]

Float64Array = npt.NDArray[np.float64]
Codes = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Format:
    """A binary floating-point format of 8 or 16 bits (0x06).

    Attributes
    ----------
    name : str
        As in `ml_dtypes` and NumPy.
    exponent_bits, fraction_bits : int
        Widths of the two fields; with the sign they make up the code.
    has_infinity : bool
        True if the highest exponent field is kept for infinity and NaN; false for the "FN" kind.
    saturates : bool
        What `encode` does with values beyond `max` unless told otherwise.

    Examples
    --------
    >>> E4M3FN.max, E4M3FN.min_subnormal == 2**-9, E5M2.max, BFLOAT16.epsilon == 2**-7
    (448.0, True, 57344.0, True)
    """

    name: str
    exponent_bits: int
    fraction_bits: int
    has_infinity: bool
    saturates: bool

    def __post_init__(self) -> None:
        if self.bits not in (8, 16) or self.exponent_bits < 2 or self.fraction_bits < 1:
            raise ValueError(
                f"format: {self.name} has {self.exponent_bits} exponent and {self.fraction_bits} fraction bits; "
                "they must be at least 2 and 1, and 8 or 16 with the sign"
            )

    @property
    def bits(self) -> int:
        """Width of a code in bits."""
        return 1 + self.exponent_bits + self.fraction_bits

    @property
    def bias(self) -> int:
        """What the exponent field has to be reduced by: ``2**(exponent_bits - 1) - 1``."""
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def code_dtype(self) -> np.dtype:
        """NumPy type of a code: uint8 or uint16."""
        return np.dtype(np.uint8 if self.bits == 8 else np.uint16)

    @property
    def max_code(self) -> int:
        """Code of the largest finite value."""
        last = (1 << (self.bits - 1)) - 1  # all ones behind the sign
        return last - (1 << self.fraction_bits) if self.has_infinity else last - 1

    @property
    def nan_code(self) -> int:
        """Code that a NaN is encoded as, without the sign: quiet in the IEEE formats, the only one in E4M3FN."""
        if self.has_infinity:
            return self.max_code + 1 + (1 << (self.fraction_bits - 1))
        return self.max_code + 1

    @property
    def max(self) -> float:
        """Largest finite value."""
        return float(self.decode(np.array([self.max_code], self.code_dtype))[0])

    @property
    def min_normal(self) -> float:
        """Smallest positive normal value, ``2**(1 - bias)``."""
        return float(2.0 ** (1 - self.bias))

    @property
    def min_subnormal(self) -> float:
        """Smallest positive value, ``2**(1 - bias - fraction_bits)``."""
        return float(2.0 ** (1 - self.bias - self.fraction_bits))

    @property
    def epsilon(self) -> float:
        """Distance from 1 to the next value, ``2**-fraction_bits``; half of it bounds the relative rounding error."""
        return float(2.0**-self.fraction_bits)

    def codebook(self) -> Float64Array:
        """Return the value of every code, in the order of the codes.

        Returns
        -------
        numpy.ndarray
            float64, shape ``(2**bits,)``; exact. The second half is the negated first half, NaN and -0 included.

        Examples
        --------
        >>> book = E4M3FN.codebook()
        >>> book.shape, int(np.isnan(book).sum()), int(np.isinf(book).sum())
        ((256,), 2, 0)
        >>> book[[0x01, 0x08, 0x38, 0x7E, 0x7F]] * 512
        array([1.00000e+00, 8.00000e+00, 5.12000e+02, 2.29376e+05,         nan])
        """
        return self.decode(np.arange(2**self.bits, dtype=self.code_dtype))

    def decode(self, codes: npt.ArrayLike) -> Float64Array:
        """Return the values that codes stand for.

        Parameters
        ----------
        codes : array_like of int
            Any shape; each in ``[0, 2**bits)``.

        Returns
        -------
        numpy.ndarray
            float64, same shape; exact.

        Raises
        ------
        ValueError
            If a code is no integer or does not fit.

        Examples
        --------
        >>> E5M2.decode([0x3C, 0x7B, 0x7C, 0xFC])
        array([1.0000e+00, 5.7344e+04,        inf,       -inf])
        """
        code = np.asarray(codes)
        if code.dtype.kind not in "ui":
            raise ValueError(f"{self.name}: codes are {code.dtype}; they must be integers")
        if code.size and (int(code.min()) < 0 or int(code.max()) >= 2**self.bits):
            raise ValueError(f"{self.name}: a code is outside [0, 2**{self.bits})")
        code = code.astype(np.int64)
        magnitude = code & (2 ** (self.bits - 1) - 1)
        field, fraction = np.divmod(magnitude, 2**self.fraction_bits)
        significand = fraction + np.where(field > 0, 2**self.fraction_bits, 0)
        value = np.ldexp(significand.astype(np.float64), np.maximum(field, 1) - self.bias - self.fraction_bits)
        if self.has_infinity:
            value = np.where(magnitude == self.max_code + 1, np.inf, value)
        first_nan = self.max_code + (2 if self.has_infinity else 1)
        value = np.where(magnitude >= first_nan, np.nan, value)
        return np.copysign(value, np.where(code >= 2 ** (self.bits - 1), -1.0, 1.0))

    def encode(self, x: npt.ArrayLike, *, saturate: bool | None = None) -> Codes:
        """Round to nearest, ties to even, and return the codes.

        Parameters
        ----------
        x : array_like of float
            Any shape; float16, float32 or float64. A float64 is rounded once, not by way of float32.
        saturate : bool, optional
            If true, whatever lies beyond `max`, infinity included, becomes `max` with its sign. If false, whatever
            rounds beyond `max` becomes infinity, or NaN in a format without infinity. By default as the format says.

        Returns
        -------
        numpy.ndarray
            uint8 or uint16, same shape. NaN becomes `nan_code` and keeps its sign; its payload is lost. (Whether the
            hardware keeps the sign of a NaN is not part of this contract.)

        Examples
        --------
        >>> E4M3FN.encode([448.0, 1e9, -np.inf, 2.0**-10, 3 * 2.0**-10]).tolist()  # the last two are ties
        [126, 126, 254, 0, 2]
        >>> E4M3FN.encode([464.0, 464.1], saturate=False).tolist()  # 464 is the tie between 448 and NaN
        [126, 127]
        """
        saturate = self.saturates if saturate is None else saturate
        with np.errstate(invalid="ignore"):  # a signalling NaN may come in
            value = np.asarray(x).astype(np.float64)
        magnitude = np.abs(value)
        finite = np.where(np.isfinite(magnitude), magnitude, 0.0)
        lowest = 1 - self.bias  # exponent of the smallest normal and of every subnormal
        exponent = np.maximum(np.where(finite == 0, lowest, np.frexp(finite)[1] - 1), lowest)
        # In units of its last place a value is below 2**(fraction_bits + 1), so that rint is the whole rounding. The
        # units of a normal contain its leading 1, which is why the field counts from 0 here; a carry to the next power
        # of two carries into the field.
        units = np.rint(np.ldexp(finite, self.fraction_bits - exponent)).astype(np.int64)
        code = ((exponent - lowest).astype(np.int64) << self.fraction_bits) + units
        limit = self.max_code if saturate else self.max_code + 1
        code = np.where(np.isinf(magnitude), limit, np.minimum(code, limit))
        code = np.where(np.isnan(value), self.nan_code, code)
        code = np.where(np.signbit(value), code + 2 ** (self.bits - 1), code)
        return code.astype(self.code_dtype)

    def round(self, x: npt.ArrayLike, *, saturate: bool | None = None) -> Float64Array:
        """Return the values that remain after a conversion to the format, ``decode(encode(x))``.

        Parameters
        ----------
        x : array_like of float
            As for `encode`.
        saturate : bool, optional
            As for `encode`.

        Returns
        -------
        numpy.ndarray
            float64, same shape.

        Examples
        --------
        >>> BFLOAT16.round([1 + 2.0**-8, 1 + 3 * 2.0**-8, 3.4e38])
        array([1.       , 1.015625,       inf])
        """
        return self.decode(self.encode(x, saturate=saturate))


E4M3FN = Format("float8_e4m3fn", exponent_bits=4, fraction_bits=3, has_infinity=False, saturates=True)
"""4 exponent bits, 3 fraction bits: up to 448, down to 2**-9; 254 finite codes, 2 NaN, no infinity."""

E5M2 = Format("float8_e5m2", exponent_bits=5, fraction_bits=2, has_infinity=True, saturates=True)
"""5 exponent bits, 2 fraction bits: up to 57344, down to 2**-16."""

BFLOAT16 = Format("bfloat16", exponent_bits=8, fraction_bits=7, has_infinity=True, saturates=False)
"""The upper half of a float32."""

FLOAT16 = Format("float16", exponent_bits=5, fraction_bits=10, has_infinity=True, saturates=False)
"""IEEE binary16: up to 65504."""

FORMATS = {f.name: f for f in (E4M3FN, E5M2, BFLOAT16, FLOAT16)}
"""All of them by name."""


def format_of(name: str) -> Format:
    """Return the format of that name (0x06).

    Parameters
    ----------
    name : str
        ``"float8_e4m3fn"``, ``"float8_e5m2"``, ``"bfloat16"`` or ``"float16"``.

    Returns
    -------
    Format
        The format.

    Raises
    ------
    ValueError
        If there is none.

    Examples
    --------
    >>> format_of("bfloat16") is BFLOAT16
    True
    """
    if name not in FORMATS:
        raise ValueError(f"format: {name!r} is none of {', '.join(FORMATS)}")
    return FORMATS[name]
