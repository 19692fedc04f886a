"""A node whose shape changes while it works: what it is given from then on changes, and what it has goes on."""

from random import Random

import pytest

from protos import inference_pb2
from serving_core.shapes import Shape
from tests.effort import few
from tests.toy_kv import answer_of
from tests.unit.serving_node.scheduler_kit import Node, prompt_of


@pytest.mark.parametrize(
    ("role", "shape"), [("prefill", (8, 0, False)), ("decode", (0, 3, True)), ("mixed", (8, 3, True))]
)
def test_a_node_tells_the_shape_that_it_begins_with(role, shape):
    load = Node(budget=8, slots=3, role=role).load
    assert (load.role, load.shape) == (role, shape_of(*shape))


def shape_of(prompt_tokens, slots, accepts_transfers):
    return inference_pb2.Shape(prompt_tokens=prompt_tokens, slots=slots, accepts_transfers=accepts_transfers)


def test_a_new_shape_is_told_at_once():
    node = Node(budget=8, slots=3, role="prefill")
    node.reshape(0, 2, accepts_transfers=True)
    assert node.num_heartbeats == 1
    assert (node.load.role, node.load.shape) == ("decode", shape_of(0, 2, True))


def test_its_home_is_what_it_was_before_it_was_lent():
    node = Node(budget=8, slots=3, role="decode")
    node.reshape(8, 3, accepts_transfers=True, is_temporary=True)
    assert (node.scheduler.shape, node.scheduler.home) == (Shape(8, 3, True), Shape(0, 3, True))
    node.reshape(8, 2, accepts_transfers=True)
    assert (node.scheduler.shape, node.scheduler.home) == (Shape(8, 2, True), Shape(8, 2, True))
    node.reshape(9, 2, accepts_transfers=True)  # which it refuses
    assert (node.scheduler.shape, node.scheduler.home) == (Shape(8, 2, True), Shape(8, 2, True))


@pytest.mark.parametrize(("prompt_tokens", "slots"), [(9, 0), (0, 4), (0, 0)])
def test_a_shape_that_it_cannot_take_is_answered_and_the_old_one_told_again(prompt_tokens, slots):
    node = Node(budget=8, slots=3, role="prefill")
    node.reshape(prompt_tokens, slots)
    assert node.num_heartbeats == 1
    (failed,) = [event.failed for event in node.events if event.HasField("failed")]
    assert failed.reason == "BAD_PARAM"
    assert node.load.shape == shape_of(8, 0, False)


def test_the_shape_bounds_the_prompt_tokens_of_a_step_beside_its_answers():
    node = Node(num_blocks=32, budget=8)
    node.writes("writes", 4, max_tokens=9)
    node.prefill("read", 16)
    assert node.step() == [("writes", 4, 1), ("read", 0, 7)]  # a step has no more than 8 tokens
    node.reshape(2, 4, accepts_transfers=True)
    assert node.step() == [("writes", 5, 1), ("read", 7, 2)]
    node.reshape(8, 4, accepts_transfers=True)
    assert node.step() == [("writes", 6, 1), ("read", 9, 7)]


def test_what_comes_to_be_read_in_spite_of_the_shape_is_read_as_fast_as_the_node_can():
    node = Node(num_blocks=32, budget=8, role="decode")
    node.prefill("read", 12)
    node.local("own", 4)
    assert node.step() == [("read", 0, 8)]
    assert node.step() == [("read", 8, 4), ("own", 0, 4)]
    node.steps()
    assert node.tokens("own") == answer_of(prompt_of(4), 4)


def test_what_comes_to_be_written_in_spite_of_the_shape_is_written():
    node = Node(num_blocks=32, slots=2, role="prefill")
    node.writes("a", 4)
    node.local("b", 4)
    node.local("waits", 4)
    node.steps()
    for name, told in (("a", answer_of(prompt_of(4), 4)[1:]), ("b", answer_of(prompt_of(4), 4))):
        assert node.tokens(name) == told
    assert node.tokens("waits") == answer_of(prompt_of(4), 4)


def test_answers_beyond_the_slots_go_on_and_no_other_begins_before_they_are_fewer():
    node = Node(num_blocks=32, slots=3, budget=16)
    for name in "abc":
        node.writes(name, 4, max_tokens=4)
    node.reshape(0, 1, accepts_transfers=True)
    node.local("own", 4)
    later = node.reserve("later", 4)
    for place in (4, 5, 6):
        assert node.step() == [("a", place, 1), ("b", place, 1), ("c", place, 1)]
    assert later.epoch not in node.opened  # "own" is older
    assert node.step() == [("own", 0, 4)]
    node.steps()
    assert later.epoch in node.opened
    assert node.load.num_preemptions == 0


@pytest.mark.parametrize("seed", few(range(40), *range(6)))
def test_a_node_that_is_flipped_at_any_time_loses_nothing(seed):
    random = Random(seed)
    node = Node(num_blocks=12, slots=3, budget=8)
    names = []
    for number in range(12):
        name = f"r{number}"
        names.append((name, prompt := prompt_of(random.randint(1, 12), number)))
        node.local(name, prompt, max_tokens=random.randint(4, 9))
        for _ in range(random.randint(0, 4)):
            node.step()
        node.reshape(*random.choice([(8, 0, False), (0, 3, True), (8, 3, True), (2, 1, False)]))
    node.steps()
    for name, prompt in names:
        tokens = node.tokens(name)
        assert tokens == answer_of(prompt, len(tokens))
        assert node.finish_reasons(name)[-1] == inference_pb2.FINISH_REASON_LENGTH
    node.check_empty()
