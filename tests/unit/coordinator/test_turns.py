"""When those who find the fleet full are told to come back."""

import pytest

from coordinator.control.turns import LEAST_S, MOST_S, Turns
from coordinator.doors.statuses import retry_after_s
from serving_core.errors import RequestError
from tests import fleet_events as events
from tests.unit.coordinator.tracker_kit import World


def busy(seconds_each, now=100.0):
    """After three answers that ended in this rhythm, the last one now."""
    turns = Turns()
    for index in range(3):
        turns.ended(now - (2 - index) * seconds_each)
    return turns


def test_each_gets_the_next_place_that_nobody_was_told_of():
    turns = busy(4.0)
    assert [turns.wait_s(100.0) for _ in range(3)] == pytest.approx([4.0, 8.0, 12.0])
    turns.ended(104.0)
    assert turns.wait_s(104.0) == pytest.approx(12.0)  # behind two who are still to come


def test_whoever_comes_after_the_crowd_waits_for_nobody():
    turns = busy(4.0)
    turns.wait_s(100.0)
    turns.ended(104.0)
    turns.ended(108.0)
    turns.ended(112.0)
    assert turns.wait_s(112.0) == pytest.approx(4.0)


def test_short_rhythms_and_long_queues_have_bounds():
    assert Turns().wait_s(5.0) == LEAST_S  # nothing is known
    assert busy(0.001).wait_s(100.0) == LEAST_S
    turns = busy(10.0)
    assert [turns.wait_s(100.0) for _ in range(10)][-4:] == [MOST_S] * 4
    assert turns.wait_s(130.0) == pytest.approx(30.0 + 25.0)  # two endings in the last 50 s


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
