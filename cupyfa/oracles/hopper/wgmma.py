"""Where WGMMA finds its register operands: fragments of the accumulators and of A (specification 0x02).

The maps are whole arrays, so that tests can ask for bijections; source is the PTX ISA ("Register fragments and shared
memory matrix layouts" of wgmma.mma_async). Operands in shared memory: `descriptors` and `swizzle`.
"""

from __future__ import annotations

import numpy as np

from cupyfa.oracles.hopper.swizzle import THREADS, Index

__all__ = ["a_fragment", "accumulator", "fp8_key_order"]


def accumulator(columns: int) -> Index:
    """Map the accumulators of m64nN to the matrix (PTX ISA; identical in all types) (specification 0x02).

    Register ``i`` of thread ``t`` in warp ``w``, lane ``l``: row ``16 w + l / 4 + 8 (i / 2 mod 2)``, column
    ``8 (i / 4) + 2 (l mod 4) + i mod 2``.

    Parameters
    ----------
    columns : int
        ``N``: 8 to 256, a multiple of 8.

    Returns
    -------
    numpy.ndarray
        int64, shape ``(128, N / 2, 2)``: (row, column) of each thread's registers.

    Examples
    --------
    >>> accumulator(8)[5].tolist()  # thread 5: rows 1 and 9, columns 2 and 3
    [[1, 2], [1, 3], [9, 2], [9, 3]]
    """
    if not 8 <= columns <= 256 or columns % 8:
        raise ValueError(f"wgmma: N is {columns}; it is a multiple of 8 from 8 to 256")
    thread, i = np.arange(THREADS)[:, None], np.arange(columns // 2)[None, :]
    warp, lane = thread // 32, thread % 32
    row = 16 * warp + lane // 4 + 8 * (i // 2 % 2)
    column = 8 * (i // 4) + 2 * (lane % 4) + i % 2
    return np.stack(np.broadcast_arrays(row, column), axis=-1)


def a_fragment(bits: int) -> Index:
    """Map the register operand A of one k-step, 64 rows by 32 bytes, to the matrix (PTX ISA) (0x02).

    Register ``a_r``: row ``16 w + l / 4 + 8 (r mod 2)``, and the ``32 / bits`` elements from column
    ``(l mod 4 + 4 (r / 2)) * 32 / bits`` on.

    Parameters
    ----------
    bits : int
        Per element: 16 (k16) or 8 (k32).

    Returns
    -------
    numpy.ndarray
        int64, shape ``(128, 4, 32 / bits, 2)``: (row, column) of each element of each register, lowest bits first.

    Examples
    --------
    >>> a_fragment(16)[5, 2].tolist()  # thread 5, a2
    [[1, 10], [1, 11]]
    """
    if bits not in (8, 16):
        raise ValueError(f"wgmma: A has {bits} bits; register operands of 8 and 16 are modelled")
    per_register = 32 // bits
    thread = np.arange(THREADS)[:, None, None]
    r, e = np.arange(4)[None, :, None], np.arange(per_register)[None, None, :]
    warp, lane = thread // 32, thread % 32
    row = 16 * warp + lane // 4 + 8 * (r % 2)
    column = per_register * (lane % 4 + 4 * (r // 2)) + e
    return np.stack(np.broadcast_arrays(row, column), axis=-1)


def fp8_key_order() -> Index:
    """Find the order of keys in which V must be stored so that FP8 P needs no shuffle (specification 0x06).

    A thread packs its accumulators ``S_4r, S_4r+1, ...`` in the order of registers; operand column ``c`` then holds the
    key that this table names, within each group of 16, and ``V'`` needs its keys in the same order.

    Returns
    -------
    numpy.ndarray
        int64, shape ``(32,)``: the key at each operand position of one k32 step.

    Examples
    --------
    >>> fp8_key_order()[:16].tolist()
    [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    """
    scores = accumulator(32)
    operand = a_fragment(8)
    order = np.full(32, -1, dtype=np.int64)
    for r in range(4):
        # a_r takes the four accumulators of its own row (r mod 2) and half of the columns (r / 2).
        source = [8 * (r // 2) + 4 * (e // 2) + 2 * (r % 2) + e % 2 for e in range(4)]
        assert np.array_equal(scores[:, source, 0], operand[:, r, :, 0])
        order[operand[:, r, :, 1]] = scores[:, source, 1]
    return order
