"""Nodes that have no room: another one is tried, and who has come in is not refused any more."""

import pytest

from coordinator.control.live import ASK_AGAIN_S
from tests import fleet_events as events
from tests.unit.coordinator.tracker_kit import PROMPT, World


def full(world, name, now=0.0):
    return world.tell(name, events.failed(world.attempt, "QUEUE_FULL", "the queue is full"), now)


def begun(world):
    world.submit()
    assert world.first(world.attempt) == ["emit 0:100", "begun d0"]


@pytest.mark.parametrize(
    ("turning_away", "told"),
    [("d0", ["cancel p0", "reserve d1", "prefill p0"]), ("p0", ["cancel d0", "reserve d0", "prefill p1"])],
)
def test_what_one_node_turns_away_another_one_takes(turning_away, told):
    world = World(max_restarts=0)
    world.submit()
    assert full(world, turning_away) == told
    assert world.outcome is None


@pytest.mark.parametrize("node_wait_s", [0.0, 5.0])
def test_a_new_request_that_every_node_turns_away_asks_again(node_wait_s):
    world = World(node_wait_s=node_wait_s)
    world.submit()
    assert full(world, "d0")[1:] == ["reserve d1", "prefill p0"]
    assert full(world, "d1") == ["cancel p0"]
    assert not {"reserve d0", "prefill p0"} & set(world.tick(0.9 * ASK_AGAIN_S))
    assert "prefill p0" in world.tick(ASK_AGAIN_S)
    assert world.first(world.attempt)[0] == "emit 0:100"
    assert world.outcome is None


@pytest.mark.parametrize("node_wait_s", [0.0, 5.0])
def test_one_that_has_tokens_out_asks_again_until_there_is_room(node_wait_s):
    world = World(("p0", "d0"), max_restarts=0, node_wait_s=node_wait_s)
    begun(world)
    now = 0.0
    for _ in range(20):
        assert full(world, "d0", now) == ["cancel p0"]
        assert not {"reserve d0", "prefill p0"} & set(world.tick(now + 0.9 * ASK_AGAIN_S))
        now += ASK_AGAIN_S
        assert world.tick(now)[-2:] == ["reserve d0", "prefill p0"]  # behind cancels that are sent again
        assert list(world.jobs[-1].token_ids) == [*PROMPT, 100]
    assert world.first(world.attempt, 1) == ["emit 1:101", "begun d0"]
    assert world.outcome is None


def test_it_does_not_ask_beyond_its_time():
    world = World(("p0", "d0"))
    begun(world)
    full(world, "d0", 99.5)
    assert world.tick(100.0) == ["end DEADLINE_EXCEEDED"]


def test_two_full_nodes_are_both_tried_again():
    world = World()
    begun(world)
    assert full(world, "d0")[1:] == ["reserve d1", "prefill p0"]
    assert full(world, "d1") == ["cancel p0"]
    assert world.tick(ASK_AGAIN_S)[0].startswith("reserve")
