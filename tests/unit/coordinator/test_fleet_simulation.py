"""Fleets under virtual time: where requests are placed, which roles nodes take, and how many nodes are asked for."""

import itertools
import random
from dataclasses import dataclass
from functools import cache

import pytest

from coordinator.control.roles import AUTO, CALM_S, FIXED, MAX_STAY_S
from tests.effort import effort, few
from tests.unit.coordinator.fleet_simulation import mean_request_s, serve

# ---- placement ----

NUM_REQUESTS = effort(50, 120, 120)


@dataclass(frozen=True)
class Load:
    """Requests a second, in bursts, with the shortest and the longest prompt and answer."""

    per_s: float
    prompt: tuple[int, int]
    answer: tuple[int, int]
    burst: int = 1

    def requests(self, rng):
        now, requests = 0.0, []
        while len(requests) < NUM_REQUESTS:
            now += rng.expovariate(self.per_s / self.burst)
            requests += [(now, rng.randint(*self.prompt), rng.randint(*self.answer)) for _ in range(self.burst)]
        return requests


LOADS = {
    "prefill-heavy": Load(5.0, (500, 1500), (4, 16)),
    "decode-heavy": Load(5.0, (20, 100), (50, 150)),
    "mixed": Load(3.0, (20, 1500), (10, 100)),
    "light": Load(0.5, (200, 800), (20, 60)),
    "bursty": Load(3.0, (200, 800), (20, 60), burst=15),
}
FLEETS = {
    "equal nodes": {"p0": 4000.0, "d0": 4000.0},
    "a slow decode node": {"p0": 8000.0, "d0": 2000.0},
    "a slow prefill node": {"p0": 2000.0, "d0": 8000.0},
    "two decode nodes": {"p0": 4000.0, "d0": 4000.0, "d1": 4000.0},
}


@cache
def mean_s(load, fleet, max_num_seqs=64):
    """Of a request: apart, together on those that write, and with nodes that write and read too."""
    requests, rates = LOADS[load].requests(random.Random(7)), FLEETS[fleet]
    together = {name.replace("d", "b"): rate for name, rate in rates.items()}
    fleets = {
        "split": rates,
        "alone": {name: rate for name, rate in together.items() if name[0] == "b"},
        "mixed": together,
    }
    return {name: mean_request_s(rates, requests, max_num_seqs) for name, rates in fleets.items()}


@pytest.mark.parametrize("load", few(LOADS, "prefill-heavy", "mixed"))
@pytest.mark.parametrize("fleet", few(FLEETS))
def test_a_reader_beside_is_as_good_as_the_better_of_a_split_and_none(load, fleet):
    means = mean_s(load, fleet)
    assert means["mixed"] <= 1.03 * min(means["split"], means["alone"])


@pytest.mark.parametrize("load", few(["mixed", "light", "bursty"]))
def test_a_reader_beside_is_as_good_where_requests_wait_for_credit(load):
    means = mean_s(load, "equal nodes", 4)
    assert means["mixed"] <= 1.03 * min(means["split"], means["alone"])


def test_two_share_the_work_where_neither_keeps_up_alone():
    means = mean_s("prefill-heavy", "equal nodes")
    assert means["mixed"] < 0.5 * min(means["split"], means["alone"])


def test_the_simulation_takes_the_time_that_a_lone_request_must():
    """1000 tokens at 4000 a second, and 3 steps of 21 ms after the first token; KV travels for 30 ms."""
    requests = [(0.0, 1000, 4)]
    assert mean_request_s({"b0": 4000.0}, requests) == pytest.approx(0.25 + 3 * 0.021)
    assert mean_request_s({"p0": 4000.0, "d0": 4000.0}, requests) == pytest.approx(0.25 + 0.03 + 3 * 0.021)


# ---- roles ----


def times(roles, requests):
    return serve({"p0": 2000.0, "d0": 2000.0, "d1": 2000.0}, requests, roles=roles)


def test_auto_helps_where_prompts_pile_up_and_leaves_alone_what_does_well():
    """Prompts of 1000 tokens, five a second for 20 s: two and a half times what one prefill node can read."""
    heavy = [(0.2 * number, 1000, 8) for number in range(100)]
    light = [(2.0 * number, 1000, 8) for number in range(10)]
    fixed_s, no_flips = times(FIXED, heavy)
    auto_s, flips = times(AUTO, heavy)
    assert no_flips == []
    assert [role for _, role in flips[:2]] == ["mixed", "mixed"]
    assert auto_s < 0.5 * fixed_s
    assert times(AUTO, light) == (times(FIXED, light)[0], [])


def steady(rate, from_s, until_s, num_prompt_tokens, num_answer_tokens):
    """Arrivals at random, so many a second."""
    rng, requests, at_s = random.Random(3), [], from_s
    while (at_s := at_s + rng.expovariate(rate)) < until_s:
        requests.append((at_s, num_prompt_tokens, num_answer_tokens))
    return requests


STEADY_S, LONG_S = effort(300.0, 600.0, 600.0), 600.0
FEW = 8
READS = {"p0": 2000.0, "d0": 2000.0, "d1": 2000.0}  # a prefill node reads two prompts of 1000 tokens a second
WRITES = {"p0": 1e5, "p1": 1e5, "d0": 1e5}
READ_LOADS = [
    (800.0, 4000),  # of which nodes come and go as often as they may
    (1800.0, 1000),
    *itertools.product((400.0, 1200.0, 1800.0, 2400.0), (250, 4000)),
]
WRITE_LOADS = [
    (0.45, 2),  # at once, in steps of 22 ms: a decode node writes 0.6 answers of 150 tokens a second
    *((rate, 8) for rate in (0.9, 1.2, 1.5, 1.9, 2.2)),  # in steps of 28 ms: 1.9 a second
]


@pytest.mark.parametrize(("tokens_per_s", "num_tokens"), few(pytest.param(*each) for each in READ_LOADS))
def test_any_steady_load_of_prompts_comes_to_have_few_flips(tokens_per_s, num_tokens):
    _, flips = serve(READS, steady(tokens_per_s / num_tokens, 0.0, STEADY_S, num_tokens, 8), roles=AUTO)
    assert len(flips) <= FEW


@pytest.mark.parametrize(("rate", "max_num_seqs"), few(pytest.param(*each) for each in WRITE_LOADS))
def test_any_steady_load_of_answers_comes_to_have_few_flips(rate, max_num_seqs):
    _, flips = serve(WRITES, steady(rate, 0.0, STEADY_S, 10, 150), max_num_seqs=max_num_seqs, roles=AUTO)
    assert len(flips) <= FEW


@pytest.mark.nightly
def test_after_any_load_a_fleet_is_what_it_was_within_the_bound():
    """One that makes nodes go to and fro, then too many prompts, then few."""
    flapping = steady(0.2, 0.0, LONG_S, 4000, 8)
    heavy_s, light_s = LONG_S + 60.0, LONG_S + 60.0 + 2 * (MAX_STAY_S + 2 * CALM_S)
    heavy = steady(5.0, LONG_S, heavy_s, 1000, 8)
    light = steady(0.1, heavy_s, light_s, 100, 8)
    _, flips = serve(READS, [*flapping, *heavy, *light], roles=AUTO)
    assert dict(flips) == {"d0": "decode", "d1": "decode"}


# ---- how many nodes ----


def needed_over_time(num_nodes, per_s, num_prompt_tokens, seconds):
    """What a fleet of so many is told once a second, from the 30th on."""
    seen = []

    def watch(agenda, fleet):
        def look():
            if agenda.now < seconds:
                seen.append(fleet.coordinator.scheduler.nodes_needed.mixed)
                agenda.after(1.0, look)

        agenda.after(30.0, look)

    requests = [(index / per_s, num_prompt_tokens, 40) for index in range(round(per_s * seconds))]
    serve({f"b{index}": 1000.0 for index in range(num_nodes)}, requests, watch=watch)
    return seen


@pytest.mark.nightly
def test_a_fleet_that_has_followed_it_is_told_the_same_again():
    """A request takes 0.2 s to read and, of a step with 64, 39 * 0.0013 s to write: 9 a second need 2.8 nodes."""
    told = {num_nodes: needed_over_time(num_nodes, 9, 200, 80.0) for num_nodes in (3, 4, 6)}
    assert all(set(numbers) == {3} for numbers in told.values()), told


def test_a_fleet_that_is_too_small_is_told_to_grow_the_longer_the_more():
    """A request takes 1 s to read and 0.05 s to write."""
    told = needed_over_time(2, 2, 1000, 60.0)
    assert min(told) >= 3
    assert told[-1] > told[0]
