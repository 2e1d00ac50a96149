"""The relay protocol: the right order passes, and each missing or early step is refused for its name."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyfa.oracles.blackwell import relay
from cupyfa.oracles.blackwell.relay import RelayEvent, relay_trace, run
from cupyfa.oracles.violations import ContractViolation

BYTES = 16384


def without(trace, action, cta=None):
    return [e for e in trace if e.action != action or cta not in (None, e.cta)]


def test_event_order():
    leader = [event.action for event in run(relay_trace(1, BYTES)) if event.cta == 0]
    assert leader == [
        "write_xchg",
        "expect_tx",
        "remote_copy",
        "relay_wait",
        "relay_arrive",
        "mma_wait",
        "mma_dQ",
        "phase_toggle",
    ]


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.data(), st.integers(1, 4))
def test_any_interleaving_that_keeps_each_role_and_handoff(data, generations):
    """The two CTAs' own steps may interleave freely; each handoff holds."""
    expected = []
    for g in range(generations):
        steps = [e for e in relay_trace(g + 1, BYTES) if e.generation == g]
        before = [e for e in steps if e.action in relay.ORDER[:3]]
        own = {cta: [e for e in before if e.cta == cta] for cta in (0, 1)}
        while own[0] or own[1]:
            cta = data.draw(st.sampled_from([c for c in (0, 1) if own[c]]))
            expected.append(own[cta].pop(0))
        expected += [e for e in steps if e not in before]
    assert run(expected) == expected
    assert {e.phase for e in expected} == {0, 1} if generations > 1 else {0}


@pytest.mark.parametrize(
    ("action", "cta", "error"),
    [
        ("write_xchg", 1, relay.CopyBeforeWrite),
        ("expect_tx", 0, relay.MissingExpectTx),
        ("remote_copy", 1, relay.IncompleteTransaction),
        ("relay_wait", 0, relay.MissingRelayWait),
        ("relay_arrive", 1, relay.MissingRelayArrival),
        ("mma_wait", 0, relay.MissingMmaWait),
        ("mma_dQ", 0, relay.EarlyReuse),
        ("phase_toggle", 1, relay.PhaseDisagreement),
    ],
)
def test_a_missing_step(action, cta, error):
    with pytest.raises(error):
        run(without(relay_trace(2, BYTES), action, cta))


def test_every_step_of_the_last_generation_is_needed():
    with pytest.raises(relay.IncompleteRelay, match="CTA 1"):
        run(relay_trace(1, BYTES)[:-1])


def test_only_one_cta_advances():
    trace = relay_trace(2, BYTES)
    ahead = [e for e in trace if not (e.cta == 1 and e.action == "phase_toggle" and e.generation == 0)]
    with pytest.raises(relay.PhaseDisagreement, match="generation 1"):
        run(ahead)


def test_wrong_byte_count():
    short = [
        replace(e, nbytes=BYTES // 2) if (e.action, e.cta) == ("remote_copy", 0) else e for e in relay_trace(1, BYTES)
    ]
    with pytest.raises(relay.IncompleteTransaction, match="CTA 1 has 8192 of 16384"):
        run(short)
    less = [
        replace(e, nbytes=BYTES // 2) if (e.action, e.cta) == ("expect_tx", 0) else e for e in relay_trace(1, BYTES)
    ]
    with pytest.raises(relay.MissingExpectTx, match="CTA 1 expects 8192 more"):
        run(less)


def test_dq_before_the_relay_arrives():
    trace = relay_trace(1, BYTES)
    late = [e for e in trace if (e.action, e.cta) == ("relay_arrive", 1)]
    rest = [e for e in trace if e not in late]
    position = [e.action for e in rest].index("mma_dQ") + 1
    with pytest.raises(relay.MissingRelayArrival, match="1 of 2"):
        run(rest[:position] + late + rest[position:])


def test_unknown_step():
    with pytest.raises(ContractViolation, match="knows no step"):
        run([RelayEvent(0, "compute", "teleport", 0)])
    with pytest.raises(ContractViolation, match="CTA 2"):
        run([RelayEvent(2, "compute", "write_xchg", 0)])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: relay.relay_trace(-1, 16), "generations -1"),
        (lambda: relay.relay_trace(1, 0), "nbytes 0"),
        (lambda: relay.run([relay.RelayEvent(2, "relay", "relay_wait", 0)]), "CTA 2 knows no step"),
        (lambda: relay.run([relay.RelayEvent(0, "relay", "relay_sleep", 0)]), "no step 'relay_sleep'"),
        (lambda: relay.run([relay.RelayEvent(0, "compute", "expect_tx", 0, -1)]), "expect_tx of -1 bytes"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ContractViolation, match=message):
        call()
