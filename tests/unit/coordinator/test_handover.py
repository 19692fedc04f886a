"""What hand-overs have cost: medians of what is recent."""

import pytest

from coordinator.control.attempts import Attempt
from coordinator.control.handover import MAX_AGE_S, MAX_SAMPLES, Handover, HandoverCosts
from coordinator.control.registry import Registry
from tests import fleet_events as events


@pytest.fixture
def nodes():
    registry = Registry({}, node_timeout_s=1.0, step_timeout_s=1.0)
    return [registry.admit(events.hello(name, role).hello, 0.0) for name, role in (("p0", "prefill"), ("d0", "decode"))]


def move(handover, nodes, *, start_s=0.0, granted_s, first_token_s, step_start_s, now):
    attempt = Attempt(1, *nodes, first_index=0, started_s=start_s)
    attempt.granted_s, attempt.first_token_s = granted_s, first_token_s
    handover.granted(attempt, granted_s)
    handover.moved(attempt, step_start_s, now)


def test_the_move_begins_with_the_later_of_first_token_and_blocks(nodes):
    handover = Handover()
    move(handover, nodes, granted_s=2.0, first_token_s=3.0, step_start_s=3.25, now=4.0)
    move(handover, nodes, granted_s=4.0, first_token_s=3.0, step_start_s=5.0, now=6.0)
    assert handover.costs(6.0) == HandoverCosts()  # two are not enough
    move(handover, nodes, granted_s=1.0, first_token_s=3.0, step_start_s=3.5, now=6.0)
    assert handover.costs(6.0) == HandoverCosts(credit_s=2.0, move_s=0.5)


def test_tokens_that_overtake_the_first_cost_nothing_and_local_ones_are_not_counted(nodes):
    handover = Handover()
    for _ in range(3):
        move(handover, nodes, granted_s=1.0, first_token_s=5.0, step_start_s=4.0, now=5.0)
    _, decode = nodes
    local = Attempt(2, decode, decode, first_index=0, started_s=0.0)
    local.first_token_s = 1.0
    for _ in range(9):
        handover.moved(local, 3.0, 5.0)
    assert handover.costs(5.0).move_s == 0.0


def test_only_the_last_ones_count_and_none_that_is_old(nodes):
    handover = Handover()
    for now, seconds in [*[(1.0, 9.0)] * 100, *[(2.0, 3.0)] * MAX_SAMPLES]:
        move(handover, nodes, granted_s=now, first_token_s=now, step_start_s=now + seconds, now=now)
    assert handover.costs(2.0).move_s == 3.0
    assert handover.costs(2.0 + MAX_AGE_S).move_s == 3.0
    assert handover.costs(2.1 + MAX_AGE_S) == HandoverCosts()
