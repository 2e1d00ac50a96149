"""Why a ring cannot deadlock: its graph of who waits for whom (specification 0x03)."""

from __future__ import annotations

from collections.abc import Collection

from cupyfa.oracles.hopper.machine import Deadlock, find_cycle

__all__ = ["check_liveness", "wait_for_graph"]


def wait_for_graph(
    blocks: int,
    stages: int,
    *,
    produced: Collection[int] | None = None,
    consumed: Collection[int] | None = None,
    released: Collection[int] | None = None,
    lag: int = 0,
) -> dict[str, tuple[str, ...]]:
    """Build the graph of who waits for whom in one ring (specification 0x03).

    ``produce(r)`` waits for ``release(r - s)`` once ``r >= s``; ``consume(r)`` waits for the commit of ``r``;
    ``release(r)`` follows ``consume(r)``. Each side also follows its own order.

    Parameters
    ----------
    blocks : int
        ``J``.
    stages : int
        ``s``.
    produced, consumed, released : collection of int, optional
        Which ordinals the producer fills and the consumers use and give back; all of them by default. A path of the
        program that forgets one is a smaller set.
    lag : int, optional
        The consumer gives item ``r`` back only after it has used item ``r + lag``, or its last one.

    Returns
    -------
    dict of str to tuple of str
        Edges from waiting to awaited; ``"produce 2"`` names the event for item 2.

    Examples
    --------
    >>> wait_for_graph(3, 2)["produce 2"]
    ('produce 1', 'release 0')
    """
    if blocks < 0 or stages < 1 or lag < 0:
        raise ValueError(
            f"wait-for graph: {blocks} blocks, {stages} stages, lag {lag}; at least one stage, none negative"
        )
    everything = range(blocks)
    produced, consumed = (everything if x is None else x for x in (produced, consumed))
    released = consumed if released is None else released
    graph: dict[str, tuple[str, ...]] = {}
    order = sorted(produced)
    for before, r in zip([-1, *order], order, strict=False):
        graph[f"produce {r}"] = _edges(before >= 0 and f"produce {before}", r >= stages and f"release {r - stages}")
    order = sorted(consumed)
    for before, r in zip([-1, *order], order, strict=False):
        graph[f"consume {r}"] = _edges(before >= 0 and f"consume {before}", f"produce {r}")
    for r in released:
        graph[f"release {r}"] = (f"consume {min(r + lag, max(order, default=r))}",)
    return graph


def _edges(*names: str | bool) -> tuple[str, ...]:
    return tuple(name for name in names if isinstance(name, str))


def check_liveness(graph: dict[str, tuple[str, ...]]) -> None:
    """Raise `Deadlock` if an event waits for itself, or for one that never happens (specification 0x03).

    Parameters
    ----------
    graph : dict of str to tuple of str
        As `wait_for_graph` builds it.

    Notes
    -----
    Following a producer's wait backwards gives ``P_r <- R_(r-s) <- C_(r-s) <- P_(r-s)``: the ordinal shrinks by ``s``,
    and the first ``s`` acquires wait for nobody. So a ring whose sides name the same items, and release what they
    use, has no cycle.

    Examples
    --------
    >>> check_liveness(wait_for_graph(5, 2))
    >>> check_liveness(wait_for_graph(5, 2, lag=2))  # holds two slots and wants a third
    Traceback (most recent call last):
    cupyfa.oracles.hopper.machine.Deadlock: deadlock: produce 2 waits for release 0; ...consume 2 waits for produce 2
    """
    cycle = find_cycle(graph)
    if cycle:
        raise Deadlock({node: graph[node][-1] for node in cycle}, {node: graph[node] for node in cycle})
    orphans = {node: e for node, edges in graph.items() for e in edges if e not in graph}
    if orphans:
        raise Deadlock(
            {node: f"{e}, which never happens" for node, e in orphans.items()}, {n: (e,) for n, e in orphans.items()}
        )
