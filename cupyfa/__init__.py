"""Attention for CuPy arrays: hand-written CUDA kernels that their user can check.

>>> import numpy as np
>>> import cupyfa
>>> x = np.ones((1, 3, 2, 16), np.float16)
>>> cupyfa.attention(x, x, x).shape
(1, 3, 2, 16)
"""

from cupyfa._version import __version__
from cupyfa.attention import AttentionResult, attention
from cupyfa.backward import Gradients, attention_backward
from cupyfa.dispatch import VarlenPlan
from cupyfa.errors import CompileError, HazardError, LaunchError, UnsupportedError
from cupyfa.explain import Explanation, explain
from cupyfa.explain_backward import BackwardExplanation, explain_backward
from cupyfa.explain_cache import CacheExplanation, explain_kvcache
from cupyfa.kvcache import attention_with_kvcache
from cupyfa.merge import merge_states
from cupyfa.paging import page_table_from_csr
from cupyfa.varlen import attention_varlen, plan_varlen
from cupyfa.varlen_backward import attention_varlen_backward
from cupyfa.vjp import Pullback, attention_vjp
from cupyfa.warmup import warmup
from cupyfa.workspace import backward_workspace_size, workspace_size

__all__ = [
    "AttentionResult",
    "BackwardExplanation",
    "CacheExplanation",
    "CompileError",
    "Explanation",
    "Gradients",
    "HazardError",
    "LaunchError",
    "Pullback",
    "UnsupportedError",
    "VarlenPlan",
    "__version__",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_vjp",
    "attention_with_kvcache",
    "backward_workspace_size",
    "explain",
    "explain_backward",
    "explain_kvcache",
    "merge_states",
    "page_table_from_csr",
    "plan_varlen",
    "warmup",
    "workspace_size",
]
