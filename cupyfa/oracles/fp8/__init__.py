"""FP8 attention: operands with descales, the loop, who holds which byte, and how wrong it is (specification 0x06).

=========== ========================================================================================
module      what it holds
=========== ========================================================================================
`operands`  codes with descales, admission, where a descale may enter attention
`attention` twin of the FP8 consumer loop
`layout`    registers, the permutation of P and V, the transpose of V
`transpose` the producer that transposes V, as a state machine
`hadamard`  the orthogonal transform of Q and K
`error`     fixtures, variants, tables of errors
=========== ========================================================================================

The number formats themselves are in `cupyfa.oracles.formats`.
"""

from . import attention, error, hadamard, layout, operands, transpose

__all__ = ["attention", "error", "hadamard", "layout", "operands", "transpose"]
