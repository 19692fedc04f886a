"""Schedules of a whole fleet, and in each of them the promises of tests/schedules/history.py.

The gate tries 50 seeds, CI 500 and the nightly 10,000, in chunks of 50 a test.

A schedule that breaks a promise is named by its seed. `SEED=17 pytest tests/schedules -k quick` runs that one alone and
tells what happened, message by message.
"""

import os
from collections import Counter
from functools import cache

import pytest

from tests.effort import effort
from tests.schedules.history import Ended, problems_of, trace_of
from tests.schedules.world import World

NUM_SEEDS, NUM_TOGETHER = effort(50, 500, 10_000), 50
NUM_WITHOUT_FAULTS = effort(12, 40, 400)
SEED = os.environ.get("SEED")


def check(seed, **options):
    """The world of a seed, after its schedule."""
    world = World(seed, traces=SEED is not None, **options)
    history = world.run()
    if problems := problems_of(history):
        more = trace_of(history) if SEED else f"what happened: SEED={seed} pytest tests/schedules -k quick"
        pytest.fail("\n".join([f"seed {seed}:", *problems, more]), pytrace=False)
    return world


@cache
def seen_in(first):
    """Check the schedules of a chunk of seeds, once in a process, and return what happens in them."""
    return sum((check(seed).seen for seed in range(first, first + NUM_TOGETHER)), Counter())


@pytest.mark.parametrize("first", [None] if SEED else range(0, NUM_SEEDS, NUM_TOGETHER))
def test_quick_schedules(first):
    check(int(SEED)) if first is None else seen_in(first)


def test_without_faults_every_answer_is_whole():
    for seed in range(NUM_WITHOUT_FAULTS):
        world = check(seed, kinds={})
        has_time = world.plan.settings.node_wait_s > 0  # for nodes to come, at the start
        patient = {ask.name for ask in world.plan.asks if has_time and ask.timeout_s > 10}
        ends = [event for event in world.history if isinstance(event, Ended) and event.request in patient]
        assert {end.how for end in ends} <= {"length"}, f"seed {seed}"


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_one_seed_gives_one_history(seed):
    one, other = (World(seed, traces=True).run() for _ in range(2))
    assert trace_of(one) == trace_of(other)
    assert one == other


def test_much_happens_in_them():
    """What is rare is there often enough to be tested, in the first chunk already."""
    seen = seen_in(0)
    names = ("whole", "failed", "handed over", "restarted", "kept", "preempted", "corrupt", "attached again")
    names += ("move migrated", "move ended", "went on", "continued")
    assert min(seen[name] for name in names) > 1, seen
    assert seen["loan lent"], seen  # prompts that begin alike are mostly placed on one node, which fetches nothing
