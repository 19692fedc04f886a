"""Prompts that a node reads for its own answers: in chunks beside the batch, from what its pool holds already."""

import pytest

from protos import inference_pb2
from tests.toy_kv import answer_of
from tests.unit.serving_node.scheduler_kit import STEP_S, Node, prompt_of

LENGTH, STOP = inference_pb2.FINISH_REASON_LENGTH, inference_pb2.FINISH_REASON_STOP


def told(num_tokens):
    return ["first_token", *["step_tokens"] * (num_tokens - 1)]


def test_a_local_prompt_is_told_as_first_token_then_step_tokens():
    node = Node()
    node.now = 3.0
    node.local("a", 8, max_tokens=4)
    assert node.load.num_waiting_tokens == 8
    assert node.begin() == [("a", 0, 8)]
    assert len(node.works[0].block_ids) == 3  # the prompt's and the first token's
    node.end()
    assert node.load.num_waiting_tokens == 0
    assert node.steps() == [[("a", 8, 1)], [("a", 9, 1)], [("a", 10, 1)]]
    assert node.words("a") == told(4)
    assert node.tokens("a") == answer_of(prompt_of(8), 4)
    assert node.finish_reasons("a") == [0, 0, 0, LENGTH]
    assert node.event("a", "first_token").prefill_s == STEP_S
    assert (node.load.num_prompt_tokens, node.load.num_cached_tokens) == (8, 0)
    assert not node.opened
    node.check_empty()


def test_decode_goes_first_and_prompts_take_the_rest_in_order_of_age():
    node = Node(num_blocks=32, budget=8)
    node.writes("writes", 4, max_tokens=9)
    node.local("first", 10)
    node.writes("writes too", 4, max_tokens=9)
    node.prefill("second", 6)
    node.local("third", 6)
    assert node.step() == [("writes", 4, 1), ("writes too", 4, 1), ("first", 0, 6)]
    assert node.load.num_waiting_tokens == 4 + 6 + 6
    assert node.step() == [("writes", 5, 1), ("writes too", 5, 1), ("first", 6, 4), ("second", 0, 2)]
    assert node.words("first") == ["first_token"]
    # what has begun to write is in the order of age too
    assert node.step() == [("writes", 6, 1), ("first", 10, 1), ("writes too", 6, 1), ("second", 2, 4), ("third", 0, 1)]


def test_a_prompt_gets_on_though_all_others_write_and_the_budget_is_least():
    node = Node(num_blocks=32, slots=3, budget=3)
    for name in "ab":
        node.writes(name, 4, max_tokens=20)
    node.local("prompt", 4)
    for place in range(4):
        assert sorted(node.step()) == [("a", 4 + place, 1), ("b", 4 + place, 1), ("prompt", place, 1)]
    assert node.tokens("prompt") == answer_of(prompt_of(4), 1)


def test_cached_blocks_are_not_computed_but_the_last_token_is():
    node = Node()
    node.writes("there", 8, salt="s")
    node.local("part", 11, salt="s")
    node.local("whole", 8, salt="s")
    assert node.load.num_waiting_tokens == 3 + 4
    assert node.step() == [("there", 8, 1), ("part", 8, 3), ("whole", 4, 4)]
    assert node.event("part", "first_token").num_cached_tokens == 8
    assert node.event("whole", "first_token").num_cached_tokens == 4
    assert (node.load.num_prompt_tokens, node.load.num_cached_tokens) == (8 + 11 + 8, 8 + 4)


def test_a_prompt_uses_what_older_ones_have_computed_while_it_waited():
    node = Node(budget=8)
    node.local("first", 10, salt="s")
    node.local("second", 11, salt="s")
    node.step()
    num_free = node.num_free
    assert node.step() == [("first", 8, 2), ("second", 8, 3)]
    assert node.num_free == num_free - 1  # two of its three blocks are those of the first
    assert (node.load.num_prompt_tokens, node.load.num_cached_tokens) == (21, 8)


def test_what_waits_for_a_slot_counts_its_tokens_as_far_as_one_can_tell():
    node = Node(slots=1)
    node.writes("there", 8, salt="s", max_tokens=20)
    node.local("local", 11, salt="s")
    node.reserve("remote", 11)
    assert node.step() == [("there", 8, 1)]
    assert node.words("remote") == []
    assert node.load.num_waiting_tokens == 3


def test_slots_are_for_answers_and_hold_up_no_prompt_of_another_node():
    node = Node(slots=1)
    node.local("writes", 4, max_tokens=3)
    node.local("waits", 4)
    node.prefill("is read", 4)
    assert node.step() == [("writes", 0, 4), ("is read", 0, 4)]
    node.steps()
    assert node.words("waits") == told(4)


def test_an_answer_of_one_token_ends_with_its_first():
    node = Node()
    node.local("length", 3, max_tokens=1)
    node.local("stop", 4, stop_token_ids=tuple(answer_of(prompt_of(4), 1)))
    node.step()
    assert node.words("length") == node.words("stop") == ["first_token"]
    assert (node.finish_reasons("length"), node.finish_reasons("stop")) == ([LENGTH], [STOP])
    node.check_empty()


def test_an_answer_begun_elsewhere_goes_on_at_its_next_index():
    node = Node()
    node.local("a", 7, num_prompt_tokens=5, max_tokens=4, epoch=3)
    node.steps()
    assert node.words("a") == told(2)
    assert node.event("a", "first_token").token.index == 2
    assert node.event("a", "first_token").attempt.epoch == 3
    assert node.tokens("a") == answer_of(prompt_of(7), 2)
    node.check_empty()


def test_the_end_of_sequence_token_ends_an_answer_unless_it_is_to_be_ignored():
    answer = answer_of(prompt_of(5), 6)
    node = Node(eos_token_id=answer[0])
    node.local("ends", 5, max_tokens=6, ignore_eos=False)
    node.local("goes on", 5, max_tokens=6)
    node.local("says three", 5, max_tokens=6, ignore_eos=False, min_tokens=3)
    node.steps()
    assert node.tokens("ends") == answer[:1]
    assert node.tokens("goes on") == answer
    least = next(place for place in range(3, 7) if place == 6 or answer[place - 1] == answer[0])
    assert node.tokens("says three") == answer[:least]
    node.check_empty()


def test_a_prompt_that_is_preempted_in_the_middle_begins_again_and_counts_once():
    node = Node(num_blocks=7, budget=4, caching=False)
    node.writes("old", 7, max_tokens=12)  # 2 blocks
    node.local("young", 9)  # 3 blocks
    assert node.step() == [("old", 7, 1), ("young", 0, 3)]
    rest = node.allocator.allocate(2)
    assert node.step() == [("old", 8, 1)]  # it needs a third block
    load = node.load
    assert (load.num_preemptions, load.num_waiting_tokens, load.num_waiting) == (1, 9, 1)
    rest.release()
    for start in (0, 3, 6):  # the freed blocks are enough for it again
        assert node.step()[1] == ("young", start, 3)
    assert node.words("young") == ["first_token"]
    assert node.event("young", "first_token").prefill_s == 5 * STEP_S  # since it was first begun
    assert node.progress("young") == [(6, STEP_S)], "once, that it has begun"
    load = node.load
    assert (load.num_prompt_tokens, load.num_cached_tokens, load.num_preemptions) == (7 + 9, 0, 1)
    node.steps()
    assert node.tokens("young") == answer_of(prompt_of(9), 4)
    node.check_empty()


def test_what_a_prompt_had_computed_before_it_gave_way_does_not_count_as_cached():
    node = Node(num_blocks=7, budget=4)
    node.writes("old", 6, max_tokens=12)
    node.local("young", 9)
    assert [node.step(), node.step()] == [[("old", 6, 1), ("young", 0, 3)], [("old", 7, 1), ("young", 3, 3)]]
    rest = node.allocator.allocate(2)
    assert node.step() == [("old", 8, 1)]  # it needs a third block
    rest.release()
    assert node.step()[1] == ("young", 4, 3)  # its first block is still there
    node.steps()
    assert node.event("young", "first_token").num_cached_tokens == 0
    node.check_empty()


def test_one_that_is_preempted_while_it_writes_has_its_first_token():
    node = Node(num_blocks=7, caching=False)
    node.local("old", 7, max_tokens=12)
    node.local("young", 7, max_tokens=12)  # both together need 10 blocks in the end
    node.steps()
    assert node.load.num_preemptions > 0
    for name in ("old", "young"):
        assert node.words(name) == told(12)
        assert node.tokens(name) == answer_of(prompt_of(7), 12)
    assert node.load.num_waiting_tokens == 0
    node.check_empty()


@pytest.mark.parametrize("budget", [3, 5, 64])
def test_the_pool_need_not_be_larger_than_the_largest_answer(budget):
    node = Node(num_blocks=7, budget=budget, slots=3)
    for index in range(4):
        node.local(str(index), 9 + index, max_tokens=14 - index)  # 6 blocks each
    node.steps(1000)
    for index in range(4):
        assert node.tokens(str(index)) == answer_of(prompt_of(9 + index), 14 - index)
    node.check_empty()


def test_an_older_prompt_is_read_though_answers_fill_every_step():
    """As many as a step has tokens, and for each that ends another one comes: the youngest skips steps."""
    node = Node(num_blocks=100, budget=4, slots=4)
    for index in range(4):
        node.writes(f"writes {index}", 4, max_tokens=20, age=10 + index)
    node.prefill("older", 3, age=1)
    node.prefill("younger", 3, age=50)
    writing = [(f"writes {index}", 1) for index in range(4)]
    for _ in range(3):
        assert [(name, num_tokens) for name, _, num_tokens in node.step()] == [*writing[:3], ("older", 1)]
    assert node.words("older") == ["first_token"]
    assert [(name, num_tokens) for name, _, num_tokens in node.step()] == writing
    node.steps()
    for index in range(4):
        assert node.tokens(f"writes {index}") == answer_of(prompt_of(4), 20)[1:]
