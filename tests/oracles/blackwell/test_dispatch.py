"""The pinned predicates, condition by condition."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles.blackwell.dispatch import (
    BACKWARD_FAMILIES,
    FORWARD_FAMILIES,
    Call,
    backward_objections,
    forward_objections,
    padded,
    q_stages,
    static_persistent,
    two_cta,
    two_cta_objections,
)

ELIGIBLE = Call()
CHANGES = [
    ({"arch": 90}, "SM100 or SM110"),
    ({"arch": 120}, "SM100 or SM110"),
    ({"two_cta_disabled": True}, "disabled"),
    ({"causal": True}, "causal"),
    ({"local": True}, "local"),
    ({"split_kv": True}, "split"),
    ({"varlen_q": True}, "variable length"),
    ({"block_sparse": True}, "sparsity"),
    ({"page_size": 64}, "page size 64"),
    ({"head_dim": 64}, "padded head_dim 64"),
    ({"head_dim": 256}, "padded head_dim 256"),
    ({"head_dim_v": 64}, "padded head_dim_v 64"),
    ({"seqlen_q": 256}, "packed query length 256"),
    ({"pack_gqa": True, "q_heads_per_kv_head": 3}, "3 packed heads"),
]


@pytest.mark.parametrize(("change", "reason"), CHANGES)
def test_each_condition_is_needed(change, reason):
    assert two_cta(ELIGIBLE)
    objections = two_cta_objections(dataclasses.replace(ELIGIBLE, **change))
    assert len(objections) == 1
    assert reason in objections[0]


@pytest.mark.parametrize(
    "change",
    [
        {"arch": 103},
        {"arch": 110},
        {"page_size": 128},
        {"head_dim": 192},
        {"head_dim": 120, "head_dim_v": 113},  # both are padded to 128
        {"seqlen_q": 257},
        {"seqlen_q": 65, "pack_gqa": True, "q_heads_per_kv_head": 4},  # 260 packed rows
        {"q_heads_per_kv_head": 3},  # not packed: divisibility does not matter
        {"pack_gqa": True, "q_heads_per_kv_head": 8},
    ],
)
def test_eligible(change):
    assert two_cta_objections(dataclasses.replace(ELIGIBLE, **change)) == ()


def test_unpacked_heads_do_not_lengthen_the_queries():
    assert not two_cta(Call(seqlen_q=256, q_heads_per_kv_head=4))
    assert two_cta(Call(seqlen_q=256, q_heads_per_kv_head=4, pack_gqa=True))


def test_dedicated_path_of_256():
    odd = Call(head_dim=256, head_dim_v=256, causal=True, varlen_q=True, seqlen_q=1, two_cta_disabled=True)
    assert two_cta(odd)
    assert not two_cta(dataclasses.replace(odd, arch=90))
    assert not two_cta(dataclasses.replace(odd, head_dim=255)), "exactly 256, not padded to it"


# One change per field, without packing, which changes what the query length means.
INDEPENDENT = {next(iter(change)): change for change, _ in CHANGES if "pack_gqa" not in change}


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.sets(st.sampled_from(sorted(INDEPENDENT))))
def test_all_reasons_are_listed(fields):
    alone = {two_cta_objections(dataclasses.replace(ELIGIBLE, **INDEPENDENT[field]))[0] for field in fields}
    change = {name: value for field in fields for name, value in INDEPENDENT[field].items()}
    call = dataclasses.replace(ELIGIBLE, **change)
    assert set(two_cta_objections(call)) == alone
    assert two_cta(call) == (not fields)


def test_padding():
    assert [padded(d) for d in (1, 16, 17, 120, 128, 129, 192)] == [16, 16, 32, 128, 128, 144, 192]


def test_second_query_tile():
    assert [q_stages(Call(seqlen_q=s)) for s in (1, 128, 129, 4096)] == [1, 1, 2, 2]
    assert q_stages(Call(seqlen_q=64, pack_gqa=True, q_heads_per_kv_head=4)) == 2


def test_families():
    assert FORWARD_FAMILIES == (8, 9, 10, 11, 12)
    assert BACKWARD_FAMILIES == (9, 10, 11, 12)
    for arch in range(70, 140, 10):
        call = Call(arch=arch)
        assert (not forward_objections(call)) == (arch // 10 in FORWARD_FAMILIES)
        assert (not backward_objections(call)) == (arch // 10 in BACKWARD_FAMILIES)


@pytest.mark.parametrize(
    ("arch", "pair", "admitted"),
    [
        (90, (256, 256), True),
        (90, (8, 248), True),
        (90, (264, 64), False),
        (90, (100, 64), False),
        (100, (128, 128), True),
        (100, (8, 128), True),
        (100, (192, 128), True),
        (110, (64, 512), True),
        (100, (256, 256), True),
        (100, (192, 192), False),
        (100, (136, 128), False),
        (100, (256, 128), False),
        (100, (4, 8), False),
    ],
)
def test_head_dimensions(arch, pair, admitted):
    assert (not forward_objections(Call(arch=arch, head_dim=pair[0], head_dim_v=pair[1]))) == admitted


@pytest.mark.parametrize(
    ("feature", "families"),
    [
        ({"fp8": True}, {10}),
        ({"split_kv": True}, {10, 11}),
        ({"page_size": 128}, {9, 10, 11}),
    ],
)
def test_features_of_the_forward_pass(feature, families):
    admitted = {f for f in FORWARD_FAMILIES if not forward_objections(Call(arch=10 * f, **feature))}
    assert admitted == families


@pytest.mark.parametrize("field", ["causal", "local", "varlen_q", "split_kv"])
def test_static_persistence(field):
    assert {f for f in FORWARD_FAMILIES if static_persistent(Call(arch=10 * f))} == {10, 11}
    assert not static_persistent(Call(**{field: True}))


def test_features_of_the_backward_pass():
    assert {f for f in BACKWARD_FAMILIES if not backward_objections(Call(arch=10 * f, deterministic=True))} == {
        9,
        10,
        11,
    }
    assert not [f for f in BACKWARD_FAMILIES if not backward_objections(Call(arch=10 * f, fp8=True))]


@pytest.mark.parametrize("change", [{"arch": 0}, {"head_dim": -1}, {"tile_m": 0}, {"seqlen_q": -1}, {"page_size": 0}])
def test_bad_calls(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        Call(**change)


@pytest.mark.parametrize("head_dim", [0, -16])
def test_bad_head_dim(head_dim):
    with pytest.raises(ValueError, match=f"head_dim is {head_dim}"):
        padded(head_dim)
