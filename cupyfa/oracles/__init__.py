"""NumPy companions of the kernels: what each kernel must compute, readable on one screen.

Nothing here touches a GPU, and nothing here imports another part of the library (NumPy and SciPy only), so an oracle
can never inherit a mistake from the code that it judges.

================= ========================================================================== =================
module            what it holds                                                              specification
================= ========================================================================== =================
`mask`            which keys a query row sees; which key blocks a query tile visits          0x01, 0x08
`dense`           attention in float64 (the reference), and at the kernel's precision        0x01
`softmax`         softmax of rows that arrive block by block: exact, and speculative         0x01, 0x05, 0x09
`score_mod`       what makes logits of raw scores: scale, softcap, bias, slopes              0x01
`online`          the tiled recurrence around it, twin of the consumer loop; the CPU backend 0x01, 0x05
`packed`          attention over packed sequences, one at a time                              0x01, 0x0B
`rotary`          rotary position embedding                                                  0x01
`kvcache`         attention over a cache in rows or pages, and what is appended to it        0x01, 0x0B
`splits`          keys in several parts, and their merge: twin of split and combine          0x01, 0x0B
`jacobian`        the softmax on the way back                                                0x0A
`backward`        the gradients in float64 (the reference, and the CPU backend), and at the  0x0A
                  kernel's precision
`query_blocks`    which query blocks a key tile visits                                       0x0A
`backward_online` the gradients tile by tile, in a declared order: twin of the mainloop      0x0A
`packed_backward` the gradients over packed sequences, one at a time                         0x0A, 0x0B
`formats`         number formats: what a few bits can hold, and how a value is rounded       0x06
`float32`         two float32 instructions that NumPy lacks                                  0x09
`exp2`            (package) 2**x by a polynomial                                             0x09
`retained`        online softmax whose maximum may lag behind                                0x09
`retained_bounds` what can be said about it in advance                                       0x09
`correction`      rescaling O: who takes part, and when                                      0x05, 0x09
`tile_time`       the resource model of one tile                                             0x01
`hopper`          (package) the Hopper machine: barriers, ring, pingpong, WGMMA, ledgers     0x02 to 0x05
`fp8`             (package) FP8 attention: descales, layouts, the transform, errors          0x06
`blackwell`       (package) the Blackwell machine, FlashAttention-4's schedule, its backward 0x07, 0x08, 0x0A
`reductions`      ordered reductions: who adds to a gradient when                            0x0A
`scheduling`      (package) tiles on workers: costs, orders, schedules                       0x0B
`evidence`        what a piece of evidence proves; compile keys                              0x0C, 0x0F
`accounting`      (package) operations, rates, and which figures may be compared             0x0D
`violations`      the base of the errors that the state machines raise
================= ========================================================================== =================

Only `dense`, `mask`, `softmax`, `score_mod` and `online` are imported with this package; the library needs `packed`,
`kvcache`, `rotary`, `backward` and `packed_backward` beside them, and what these import.

Arrays are ``(batch, seqlen, heads, head_dim)``. Query head ``h`` uses key/value head ``h // (heads_q // heads_kv)``.
Causal masks are aligned bottom-right. A row that sees no key gives out 0 and lse -inf. The lse is the natural
logarithm, shaped ``(batch, heads_q, seqlen_q)``.
"""

from . import dense, mask, online

__all__ = ["dense", "mask", "online"]
