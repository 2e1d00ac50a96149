"""The rate table and the ceilings of 0x07."""

import pytest

from cupyfa.oracles.blackwell.machine import BLACKWELL, HOPPER, CeilingExceeded, check_ceilings, exponential_share


def test_products_double_and_nothing_else_does():
    assert (HOPPER.mma_ops, BLACKWELL.mma_ops) == (4096, 8192)
    assert BLACKWELL.mma_ops / HOPPER.mma_ops == 2
    assert HOPPER.exponentials == BLACKWELL.exponentials == 16
    assert HOPPER.shared_bytes == BLACKWELL.shared_bytes == 128
    assert (HOPPER.accumulator_tile, BLACKWELL.accumulator_tile) == ((64, 128), (128, 128))
    assert (HOPPER.accumulator, BLACKWELL.accumulator) == ("registers", "TMEM")


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_exponentials_weigh_twice_as_much(head_dim):
    assert exponential_share(BLACKWELL, head_dim) == 2 * exponential_share(HOPPER, head_dim)


def test_exponentials_tie_with_the_products_at_128():
    assert exponential_share(HOPPER, 128) == 0.5
    assert exponential_share(BLACKWELL, 128) == 1
    assert exponential_share(BLACKWELL, 64) > 1 > exponential_share(BLACKWELL, 192, 128)
    # From whole tiles instead of per score: 128 x 128 scores, d = 192, d_v = 128.
    mma = (2 * 128 * 128 * 192 + 2 * 128 * 128 * 128) / 8192
    assert exponential_share(BLACKWELL, 192, 128) == pytest.approx(128 * 128 / 16 / mma)


@pytest.mark.parametrize("dims", [(0, None), (-8, 64), (64, 0)])
def test_head_dims_are_positive(dims):
    with pytest.raises(ValueError, match="must be positive"):
        exponential_share(BLACKWELL, *dims)


def test_ceilings():
    check_ceilings(threads=512, registers_per_thread=128, shared_bytes=232_448)  # 16 warps and 227 KiB: both exact
    check_ceilings(threads=256, registers_per_thread=255, shared_bytes=0)
    with pytest.raises(CeilingExceeded, match="256 registers per thread"):
        check_ceilings(128, 256, 0)
    with pytest.raises(CeilingExceeded, match="69632 registers"):
        check_ceilings(512, 136, 0)
    with pytest.raises(CeilingExceeded, match="232449 bytes"):
        check_ceilings(512, 128, 232_449)


@pytest.mark.parametrize(
    ("cta", "message"), [((0, 128, 0), "0 threads"), ((128, -1, 0), "-1 registers"), ((128, 32, -1), "-1 bytes")]
)
def test_bad_input(cta, message):
    with pytest.raises(ValueError, match=message):
        check_ceilings(*cta)
