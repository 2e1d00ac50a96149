"""Other attention libraries, each behind a small adapter; one that does not import is listed with the reason.

All of them get the arrays that cupyfa gets: torch tensors that share CuPy's memory, on the legacy default stream, which
is the default stream of both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any

import cupyfa
from cupyfa.bench.harness import Contestant, first_line
from cupyfa.bench.problems import Inputs
from cupyfa.bench.torch_arrays import from_torch, tensors

__all__ = ["BASELINE", "PEERS", "Availability", "Peer", "enter", "invite", "prepare_all", "probe_all", "why_not_here"]

#: The peer that the ratio refers to.
BASELINE = "cuDNN"


@dataclasses.dataclass(frozen=True)
class Availability:
    """Whether a peer can take part.

    Attributes
    ----------
    name : str
        The column of the table.
    title : str
        What it is.
    version : str or None
        None if it is absent.
    reason : str
        Why it is absent.
    """

    name: str
    title: str
    version: str | None
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Peer:
    """An adapter.

    Attributes
    ----------
    name : str
        The column of the table.
    title : str
        What it is.
    modules : tuple of str
        What must import.
    distributions : tuple of str
        Names under which its version may be found.
    prepare : Callable
        Makes a Contestant for Inputs of CuPy arrays, in a benchmark of gradients for BackwardInputs.
    takes : frozenset of str
        Which of the :attr:`Cell.needs <cupyfa.bench.problems.Cell.needs>` it serves.
    """

    name: str
    title: str
    modules: tuple[str, ...]
    distributions: tuple[str, ...]
    prepare: Callable[[Any], Contestant]
    takes: frozenset[str] = frozenset()

    def probe(self) -> Availability:
        """Import the peer and tell its version, or why it is absent."""
        try:
            modules = [importlib.import_module(name) for name in ("torch", *self.modules)]
        except Exception as error:  # a broken build raises anything
            return Availability(self.name, self.title, None, first_line(error))
        if not modules[0].cuda.is_available():
            return Availability(self.name, self.title, None, "torch finds no CUDA device")
        return Availability(self.name, self.title, self._version(modules[-1]))

    def _version(self, module: Any) -> str:
        for name in self.distributions:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                return importlib.metadata.version(name)
        return str(getattr(module, "__version__", "unknown"))


def probe_all(peers: Sequence[Peer]) -> list[Availability]:
    """Probe peers.

    Parameters
    ----------
    peers : sequence of Peer
        Usually PEERS.

    Returns
    -------
    list of Availability
        In the same order.
    """
    return [peer.probe() for peer in peers]


def invite(peers: Sequence[Peer], names: Sequence[str]) -> tuple[list[Peer], list[Availability]]:
    """Probe the peers that the user wants.

    Parameters
    ----------
    peers : sequence of Peer
        Who may take part.
    names : sequence of str
        Who shall.

    Returns
    -------
    present : list of Peer
        Who can.
    found : list of Availability
        Of all that were wanted.
    """
    invited = [peer for peer in peers if peer.name in names]
    found = probe_all(invited)
    return [peer for peer, answer in zip(invited, found, strict=True) if answer.version is not None], found


# ----------------------------------------------------------------------------------------------------------------------
# Adapters


def _prepare_sdpa(inputs: Inputs, name: str, backend: str) -> Contestant:
    """PyTorch's function on (batch, heads, seqlen, head_dim) views, with one of its back ends."""
    sdpa = importlib.import_module("torch.nn.functional").scaled_dot_product_attention
    attention = importlib.import_module("torch.nn.attention")
    chosen = getattr(attention.SDPBackend, backend)
    q, k, v = (tensor.transpose(1, 2) for tensor in tensors(inputs))
    causal = inputs.cell.causal
    return Contestant(
        name,
        call=lambda: sdpa(q, k, v, is_causal=causal, enable_gqa=inputs.cell.heads_kv is not None),
        convert=lambda out: from_torch(out.transpose(1, 2), inputs.q.dtype),
        context=lambda: attention.sdpa_kernel(chosen),
    )


def _prepare_cudnn(inputs: Inputs) -> Contestant:
    return _prepare_sdpa(inputs, "cuDNN", "CUDNN_ATTENTION")


def _prepare_flash(inputs: Inputs) -> Contestant:
    return _prepare_sdpa(inputs, "flash", "FLASH_ATTENTION")


def _prepare_flash_attn(inputs: Inputs, name: str, module: str) -> Contestant:
    """flash-attn's function on (batch, seqlen, heads, head_dim); some versions return the LSE too."""
    function = importlib.import_module(module).flash_attn_func
    q, k, v = tensors(inputs)
    causal = inputs.cell.causal
    return Contestant(
        name,
        call=lambda: function(q, k, v, causal=causal),
        convert=lambda out: from_torch(out[0] if isinstance(out, tuple) else out, inputs.q.dtype),
    )


def _prepare_flash_attn_3(inputs: Inputs) -> Contestant:
    return _prepare_flash_attn(inputs, "FA3", "flash_attn_interface")


def _prepare_flash_attn_4(inputs: Inputs) -> Contestant:
    return _prepare_flash_attn(inputs, "FA4", "flash_attn.cute")


def _prepare_flashinfer(inputs: Inputs) -> Contestant:
    """FlashInfer's ragged prefill over sequences of one length; the plan is made here, outside the timing."""
    torch = importlib.import_module("torch")
    flashinfer = importlib.import_module("flashinfer")
    cell = inputs.cell
    q, k, v = (tensor.reshape(-1, cell.heads, cell.head_dim) for tensor in tensors(inputs))
    workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    indptr = torch.arange(cell.batch + 1, dtype=torch.int32, device=q.device) * cell.seqlen
    wrapper.plan(
        indptr, indptr, cell.heads, cell.heads, cell.head_dim, causal=cell.causal, q_data_type=q.dtype
    )  # fmt: skip
    return Contestant(
        "FlashInfer",
        call=lambda: wrapper.run(q, k, v),
        convert=lambda out: from_torch(out.reshape(cell.shape), inputs.q.dtype),
    )


PEERS = (
    Peer("cuDNN", "torch SDPA, cuDNN back end", ("torch.nn.attention", "torch"), ("torch",), _prepare_cudnn),
    Peer("flash", "torch SDPA, flash back end", ("torch.nn.attention", "torch"), ("torch",), _prepare_flash),
    Peer("FA3", "flash-attn 3", ("flash_attn_interface",), ("flash_attn_3", "flash-attn-3"), _prepare_flash_attn_3),
    Peer("FA4", "flash-attn 4", ("flash_attn.cute",), ("flash-attn-4",), _prepare_flash_attn_4),
    Peer("FlashInfer", "FlashInfer", ("flashinfer",), ("flashinfer-python",), _prepare_flashinfer),
)


# ----------------------------------------------------------------------------------------------------------------------
# Who takes part


def why_not_here() -> str | None:
    """Return one sentence if cupyfa's kernels cannot run here.

    Returns
    -------
    str or None
        What the benchmark needs and does not find.
    """
    try:
        import cupy

        if not cupy.cuda.is_available():
            return "The benchmark needs a GPU: CuPy finds no CUDA device."
    except ImportError as error:
        return f"The benchmark needs a GPU and CuPy: {first_line(error)}."
    capability = cupy.cuda.Device().compute_capability
    if capability != "90":
        return f"The benchmark needs a Hopper GPU: this one has compute capability {capability[:-1]}.{capability[-1]}."
    return None


def _own(inputs: Inputs) -> Contestant:
    q, k, v = inputs.q, inputs.k, inputs.v
    return Contestant("cupyfa", functools.partial(cupyfa.attention, q, k, v, out=inputs.out, **inputs.options))


def enter(inputs: Inputs, peers: Sequence[Peer] | None = None) -> tuple[list[Contestant], dict[str, str]]:
    """Prepare the peers that are present, and cupyfa.

    Parameters
    ----------
    inputs : Inputs
        The arrays.
    peers : sequence of Peer, optional
        Those that are present; otherwise they are looked for. Who does not take the options of the problem is left out.

    Returns
    -------
    contestants : list of Contestant
        cuDNN first where it is present: it is also the reference of the comparison. cupyfa last.
    failed : dict
        Name to reason, for peers that refuse the problem.
    """
    if peers is None:
        peers = [peer for peer in PEERS if peer.probe().version is not None]
    contestants, failed = prepare_all(inputs, peers)
    return [*contestants, _own(inputs)], failed


def prepare_all(inputs: Inputs, peers: Sequence[Peer]) -> tuple[list[Contestant], dict[str, str]]:
    """Prepare peers.

    Parameters
    ----------
    inputs : Inputs
        The arrays, as the peers take them.
    peers : sequence of Peer
        Those that are present. Who does not take the options of the problem is left out.

    Returns
    -------
    contestants : list of Contestant
        In their order.
    failed : dict
        Name to reason, for peers that refuse the problem.
    """
    contestants: list[Contestant] = []
    failed: dict[str, str] = {}
    for peer in peers:
        if not inputs.cell.needs <= peer.takes:
            continue
        try:
            contestants.append(peer.prepare(inputs))
        except Exception as error:  # a peer may raise anything
            failed[peer.name] = first_line(error)
    return contestants, failed
