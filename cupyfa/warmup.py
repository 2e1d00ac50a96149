"""Compile kernels before they are needed: in parallel, with a progress bar."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from cupyfa.backward_shapes import specs_of_backward_call
from cupyfa.cache_shapes import specs_of_cache_call
from cupyfa.call_shapes import options_and_operands
from cupyfa.kernels import load
from cupyfa.operand import Arrays
from cupyfa.problem import Problem
from cupyfa.select import Config, Device, select
from cupyfa.spec import PlanSpec, Spec

__all__ = ["warmup"]


def warmup(calls: Iterable[Mapping[str, Any]], *, workers: int | None = None, progress: bool = True) -> list[Spec]:
    """Compile and load the kernels of some calls on the current device, so that no later one has to.

    A kernel that is warm can be launched into a graph under capture; a cold one cannot.

    Parameters
    ----------
    calls : iterable of Mapping
        The keyword arguments of :func:`cupyfa.attention`, with shapes in place of arrays: ``q``, ``k``, and ``v`` if it
        is not that of ``k``; ``dtype``, one for all of them; ``sink=True``, ``alibi_slopes=True``, ``seqused_q=True``
        and ``seqused_k=True`` where there will be such an array; ``bias``, a shape, and ``bias_dtype`` if that is not
        float32. ``out`` and ``lse`` do not matter. For :func:`cupyfa.attention_varlen` the shapes have three axes, and
        ``sequences`` says how many there will be; any other number needs the same kernels. For
        :func:`cupyfa.attention_with_kvcache` there are ``k_cache``, ``v_cache`` if it is not as long, and the shapes
        ``page_table``, ``k`` and ``v`` or ``cache_batch_idx=True`` as far as the call has them; rotary tables and
        lengths do not matter. For :func:`cupyfa.attention_backward` and its packed sibling there are the shape ``dout``
        beside what the forward call has, and ``deterministic``; a ``dlse`` and the gradients do not matter.
    workers : int, optional
        How many kernels are compiled at a time; by default as many as there are processors.
    progress : bool
        Show a bar on stderr.

    Returns
    -------
    list of Spec
        The kernels that are warm now, each once.

    Raises
    ------
    TypeError, ValueError
        A call has an argument that the function does not take, or would refuse.
    UnsupportedError, CompileError
        As for the calls. What was compiled before stays warm.

    Examples
    --------
    >>> calls = [
    ...     {"q": (2, seqlen, 32, 128), "k": (2, seqlen, 8, 128), "dtype": "bfloat16", "causal": True}
    ...     for seqlen in (1, 4096)
    ... ]
    >>> warmup(calls)  # doctest: +SKIP
    warmup: 100%|██████████| 1/1 [00:02<00:00,  2.13s/kernel]
    [FwdSpec(...)]
    >>> both = [call | way for call in calls for way in ({}, {"dout": call["q"]})]  # with the gradients
    >>> warmup(both)  # doctest: +SKIP
    warmup: 100%|██████████| 6/6 [00:04<00:00,  1.43kernel/s]
    [FwdSpec(...), PreprocessSpec(...), BwdSpec(...), ...]
    """
    import cupy  # noqa: PLC0415 - imported where a GPU is used
    from tqdm import tqdm  # noqa: PLC0415

    index = cupy.cuda.runtime.getDevice()
    device = Device.current()
    specs = list(dict.fromkeys(spec for number, call in enumerate(calls) for spec in _specs(number, call, device)))

    def load_there(spec: Spec) -> None:
        with cupy.cuda.Device(index):
            load(spec, index)

    bar = tqdm(total=len(specs), desc="warmup", unit="kernel", disable=not progress)
    with bar, ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        for done in as_completed([pool.submit(load_there, spec) for spec in specs]):
            done.result()
            bar.update()
    return specs


def _specs(number: int, call: Mapping[str, Any], device: Device) -> tuple[Spec, ...]:
    """Return the kernels of a call."""
    if "k_cache" in call:
        return specs_of_cache_call(number, call, device)
    if "dout" in call:
        return specs_of_backward_call(number, call, device)
    options, operands = options_and_operands(number, call)
    problem = Problem.from_operands(Arrays(**operands), options, want_lse=False, current_device=0)
    config: Config | None = call.get("config")
    spec = select(problem, device, config).spec
    return (spec, PlanSpec()) if problem.planned else (spec,)
