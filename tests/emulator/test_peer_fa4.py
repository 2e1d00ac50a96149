"""FlashAttention-4's own Blackwell kernels, executed by the emulator, must compute attention.

No Blackwell GPU takes part in this project's tests, so nothing of our own can show that the emulator has the
descriptors, TMEM layouts, swizzles, two-CTA splits, byte counts and orders of sm_100a right: a misreading that a kernel
and the emulator share would cancel. These kernels were written by others against the real machine; under a misreading
they compute garbage. They need packages that are too large to require (`fa4.why_unavailable`), and are compiled anew in
each session.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from emulator import fa4

from cupyfa.emulator.policies import POLICIES
from cupyfa.oracles import dense
from cupyfa.testing import Case, assert_close

KERNELS = [
    "fwd-bfloat16-d64-full-1cta",
    "fwd-bfloat16-d64-causal-1cta",
    "fwd-bfloat16-d128-full-1cta",
    "fwd-bfloat16-d128-causal-1cta",
    "fwd-float16-d128-full-1cta",
    "fwd-bfloat16-d128-full-2cta",
    "fwd-float16-d128-full-2cta",
]
# Head dimension, data type and mask are those of the kernel.
CASES = [
    Case("whole", 1, 512, 512, 2, 2, 0),
    Case("ragged", 1, 300, 300, 2, 2, 0),
    Case("lengths", 1, 290, 717, 1, 1, 0),  # more key blocks than a ring of K and V has slots; causal: bottom-right
    Case("tiles", 2, 257, 130, 3, 3, 0),  # three tiles and more for each CTA of the persistent kernels
    Case("rescale", 1, 300, 640, 1, 1, 0, amplitude=3.0),  # the running maximum grows by more than the threshold
]


@pytest.fixture(scope="session")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], fa4.Kernel]:
    """Compile on first use all kernels of a CTA count, then read the one asked for."""
    if reason := fa4.why_unavailable():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("fa4")

    def read(name: str) -> fa4.Kernel:
        if not folder.joinpath(f"{name}.ptx").exists():
            fa4.compile_kernels(folder, [other for other in KERNELS if other[-4:] == name[-4:]])
        return fa4.Kernel.read(folder, name)

    return read


def case_of(name: str, case: Case) -> Case:
    """The case with the kernel's head dimension, data type and mask."""
    _, dtype, head_dim, mask, _ = name.split("-")
    return replace(case, dtype=dtype, head_dim=int(head_dim[1:]), causal=mask == "causal")


def check(case: Case, result: fa4.Result) -> None:
    """Compare out and lse with float64 attention.

    Some of the kernel's exponentials come from a polynomial of degree 3 whose relative error is 9e-5: hence the
    absolute bound on the lse. Against the rounding of P to 16 bits it counts little, so out has to meet the bound of
    our own kernels.
    """
    q, k, v = case.make_inputs()
    out, lse = dense.attention(q, k, v, **case.options)
    np.testing.assert_allclose(result.lse, lse, rtol=0, atol=1e-4, err_msg=case.id)
    same_precision, _ = dense.same_precision(q, k, v, **case.options)
    assert_close(result.out, out, same_precision, context=result.run)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.group)
@pytest.mark.parametrize("name", KERNELS)
def test_attention(kernel: Callable[[str], fa4.Kernel], name: str, case: Case) -> None:
    case = case_of(name, case)
    result = kernel(name).run(case, sms=2)
    check(case, result)
    assert not result.run.hazards, result.run


@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - {"eager"}))
@pytest.mark.parametrize("name", ["fwd-bfloat16-d64-causal-1cta", "fwd-bfloat16-d128-full-2cta"])
def test_any_schedule_gives_the_same_bits(kernel: Callable[[str], fa4.Kernel], name: str, policy: str) -> None:
    case = case_of(name, CASES[2])
    eager = kernel(name).run(case, sms=2, policy="eager")
    for seed in range(3):
        other = kernel(name).run(case, sms=2, policy=policy, seed=seed)
        assert not other.run.hazards, other.run
        assert np.array_equal(other.out.view(np.uint16), eager.out.view(np.uint16)), other.run
        assert np.array_equal(other.lse.view(np.uint32), eager.lse.view(np.uint32)), other.run


def test_divisor() -> None:
    rng = np.random.default_rng(0)
    numerators = [0, 1, 2, 2**31 - 1, 2**32 - 1, *rng.integers(0, 2**32, 200).tolist()]
    for value in [*range(1, 300), 2**20 - 1, 2**20, 2**20 + 1, 2**31 - 1, 2**31]:
        stored, multiplier, shift1, shift2 = struct.unpack("<IIBB2x", fa4.divisor(value))
        assert (stored, multiplier >> 32) == (value, 0)
        for n in numerators:
            high = multiplier * n >> 32
            assert (high + (n - high >> shift1)) >> shift2 == n // value, (n, value)
