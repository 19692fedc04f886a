"""Answers whose prompts other nodes read: credit and running slots, the batch, who gives way, and reuse."""

import pytest

from protos import inference_pb2
from serving_core import reasons
from tests.toy_kv import answer_of
from tests.unit.serving_node.scheduler_kit import BLOCK_BYTES, Node, prompt_of

LENGTH = inference_pb2.FINISH_REASON_LENGTH


def granted(node):
    return [opened.request.request_id for opened in node.opened.values()]


def test_credit_takes_the_prompt_and_the_first_token_to_come():
    node = Node(num_blocks=16)
    request = node.reserve("a", 8)
    assert node.num_free == 13  # 8 prompt tokens and one more, 4 to a block
    assert len(node.opened[request.epoch].block_ids) == 2  # only the prompt's are received
    assert node.descriptors("a") == [node.opened[request.epoch].descriptor]
    assert node.words("a") == ["reserved"]


def test_the_descriptor_is_told_when_every_rank_awaits_the_blocks():
    node = Node()
    node.credits_at_once = False
    request = node.reserve("a", 8)
    assert node.words("a") == []
    node.grant(request)
    assert node.words("a") == ["reserved"]


def test_credit_stops_at_the_slots_and_follows_age():
    node = Node(slots=2)
    for name in "ab":
        node.writes(name, 4)
    node.reserve("young", 4, age=20)
    node.reserve("old", 4, age=10)
    assert granted(node) == []
    node.steps()
    assert granted(node) == ["old", "young"]


def test_a_large_one_holds_up_those_that_are_younger_and_not_those_that_are_older():
    node = Node(num_blocks=6)
    node.writes("a", 8)  # 3 blocks
    node.reserve("large", 14, age=10)  # 4 blocks
    node.reserve("small", 1, age=11)
    assert granted(node) == []
    node.reserve("older", 1, age=9)
    assert granted(node) == ["older"]


def test_prompts_to_be_read_do_not_overtake_an_older_one_that_waits_for_credit():
    node = Node(num_blocks=6)
    node.writes("a", 8)  # 3 blocks
    waits = node.reserve("waits", 14, age=10)
    node.prefill("younger", 4, age=11)
    node.local("younger too", 4, age=12)
    assert node.step() == [("a", 8, 1)]
    node.prefill("older", 4, age=9)
    assert node.step() == [("a", 9, 1), ("older", 0, 4)]
    node.cancel(waits)
    assert [share[0] for share in node.step()] == ["a", "younger"]  # there is no room for the other


def test_credit_does_not_take_what_an_older_prompt_waits_for():
    node = Node(num_blocks=6, budget=4)
    node.writes("a", 8, max_tokens=9)  # 3 blocks
    node.prefill("reads", 16, age=5)  # 4 blocks: one is missing
    node.reserve("younger", 4, age=6)
    node.step()
    assert granted(node) == []
    node.reserve("older", 1, age=4)
    assert granted(node) == ["older"]


def test_credit_leaves_a_block_for_each_that_holds_some():
    node = Node(num_blocks=5)
    node.reserve("a", 4)  # 2 blocks
    node.reserve("b", 4)  # 2 more would leave 1 for the 1 that holds: fits
    node.reserve("c", 1, max_tokens=1)  # 1 block is free, and is spoken for
    assert granted(node) == ["a", "b"]


def test_what_is_read_for_another_node_grows_no_more_and_needs_no_spare_block():
    node = Node(num_blocks=5)
    node.has_read("read", 8)  # 2 blocks
    node.reserve("a", 11)  # all others
    assert granted(node) == ["a"]
    node = Node(num_blocks=6)
    node.writes("writes", 11)  # 3 blocks
    node.prefill("reads", 12)  # 3 more would leave none for the one that writes
    assert node.step() == [("writes", 11, 1)]


def test_a_committed_request_writes_one_token_a_step_behind_its_first():
    node = Node()
    request = node.reserve("a", 6, max_tokens=4)
    node.arrive(request)
    assert node.words("a") == ["reserved", "committed"]
    assert node.steps() == [[("a", 6, 1)], [("a", 7, 1)], [("a", 8, 1)]]
    assert node.tokens("a") == answer_of(prompt_of(6), 4)[1:]
    assert node.event("a", "committed").num_bytes == 2 * BLOCK_BYTES
    assert node.finish_reasons("a") == [0, 0, LENGTH]
    assert [token.index for event in node.events for token in event.step_tokens.tokens] == [1, 2, 3]
    node.check_empty()


def test_no_step_is_planned_while_there_is_nothing_to_compute():
    node = Node()
    assert node.step() == []
    node.reserve("a", 6)
    assert node.step() == []


def test_the_youngest_is_preempted_computes_again_in_chunks_and_goes_on():
    node = Node(num_blocks=7, budget=4, caching=False)
    node.writes("old", 7, max_tokens=12)  # 2 blocks
    node.writes("young", 7, max_tokens=9)  # 2 blocks
    rest = node.allocator.allocate(3)  # somebody else's
    node.step()  # both fill their second block
    assert node.step() == [("old", 8, 1)]  # both need a third: none is left
    assert node.load.num_preemptions == 1
    assert node.load.num_waiting_tokens == 9
    rest.release()
    assert node.step() == [("old", 9, 1), ("young", 0, 3)]  # first tokens of answers, then what the budget holds
    assert node.step() == [("old", 10, 1), ("young", 3, 3)]
    assert node.words("young") == ["reserved", "committed", "step_tokens"]
    assert node.step() == [("old", 11, 1), ("young", 6, 3)]
    node.steps()
    for name, max_tokens in (("old", 12), ("young", 9)):
        assert node.tokens(name) == answer_of(prompt_of(7), max_tokens)[1:]
    node.check_empty()


def test_the_young_one_in_want_of_a_block_gives_way_itself():
    node = Node(num_blocks=5, caching=False)
    node.writes("old", 5, max_tokens=3)  # 2 blocks, for good
    node.writes("young", 7, max_tokens=9)  # 2 blocks, and soon a third
    rest = node.allocator.allocate(1)
    assert node.step() == [("old", 5, 1), ("young", 7, 1)]
    assert node.step() == [("old", 6, 1)]
    assert node.load.num_preemptions == 1
    rest.release()
    assert node.step() == [("young", 0, 9)]


def test_age_and_not_arrival_says_who_gives_way():
    node = Node(num_blocks=5, caching=False)
    node.writes("young", 7, max_tokens=9, age=2)
    node.writes("old", 7, max_tokens=9, age=1)
    node.step()
    node.step()
    assert node.step() == [("old", 9, 1)]
    node.steps()
    assert node.tokens("old") == node.tokens("young") == answer_of(prompt_of(7), 9)[1:]
    node.check_empty()


def test_no_credit_while_a_preempted_request_that_is_older_waits():
    node = Node(num_blocks=6)
    node.writes("old", 7, max_tokens=16)
    node.writes("young", 7)
    rest = node.allocator.allocate(2)
    node.step()
    node.step()
    assert node.load.num_preemptions == 1
    node.reserve("new", 1)
    assert granted(node) == []
    rest.release()


def test_what_one_needs_that_was_preempted_is_kept_for_it_behind_the_first_prompt_too():
    node = Node(num_blocks=10, caching=False)
    node.writes("old", 7, max_tokens=16, age=1)
    node.writes("young", 7, max_tokens=9, age=3)
    rest = node.allocator.allocate(node.num_free)
    node.step()
    node.step()
    node.prefill("first", 12, age=2)  # 3 blocks, as many as the preempted
    node.reserve("younger", 1, age=4)
    rest.release()
    node.tick(node.now)  # 7 are free
    assert granted(node) == []


def test_refusals_name_the_limit_and_the_value():
    node = Node(num_blocks=4, slots=1, max_num_queued=1)
    node.reserve("never", 9, max_tokens=8)
    failed = node.event("never", "failed")
    assert (failed.reason, failed.message) == (
        reasons.PROMPT_TOO_LONG,
        "prompt and max_tokens need 5 KV blocks, the decode node has 4",
    )
    node.local("nor here", 9, max_tokens=8)
    assert node.event("nor here", "failed").reason == reasons.PROMPT_TOO_LONG
    node.reserve("fits exactly", 9, max_tokens=7)
    node.reserve("waits", 4)
    node.reserve("one too many", 4)
    failed = node.event("one too many", "failed")
    assert (failed.reason, failed.message) == (reasons.QUEUE_FULL, "the decode queue holds its 1 requests")


def test_tokens_that_are_answered_already_are_not_counted_again():
    node = Node(num_blocks=4)
    node.reserve("a", 13, num_prompt_tokens=9, max_tokens=7)  # 16 in the end
    assert node.words("a") == ["reserved"]


def test_a_tail_without_a_token_fails_the_request():
    node = Node()
    request = node.reserve("a", 6)
    node.arrive(request, tail=b"abc")
    assert node.words("a") == ["reserved", "failed"]
    assert node.event("a", "failed").reason == reasons.TRANSFER_FAILED
    node.check_empty()


def test_kv_of_which_some_has_not_come_fails_the_request_and_is_nobodys():
    """Whatever its sender says: nobody has written the rest."""
    node = Node()
    request = node.reserve("a", 9)
    node.arrive(request, num_bytes=2 * BLOCK_BYTES)
    assert node.words("a") == ["reserved", "failed"]
    failed = node.event("a", "failed")
    assert (failed.reason, failed.message) == (reasons.TRANSFER_FAILED, "2 blocks came; it must be 3")
    again = node.reserve("again", 9)
    assert node.opened[again.epoch].num_cached == 0
    node.arrive(again)
    assert node.words("again") == ["reserved", "committed"]


# ---- reuse ----


def test_credit_starts_with_the_blocks_that_the_pool_holds():
    node = Node()
    node.writes("first", 8, salt="s")
    second = node.reserve("second", 11, salt="s")
    other = node.reserve("other", 11, salt="another")
    assert node.opened[second.epoch].num_cached == 2
    assert node.opened[second.epoch].block_ids[:2] == [0, 1]
    assert node.opened[other.epoch].num_cached == 0
    assert node.num_free == 16 - 3 - 1 - 3
    node.arrive(second)
    committed = node.event("second", "committed")
    assert (committed.num_bytes, committed.num_bytes_saved) == (BLOCK_BYTES, 2 * BLOCK_BYTES)


def test_a_whole_prompt_may_be_there_and_its_next_token_gets_a_block_of_its_own():
    node = Node()
    node.writes("first", 8, salt="s")
    node.writes("second", 8, salt="s")
    assert (node.load.num_prompt_tokens, node.load.num_cached_tokens) == (8 + 8, 8)
    assert node.begin() == [("first", 8, 1), ("second", 8, 1)]
    first, second = (work.block_ids for work in node.works)
    assert first[:2] == second[:2]
    assert first[2] != second[2]
    node.end()


def test_what_is_granted_and_not_committed_is_nobody_elses():
    node = Node()
    node.writes("first", 4, salt="s")
    second, third = (node.reserve(name, 12, salt="s") for name in ("second", "third"))
    assert [opened.num_cached for opened in node.opened.values()] == [1, 1]
    node.receive_fails(second)
    assert node.load.num_blocks_cached == 0
    node.arrive(third)
    fourth = node.reserve("fourth", 12, salt="s")
    assert node.opened[fourth.epoch].num_cached == 3


def test_the_blocks_of_an_answer_stay_for_the_next_turn_whoever_reads_it():
    node = Node()
    node.writes("turn", 6, max_tokens=8, salt="s")
    node.steps()
    assert node.load.num_blocks_cached == 3  # 14 tokens, the last of which has no KV
    prompt = [*prompt_of(6), *answer_of(prompt_of(6), 8), 1, 2]
    granted = node.reserve("from elsewhere", prompt, salt="s")
    assert node.opened[granted.epoch].num_cached == 3
    node.prefill("for elsewhere", prompt, salt="s")
    node.local("here", prompt, salt="s")
    assert node.step() == [("for elsewhere", 12, 4), ("here", 12, 4)]


def test_credit_counts_cached_blocks_that_nobody_uses_as_taken():
    node = Node(num_blocks=6)
    gone = node.writes("gone", 8, salt="s")
    node.cancel(gone)
    assert (node.num_free, node.load.num_blocks_cached) == (6, 2)
    node.writes("a", 8)  # 3 blocks
    node.reserve("b", 8, salt="s")  # 3 more, 2 of them cached, would leave a none to grow
    assert granted(node) == []
    node = Node(num_blocks=6)
    node.writes("a", 8, salt="s")
    node.reserve("b", 8, salt="s")  # 1 more, the others are in use anyway
    assert granted(node) == ["b"]
    assert node.num_free == 2


def test_the_preempted_computes_only_what_was_taken_from_it():
    node = Node(num_blocks=8)
    node.writes("old", 7, max_tokens=12)  # 2 blocks
    node.writes("young", 11, max_tokens=9)  # 3 blocks
    rest = node.allocator.allocate(3)  # somebody else's
    node.step()  # both fill their last block
    assert node.step() == [("old", 8, 1)]  # it takes the youngest block of the preempted
    assert node.load.num_blocks_cached == 2
    rest.release()
    assert node.step() == [("old", 9, 1), ("young", 8, 5)]
    node.steps()
    assert node.tokens("young") == answer_of(prompt_of(11), 9)[1:]


def test_without_caching_every_block_is_sent():
    node = Node(caching=False)
    node.writes("first", 8, salt="s")
    second = node.reserve("second", 8, salt="s")
    assert node.opened[second.epoch].num_cached == 0
    assert node.hints == set()


@pytest.mark.parametrize("tp_size", [0, 1, 3])
def test_the_ranks_that_send_are_known_when_the_descriptor_is_drawn(tp_size):
    node = Node()
    request = node.reserve("a", 8, tp_size=tp_size)
    (node_request,) = [each for each in node.scheduler.node_requests if each.request.epoch == request.epoch]
    assert node_request.incoming.source_tp == max(1, tp_size)
