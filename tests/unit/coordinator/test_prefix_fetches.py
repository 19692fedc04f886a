"""When nodes lend each other blocks of prompts: the price, the placement by it, and what the scheduler makes of it."""

import pytest

from coordinator.control.instructions import Send
from coordinator.control.load import Ledger, Prompt
from coordinator.control.nodes import Registry
from coordinator.control.placement.costs import (
    FETCH_ALWAYS,
    FETCH_AUTO,
    FETCH_NEVER,
    MAX_PREFIX_FETCH_AGE_S,
    MIN_PATIENCE_S,
    MIN_PREFIX_FETCHES,
    PATIENCE_S,
    UNMEASURED_S,
    PrefixFetchEstimator,
    TransferEstimates,
    Wanted,
)
from coordinator.control.placement.policy import POLICIES
from protos import fleet_pb2, inference_pb2
from serving_core.shapes import Shape
from tests import fleet_events as events
from tests.unit.coordinator.scheduler_kit import World

PAIR = ("d0", "p0")
TOKENS = list(range(1, 101))
HINTS = events.block_hints(TOKENS)  # six full blocks of 16
BLOCK_SIZE = 16
RATE = 1000.0


# ---- the price ----


def measured(*prefix_fetches, fetches=FETCH_AUTO, now=0.0):
    known = PrefixFetchEstimator(fetches)
    for num_tokens, seconds in prefix_fetches:
        known.ended(PAIR, num_tokens, seconds, now)
    return known.estimates(now)


def test_what_was_never_measured_is_tried():
    costs = measured(*[(100, 9.0)] * (MIN_PREFIX_FETCHES - 1))
    assert costs.seconds(PAIR, 100) == UNMEASURED_S
    assert costs.is_worth(PAIR, 100, 1.1 * UNMEASURED_S)
    assert not costs.is_worth(PAIR, 100, UNMEASURED_S)


@pytest.mark.parametrize(("num_tokens", "seconds"), [(100, 0.2), (50, 0.2), (200, 0.4)])
def test_a_price_is_never_less_than_was_measured(num_tokens, seconds):
    """Fewer tokens may take as long, and more as much longer as they are more."""
    costs = measured((100, 0.2), (100, 0.1), (100, 0.9))
    assert costs.seconds(PAIR, num_tokens) == pytest.approx(seconds)
    assert costs.is_worth(PAIR, num_tokens, seconds + 0.01)
    assert not costs.is_worth(PAIR, num_tokens, seconds)
    assert costs.seconds(("d1", "p0"), num_tokens) == UNMEASURED_S  # another pair's


def test_old_prefix_fetches_count_no_more():
    known = PrefixFetchEstimator(FETCH_AUTO)
    for _ in range(MIN_PREFIX_FETCHES):
        known.ended(PAIR, 100, 9.0, 0.0)
    assert known.estimates(MAX_PREFIX_FETCH_AGE_S).seconds(PAIR, 100) == 9.0
    assert known.estimates(MAX_PREFIX_FETCH_AGE_S + 1).seconds(PAIR, 100) == UNMEASURED_S


def test_always_and_never_ask_for_no_price():
    slow = [(100, 9.0)] * MIN_PREFIX_FETCHES
    assert measured(*slow, fetches=FETCH_ALWAYS).is_worth(PAIR, 1, 0.0)
    assert not measured(fetches=FETCH_NEVER).is_worth(PAIR, 100, 9.0)
    assert not measured(fetches=FETCH_ALWAYS).is_worth(PAIR, 0, 9.0)


def test_patience_is_what_computing_takes():
    assert measured().patience_s(3.0) == 3.0
    assert measured().patience_s(0.0) == MIN_PATIENCE_S
    assert measured(fetches=FETCH_ALWAYS).patience_s(0.0) == PATIENCE_S


# ---- placement ----


def admit(registry, name, hints=(), *, keeps=False):
    node = registry.admit(events.hello(name, tp_size=2, keeps_sequences=keeps).hello, 0.0)
    registry.heartbeat(node, events.heartbeat("ready", prefill_tokens_per_s=RATE).heartbeat, 0.0)
    registry.cache_changed(node, events.cache_changed(hints).cache_changed)
    return node


def placed(
    fetches=FETCH_AUTO,
    held={"d0": HINTS},  # noqa: B006
    prefix_fetches=(),
    names=("p0", "d0"),
    queued=None,
    keeping=(),
):
    registry, ledger = Registry({}, node_timeout_s=1e9, step_timeout_s=1e9), Ledger()
    nodes = {name: admit(registry, name, held.get(name, ()), keeps=name in keeping) for name in names}
    for name, num_tokens in (queued or {}).items():
        ledger.prefill(f"of {name}", nodes[name], num_tokens, Prompt(TOKENS).block_hashes(BLOCK_SIZE))
    costs = TransferEstimates(prefix_fetches=measured(*prefix_fetches, fetches=fetches))
    return POLICIES["auto"].place(registry.nodes, ledger, Wanted(Prompt(TOKENS), 110), costs, 0.0)


def test_the_prefill_node_is_lent_what_the_decode_node_holds():
    prefix_fetch = placed().prefix_fetch
    assert (prefix_fetch.source.name, prefix_fetch.num_tokens, prefix_fetch.num_fetched) == ("d0", 96, 96)
    assert prefix_fetch.to_wire().tp_size == 2


def test_nothing_is_fetched_from_a_node_whose_engine_hands_nothing_over():
    assert placed(keeping=("d0",)).prefix_fetch is None


def test_nothing_is_fetched_to_a_node_whose_engine_takes_nothing():
    assert placed(keeping=("p0",)).prefix_fetch is None


def test_what_the_prefill_node_holds_is_not_lent():
    prefix_fetch = placed(held={"d0": HINTS, "p0": HINTS[:4]}).prefix_fetch
    assert (prefix_fetch.num_tokens, prefix_fetch.num_fetched) == (96, 32)
    assert placed(held={"d0": HINTS, "p0": HINTS}).prefix_fetch is None


@pytest.mark.parametrize(
    ("fetches", "prefix_fetch_s", "is_lent"),
    [(FETCH_AUTO, 0.09, True), (FETCH_AUTO, 0.097, False), (FETCH_ALWAYS, 9.0, True), (FETCH_NEVER, 0.0, False)],
)
def test_blocks_travel_where_that_is_faster_than_computing_them(fetches, prefix_fetch_s, is_lent):
    """96 tokens take 0.096 s to be computed."""
    assert (
        placed(fetches, prefix_fetches=[(96, prefix_fetch_s)] * MIN_PREFIX_FETCHES).prefix_fetch is not None
    ) == is_lent


def test_the_node_that_holds_the_prompt_is_preferred_while_its_queue_is_short():
    """And one that holds nothing is lent it where the queue is longer than the prefix fetch takes."""
    options = {"names": ("p0", "p1", "d0"), "held": {"p1": HINTS}}
    near = placed(**options)
    assert (near.prefill_node.name, near.prefix_fetch) == ("p1", None)
    far = placed(**options, queued={"p1": 500})
    assert (far.prefill_node.name, far.prefix_fetch.source.name) == ("p0", "p1")
    alone = placed(**options, queued={"p1": 500}, fetches=FETCH_NEVER)
    assert (alone.prefill_node.name, alone.prefix_fetch) == ("p0", None)


def test_a_node_lends_what_it_holds_and_not_what_it_is_yet_to_read():
    some = events.block_hints([5] * 16)
    options = {"names": ("p0", "p1", "d0"), "held": {"p0": some, "p1": some}}
    near = placed(**options, queued={"p1": 10})
    assert (near.prefill_node.name, near.prefix_fetch) == ("p1", None), "which computes it for another prompt anyway"
    far = placed(**options, queued={"p1": 500})
    assert (far.prefill_node.name, far.prefix_fetch) == ("p0", None)


def test_without_rates_there_is_no_price():
    registry = Registry({}, node_timeout_s=1e9, step_timeout_s=1e9)
    nodes = [registry.admit(events.hello(name).hello, 0.0) for name in ("p0", "d0")]
    for node in nodes:
        registry.heartbeat(node, events.heartbeat("ready").heartbeat, 0.0)
    registry.cache_changed(nodes[1], events.cache_changed(HINTS).cache_changed)
    costs = TransferEstimates(prefix_fetches=measured(fetches=FETCH_ALWAYS))
    assert (
        POLICIES["auto"].place(registry.nodes, Ledger(), Wanted(Prompt(TOKENS), 110), costs, 0.0).prefix_fetch is None
    )


# ---- the scheduler ----


class PrefixSends(World):
    """A world in which d1 holds the prompt, and p0 is to read it."""

    def __init__(self):
        super().__init__(("p0", "d0"), fetches=FETCH_ALWAYS)
        self.attach("d1", shape=Shape(0, 64, accepts_transfers=False))  # so d0 writes the answer
        for name in ("p0", "d0", "d1"):
            self.rate(name)
        self.holds("d1", HINTS)
        self.submit(token_ids=TOKENS)
        (self.fetch_prefix,) = [job.fetch_prefix for job in self.jobs if job.HasField("fetch_prefix")]
        self.of_fetch = fleet_pb2.Attempt(request_id="r/0", epoch=self.fetch_prefix.epoch)

    def rate(self, name):
        beat = events.heartbeat("ready", prefill_tokens_per_s=RATE)
        self.registry.heartbeat(self.registry.find(name), beat.heartbeat, 0.0)

    def prefix_fetch_begun(self, descriptor=b"descriptor"):
        body = fleet_pb2.PrefixFetchBegun(attempt=self.jobs[0].attempt, descriptor=descriptor)
        return self.tell("p0", fleet_pb2.NodeEvent(prefix_fetch_begun=body))

    def prefix_fetch_ended(self, num_blocks=6, seconds=0.5, now=0.0):
        sizes = {"num_blocks": num_blocks, "num_bytes": 10 * num_blocks, "seconds": seconds}
        body = fleet_pb2.PrefixFetchEnded(attempt=self.jobs[0].attempt, **sizes)
        return self.tell("p0", fleet_pb2.NodeEvent(prefix_fetch_ended=body), now)

    def lender_fails(self):
        failed = fleet_pb2.Failed(attempt=self.of_fetch, reason="TRANSFER_FAILED", message="it has nothing")
        return self.tell("d1", fleet_pb2.NodeEvent(failed=failed))


def test_a_descriptor_goes_to_the_lender_and_the_prefix_fetch_is_counted():
    world = PrefixSends()
    assert world.fetch_prefix.num_tokens == 96
    assert world.fetch_prefix.epoch != world.jobs[0].attempt.epoch
    assert world.account("p0")[0] == 4  # tokens that it is to compute
    assert world.prefix_fetch_begun() == ["send_prefix d1"]
    assert world.attempt == world.of_fetch
    assert world.prefix_fetch_ended() == []
    metrics = world.metrics
    assert (metrics.num_fetched_blocks, metrics.num_fetched_kv_bytes, metrics.prefix_fetches["lent"]) == (6, 60, 1)
    world.first(world.jobs[0].attempt)
    attempt = world.jobs[0].attempt
    world.tell("d0", events.committed(attempt))
    world.step(attempt, 1, events.LENGTH)
    assert (world.outcome.fetched_kv_bytes, world.outcome.timeline.prefix_fetch_s) == (60, 0.5)


def test_a_lender_that_has_nothing_ends_the_prefix_fetch_and_not_the_request():
    world = PrefixSends()
    world.prefix_fetch_begun()
    assert world.lender_fails() == ["cancel p0"]
    assert world.attempt == world.of_fetch
    assert world.prefix_fetch_ended(num_blocks=0) == []
    assert world.metrics.prefix_fetches["not_lent"] == 1
    cancelled = fleet_pb2.NodeEvent(cancelled=fleet_pb2.Cancelled(attempt=world.of_fetch))
    assert world.tell("p0", cancelled) == []
    assert world.first(world.jobs[0].attempt) == ["emit 0:100", "begun d0"]


def test_a_lender_that_is_lost_ends_the_prefix_fetch_and_not_the_request():
    world = PrefixSends()
    world.prefix_fetch_begun()
    assert world.lose("d1") == ["cancel p0"]
    assert world.attempt == world.of_fetch
    assert world.first(world.jobs[0].attempt) == ["emit 0:100", "begun d0"]


def test_one_that_asks_for_what_a_lost_node_was_to_lend_is_told_so():
    world = PrefixSends()
    assert world.lose("d1") == ["cancel p0"]
    assert world.prefix_fetch_begun() == ["cancel p0"]


@pytest.mark.parametrize(("is_asked_for", "num_cancelled"), [(False, 2), (True, 1)])
def test_a_prefill_node_gives_back_what_it_keeps_for_blocks_that_nobody_was_asked_for(is_asked_for, num_cancelled):
    """Its descriptor may be on the way when the request ends. What a source was asked for comes, for whoever asks
    again."""
    world = PrefixSends()
    if is_asked_for:
        world.prefix_fetch_begun()
    ended = world.scheduler.finish("r/0", inference_pb2.FINISH_REASON_ABORT, 0.0)
    told = [each.command for each in ended if isinstance(each, Send) and each.node.name == "p0"]
    epochs = [each.attempt.epoch for each in told if each.HasField("cancel")]
    assert epochs == [world.jobs[0].attempt.epoch, world.fetch_prefix.epoch][:num_cancelled]


def test_what_others_say_of_a_prefix_fetch_counts_for_nothing():
    world = PrefixSends()
    world.prefix_fetch_begun()
    assert world.tell("d0", fleet_pb2.NodeEvent(failed=fleet_pb2.Failed(attempt=world.of_fetch))) == []
    odd = fleet_pb2.PrefixFetchEnded(attempt=world.jobs[0].attempt, num_blocks=9)
    assert world.tell("d0", fleet_pb2.NodeEvent(prefix_fetch_ended=odd)) == []
    assert world.metrics.num_fetched_blocks == 0
