"""The engine's thread: results, reports of layers on the event loop, failures, figures."""

import asyncio
import threading
import time

import pytest

from engine.stepper import NextStep, Stepper
from serving_core.requests import SampledToken


class Computer:
    """Stands where an engine does; tells of 20 layers."""

    def __init__(self, error=None):
        self.error = error
        self.threads = set()

    def step(self, works, on_layer=None):
        self.threads.add(threading.current_thread())
        time.sleep(0.01)
        if self.error is not None:
            raise self.error
        for layer in range(20):
            if on_layer is not None:
                on_layer(layer + 1)
        return [SampledToken(work) for work in works]


async def test_a_step_runs_in_one_other_thread_and_is_counted():
    computer = Computer()
    stepper = Stepper(computer.step)
    assert (stepper.step_s, stepper.step_age_s, stepper.num_steps) == (0.0, 0.0, 0)
    for _ in range(3):
        tokens, step_s = await stepper.step([1, 2])
    assert tokens == [SampledToken(1), SampledToken(2)]
    assert step_s >= 0.01
    assert stepper.step_s >= 0.01
    assert stepper.num_steps == 3
    assert len(computer.threads) == 1
    assert threading.current_thread() not in computer.threads
    stepper.close()


async def test_layers_are_reported_on_the_loop_before_the_step_ends():
    reports = []
    stepper = Stepper(Computer().step)
    await stepper.step([1], lambda num_layers: reports.append((num_layers, threading.current_thread())))
    assert reports == [(done, threading.main_thread()) for done in range(1, 21)]
    stepper.close()


async def test_a_step_that_fails_is_over():
    stepper = Stepper(Computer(ValueError("odd")).step)
    with pytest.raises(ValueError, match="odd"):
        await stepper.step([1])
    assert stepper.step_age_s == 0.0
    assert stepper.num_steps == 1
    stepper.close()


class Chain:
    """Steps that follow each other: each gives its number, and notes what it is behind."""

    def __init__(self, stepper):
        self.stepper = stepper
        self.story = []

    def compute(self, before, on_begun, until_known):
        on_begun()
        until_known()
        self.story.append(f"behind {before}")
        return before + 1

    def offer(self, step, *, follows=True, compute=None):
        done = asyncio.get_running_loop().create_future()
        step.next_step = NextStep([2], done, follows=lambda result: follows, compute=compute or self.compute)
        return step.next_step


@pytest.fixture
def gate():
    return threading.Event()


@pytest.fixture
async def chain(gate):
    stepper = Stepper(lambda parts, on_layer: gate.wait(60.0) and 1)
    yield Chain(stepper)
    gate.set()
    stepper.close()


async def test_a_step_follows_at_once_and_ends_when_the_one_before_is_taken_in(chain, gate):
    first = chain.stepper.begin([1])
    second = chain.offer(first)
    gate.set()
    done = await first.done
    assert (done.result, done.goes_on) == (1, True)
    assert chain.story == []
    assert chain.stepper.step_age_s > 0
    third = chain.offer(second)
    second.take_in()
    assert (await second.done).result == 2
    third.take_in()
    done = await third.done
    assert (done.result, done.goes_on) == (3, False)
    assert chain.story == ["behind 1", "behind 2"]
    assert (chain.stepper.step_age_s, chain.stepper.num_steps) == (0.0, 3)
    assert (await chain.stepper.step([1]))[0] == 1


async def test_a_step_that_does_not_follow_is_never_begun(chain, gate):
    first = chain.stepper.begin([1])
    chain.offer(first, follows=False)
    gate.set()
    done = await first.done
    assert (done.result, done.goes_on) == (1, False)
    assert chain.story == []


async def test_a_step_that_follows_and_fails_leaves_the_one_before_as_it_is(chain, gate):
    def fail(before, on_begun, until_known):
        raise ValueError("odd")

    first = chain.stepper.begin([1])
    second = chain.offer(first, compute=fail)
    gate.set()
    assert (await first.done).goes_on
    with pytest.raises(ValueError, match="odd"):
        await second.done
    assert chain.stepper.step_age_s == 0.0


async def test_a_step_whose_predecessor_nobody_takes_in_fails(chain, gate):
    first = chain.stepper.begin([1])
    second = chain.offer(first)
    gate.set()
    assert (await first.done).goes_on
    second.give_up()
    with pytest.raises(RuntimeError, match="not taken in"):
        await second.done
    assert chain.story == []
