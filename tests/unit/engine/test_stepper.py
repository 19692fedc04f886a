"""The engine's thread: results, reports of layers on the event loop, failures, figures."""

import threading
import time

import pytest

from engine.stepper import Stepper
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
