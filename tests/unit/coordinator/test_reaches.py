"""Requests that are longer than a pool: which nodes they may be given to, and who may hold some of them."""

import pytest

from coordinator.control.instructions import Releases
from coordinator.control.load import Ledger, Prompt
from coordinator.control.migration import num_left
from coordinator.control.nodes import Registry
from coordinator.control.placement.costs import TransferEstimates, Wanted
from coordinator.control.placement.policy import POLICIES, best_decode_node
from coordinator.control.roles import RecentCapacity
from protos import fleet_pb2
from protos.convert import shape_to_wire
from serving_core.errors import RequestError
from serving_core.shapes import DECODE, PREFILL, preset
from tests import fleet_events as events
from tests.unit.coordinator.scheduler_kit import World

POOL = 160  # tokens, ten blocks
KEY = bytes(32)


@pytest.fixture
def registry():
    return Registry(events.MODEL, node_timeout_s=3.0, step_timeout_s=60.0)


def admit(registry, name, role="mixed", *, num_tokens=112, **fields):
    hello = events.hello(name, role, **{"num_blocks": 10, "max_model_len": 400, **fields}).hello
    if num_tokens:
        holder = fleet_pb2.KVHolder(address=f"{name}:1", key=KEY)
        hello.remote_kvs.CopyFrom(fleet_pb2.HolderOffer(holder=holder, num_tokens=num_tokens))
    return registry.admit(hello, 0.0)


def place(registry, num_prompt, num_tokens, policy="auto", ledger=None):
    wanted = Wanted(Prompt(list(range(num_prompt))), num_tokens)
    return POLICIES[policy].place(registry.nodes, ledger or Ledger(), wanted, TransferEstimates(), now=0.0)


def test_a_node_reaches_as_far_as_those_that_would_hold_blocks_for_it(registry):
    first = admit(registry, "a")
    assert first.reach_tokens == first.pool_tokens == POOL
    second = admit(registry, "b")
    assert (first.reach_tokens, second.reach_tokens) == (POOL + 112, POOL + 112)
    third = admit(registry, "c")
    assert (first.reach_tokens, first.max_request_tokens) == (POOL + 224, 384)
    assert registry.capacity.decode_pool_tokens == POOL + 224
    assert registry.capacity.own_pool_tokens == POOL
    registry.lose(third)
    assert first.reach_tokens == POOL + 112
    limits = {"max_num_batched_tokens": 512, "max_num_seqs": 64}
    writes = shape_to_wire(preset(DECODE, **limits))
    registry.heartbeat(first, events.heartbeat(shape=writes).heartbeat, 1.0)  # it reads no more
    assert (first.reach_tokens, second.reach_tokens) == (POOL + 112, POOL + 112)
    reads = shape_to_wire(preset(PREFILL, **limits))
    registry.heartbeat(first, events.heartbeat(shape=reads).heartbeat, 2.0)  # KV elsewhere travels to no other node
    assert (first.reach_tokens, second.reach_tokens) == (POOL, POOL + 112)


def test_what_a_node_could_hold_counts_for_a_while_after_it_has_gone(registry):
    recent = RecentCapacity(registry, wait_s=5.0)
    recent.note(0.0)
    assert recent.at(0.0).decode_pool_tokens is None
    admit(registry, "a", num_tokens=0)
    second = admit(registry, "b", num_tokens=0, num_blocks=20, max_model_len=800)
    recent.note(1.0)
    registry.lose(second)
    for now, length, pool in ((5.9, 800, 2 * POOL), (6.1, 400, POOL)):
        recent.note(now)
        there = recent.at(now)
        assert (there.max_model_len, there.decode_pool_tokens, there.prefill_pool_tokens) == (length, pool, pool)
        assert there.own_pool_tokens == POOL, "an answer without a length is to begin now"


def test_a_node_that_drains_is_given_no_blocks_of_others(registry):
    first, second = admit(registry, "a"), admit(registry, "b")
    registry.drain(second)
    assert registry.kv_holders_of(first) == []
    assert first.reach_tokens == POOL
    registry.drain(second, is_drained=False)
    assert registry.kv_holders_of(first) == [second]
    assert first.reach_tokens == POOL + 112
    registry.heartbeat(second, events.heartbeat(state="draining").heartbeat, 1.0)
    assert first.reach_tokens == POOL


def test_a_drain_waits_for_what_a_node_holds_for_others(registry):
    node = admit(registry, "a")
    assert num_left(node, [], Releases(0)) == 0
    registry.heartbeat(node, events.heartbeat(num_remote_kv_blocks=16).heartbeat, 1.0)
    assert num_left(node, [], Releases(0)) == 1


@pytest.mark.parametrize(
    "other", [{"num_tokens": 0}, {"numerics": {"cpu": "another"}}], ids=["wants none", "computes other bits"]
)
def test_who_is_no_kv_holder(registry, other):
    first = admit(registry, "a")
    admit(registry, "b", **other)
    assert registry.kv_holders_of(first) == []
    assert first.reach_tokens == POOL


def test_a_long_request_is_read_and_written_by_one_node(registry):
    nodes = [admit(registry, "a"), admit(registry, "b"), admit(registry, "p", "prefill", num_tokens=0, num_blocks=100)]
    placed = place(registry, 100, 200)
    assert placed.prefill_node is placed.decode_node
    assert placed.decode_node in nodes[:2]
    with pytest.raises(RequestError, match="can hold 300 tokens"):
        place(registry, 100, 300)


def decode_node_alone(registry, num_prompt, num_tokens):
    wanted = Wanted(Prompt(list(range(num_prompt))), num_tokens)
    placed = best_decode_node(registry.nodes, Ledger(), wanted, TransferEstimates())
    return placed and (placed.prefill_node.name, placed.decode_node.name)


@pytest.mark.parametrize(("num_prompt", "num_tokens"), [(POOL + 1, POOL + 2), (10, POOL + 1)], ids=["prompt", "answer"])
def test_where_phases_are_apart_a_decode_node_reads_what_is_longer_than_a_pool(registry, num_prompt, num_tokens):
    """The pool of the prefill node is one of those that hold its oldest blocks."""
    p0, d0 = admit(registry, "p0", "prefill"), admit(registry, "d0", "decode")
    assert (p0.reach_tokens, d0.reach_tokens) == (POOL, POOL + 112)
    assert registry.kv_holders_of(d0) == [p0]
    assert (registry.capacity.prefill_pool_tokens, registry.capacity.decode_pool_tokens) == (POOL + 112, POOL + 112)
    assert decode_node_alone(registry, num_prompt, num_tokens) == ("d0", "d0")
    assert decode_node_alone(registry, POOL - 1, POOL) is None, "two pools hold it"
    assert decode_node_alone(registry, num_prompt, POOL + 113) is None
    registry.lose(p0)
    assert registry.capacity.prefill_pool_tokens is None
    assert decode_node_alone(registry, 10, 20) is None


def test_a_mixed_node_reads_a_long_request_before_a_decode_node_does(registry):
    for name, role in (("p0", "prefill"), ("d0", "decode"), ("b0", "mixed")):
        admit(registry, name, role)
    assert decode_node_alone(registry, POOL + 1, POOL + 2) is None
    assert place(registry, POOL + 1, POOL + 2).decode_node.name == "b0"


def test_a_long_request_where_phases_are_apart():
    """It stays where it is while the others hold its blocks, and begins again where that node is lost."""
    world = World((), max_restarts=3)
    for name, role in (("p0", "prefill"), ("d0", "decode"), ("d1", "decode")):
        admit(world.registry, name, role)
    assert world.submit(token_ids=list(range(100)), max_tokens=100) == ["reserve d0"]
    assert world.is_local
    assert [holder.address for holder in world.reserve.job.kv_holders] == ["d1:1", "p0:1"]
    world.tell("d0", events.first_token(events.sampled(world.attempt, 0, 100)))
    assert world.lose("d0", 1.0) == ["reserve d1"]
    assert world.is_local
    assert [holder.address for holder in world.reserve.job.kv_holders] == ["p0:1"]


@pytest.mark.parametrize(("max_tokens", "said"), [(150, ["reserve b"]), (151, [])])
def test_a_long_answer_stays(max_tokens, said):
    world = World(())
    admit(world.registry, "a")
    admit(world.registry, "b")
    assert world.submit(token_ids=list(range(10)), max_tokens=max_tokens) == ["reserve a"]
    world.tell("a", events.first_token(events.sampled(world.attempt, 0, 100)))
    world.step(world.attempt, 1, node="a")
    assert world.drain("a", 1.0) == said


def test_a_long_request_has_no_block_in_common_with_others():
    """As its tiles may leave."""
    world = World(())
    a, _ = admit(world.registry, "a"), admit(world.registry, "b", "decode", num_tokens=0)
    holder = admit(world.registry, "c", max_num_seqs=1)
    for node in (a, holder):
        world.registry.cache_changed(node, events.cache_changed([1]).cache_changed)
    tokens = list(range(100))
    world.ledger.decode("full", holder, POOL)
    for number, max_tokens in enumerate((10, 100)):
        assert world.submit(f"{number}/0", token_ids=tokens, max_tokens=max_tokens) == ["reserve a"]
    assert world.ledger.tokens_taken(a) == 200


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("num_prompt", "num_tokens"), [(100, 200), (170, 200)])
def test_no_policy_divides_a_long_request(registry, policy, num_prompt, num_tokens):
    """Though the one node has answers and the other one prompts."""
    nodes, ledger = [admit(registry, "a"), admit(registry, "b")], Ledger()
    ledger.decode("answer", nodes[0], 100)
    ledger.prefill("prompt", nodes[1], 50)
    placed = place(registry, num_prompt, num_tokens, policy, ledger)
    assert placed.prefill_node is placed.decode_node


@pytest.mark.parametrize("offer", [{"num_tokens": POOL + 1}, {"holder": {"address": "a:1", "key": b"short"}}])
def test_an_offer_that_cannot_be(registry, offer):
    hello = events.hello("a", "mixed", num_blocks=10).hello
    hello.remote_kvs.CopyFrom(fleet_pb2.HolderOffer(**offer))
    with pytest.raises(RequestError):
        registry.admit(hello, 0.0)


@pytest.fixture
def world():
    """Readers of 32 tokens, and decode nodes of 160."""
    world = World((), max_restarts=3, node_wait_s=5.0)
    for name in ("p0", "d0", "d1", "d2"):
        world.attach(name, num_blocks=2 if name == "p0" else 10)
    return world


def write(world, num_prompt, num_tokens):
    """The request r/0 on d0, of which so many tokens have come."""
    assert world.submit(token_ids=list(range(num_prompt)), max_tokens=60) == ["reserve d0", "prefill p0"]
    attempt = world.attempt
    world.first(attempt)
    world.tell("p0", events.transferred(attempt))
    for index in range(1, num_tokens):
        world.step(attempt, index)


def test_an_answer_that_has_outgrown_the_prefill_nodes_is_read_by_who_writes_it(world):
    write(world, 30, 3)
    world.submit("another/0", max_tokens=2)  # on d1, so that d2 has most room
    assert world.lose("d0", 1.0) == ["reserve d2"]
    job = world.reserve.job
    assert (world.is_local, len(job.token_ids), job.num_prompt_tokens) == (True, 33, 30)
    attempt = world.attempt
    assert world.tell("d2", events.first_token(events.sampled(attempt, 3, 103)), 2.0) == ["emit 3:103"]
    assert world.step(attempt, 4, events.LENGTH, 3.0, "d2") == ["emit 4:104", "end complete"]
    assert world.outcome.timeline.num_restarts == 1


def test_an_answer_that_a_prefill_node_can_hold_is_read_there(world):
    write(world, 30, 2)
    assert world.lose("d0", 1.0) == ["reserve d1", "prefill p0"]


def test_an_answer_waits_for_prefill_nodes_where_there_is_none(world):
    write(world, 30, 3)
    world.lose("p0")
    assert world.lose("d0", 1.0) == []
    world.attach("p1", num_blocks=10)
    assert world.tick(2.0) == ["reserve d1", "prefill p1"]


def test_what_no_node_can_hold_has_no_prefill_node():
    world = World((), max_restarts=3)
    for name, num_blocks in (("p0", 2), ("d0", 10), ("d1", 4)):
        world.attach(name, num_blocks=num_blocks)
    write(world, 30, 3)
    assert world.lose("d0", 1.0) == ["end NO_PREFILL_WORKER"]
