"""Unequal tiles on equal workers: costs, orders, schedules; what an order does to L2 and to dQ (specification 0x0B).

========== =========================================================================================
module     what it holds
========== =========================================================================================
`costs`    key blocks of a query tile, and a linear model on top
`orders`   lexical, longest first, in sections that fit into L2
`makespan` who computes a tile when, and when the last one ends; bounds
`cache`    keys and values in L2 while a schedule runs
`clc`      work distribution by the hardware: its protocol, and the order that it does not keep
`varlen`   sequences of different lengths: sorted batches, and finding a tile without sorting
`turns`    the forward order against the turns of a deterministic dQ
`study`    orders compared on random batches
========== =========================================================================================
"""

from . import cache, clc, costs, makespan, orders, study, turns, varlen

__all__ = ["cache", "clc", "costs", "makespan", "orders", "study", "turns", "varlen"]
