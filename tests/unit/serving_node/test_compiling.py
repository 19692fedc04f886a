"""Commands wait for the grammar that they bring."""

import asyncio
import threading

import pytest

from protos import fleet_pb2
from serving_core.errors import RequestError
from serving_node.compiling import Compiling

DEADLINE_S = 60.0


class World:
    """A compiler that does as the test says, and what reaches the logic."""

    def __init__(self):
        self.heard = []
        self.may_end = threading.Event()
        self.error = None
        self.compiling = Compiling(self, self._pass_on, self._refuse)

    def guide_of(self, grammar):
        assert self.may_end.wait(DEADLINE_S), "the test never let it end"
        if self.error is not None:
            raise self.error
        return grammar.upper()

    def _pass_on(self, command, guide):
        self.heard.append((command.WhichOneof("command"), command.attempt.request_id, guide))

    def _refuse(self, attempt, error):
        self.heard.append(("refused", attempt.request_id, (error.reason, str(error))))

    def take(self, kind, name, grammar="", asker=""):
        attempt = fleet_pb2.Attempt(request_id=name, epoch=7)
        command = fleet_pb2.NodeCommand(attempt=attempt)
        getattr(command, kind).SetInParent()
        if kind in ("prefill", "reserve"):
            getattr(command, kind).job.CopyFrom(fleet_pb2.Job(attempt=attempt, grammar=grammar, asker=asker))
        self.compiling.take(command)

    async def until_idle(self):
        self.may_end.set()
        async with asyncio.timeout(DEADLINE_S):
            while not self.compiling.is_idle:
                await asyncio.sleep(0.001)


async def test_what_needs_no_grammar_waits_for_none():
    world = World()
    world.take("prefill", "slow", "g")
    world.take("reserve", "b")
    world.take("cancel", "c")
    assert world.heard == [("reserve", "b", None), ("cancel", "c", None)]
    await world.until_idle()


async def test_what_follows_for_the_same_attempt_waits_behind_it():
    world = World()
    world.take("prefill", "a", "g")
    world.take("deliver", "a")
    world.take("reserve", "b", "h")
    world.take("begun", "b")
    assert world.heard == []
    await world.until_idle()
    assert world.heard == [
        ("prefill", "a", "G"),
        ("deliver", "a", None),
        ("reserve", "b", "H"),
        ("begun", "b", None),
    ]


async def test_each_asker_has_a_turn_before_any_has_a_second():
    world = World()
    for number in range(3):
        world.take("prefill", f"a{number}", "g", asker="ann")
    world.take("prefill", "b", "g", asker="bob")
    await world.until_idle()
    assert [name for _, name, _ in world.heard] == ["a0", "a1", "b", "a2"]


async def test_what_comes_twice_comes_with_its_guide_both_times():
    """And the logic refuses it the second time, as it does without a grammar."""
    world = World()
    for _ in range(2):
        world.take("reserve", "a", "g")
    await world.until_idle()
    assert world.heard == [("reserve", "a", "G")] * 2


async def test_what_is_cancelled_meanwhile_never_begins():
    world = World()
    world.take("prefill", "a", "g")
    world.take("deliver", "a")
    world.take("cancel", "a")
    assert world.heard == [("cancel", "a", None)]
    world.take("prefill", "b", "h")
    await world.until_idle()
    assert world.heard[1:] == [("prefill", "b", "H")]


async def test_nobody_waits_after_the_coordinator_is_lost():
    world = World()
    world.take("prefill", "a", "g")
    world.compiling.forget()
    world.take("prefill", "b", "h")
    await world.until_idle()
    assert world.heard == [("prefill", "b", "H")]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RequestError("BAD_PARAM", "no grammar"), ("BAD_PARAM", "no grammar")),
        (ValueError("a secret"), ("ENGINE_ERROR", "the node cannot compile the grammar")),
    ],
)
async def test_what_is_not_compiled_is_refused(error, told):
    world = World()
    world.error = error
    world.take("prefill", "a", "g")
    world.take("deliver", "a")
    await world.until_idle()
    assert world.heard == [("refused", "a", told), ("deliver", "a", None)]
