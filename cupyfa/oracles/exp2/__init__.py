"""2**x without the exponential unit, and where the kernels use it (specification 0x09).

============ =======================================================================================
module       what it holds
============ =======================================================================================
`polynomial` range reduction, the polynomial, its coefficients, the hardware's stand-in, measures
`fit`        the best polynomial in the sense of the relative error
`fragments`  which entries of a score row go to the polynomial
============ =======================================================================================
"""

from . import fit, fragments, polynomial

__all__ = ["fit", "fragments", "polynomial"]
