"""What the past says of what is to come: how often something happens, how long answers get, what KV transfers cost, and
when those who find the fleet full are to come back."""

import pytest

from coordinator.api.statuses import retry_after_s
from coordinator.control.admission import (
    MAX_RETRY_AFTER_S,
    MIN_RETRY_AFTER_S,
    NUM_RETRIES_MEASURED,
    RETRY_GRACE_S,
    RetryAfterEstimator,
)
from coordinator.control.load import MAX_LENGTHS, MAX_TIMES, MIN_LENGTHS, LengthEstimator, RateEstimator
from coordinator.control.nodes import Registry
from coordinator.control.placement.costs import (
    MAX_TRANSFER_AGE_S,
    MAX_TRANSFERS,
    TransferEstimates,
    TransferEstimator,
)
from coordinator.control.request import Attempt
from serving_core.errors import RequestError
from tests import fleet_events as events
from tests.unit.coordinator.scheduler_kit import World

# ---- how often ----


def test_times_a_second_are_those_since_the_first_that_is_remembered():
    rate = RateEstimator()
    assert rate.per_s(0.0) == 0.0
    rate.add(10.0)
    assert rate.per_s(10.0) == 0.0
    rate.add(10.0)
    assert rate.per_s(10.0) == 0.0  # nobody can say yet
    rate.add(11.0)
    assert rate.per_s(11.0) == pytest.approx(2.0)
    assert rate.per_s(30.0) == pytest.approx(0.1)  # nobody has come for long
    rate.add(32.0, 0.5)
    assert rate.per_s(32.0) == pytest.approx(2.5 / 22)
    for index in range(MAX_TIMES):
        rate.add(40.0 + index / 4)
    assert rate.per_s(40.0 + (MAX_TIMES - 1) / 4) == pytest.approx(4.0)


# ---- how long answers get ----


def lengths_of(*lengths):
    found = LengthEstimator()
    for each in lengths:
        found.ended(each)
    return found


def test_until_enough_have_ended_an_answer_may_be_as_long_as_its_request_allows():
    assert lengths_of(*[10] * (MIN_LENGTHS - 1)).left(0, 500) == 500
    assert lengths_of(*[10] * MIN_LENGTHS).left(0, 500) == 10
    assert lengths_of(*[10] * MIN_LENGTHS).left(0, 7) == 7


def test_three_of_four_that_came_as_far_got_no_more():
    found = lengths_of(*range(1, 101))
    assert found.left(0, 500) == 76
    assert found.left(50, 450) == 38  # of 51 to 100


def test_where_too_few_came_as_far_there_are_as_many_again():
    found = lengths_of(*range(1, 101))
    assert found.left(90, 410) == 90  # ten came so far
    assert found.left(100, 400) == 100
    assert found.left(100, 7) == 7


def test_what_is_old_is_forgotten():
    found = lengths_of(*[1000] * MAX_LENGTHS, *[5] * MAX_LENGTHS)
    assert found.left(0, 4000) == 5


# ---- what KV transfers cost ----


@pytest.fixture
def nodes():
    registry = Registry({}, node_timeout_s=1.0, step_timeout_s=1.0)
    return [registry.admit(events.hello(name, role).hello, 0.0) for name, role in (("p0", "prefill"), ("d0", "decode"))]


def migration(transfers, nodes, *, start_s=0.0, reserved_s, first_token_s, step_start_s, now):
    attempt = Attempt(1, *nodes, first_index=0, started_s=start_s)
    attempt.reserved_s, attempt.first_token_s = reserved_s, first_token_s
    transfers.reserved(attempt, reserved_s)
    transfers.decoding(attempt, step_start_s, now)


def test_the_move_begins_with_the_later_of_first_token_and_blocks(nodes):
    transfers = TransferEstimator()
    migration(transfers, nodes, reserved_s=2.0, first_token_s=3.0, step_start_s=3.25, now=4.0)
    migration(transfers, nodes, reserved_s=4.0, first_token_s=3.0, step_start_s=5.0, now=6.0)
    assert transfers.estimates(6.0) == TransferEstimates()  # two are not enough
    migration(transfers, nodes, reserved_s=1.0, first_token_s=3.0, step_start_s=3.5, now=6.0)
    assert transfers.estimates(6.0) == TransferEstimates(credit_s=2.0, transfer_s=0.5)


def test_tokens_that_overtake_the_first_cost_nothing_and_local_ones_are_not_counted(nodes):
    transfers = TransferEstimator()
    for _ in range(3):
        migration(transfers, nodes, reserved_s=1.0, first_token_s=5.0, step_start_s=4.0, now=5.0)
    _, decode = nodes
    local = Attempt(2, decode, decode, first_index=0, started_s=0.0)
    local.first_token_s = 1.0
    for _ in range(9):
        transfers.decoding(local, 3.0, 5.0)
    assert transfers.estimates(5.0).transfer_s == 0.0


def test_only_the_last_ones_count_and_none_that_is_old(nodes):
    transfers = TransferEstimator()
    for now, seconds in [*[(1.0, 9.0)] * 100, *[(2.0, 3.0)] * MAX_TRANSFERS]:
        migration(transfers, nodes, reserved_s=now, first_token_s=now, step_start_s=now + seconds, now=now)
    assert transfers.estimates(2.0).transfer_s == 3.0
    assert transfers.estimates(2.0 + MAX_TRANSFER_AGE_S).transfer_s == 3.0
    assert transfers.estimates(2.1 + MAX_TRANSFER_AGE_S) == TransferEstimates()


# ---- when to come back ----


def busy(seconds_each, now=100.0):
    """After three answers that ended in this rhythm, the last one now."""
    retries = RetryAfterEstimator()
    for index in range(3):
        retries.ended(now - (2 - index) * seconds_each)
    return retries


def test_each_gets_the_next_place_that_nobody_was_told_of():
    retries = busy(4.0)
    assert [retries.retry_after_s(100.0) for _ in range(3)] == pytest.approx([4.0, 8.0, 12.0])
    retries.ended(104.0)
    assert retries.retry_after_s(104.0) == pytest.approx(12.0)  # behind two who are still to come


def test_whoever_comes_after_the_crowd_waits_for_nobody():
    retries = busy(4.0)
    retries.retry_after_s(100.0)
    retries.ended(104.0)
    retries.ended(108.0)
    retries.ended(112.0)
    assert retries.retry_after_s(112.0) == pytest.approx(4.0)


def test_who_was_told_to_come_is_known_when_it_comes():
    retries = busy(4.0)
    assert [retries.retry_after_s(100.0, key=key) for key in (6, 7, 8)] == pytest.approx([4.0, 8.0, 12.0])
    assert not retries.returned(9, 104.0), "somebody else"
    assert retries.returned(6, 104.0)
    assert not retries.returned(6, 104.0), "once"
    assert not retries.returned(7, 108.0 - RETRY_GRACE_S - 0.1), "too early"
    assert not retries.returned(7, 108.0), "and so it has lost it"
    assert not retries.returned(8, 112.0 + RETRY_GRACE_S + 0.1), "too late"


@pytest.mark.parametrize("every", [0, 1, 2])
def test_time_is_kept_by_the_share_of_turns_that_were_taken(every):
    """An answer ends each second, and each second one is turned away, of whom each one, or each second, comes back."""
    retries = busy(1.0)
    for key in range(4 * NUM_RETRIES_MEASURED):
        now = 101.0 + key
        retries.ended(now)
        assert retries.retry_after_s(now, key=key) <= 2.0
        if every and key % every == 0:
            assert retries.returned(key, now + 0.5)
    for _ in range(10):
        now += 1.0
        retries.ended(now)
        retries.returned(-1, now)  # the last ones that did not come are forgotten
    assert retries.reserved_s(now, 60.0) == 0.0
    retries.retry_after_s(now, 30.0, -1)
    assert retries.reserved_s(now, 29.0) == 0.0
    assert retries.reserved_s(now, 30.0) == pytest.approx(1 / every if every else 0.0, abs=0.1)


def test_short_rhythms_and_long_queues_have_bounds():
    assert RetryAfterEstimator().retry_after_s(5.0) == MIN_RETRY_AFTER_S  # nothing is known
    assert busy(0.001).retry_after_s(100.0) == MIN_RETRY_AFTER_S
    retries = busy(10.0)
    assert [retries.retry_after_s(100.0) for _ in range(10)][-4:] == [MAX_RETRY_AFTER_S] * 4
    assert retries.retry_after_s(130.0) == pytest.approx(30.0 + 25.0)  # two endings in the last 50 s


def test_a_full_fleet_tells_by_the_pace_of_its_answers():
    world = World(("p0", "d0"), max_live=1)
    for now in (0.0, 3.0, 6.0, 9.0):
        world.submit(f"{now}/0", now=now)
        assert world.first(world.attempt, now=now, finish_reason=1) == ["emit 0:100", "cancel d0", "end complete"]
        world.tell("d0", events.cancelled(world.attempt), now)
    world.submit("live/0", now=9.0)
    told = []
    for name in ("a/0", "b/0"):
        with pytest.raises(RequestError, match="the limit is 1") as error:
            world.submit(name, now=9.0)
        told.append(retry_after_s(error.value))
    assert told == [3, 6]
