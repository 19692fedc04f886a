"""How an attempt ends on a node: once, after everything has let go, and never without a word that is owed."""

from dataclasses import dataclass, field

import pytest

from protos import fleet_pb2
from protos.attempts import Attempts
from serving_core.errors import RequestError
from serving_core.requests import Request, SamplingParams


@dataclass(eq=False)
class Holding:
    request: Request
    is_busy: bool = False
    log: list[str] = field(default_factory=list)

    def stop(self):
        self.log.append("stop")

    def release(self):
        assert not self.is_busy
        self.log.append("release")


def make(name="a", epoch=1, **kwargs):
    return Holding(Request(name, epoch, [1], 1, SamplingParams(max_tokens=1)), **kwargs)


@pytest.fixture
def sent():
    return []


@pytest.fixture
def attempts(sent):
    return Attempts(lambda **event: sent.append(event), lambda: sent.append("released"))


def wire(name="a", epoch=1):
    return fleet_pb2.Attempt(request_id=name, epoch=epoch)


def test_a_cancel_is_answered_after_the_release(attempts, sent):
    holding = make()
    attempts.add(holding)
    attempts.cancel(wire())
    assert holding.log == ["stop", "release"]
    assert sent == [{"cancelled": fleet_pb2.Cancelled(attempt=wire())}, "released"]


def test_nothing_is_released_or_told_while_a_step_or_a_transfer_is_busy(attempts, sent):
    holding = make(is_busy=True)
    attempts.add(holding)
    attempts.cancel(wire())
    assert holding.log == ["stop"]
    assert sent == []
    holding.is_busy = False
    attempts.settle(holding)
    assert holding.log == ["stop", "release"]
    assert sent[0] == {"cancelled": fleet_pb2.Cancelled(attempt=wire())}


def test_the_first_ending_wins_and_happens_once(attempts, sent):
    holding = make(is_busy=True)
    attempts.add(holding)
    attempts.fail(holding, "ENGINE_ERROR", "broke")
    attempts.cancel(wire())
    holding.is_busy = False
    attempts.settle(holding)
    attempts.settle(holding)
    failed = fleet_pb2.Failed(attempt=wire(), reason="ENGINE_ERROR", message="broke")
    assert sent == [{"failed": failed}, "released"]
    assert holding.log == ["stop", "release"]


def test_an_unknown_cancel_is_answered_at_once(attempts, sent):
    attempts.cancel(wire("nobody", 7))
    assert sent == [{"cancelled": fleet_pb2.Cancelled(attempt=wire("nobody", 7))}]


def test_epochs_are_separate_attempts(attempts):
    old, new = make(epoch=1), make(epoch=2)
    attempts.add(old)
    attempts.add(new)
    attempts.cancel(wire(epoch=1))
    assert attempts.live(wire(epoch=1)) is None
    assert attempts.live(wire(epoch=2)) is new


def test_a_lost_coordinator_ends_all_without_a_word(attempts, sent):
    holdings = [make("a"), make("b", is_busy=True)]
    for holding in holdings:
        attempts.add(holding)
    attempts.end_all()
    assert sent == ["released"]
    holdings[1].is_busy = False
    attempts.settle_all([holdings[1].request])
    assert sent == ["released", "released"]


async def test_idle_when_nothing_is_left(attempts):
    await attempts.idle()
    holding = make()
    attempts.add(holding)
    attempts.end(holding)
    await attempts.idle()


def test_an_attempt_that_is_here_already_is_refused(attempts):
    attempts.add(make())
    attempts.check_new(wire(epoch=2))
    with pytest.raises(RequestError, match="announced twice"):
        attempts.check_new(wire())
