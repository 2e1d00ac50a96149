"""NumPy companions of the kernels: what each kernel must compute, readable on one screen.

Nothing here touches a GPU, and nothing here imports another part of the library (NumPy and SciPy only), so an oracle
can never inherit a mistake from the code that it judges.

========= ===========================================================================================
module    what it holds
========= ===========================================================================================
`mask`    which keys a query row sees; which key blocks a query tile visits, and which need masking
`dense`   attention in float64 (the reference), and at the kernel's precision (the yardstick of error)
`online`  the tiled online recurrence, twin of the consumer loop; also the library's CPU backend
========= ===========================================================================================

Arrays are ``(batch, seqlen, heads, head_dim)``. Query head ``h`` uses key/value head ``h // (heads_q // heads_kv)``.
Causal masks are aligned bottom-right. A row that sees no key gives out 0 and lse -inf. The lse is the natural
logarithm, shaped ``(batch, heads_q, seqlen_q)``.
"""

from . import dense, mask, online

__all__ = ["dense", "mask", "online"]
