"""A node that would stand still: what its youngest only keeps for other nodes goes to an older one that lacks it."""

import pytest

from decode_node.preemption import MAX_EVICTIONS
from tests.toy_kv import answer_of
from tests.unit.serving_node.scheduler_kit import Node, prompt_of


def test_a_prompt_that_was_here_before_gets_the_blocks_of_a_grant():
    """Ages as they come: the grant was given while an older prompt was first in the queue."""
    node = Node(9)
    rest = node.allocator.allocate(1)
    node.prefill("first", 2)
    node.local("second", 23, max_tokens=1)  # 6 blocks
    grant = node.reserve("granted", 8)  # 3 blocks: enough is left for the first alone
    assert node.words("granted") == ["reserved"]
    assert node.step() == [("first", 0, 2)]
    rest.release()
    assert node.step() == []
    assert node.cancelled == [grant.epoch]
    node.receive_fails(grant)
    assert node.words("granted") == ["reserved", "revoked"]  # and not granted again before the older one
    assert node.step() == [("second", 0, 23)]
    assert node.words("granted") == ["reserved", "revoked", "reserved"]
    node.arrive(grant)
    node.steps()
    assert node.tokens("granted") == answer_of(prompt_of(8), 4)[1:]


@pytest.mark.parametrize("how", ["reserve", "local", "prefill"])
def test_an_older_request_gets_the_blocks_of_a_prompt_that_is_read(how):
    node = Node(6)
    younger = node.has_read("younger", 17, age=9)  # 5 blocks
    older = getattr(node, how)("older", 11, age=1)  # 3 blocks
    assert node.step() == ([("older", 0, 11)] if how != "reserve" else [])
    if how == "reserve":
        node.begun(older)
        assert node.step() == []
        assert node.words("older") == ["reserved"]
        node.arrive(older)
    if how == "prefill":
        node.deliver(older)
        node.sent(older)
    node.steps()
    node.deliver(younger)
    assert node.sending[younger.epoch].is_finished
    node.sent(younger)
    assert node.words("younger") == ["first_token", "transferred"]
    node.check_empty()


def test_the_youngest_goes_first_and_no_more_than_is_needed():
    node = Node(8)
    for name, age in (("middle", 5), ("youngest", 9), ("oldest", 3)):
        node.has_read(name, 8, age=age)
    node.prefill("older", 13, age=4)  # 4 blocks, 2 are free
    assert node.step() == [("older", 0, 13)]
    waiting = [each.request.request_id for each in node.scheduler.node_requests if each.lease is None]
    assert waiting == ["youngest"]


def test_an_older_request_gets_the_slot_of_a_grant():
    node = Node(16, slots=1)
    grant = node.reserve("granted", 4, age=9)
    read = node.has_read("read", 4, age=8)
    node.coming(grant)
    older = node.reserve("older", 4, age=1)
    assert node.words("older") == []
    assert node.step() == []
    assert node.cancelled == [], "nobody has read it yet: the running slot would be of no use"
    node.begun(older)
    assert node.cancelled == []
    assert node.step() == []
    assert node.cancelled == [grant.epoch]
    node.receive_fails(grant)
    assert node.words("older") == ["reserved"]
    node.arrive(older)
    node.steps()
    assert node.words("granted") == ["reserved", "revoked", "reserved"]
    assert node.words("read") == ["first_token"]  # it has no running slot, and kept what it has
    node.deliver(read)
    node.sent(read)
    node.arrive(grant)
    node.steps()
    node.check_empty()


def test_what_is_read_is_not_taken_for_one_that_lacks_a_slot_alone():
    node = Node(16, slots=1)
    node.reserve("granted", 4, age=1)
    node.has_read("read", 4, age=9)
    node.reserve("waits", 4, age=2)
    node.local("waits too", 4, age=3)
    assert node.step() == []
    assert node.cancelled == []
    assert node.num_free == 16 - 2 - 1


def test_one_that_was_preempted_has_no_slot_and_is_the_first_to_get_one_again():
    node = Node(8, slots=2)
    node.writes("old", 7, max_tokens=14, age=1)
    node.writes("young", 7, max_tokens=9, age=2)
    rest = node.allocator.allocate(node.num_free)
    node.step()
    node.step()
    assert node.load.num_preemptions == 1
    node.reserve("younger", 1, age=3)
    rest.release()
    node.tick(node.now)  # now there are blocks for both
    assert node.words("younger") == []
    assert ("young", 4, 5) in node.step()  # one of its blocks was there
    assert node.words("younger") == []
    node.steps()
    assert node.words("younger") == ["reserved"]


def test_nothing_is_taken_back_for_a_younger_one():
    node = Node(6)
    node.has_read("read", 8, age=1)
    node.reserve("granted", 7, age=2)  # 2 blocks
    node.prefill("prompt", 16, age=3)
    node.reserve("answer", 11, age=4)
    for _ in range(3):
        assert node.step() == []
    assert node.cancelled == []
    assert node.words("granted") == ["reserved"]


def test_nothing_is_taken_back_while_the_node_has_something_to_compute():
    node = Node(6)
    node.writes("writes", 4, max_tokens=4, age=1)
    grant = node.reserve("granted", 7, age=9)
    node.prefill("prompt", 13, age=2)
    while node.step():
        assert node.cancelled == [] or "writes" not in [
            each.request.request_id for each in node.scheduler.node_requests
        ]
    assert node.cancelled == [grant.epoch]


@pytest.mark.parametrize("what", ["a sender", "one that ends", "a grant that is taken back", "an aborted grant"])
def test_nothing_is_taken_back_while_something_comes_free_anyway(what):
    node = Node(8)
    sending = node.has_read("sending", 8, age=7)
    grant = node.reserve("granted", 4, age=8)  # 2 blocks
    other = node.reserve("other", 4, age=9)
    if what == "a sender":
        node.deliver(sending)
    elif what == "one that ends":
        node.cancel(other)
    elif what == "an aborted grant":
        node.receive_fails(other, "TRANSFER_ABORTED")
    node.prefill("prompt", 29, age=1)  # all 8 blocks
    cancelled = list(node.cancelled)
    node.step()
    if what == "a grant that is taken back":
        assert node.cancelled == [other.epoch]
        node.step()
        cancelled = [other.epoch]
    assert node.cancelled == cancelled
    assert grant.epoch in node.opened


def test_a_prompt_that_was_evicted_often_is_kept_unless_the_node_would_stand_still():
    node = Node(12, caching=False)
    read = node.has_read("read", 13, age=50)  # 4 blocks
    for index in range(MAX_EVICTIONS + 1):
        busy = node.writes("busy", 9, max_tokens=9, age=1, epoch=100 + index)  # needs no block for some steps
        old = node.writes("old", 7, max_tokens=9, age=2, epoch=200 + index)
        rest = node.allocator.allocate(node.num_free)
        node.step()
        shares = [each[0] for each in node.step()]
        is_kept = index == MAX_EVICTIONS
        assert shares == (["busy"] if is_kept else ["busy", "old"])
        if is_kept:
            node.cancel(busy)
            assert [each[0] for each in node.step()] == ["old"]
            node.cancel(old)
        else:
            node.cancel(busy)
            node.cancel(old)
        rest.release()
        node.step()
    assert node.words("read") == ["first_token"]
    node.deliver(read)
    node.sent(read)
    node.check_empty()


def test_prompts_that_have_blocks_get_on_though_an_older_one_has_none():
    node = Node(6, budget=4)
    node.prefill("young", 12, age=9)
    assert node.step() == [("young", 0, 4)]
    node.prefill("old", 24, age=1)
    assert node.step() == [("young", 4, 4)]
    node.local("younger still", 4, age=10)
    assert node.step() == [("young", 8, 4)]
    assert node.step() == [("old", 0, 4)]  # at the cost of what was read
    assert node.words("young") == ["first_token"]


# ---- how much is read for other nodes ----


def with_an_answer(num_blocks=16, **options):
    """A node that writes for long, in one block for now."""
    node = Node(num_blocks, **options)
    node.writes("own", 1, max_tokens=40, age=1)
    return node


def names_in(shares):
    return [name for name, _, _ in shares]


def test_prompts_for_other_nodes_hold_half_of_the_pool_where_the_node_also_writes():
    node = with_an_answer()
    for index in range(3):
        node.prefill(f"out {index}", 16, age=10 + index)  # 4 blocks each
    node.local("here", 4, age=20)
    assert names_in(node.step()) == ["own", "out 0", "out 1", "here"]
    assert names_in(node.step()) == ["own", "here"]


def test_one_that_leaves_lets_the_next_one_start():
    node = with_an_answer()
    requests = [node.prefill(f"out {index}", 16, age=10 + index) for index in range(3)]
    node.step()
    node.deliver(requests[1])
    assert names_in(node.step()) == ["own"]
    node.sent(requests[1])
    assert names_in(node.step()) == ["own", "out 2"]


def test_what_is_kept_does_not_count():
    node = with_an_answer()
    requests = [node.prefill(f"out {index}", 16, age=10 + index) for index in range(3)]
    node.step()
    node.keep(requests[0])
    assert names_in(node.step()) == ["own", "out 0", "out 2"]


def test_a_node_that_only_reads_has_all_of_its_pool_for_it():
    node = Node(16)
    for index in range(4):
        node.prefill(f"out {index}", 16)
    assert len(node.step()) == 4


@pytest.mark.parametrize("awaits", [False, True])
def test_answers_that_are_awaited_count_as_the_nodes_own(awaits):
    node = Node(16)
    if awaits:
        node.reserve("in", 4, age=1)
    for index in range(3):
        node.prefill(f"out {index}", 16, age=10 + index)
    assert len(node.step()) == (2 if awaits else 3)


def test_one_that_is_larger_than_half_of_the_pool_starts_when_there_is_no_other():
    node = with_an_answer()
    small = node.prefill("small", 4, age=10)
    node.prefill("large", 36, age=11)
    node.prefill("younger", 4, age=12)
    assert names_in(node.step()) == ["own", "small"]
    assert names_in(node.step()) == ["own"], "the younger one waits for the large one"
    node.deliver(small)
    node.sent(small)
    assert names_in(node.step()) == ["own", "large"]


def test_an_older_one_takes_the_place_of_younger_ones_that_only_wait():
    node = with_an_answer()
    for index in range(2):
        node.prefill(f"out {index}", 16, age=10 + index)
    node.step()
    node.prefill("older", 16, age=5)
    assert names_in(node.step()) == ["own", "older"]
    assert names_in(node.step()) == ["own"]
    waiting = [each.request.request_id for each in node.scheduler.node_requests if each.lease is None]
    assert waiting == ["out 1"]


def test_an_older_one_does_not_wait_for_one_that_was_evicted_often():
    node = with_an_answer(caching=False)
    node.prefill("read", 20, age=50)
    node.step()
    for index in range(MAX_EVICTIONS):
        older = node.prefill("older", 16, age=5, epoch=100 + index)
        assert "older" in names_in(node.step())
        node.cancel(older)
        assert "read" in names_in(node.step())
    node.prefill("older", 16, age=5, epoch=200)
    assert names_in(node.step()) == ["own", "older"]
    assert all(each.lease is not None for each in node.scheduler.node_requests)


def test_what_the_cap_holds_back_is_promised_no_blocks():
    node = with_an_answer(12)
    node.prefill("out", 24, age=10)
    node.step()
    node.prefill("held back", 16, age=11)
    node.reserve("in", 12, age=12)  # 4 blocks; 5 are free, and the running answer may need one
    assert node.words("in") == ["reserved"]


def test_nothing_is_taken_from_others_for_what_the_cap_holds_back():
    node = Node(16)
    node.prefill("out", 28, age=10)
    grant = node.reserve("in", 4, age=20)
    node.step()
    node.prefill("held back", 16, age=11)
    assert node.step() == []
    assert node.step() == []
    assert node.cancelled == []
    node.receive_fails(grant)
