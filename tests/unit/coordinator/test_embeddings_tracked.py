"""Embeddings in the tracker: a node that reads, none that writes."""

import pytest

from serving_core.errors import RequestError
from serving_core.reasons import NO_PREFILL_WORKER
from serving_core.requests import LAST
from tests import fleet_events as events
from tests.unit.coordinator.tracker_kit import PROMPT, World


def test_one_node_reads_and_its_word_is_the_end():
    world = World(("p0",))
    assert world.embed(kind=LAST) == ["prefill p0"]
    [job] = world.jobs
    assert (list(job.token_ids), job.pooling.kind, job.pooling.normalizes) == (PROMPT, LAST, True)
    assert world.account("p0") == (3, 0, 0, 0)
    event = events.embedded(world.attempt, b"vector", prefill_s=0.5, num_cached_tokens=2)
    assert world.tell("p0", event, now=2.0) == ["embedded vector", "end complete"]
    complete = world.outcome
    assert (complete.prompt_tokens, complete.completion_tokens, complete.cached_tokens) == (3, 0, 2)
    told = complete.timeline
    assert (told.prefill_node, told.decode_node, told.prefill_queue_s, told.prefill_s) == ("p0", "", 1.5, 0.5)
    assert (world.tracker.num_open, world.account("p0")) == (0, (0, 0, 0, 0))
    assert (world.metrics.num_prompt_tokens, world.metrics.num_cached_tokens) == (3, 2)
    world.ledger.check_integrity()
    assert world.tell("p0", event, now=3.0) == []


def test_the_node_with_less_to_read_is_taken_one_that_does_both_too():
    world = World(("p0", "b0", "d0"))
    world.embed("a/0", [1] * 50)
    first = world.reader
    world.embed("b/0", [2] * 50)
    assert {first, world.reader} == {"p0", "b0"}


def test_a_word_about_an_embedding_that_nobody_asked_for_does_nothing():
    world = World()
    world.submit()
    assert world.tell("p0", events.embedded(world.attempt)) == []
    assert world.tracker.num_open == 1


@pytest.mark.parametrize("how", ["lost", "full", "draining"])
def test_another_node_reads_it_when_the_first_does_not(how):
    world = World(("p0", "p1"), embeds=True)
    world.embed()
    one, other = (world.reader, "p1" if world.reader == "p0" else "p0")
    if how == "lost":
        assert world.lose(one) == [f"prefill {other}"]
    elif how == "full":
        assert world.tell(one, events.failed(world.attempt, "QUEUE_FULL")) == [f"prefill {other}"]
    else:
        assert world.drain(one, 1.0) == [f"cancel {one}", f"prefill {other}"]
    assert world.tell(other, events.embedded(world.attempt, b"v")) == ["embedded v", "end complete"]
    world.ledger.check_integrity()


def test_what_the_engine_fails_at_is_the_end():
    world = World(("p0",))
    world.embed()
    assert world.tell("p0", events.failed(world.attempt, "ENGINE_ERROR")) == ["end ENGINE_ERROR"]


def test_one_that_is_given_up_is_cancelled_where_it_is_read():
    world = World(("p0",))
    world.embed()
    assert world.tick(101.0) == ["cancel p0", "end DEADLINE_EXCEEDED"]


def test_without_a_node_that_reads_it_waits_for_one_or_is_refused():
    world = World(("d0",), embeds=True)
    with pytest.raises(RequestError) as caught:
        world.embed()
    assert caught.value.reason == NO_PREFILL_WORKER
    world = World((), embeds=True, node_wait_s=5.0)
    assert world.embed() == []
    assert world.tick(1.0) == []
    world.attach("p0")
    assert world.tick(2.0) == ["prefill p0"]
