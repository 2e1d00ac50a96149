"""What a benchmark figure means: operations, rates, and what may be compared (specification 0x0D).

======== ===========================================================================================
module   what it holds
======== ===========================================================================================
`flops`  how many operations are counted: three numerators and their conventions
`rates`  from operations and times to rates and ratios; clocks, speedups
`record` conditions and manifests: which figures may be compared
======== ===========================================================================================
"""

from . import flops, rates, record

__all__ = ["flops", "rates", "record"]
