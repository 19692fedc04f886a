"""Blocks that one node's scheduler lends another one's, over KV that tells whether what a step reads is that of its own
tokens, and whether a block's name is what its bits depend on."""

import random

import pytest

from kv_transfer.results import Received, Sent, TransferFailed
from protos import convert, fleet_pb2
from serving_node.kv_offload import LOAD_DEADLINE_S, MAX_FETCHED, MAX_LOADS, OffloadPlan
from tests.effort import few
from tests.toy_kv import NUMERICS, answer_of
from tests.unit.serving_node.scheduler_kit import BLOCK_BYTES, BLOCK_SIZE, Node, a_descriptor, prompt_of
from tests.unit.serving_node.slack_kit import ExactCosts

EPOCH = 1000
PATIENCE_S = 5.0
FIRST = prompt_of(18)
CHAT = [*FIRST, *answer_of(FIRST, 9)]
NEXT = [*CHAT, *prompt_of(7, first=1)]
NUM_HELD = len(CHAT) - 1  # the last token of an answer has no KV


def a_borrow(num_tokens=NUM_HELD // BLOCK_SIZE * BLOCK_SIZE, epoch=EPOCH):
    return fleet_pb2.FetchPrefix(epoch=epoch, num_tokens=num_tokens, tp_size=1, pp_size=1, patience_s=PATIENCE_S)


def source(**options):
    """A node that has written an answer."""
    node = Node(numerics=NUMERICS[0], **options)
    node.local("first", FIRST, salt="", max_tokens=9)
    node.steps()
    return node


def asked_to_borrow(node, prompt=NEXT, **fetch_prefix):
    """The next turn has come to a node that is to read it; it may lack blocks of others."""
    node.prefill("next", prompt, salt="", fetch_prefix=a_borrow(**fetch_prefix))
    return node.begin()


def asked_to_lend(node, reader, prompt=NEXT, epoch=EPOCH):
    attempt = fleet_pb2.Attempt(request_id="next", epoch=epoch)
    descriptor = reader.event("next", "prefix_fetch_begun").descriptor
    node.handle(send_prefix=fleet_pb2.SendPrefix(attempt=attempt, descriptor=descriptor, token_ids=prompt))
    return node.sending.get(epoch)


def send(node, reader):
    """The lent blocks arrive, as they are in the source's pool now. What the borrower is to hear of it."""
    send_prefix, fetch_prefix = node.sending.pop(EPOCH), reader.prefix_fetch_begun.pop(EPOCH)
    new = slice(fetch_prefix.num_cached, len(send_prefix.block_ids))
    reader.kv.copy_from(node.kv, send_prefix.block_ids[new], fetch_prefix.block_ids[new])
    return Received(send_prefix.tail, len(send_prefix.block_ids[new]) * BLOCK_BYTES)


def carry(node, reader):
    """The lent blocks arrive, and both hear of it."""
    received = send(node, reader)
    reader.worker.received(EPOCH, received)
    reader.check()
    node.worker.sent(EPOCH, Sent(received.num_bytes))
    node.check()


def fails(node, message="lost on the way"):
    """What was under way to the node that borrows has ended."""
    del node.prefix_fetch_begun[EPOCH]
    node.worker.received(EPOCH, TransferFailed("TRANSFER_FAILED", message))
    node.check()


def read_out(reader):
    """The prompt is read, as if it had never waited, and let go."""
    shares = [share for step in reader.steps() for share in step]
    assert reader.tokens("next") == answer_of(NEXT, 1)
    (node_request,) = reader.scheduler.node_requests
    reader.cancel(node_request.request)
    return shares


@pytest.mark.parametrize("is_batch_invariant", [True, False])
def test_an_answers_blocks_are_read_nowhere_else_again(is_batch_invariant):
    node, reader = (
        source(is_batch_invariant=is_batch_invariant),
        Node(numerics=NUMERICS[1], is_batch_invariant=is_batch_invariant),
    )
    assert asked_to_borrow(reader) == []
    assert reader.load.num_blocks_leaked == 0
    asked_to_lend(node, reader)
    assert node.load.num_blocks_leaked == 0
    assert node.num_free == node.allocator.num_blocks - NUM_HELD // BLOCK_SIZE  # nobody else can have them
    carry(node, reader)
    assert (
        reader.event("next", "prefix_fetch_ended").num_blocks,
        reader.event("next", "prefix_fetch_ended").num_bytes,
    ) == (6, 600)
    assert set(node.allocator.blocks_by_name) == set(reader.allocator.blocks_by_name)  # under the same names
    assert read_out(reader) == [("next", 24, len(NEXT) - 24)]
    assert reader.event("next", "first_token").num_cached_tokens == 24
    reader.check_empty()
    node.check_empty()


def test_only_what_the_reader_lacks_travels():
    node, reader = source(), Node(numerics=NUMERICS[1])
    reader.has_read("before", FIRST, salt="")
    asked_to_borrow(reader)
    send_prefix = asked_to_lend(node, reader)
    assert (reader.prefix_fetch_begun[EPOCH].num_cached, len(send_prefix.block_ids)) == (4, 6)
    carry(node, reader)  # behind blocks that this node has computed itself: copies that bear a name of their own
    assert reader.event("next", "prefix_fetch_ended").num_blocks == 2
    shares = [share for step in reader.steps() for share in step]
    assert shares == [("next", 24, len(NEXT) - 24)]
    assert reader.tokens("next") == answer_of(NEXT, 1)


def test_others_are_read_while_blocks_come():
    node, reader = source(), Node(numerics=NUMERICS[1])
    asked_to_borrow(reader)
    reader.prefill("other", prompt_of(5))
    assert reader.step() == [("other", 0, 5)]
    asked_to_lend(node, reader)
    carry(node, reader)
    assert reader.step() == [("next", 24, len(NEXT) - 24)]


def test_nothing_is_borrowed_into_blocks_that_an_older_one_waits_for():
    """Prefix fetches of younger prompts, each of which begins before the last one ends, would keep it waiting for
    ever."""
    reader = Node(num_blocks=12, numerics=NUMERICS[1])
    reader.writes("writes", 12, max_tokens=4, age=1)
    older = reader.reserve("older", 33, age=2)  # 9 of 12 blocks, of which 8 are free
    for index in range(8):
        reader.prefill(
            f"younger {index}", prompt_of(20, first=index), age=10 + index, fetch_prefix=a_borrow(16, 1000 + index)
        )
        reader.step()
        assert not reader.prefix_fetch_begun
    assert reader.words("older") == ["reserved"]
    reader.arrive(older)
    reader.steps()
    assert len(reader.prefix_fetch_begun) > 1, "now it is their turn"


def test_a_lender_that_needed_its_blocks_for_others_lends_what_is_left():
    node, reader = source(num_blocks=8), Node(numerics=NUMERICS[1])
    node.local("other", prompt_of(16, first=2), salt="", max_tokens=1)
    node.steps()
    asked_to_borrow(reader)
    send_prefix = asked_to_lend(node, reader)
    num_left = len(send_prefix.block_ids)
    assert 0 < num_left < 6
    carry(node, reader)
    assert read_out(reader) == [("next", num_left * BLOCK_SIZE, len(NEXT) - num_left * BLOCK_SIZE)]
    reader.check_empty()


def test_a_lender_that_has_nothing_says_so_and_the_prompt_is_computed():
    node, reader = Node(numerics=NUMERICS[0]), Node(numerics=NUMERICS[1])
    asked_to_borrow(reader)
    assert asked_to_lend(node, reader) is None
    assert "no more of the tokens" in node.event("next", "failed").message
    reader.handle(cancel=fleet_pb2.Cancel(attempt=node.event("next", "failed").attempt))
    assert reader.cancelled == [EPOCH]
    assert read_before_the_end(reader) == [("next", 0, len(NEXT))]
    fails(reader)
    assert reader.words("next")[-2:] == ["prefix_fetch_ended", "cancelled"]
    assert reader.event("next", "cancelled").attempt.epoch == EPOCH


def read_before_the_end(reader):
    """The prompt does not wait for the end of the transfer, whose blocks nobody else can have until then."""
    share = reader.step()
    assert reader.num_free < reader.allocator.num_blocks - -(-len(NEXT) // BLOCK_SIZE)
    assert reader.load.num_blocks_leaked == 0
    return share


def test_what_is_late_is_computed():
    reader = Node(numerics=NUMERICS[1])
    asked_to_borrow(reader)
    assert reader.scheduler.wake_at_s == PATIENCE_S
    reader.tick(PATIENCE_S - 0.1)
    assert reader.begin() == []
    reader.tick(PATIENCE_S)
    assert reader.cancelled == [EPOCH]
    assert reader.step() == [("next", 0, len(NEXT))]
    fails(reader)
    assert reader.event("next", "prefix_fetch_ended").num_blocks == 0


@pytest.mark.parametrize("is_batch_invariant", [True, False])
def test_what_comes_after_patience_is_over_is_for_others_and_takes_nothing_from_a_prompt_that_has_begun(
    is_batch_invariant,
):
    node, reader = (
        source(is_batch_invariant=is_batch_invariant),
        Node(numerics=NUMERICS[1], is_batch_invariant=is_batch_invariant),
    )
    asked_to_borrow(reader)
    asked_to_lend(node, reader)
    received = send(node, reader)
    reader.tick(PATIENCE_S)
    assert reader.step() == [("next", 0, len(NEXT))]
    (node_request,) = reader.scheduler.node_requests
    held = list(node_request.names.names), list(node_request.names.numerics_ids)
    reader.worker.received(EPOCH, received)
    reader.check()
    assert (node_request.names.names, node_request.names.numerics_ids) == held != ([], [])
    assert read_out(reader) == []


def test_a_tail_that_tells_of_more_than_came_is_not_believed():
    node, reader = source(), Node(numerics=NUMERICS[1])
    asked_to_borrow(reader)
    send_prefix = asked_to_lend(node, reader)
    for tail, num_bytes in ((send_prefix.tail, 5 * BLOCK_BYTES), (b"\xff", 600)):
        reader.prefix_fetch_begun.pop(EPOCH, None)
        if ("remote prefix fetch", EPOCH) in [holder for holder, _ in reader.scheduler.leases]:
            reader.worker.received(EPOCH, Received(tail, num_bytes))
            reader.check()
    assert reader.event("next", "prefix_fetch_ended").num_blocks == 0
    assert read_out(reader) == [("next", 0, len(NEXT))]


def test_a_prompt_that_is_cancelled_while_its_blocks_come():
    node, reader = source(), Node(numerics=NUMERICS[1])
    asked_to_borrow(reader)
    asked_to_lend(node, reader)
    (node_request,) = reader.scheduler.node_requests
    reader.cancel(node_request.request)
    carry(node, reader)  # for whoever asks again
    assert reader.load.num_blocks_leaked == 0
    reader.check_empty()


def test_what_is_there_meanwhile_is_not_asked_for():
    reader = source()
    assert asked_to_borrow(reader) == [("next", 24, len(NEXT) - 24)]
    assert not reader.prefix_fetch_begun


def test_the_kv_offload_comes_first():
    """Its blocks are nearer; what it lacks is not asked for where it holds as much."""
    tier = OffloadPlan(num_host=16, host_s=0.001, reads_always=True)
    reader = source(num_blocks=9, tier=tier)
    reader.local("other", prompt_of(35, first=2), salt="", max_tokens=1)
    reader.steps()
    reader.prefill("next", NEXT, salt="", fetch_prefix=a_borrow())
    assert reader.begin() == [("next", 24, len(NEXT) - 24)]
    assert reader.num_loads == 1
    assert not reader.prefix_fetch_begun


def lender_with_a_tier(num_free=9, costs=None, **options):
    """Whose pool of 9 blocks has given up what it wrote, so that it lies in the KV offload; of that pool so many are
    not in use."""
    tier = OffloadPlan(num_host=16, **{"host_s": 0.001, "reads_always": True, **options})
    node = source(num_blocks=9, tier=tier, costs=costs)
    node.local("other", prompt_of(35, first=2), salt="", max_tokens=1)
    node.steps()
    node.loads_at_once = False
    if num_free < 9:
        node.local("more", prompt_of((9 - num_free) * BLOCK_SIZE - 1, first=4), salt="", max_tokens=1)
        node.begin()
        assert node.num_free == num_free
    return node


def test_what_lies_in_the_kv_offload_is_lent_too():
    node, reader = lender_with_a_tier(), Node(numerics=NUMERICS[1])
    asked_to_borrow(reader)
    assert asked_to_lend(node, reader) is None
    assert node.load.num_blocks_leaked == 0
    assert asked_to_lend(node, reader) is None  # told again
    (load_id,) = node.loads
    node.load_ends(load_id)
    assert len(node.sending[EPOCH].block_ids) == 6
    carry(node, reader)
    assert read_out(reader) == [("next", 24, len(NEXT) - 24)]
    assert node.load.tier.num_hits == 6
    node.check_empty()
    reader.check_empty()


@pytest.mark.parametrize("num_good", [0, 2])
def test_of_damaged_blocks_those_before_them_are_lent(num_good):
    node, reader = lender_with_a_tier(), Node(numerics=NUMERICS[1])
    asked_to_borrow(reader)
    asked_to_lend(node, reader)
    (load_id,) = node.loads
    node.load_ends(load_id, num_good)
    if num_good:
        assert len(node.sending[EPOCH].block_ids) == num_good
        carry(node, reader)
        assert read_out(reader) == [("next", num_good * BLOCK_SIZE, len(NEXT) - num_good * BLOCK_SIZE)]
    else:
        assert "no more of the tokens" in node.event("next", "failed").message
    node.check_empty()


def test_blocks_that_are_read_back_too_late_are_not_lent():
    node, reader = lender_with_a_tier(), Node(numerics=NUMERICS[1])
    asked_to_borrow(reader)
    asked_to_lend(node, reader)
    node.tick(node.now + LOAD_DEADLINE_S)
    assert "no more of the tokens" in node.event("next", "failed").message
    assert node.load.tier.num_late == 1
    node.check_empty()


@pytest.mark.parametrize(("num_free", "num_read"), [(7, 6), (4, 3), (1, 0)])
def test_as_many_are_read_back_for_others_as_answers_here_leave_room_for(num_free, num_read):
    """One answer is being written here, and may need one block more."""
    node, reader = lender_with_a_tier(num_free), Node(numerics=NUMERICS[1])
    asked_to_borrow(reader)
    asked_to_lend(node, reader)
    assert [len(load.slots) for load in node.loads.values()] == [num_read] * (num_read > 0)


def test_nothing_is_read_back_for_others_into_blocks_that_a_prompt_waits_for():
    """One answer may need one block more, and the prompt needs five of the seven that are free."""
    node, reader = lender_with_a_tier(num_free=7), Node(numerics=NUMERICS[1])
    node.local("waits", prompt_of(19, first=5), salt="", max_tokens=1)
    asked_to_borrow(reader)
    asked_to_lend(node, reader)
    assert [len(load.slots) for load in node.loads.values()] == [1]


def test_nothing_is_read_back_that_the_other_node_has():
    node, reader = lender_with_a_tier(num_free=4), Node(numerics=NUMERICS[1])
    reader.has_read("before", FIRST, salt="")  # 4 blocks, and there is room to read 3
    asked_to_borrow(reader)
    assert asked_to_lend(node, reader) is None
    assert node.loads == {}
    assert "no more of the tokens" in node.event("next", "failed").message


@pytest.mark.parametrize(("num_known", "num_loads"), [(0, 1), (4, 0)])
def test_blocks_are_read_back_for_others_where_computing_what_they_lack_takes_longer(num_known, num_loads):
    """Six blocks take 0.06 s to be read; computing takes 0.004 s a token."""
    costs = ExactCosts((0.0, 0.0, 0.0, 0.0, 0.004, 0.0, 0.0))
    node = lender_with_a_tier(costs=costs, host_s=0.01, reads_always=False)
    reader = Node(numerics=NUMERICS[1])
    if num_known:
        reader.has_read("before", FIRST, salt="")
    asked_to_borrow(reader)
    asked_to_lend(node, reader)
    assert len(node.loads) == num_loads


def test_a_node_keeps_some_loads_for_its_own_prompts():
    """Of four that are asked for there is room for all."""
    node = lender_with_a_tier()
    for epoch in range(MAX_LOADS):
        reader = Node(numerics=NUMERICS[1])
        asked_to_borrow(reader, num_tokens=2 * BLOCK_SIZE, epoch=epoch)
        asked_to_lend(node, reader, epoch=epoch)
    assert [len(load.slots) for load in node.loads.values()] == [2] * MAX_FETCHED
    assert MAX_FETCHED < MAX_LOADS


def test_a_coordinator_that_is_gone_ends_what_is_read_back_for_others():
    node, reader = lender_with_a_tier(), Node(numerics=NUMERICS[1])
    asked_to_borrow(reader)
    asked_to_lend(node, reader)
    node.detached()
    (load_id,) = node.loads
    node.load_ends(load_id)
    assert node.sending == {}
    node.check_empty()


@pytest.mark.parametrize("seed", few(range(30)))
def test_nothing_wrong_is_lent(seed):
    """Of chats in a pool and a tier too small for them, with reads that find a part."""
    rng = random.Random(seed)
    tier = OffloadPlan(rng.randint(0, 6), rng.randint(8, 24), 0.001, 0.001, reads_always=True)
    node, chats, num_fetched = Node(numerics=NUMERICS[0], num_blocks=14, tier=tier), [], 0
    for number in range(40):
        prompt, num_tokens = prompt_of(40, first=rng.randint(0, 2))[: rng.randint(6, 30)], rng.randint(1, 9)
        node.loads_at_once = True
        node.local(str(number), prompt, salt="", max_tokens=num_tokens)
        node.steps()
        chats.append([*prompt, *answer_of(prompt, num_tokens)])
        node.loads_at_once = False
        text, reader = [*rng.choice(chats), 1, 2, 3], Node(numerics=NUMERICS[1])
        asked_to_borrow(reader, text, num_tokens=(len(text) - 4) // BLOCK_SIZE * BLOCK_SIZE)
        asked_to_lend(node, reader, text)
        for load_id, load in list(node.loads.items()):
            node.load_ends(load_id, rng.choice([None, None, rng.randint(0, len(load.slots))]))
        if EPOCH in node.sending:
            carry(node, reader)
            num_fetched += reader.event("next", "prefix_fetch_ended").num_blocks
            reader.steps()
            assert reader.tokens("next") == answer_of(text, 1)
    assert num_fetched > 0
    assert node.load.tier.num_hits > 0
    node.check_empty()


def test_a_coordinator_that_is_gone_ends_prefix_fetches():
    node, reader = source(), Node(numerics=NUMERICS[1])
    asked_to_borrow(reader)
    asked_to_lend(node, reader)
    reader.detached()
    node.detached()
    assert reader.cancelled == node.cancelled == [EPOCH]
    fails(reader)
    del node.sending[EPOCH]
    node.worker.sent(EPOCH, TransferFailed("TRANSFER_FAILED", "cancelled"))
    node.check()
    node.check_empty()
    assert reader.num_free == reader.allocator.num_blocks


@pytest.mark.parametrize(
    "descriptor", [b"odd", a_descriptor(6, num_tokens=24, epoch=EPOCH + 1)], ids=["odd", "of another epoch"]
)
def test_a_descriptor_that_is_not_the_prefix_fetches_lends_nothing(descriptor):
    node = source()
    attempt = fleet_pb2.Attempt(request_id="next", epoch=EPOCH)
    node.handle(send_prefix=fleet_pb2.SendPrefix(attempt=attempt, descriptor=descriptor, token_ids=NEXT))
    assert not node.sending
    assert node.event("next", "failed").attempt == attempt
    node.check_empty()


def test_other_salts_and_adapters_find_nothing():
    node, reader = source(), Node(numerics=NUMERICS[1])
    asked_to_borrow(reader)
    attempt = fleet_pb2.Attempt(request_id="next", epoch=EPOCH)
    descriptor = reader.event("next", "prefix_fetch_begun").descriptor
    for other in ({"cache_salt": "b"}, {"adapter": "one"}):
        node.handle(send_prefix=fleet_pb2.SendPrefix(attempt=attempt, descriptor=descriptor, token_ids=NEXT, **other))
    assert not node.sending


def test_runs_of_makers_that_a_tail_cannot_tell_are_not_lent(monkeypatch):
    monkeypatch.setattr("serving_node.peer_fetch.MAX_NUMERICS_RUNS", 1)
    node, reader = source(is_batch_invariant=False), Node(numerics=NUMERICS[1])
    asked_to_borrow(reader)
    assert len(asked_to_lend(node, reader).block_ids) == 4  # of chunks; the steps' have another numerics id
    assert len(convert.from_tail(node.sending[EPOCH].tail)[1]) == 1
    carry(node, reader)
    assert read_out(reader)[0][1] == 16
