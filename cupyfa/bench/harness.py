"""What every benchmark shares: the problem, checks before timing, interleaved rounds, statistics.

A GPU slows down as it warms up, so two contestants timed one after the other are not comparable. Here each round times
every contestant once, in an order that changes from round to round, and a ratio is formed within a round, between
batches that are milliseconds apart; only then the median over rounds is taken.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

__all__ = [
    "Contestant",
    "Spread",
    "Timer",
    "Timing",
    "first_line",
    "interleave",
    "keep_busy",
    "order",
    "ratio",
    "time_in_turn",
    "time_on_gpu",
]


@dataclasses.dataclass(frozen=True)
class Contestant:
    """One implementation, ready to run on one problem.

    Attributes
    ----------
    name : str
        The column of the table.
    call : Callable
        Enqueues one pass on the legacy default stream.
    convert : Callable
        Makes an array of the inputs' kind, (batch, seqlen, heads, head_dim), of what ``call`` returned; of gradients
        three.
    context : Callable
        Makes a context manager in which the calls happen; entered once for a batch.
    """

    name: str
    call: Callable[[], Any]
    convert: Callable[[Any], Any] = lambda result: result
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def output(self) -> Any:
        """Run once and return the result."""
        with self.context():
            return self.convert(self.call())


def first_line(error: BaseException) -> str:
    """Return an error as one short line.

    Parameters
    ----------
    error : BaseException
        The error.

    Returns
    -------
    str
        Its type and the first line of its text.
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__


@dataclasses.dataclass(frozen=True)
class Spread:
    """A median and its range.

    Attributes
    ----------
    median, low, high : float
        Median, smallest and largest.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclasses.dataclass(frozen=True)
class Timing:
    """What was measured for a contestant.

    Attributes
    ----------
    calls : int
        Calls of a batch.
    seconds : tuple of float
        Seconds of one call, for each round.
    """

    calls: int
    seconds: tuple[float, ...]

    @property
    def spread(self) -> Spread:
        """Seconds of one call."""
        return Spread.of(self.seconds)


#: Seconds that a batch of calls takes.
Timer = Callable[[Contestant, int], float]


def time_on_gpu(contestant: Contestant, calls: int) -> float:
    """Time a batch of back-to-back calls between two CUDA events.

    One call more goes ahead, so that the GPU is busy while the host enqueues the first timed one.

    Parameters
    ----------
    contestant : Contestant
        What to run.
    calls : int
        Number of timed calls.

    Returns
    -------
    float
        Seconds of the batch.
    """
    import cupy

    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    call = contestant.call
    with contestant.context():
        call()
        start.record()
        for _ in range(calls):
            call()
        stop.record()
    stop.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, stop)) * 1e-3


def order(count: int, index: int) -> list[int]:
    """Return the order of a round: rotated by one from round to round, and reversed after each full turn.

    Parameters
    ----------
    count : int
        Number of contestants.
    index : int
        Number of the round.

    Returns
    -------
    list of int
        A permutation. In ``count`` rounds everyone has every place once; the reversal changes who comes before whom.
    """
    turn, shift = divmod(index, count)
    rotated = [(shift + place) % count for place in range(count)]
    return rotated[::-1] if turn % 2 else rotated


def interleave(
    contestants: Sequence[Contestant],
    rounds: int,
    timer: Timer,
    *,
    batch_seconds: float = 0.010,
    calls: int | None = None,
) -> dict[str, Timing]:
    """Time every contestant of one problem once in each round.

    Parameters
    ----------
    contestants : sequence of Contestant
        Who takes part, each under a name of its own.
    rounds, timer, batch_seconds, calls
        As for :func:`time_in_turn`.

    Returns
    -------
    dict
        Name to Timing; the figures of one round stand at one index.
    """
    timings = time_in_turn(contestants, rounds, timer, batch_seconds=batch_seconds, calls=calls)
    return {contestant.name: timing for contestant, timing in zip(contestants, timings, strict=True)}


def time_in_turn(
    contestants: Sequence[Contestant],
    rounds: int,
    timer: Timer,
    *,
    batch_seconds: float = 0.010,
    calls: int | None = None,
) -> list[Timing]:
    """Time every contestant once in each round.

    Parameters
    ----------
    contestants : sequence of Contestant
        Who takes part; names do not matter, so several problems may share the rounds.
    rounds : int
        Number of rounds that count; one more goes ahead, for the clocks to settle.
    timer : Callable
        Takes a contestant and a number of calls, returns the seconds that they took.
    batch_seconds : float
        Length of a batch, from which the number of calls follows.
    calls : int, optional
        The number of calls, instead.

    Returns
    -------
    list of Timing
        In the order of the contestants; the figures of one round stand at one index.
    """
    if not contestants:
        return []
    batches = [calls or _calls_for(contestant, timer, batch_seconds) for contestant in contestants]
    seconds: list[list[float]] = [[] for _ in contestants]
    for index in range(-1, rounds):
        for place in order(len(contestants), max(index, 0)):
            duration = timer(contestants[place], batches[place]) / batches[place]
            if index >= 0:
                seconds[place].append(duration)
    return [Timing(batch, tuple(figures)) for batch, figures in zip(batches, seconds, strict=True)]


def _calls_for(contestant: Contestant, timer: Timer, batch_seconds: float) -> int:
    timer(contestant, 2)  # warm-up: compilers, plans and heuristics are not timed
    estimate = timer(contestant, 5) / 5
    return max(1, min(10_000, round(batch_seconds / max(estimate, 1e-9))))


def keep_busy(contestant: Contestant, timer: Timer, seconds: float) -> None:
    """Run a contestant for some time without counting it: clocks rise while the GPU works, and fall while it waits.

    Parameters
    ----------
    contestant : Contestant
        What to run.
    timer : Callable
        As for :func:`time_in_turn`.
    seconds : float
        For how long, about.
    """
    timer(contestant, _calls_for(contestant, timer, seconds))


def ratio(timing: Timing, baseline: Timing) -> Spread:
    """Return how many times as fast as the baseline a contestant is.

    Parameters
    ----------
    timing, baseline : Timing
        Of the same rounds.

    Returns
    -------
    Spread
        Of the ratios within a round.
    """
    return Spread.of([b / t for t, b in zip(timing.seconds, baseline.seconds, strict=True)])
