"""What was expected of a request with limits, as its timeline or its refusal tells: worked out by hand."""

import pytest

from coordinator.control.slo import Slo
from serving_core.errors import RequestError
from tests import fleet_events as events
from tests.unit.coordinator.scheduler_kit import World

# A step takes 10 ms and 5 ms for each answer, a prompt 1 ms a token and a step's 10 ms for each 512 of them.
WEIGHTS = [0.010, 0.005, 0.0, 0.0, 0.001, 0.0, 0.0]
LONG_PROMPT, LONG_S = list(range(1000)), 1.02
LIMITS = Slo("", 10.0, 0.022)  # two answers keep it
MARGIN_S = 1.0  # a tenth of the limit, which a new coordinator spares
NOTHING = {"expected_ttft_s": 0.0, "expected_prefill_s": 0.0, "ttft_margin_s": 0.0, "expected_tpot_s": 0.0}
NOTHING |= {"deferred_s": 0.0, "is_late": False}


def world_of(*names, **settings):
    world = World((), **settings)
    for name in names or ("b0",):
        world.attach(name, num_blocks=10_000, max_model_len=100_000)
        told = events.heartbeat(step_weights=WEIGHTS, prefill_tokens_per_s=1000.0)
        world.registry.heartbeat(world.registry.find(name), told.heartbeat, 0.0)
    return world


def submit(world, name, limits=LIMITS, **others):
    return world.submit(f"{name}/0", slo=limits, **{"max_tokens": 200, **others})


def full_world(**settings):
    """b0 writes two answers, as many as keep their limit: the attempts of these."""
    world, attempts = world_of(**settings), []
    for name in ("one", "two"):
        assert submit(world, name) == ["reserve b0"]
        attempts.append(world.attempt)
        world.tell("b0", events.first_token(events.sampled(world.attempt, 0, 100)))
        assert world.step(world.attempt, 1, node="b0") == ["emit 1:101"]
    return world, attempts


def end(world, attempt, now, node="b0"):
    """The answer ends with its first token."""
    return world.tell(node, events.first_token(events.sampled(attempt, 0, 100, events.LENGTH)), now)


def expected(world):
    timeline = world.outcome.timeline
    return {name: getattr(timeline, name) for name in NOTHING}


def told(refusal):
    assert refusal.reason == "WOULD_BE_LATE"
    return {name: float(value) for name, value in refusal.metadata.items() if name != "retry_after_s"}


def figures(ttft_s, prefill_s, tpot_s, *, margin_s=MARGIN_S, **others):
    seconds = {"expected_ttft_s": ttft_s, "expected_prefill_s": prefill_s, "expected_tpot_s": tpot_s}
    return pytest.approx(seconds | {"ttft_margin_s": margin_s, "deferred_s": 0.0, **others}, abs=1e-6)


def test_the_first_token_is_expected_from_the_arrival_on_behind_those_before_it():
    world = world_of()
    assert submit(world, "first", token_ids=LONG_PROMPT, now=1.0, preparing_s=0.25) == ["reserve b0"]
    first = world.attempt
    assert submit(world, "second", token_ids=LONG_PROMPT[::-1], now=1.5) == ["reserve b0"]
    end(world, world.attempt, 3.0)
    # The prompt before counts as a whole one; of its answer no step has begun.
    assert expected(world) == figures(2 * LONG_S, LONG_S, 0.015, is_late=False)
    end(world, first, 3.0)
    assert expected(world) == figures(0.25 + LONG_S, LONG_S, 0.015, is_late=False)


def test_a_request_that_was_deferred_tells_for_how_long():
    world, (first, _) = full_world()
    assert submit(world, "r", now=1.0) == []
    assert world.step(first, 2, events.LENGTH, node="b0", now=3.0)[-1] == "reserve b0"
    end(world, world.attempt, 4.0)
    found = expected(world)
    assert found["deferred_s"] == 2.0
    assert found["expected_ttft_s"] - found["expected_prefill_s"] == pytest.approx(2.0), "nothing is before it"
    assert found["expected_tpot_s"] == pytest.approx(0.020), "beside the other"
    assert (found["ttft_margin_s"], found["is_late"]) == (pytest.approx(MARGIN_S), False)


def test_a_request_behind_all_others_tells_so():
    world, attempts = full_world()
    assert submit(world, "r", Slo("", 1e-3, 0.022), now=1.0) == []
    for attempt in attempts:
        said = world.step(attempt, 2, events.LENGTH, node="b0", now=3.0)
    assert said[-1] == "reserve b0"
    end(world, world.attempt, 4.0)
    found = expected(world)
    assert (found["is_late"], found["deferred_s"], found["ttft_margin_s"]) == (True, 2.0, 0.0)


@pytest.mark.parametrize("cause", ["lose", "drain"])
def test_another_attempt_changes_nothing_of_what_was_expected(cause):
    world = world_of("b0", "b1")
    assert submit(world, "r", token_ids=LONG_PROMPT) == ["reserve b0"]
    assert getattr(world, cause)("b0", 5.0)[-1] == "reserve b1"
    end(world, world.attempt, 7.0, node="b1")
    assert expected(world) == figures(LONG_S, LONG_S, 0.015, is_late=False)


@pytest.mark.parametrize("limits", [None, Slo("", priority=3)])
def test_without_limits_nothing_is_expected(limits):
    world = world_of()
    submit(world, "r", limits)
    end(world, world.attempt, 1.0)
    assert expected(world) == NOTHING


def test_before_steps_are_known_nothing_is_expected_but_what_is_spared():
    world = World(("b0",))
    submit(world, "r", Slo("", 10.0, None))
    end(world, world.attempt, 1.0)
    assert expected(world) == pytest.approx(NOTHING | {"ttft_margin_s": MARGIN_S})


def test_a_refusal_at_arrival_tells_what_was_expected():
    """A prompt of 1.02 s cannot be read in the 0.9 s that are planned for; a third answer would be one too many."""
    world, _ = full_world(admits_late=False)
    with pytest.raises(RequestError) as caught:
        submit(world, "r", Slo("", 1.0, 0.022), token_ids=LONG_PROMPT, now=1.0)
    found = told(caught.value)
    assert found.pop("expected_prefill_s") == found.pop("expected_ttft_s") > LONG_S, "beside two answers"
    assert found == pytest.approx({"ttft_margin_s": 0.1, "expected_tpot_s": 0.025, "deferred_s": 0.0})


def test_a_refusal_after_a_wait_tells_how_long_that_was():
    world, _ = full_world(admits_late=False)
    assert submit(world, "r", now=1.0) == []
    assert world.tick(7.0) == ["end WOULD_BE_LATE"]
    found = told(world.outcome)
    assert (found["deferred_s"], found["ttft_margin_s"]) == (6.0, pytest.approx(MARGIN_S))
    assert found["expected_ttft_s"] - found["expected_prefill_s"] == pytest.approx(6.0)


def test_a_refusal_of_a_node_tells_since_when_the_request_was_there():
    world = world_of(admits_late=False)
    assert submit(world, "r", token_ids=LONG_PROMPT, now=1.0) == ["reserve b0"]
    world.tell("b0", events.failed(world.attempt, "WOULD_BE_LATE"), 9.0)
    assert told(world.outcome) == figures(LONG_S, LONG_S, 0.015, prefill_queue_s=8.0)
