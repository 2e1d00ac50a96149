"""Broken forward traces: each is refused for the named reason, and most of them compute wrong attention."""

import numpy as np
import pytest

from cupyfa.oracles.blackwell import contract
from cupyfa.oracles.blackwell.ledger import Tile
from cupyfa.oracles.blackwell.schedule import Durations, Event, simulate
from cupyfa.oracles.violations import ContractViolation

BLOCKS = 3
ROWS, KEYS, DIM = 16, 128, 8


@pytest.fixture
def trace():
    return list(simulate(BLOCKS, Durations.from_ledger(Tile(128, 128, 128), rescale=64)).events)


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(6)
    Q = [rng.standard_normal((ROWS, DIM)) for _ in range(2)]
    # Scores grow from block to block, so that the running maximum moves and O is really rescaled.
    K = [rng.standard_normal((KEYS, DIM)) * 0.3 * (1 + 0.5 * j) for j in range(BLOCKS)]
    V = [rng.standard_normal((KEYS, DIM)) for _ in range(BLOCKS)]
    return Q, K, V


def dense(Q, K, V):
    S = Q @ np.concatenate(K).T
    P = np.exp(S - S.max(axis=1, keepdims=True))
    return P / P.sum(axis=1, keepdims=True) @ np.concatenate(V)


def error(trace, problem):
    Q, K, V = problem
    got = contract.execute(trace, Q, K, V)
    return max(float(np.abs(O - dense(q, K, V)).max()) for O, q in zip(got, Q, strict=True))


def move(trace, what, before):
    """Put one event right before another; both are (action, tile, block)."""
    find = {(e.action, e.tile, e.block): e for e in trace}
    rest = [e for e in trace if e is not find[what]]
    rest.insert(rest.index(find[before]), find[what])
    return rest


def test_a_right_trace_computes_attention(trace, problem):
    contract.check(trace, BLOCKS)
    assert error(trace, problem) < 1e-14


def test_one_stage_computes_attention(problem):
    events = simulate(BLOCKS, Durations(3, 2, 5), q_stage=1).events
    contract.check(events, BLOCKS, q_stage=1)
    Q, K, V = problem
    np.testing.assert_allclose(contract.execute(events, Q[:1], K, V)[0], dense(Q[0], K, V), atol=1e-14)


def test_overlapped_exponentials(trace):
    broken = move(trace, ("exp_begin", "L", 0), ("p_final", "H", 0))
    with pytest.raises(contract.OverlappedExponentials, match="L_0 enters while H_0"):
        contract.check(broken, BLOCKS)


def test_product_before_the_correction_releases_o(trace, problem):
    broken = move(trace, ("rescaled", "H", 1), ("pv_done", "H", 1))
    with pytest.raises(contract.ProductBeforeRescale, match="pv_issue of H_1"):
        contract.check(broken, BLOCKS)
    assert error(broken, problem) > 1e-2


def test_scores_overwritten_after_the_early_signal(trace, problem):
    # The next scores come right after P's early part is published: P is only 75 percent of what PV needs.
    broken = move(trace, ("qk_issue", "H", 1), ("pv_done", "H", 0))
    with pytest.raises(contract.EarlyOverwrite, match="qk_issue of H_1 comes before pv_done of H_0"):
        contract.check(broken, BLOCKS)
    assert error(broken, problem) > 1e-2


def test_product_before_p(trace, problem):
    broken = move(trace, ("pv_issue", "L", 0), ("p_early", "L", 0))
    broken = move(broken, ("rescaled", "L", 0), ("pv_issue", "L", 0))
    with pytest.raises(contract.ProductBeforeP):
        contract.check(broken, BLOCKS)
    assert error(broken, problem) > 1e-2


def test_the_early_signal_is_not_completion(trace, problem):
    broken = move(trace, ("pv_issue", "L", 2), ("p_final", "L", 2))
    broken = move(broken, ("pv_done", "L", 2), ("p_final", "L", 2))
    with pytest.raises(contract.ProductBeforeFinalP, match="pv_done of L_2 comes before p_final of L_2"):
        contract.check(broken, BLOCKS)
    assert error(broken, problem) > 1e-2


def test_softmax_before_the_scores(trace, problem):
    broken = move(trace, ("exp_begin", "H", 1), ("s_ready", "H", 1))
    with pytest.raises(contract.ProbabilitiesBeforeScores):
        contract.check(broken, BLOCKS)
    assert error(broken, problem) > 1e-2


def test_rescale_before_the_product_of_the_old_frame(trace):
    broken = move(trace, ("rescaled", "H", 1), ("pv_done", "H", 0))
    with pytest.raises(contract.RescaleBeforeProduct):
        contract.check(broken, BLOCKS)


def test_forgotten_drain(trace):
    with pytest.raises(contract.IncompleteSchedule, match="pv_done of H_2 is missing"):
        contract.check([e for e in trace if (e.action, e.tile, e.block) != ("pv_done", "H", 2)], BLOCKS)
    with pytest.raises(contract.IncompleteSchedule, match="not expected"):
        contract.check(trace, BLOCKS - 1)
    with pytest.raises(contract.IncompleteSchedule, match="twice"):
        contract.check([*trace, trace[0]], BLOCKS)


def test_startup_in_the_wrong_order(trace):
    broken = move(trace, ("qk_issue", "L", 0), ("qk_issue", "H", 0))
    with pytest.raises(contract.WrongTensorOrder, match="QK_L_0 was issued where QK_H_0 is due"):
        contract.check(broken, BLOCKS)


def test_every_edge_is_needed(trace):
    """Swapping any two neighbouring events that an edge ties is refused, for the reason that the edge names."""
    position = {(e.action, e.tile, e.block): n for n, e in enumerate(trace)}
    for edge in contract.EDGES:
        for tile in "HL":
            j = 1
            before, after = position[edge.before, tile, j - edge.behind], position[edge.after, tile, j]
            assert before < after
            broken: list[Event] = [e for n, e in enumerate(trace) if n != after]
            broken.insert(before, trace[after])
            # Moving `after` in front of `before` may break other edges of `after` too; the refusal is one of those.
            allowed = tuple({e.error for e in contract.EDGES if edge.after in (e.after, e.before)})
            with pytest.raises((*allowed, contract.OverlappedExponentials)):
                contract.check(broken, BLOCKS)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: contract.check([], -1), "blocks -1"),
        (lambda: contract.check([], 1, 3), "q_stage 3"),
        (lambda: contract.execute([], [], [np.ones((4, 2))], [np.ones((4, 2))]), "matrices of one shape"),
        (lambda: contract.execute([], [np.ones((4, 2))], [np.ones((4, 2))], []), "matrices of one shape"),
        (lambda: contract.execute([], [np.ones((4, 2))], [np.ones((4, 3))], [np.ones((4, 2))]), r"must be \(m, d\)"),
        (lambda: contract.execute([], [np.ones((4, 2))], [np.ones((1, 2))], [np.ones((4, 2))]), r"must be \(m, d\)"),
        (
            lambda: contract.execute(
                [Event(0, "mma", "qk_issue", "L", 0, "startup")], *[[np.ones((4, 2))] for _ in range(3)]
            ),
            "qk_issue of L_0 has no operands",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ContractViolation, match=message):
        call()
