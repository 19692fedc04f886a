"""Prompts that begin alike and come together: what they begin with travels to the node that writes once."""

import pytest

from serving_core.node.requests import RequestState
from tests.toy_kv import answer_of
from tests.unit.serving_node.scheduler_kit import BLOCK_BYTES, Node, prompt_of

COMMON = prompt_of(20)  # five blocks


def alike(number):
    """A prompt that begins as the others do."""
    return [*COMMON, number % 3, (number + 1) % 3, number // 3 % 3]


def reserve(node, number, **job):
    return node.reserve(f"r{number}", alike(number), **{"salt": "one", "age": number, **job})


def words(node, number):
    return node.words(f"r{number}")


def finish(node, number, prompt=None):
    node.steps()
    prompt = alike(number) if prompt is None else prompt
    assert node.tokens(f"r{number}") == answer_of(prompt, 4)[1:]


def finish_all(node, count):
    for number in range(1, count + 1):
        finish(node, number)
    node.check_empty()


def test_what_prompts_begin_with_is_sent_and_held_once():
    node = Node(32)
    requests = [reserve(node, number) for number in range(1, 5)]
    assert list(node.opened) == [requests[0].epoch]
    assert node.num_free == 32 - 6
    node.arrive(requests[0])
    assert [node.opened[each.epoch].num_cached for each in requests[1:]] == [5, 5, 5]
    assert node.num_free == 32 - 6 - 3
    for request in requests[1:]:
        node.arrive(request)
    saved = [node.event(f"r{number}", "committed").num_bytes_saved for number in range(1, 5)]
    assert saved == [0, *[5 * BLOCK_BYTES] * 3]
    finish_all(node, 4)


def test_a_prompt_waits_again_for_what_is_behind_that():
    """Two that have more in common with each other than with the first one."""
    node = Node(64)
    more = [*COMMON, *[1] * 16]
    first = reserve(node, 1)
    second = node.reserve("r2", [*more, 0], salt="one", age=2)
    third = node.reserve("r3", [*more, 2], salt="one", age=3)
    node.arrive(first)
    assert node.opened.keys() == {second.epoch}
    assert node.opened[second.epoch].num_cached == 5
    node.arrive(second)
    assert node.opened[third.epoch].num_cached == 9
    node.arrive(third)
    finish(node, 3, [*more, 2])


@pytest.mark.parametrize("how", ["fails", "is aborted", "is cancelled"])
def test_where_the_first_one_does_not_come_the_next_one_gets_all_of_it(how):
    node = Node(32)
    first, second, third = (reserve(node, number) for number in range(1, 4))
    if how == "is cancelled":
        node.cancel(first)
        assert second.epoch in node.opened, "what may still come of the first one is of no use"
    node.receive_fails(first, *(["TRANSFER_ABORTED"] if how == "is aborted" else []))
    assert node.opened.keys() == {second.epoch}
    assert node.opened[second.epoch].num_cached == 0
    node.arrive(second)
    assert node.opened[third.epoch].num_cached == 5
    node.arrive(third)
    node.cancel(first)
    for number in (2, 3):
        finish(node, number)
    node.check_empty()


def test_where_the_first_ones_blocks_are_taken_back_nobody_waits_for_them():
    node = Node(32, slots=2)
    first, second, third = (reserve(node, number) for number in range(1, 4))
    urgent = node.reserve("urgent", 4, age=9)
    node.begun(urgent)
    assert node.opened.keys() == {first.epoch, urgent.epoch}
    read = node.reserve("read", 4, age=8)
    node.begun(read)
    assert node.cancelled == [first.epoch], "the only one of which nothing has come"
    node.receive_fails(first)
    assert node.opened.keys() == {urgent.epoch, read.epoch}
    for request in (urgent, read):
        node.arrive(request)
    node.steps()
    assert node.opened.keys() == {first.epoch}
    node.arrive(first)
    assert node.opened[second.epoch].num_cached == 5
    node.arrive(second)
    node.steps()
    assert node.opened[third.epoch].num_cached == 5
    node.arrive(third)
    finish_all(node, 3)


def test_when_the_coordinator_is_gone_nobody_waits_for_anybody():
    node = Node(32)
    first, _ = (reserve(node, number) for number in range(1, 3))
    node.detached()
    node.receive_fails(first)
    node.check_empty()


def test_a_prompt_that_is_read_waits_for_none_that_is_not():
    node = Node(32)
    first, second, third = (reserve(node, number) for number in range(1, 4))
    node.coming(first)
    node.begun(second)
    assert node.opened.keys() == {first.epoch, second.epoch}
    node.begun(third)
    assert third.epoch in node.opened
    node.arrive(first)
    node.arrive(third)
    node.arrive(second)
    finish_all(node, 3)


def test_a_prompt_that_is_read_waits_for_what_is_read_too_and_comes():
    node = Node(32)
    first, second, third = (reserve(node, number) for number in range(1, 4))
    younger = node.reserve("younger", 4, age=9)
    node.coming(first)
    node.begun(first)
    node.begun(second)
    for _ in range(3):
        assert node.step() == []
    assert node.opened.keys() == {first.epoch, younger.epoch}
    assert node.cancelled == [], "it lacks nothing that others could give way with"
    node.arrive(first)
    assert node.opened[second.epoch].num_cached == node.opened[third.epoch].num_cached == 5


@pytest.mark.parametrize(
    "what", ["little in common", "another salt", "no caching", "all that is to come", "another beginning"]
)
def test_who_gets_credit_beside_the_first_one(what):
    node = Node(64, caching=what != "no caching")
    if what == "another beginning":
        node.writes("before", [2] * 8, salt="one", max_tokens=2)
    first = node.reserve("r1", [*alike(1), *[1] * 9], salt="one", age=1)
    node.coming(first)
    node.begun(first)
    if what == "another beginning":
        second = node.reserve("r2", [*[2] * 8, *alike(1)[8:], *[1] * 9], salt="one")  # of which two blocks are here
    elif what == "little in common":
        second = node.reserve("r2", [*COMMON[:15], *[2 - token for token in COMMON[15:]]], salt="one")
    elif what == "all that is to come":
        migrations = {"num_prompt_tokens": 20, "ahead": 2, "is_whole": True}
        second = node.reserve("r2", alike(2), salt="one", max_tokens=8, **migrations)
    else:
        second = reserve(node, 2, salt="two" if what == "another salt" else "one")
    assert node.opened.keys() == {first.epoch, second.epoch}


def test_what_does_not_stand_behind_the_same_blocks_is_not_found_and_comes_once_more():
    """The node's own block of their first tokens comes after the first one was granted blocks, and is found first."""
    node = Node(64)
    first, second, third = (reserve(node, number) for number in range(1, 4))
    node.local("own", [*COMMON[:4], 0], max_tokens=1, salt="one")
    node.steps()
    node.arrive(first)
    assert node.opened.keys() == {second.epoch}
    assert node.opened[second.epoch].num_cached == 1
    node.arrive(second)
    assert node.opened[third.epoch].num_cached == 5
    node.arrive(third)
    finish_all(node, 3)


def test_what_takes_too_long_is_sent_for_each():
    node = Node(32, credit_timeout_s=5.0)
    first, second = (reserve(node, number) for number in range(1, 3))
    assert node.scheduler.wake_at_s == 5.0
    node.tick(5.0)
    assert node.opened.keys() == {first.epoch, second.epoch}
    assert words(node, 2) == ["reserved"]
    node.arrive(second)
    node.arrive(first)
    finish(node, 2)
    node.check_empty()


def test_what_takes_too_long_leaves_the_time_for_credit_as_it_is():
    node = Node(7, credit_timeout_s=5.0)
    first, _ = (reserve(node, number) for number in range(1, 3))
    node.tick(5.0)
    assert words(node, 2) == []
    assert node.scheduler.wake_at_s == 10.0
    node.tick(10.0)
    assert words(node, 2) == ["failed"]
    assert node.event("r2", "failed").reason == "QUEUE_FULL"
    node.arrive(first)
    finish(node, 1)


@pytest.mark.parametrize("how", ["reserve", "local", "prefill"])
def test_others_leave_room_for_those_that_share(how):
    """As if they had got it with the first one: a younger one does not take it meanwhile."""
    node = Node(14)
    first, second = (reserve(node, number) for number in range(1, 3))
    younger = getattr(node, how)("younger", 9, age=9)
    assert node.step() == []
    assert node.words("younger") == []
    node.arrive(first)
    assert second.epoch in node.opened
    shares = node.step()
    if how == "reserve":
        assert younger.epoch in node.opened
    else:
        assert ("younger", 0, 9) in shares


def test_others_leave_slots_for_those_that_share():
    node = Node(64, slots=2)
    first, second = (reserve(node, number) for number in range(1, 3))
    other = node.reserve("other", 4, age=9)
    assert other.epoch not in node.opened
    node.arrive(first)
    assert second.epoch in node.opened
    assert other.epoch not in node.opened


def test_those_that_share_take_no_places_of_those_that_wait_for_room():
    node = Node(10, max_num_queued=1)
    for number in range(1, 4):
        reserve(node, number)
    assert [words(node, number) for number in range(1, 4)] == [["reserved"], [], []]
    node.reserve("first without room", 33, age=8)
    node.reserve("second without room", 33, age=9)
    assert [node.words(f"{which} without room") for which in ("first", "second")] == [[], ["failed"]]


def test_steps_are_planned_ahead_while_prompts_only_wait_for_what_another_one_brings():
    node = Node(64)
    node.writes("answer", 5, max_tokens=20, age=1)
    for number in (2, 3):
        reserve(node, number)
    assert [each.state for each in node.scheduler.node_requests][1:] == [
        RequestState.RECEIVING_KV,
        RequestState.WAITING_FOR_BLOCKS,
    ]
    node.begin()
    assert node.scheduler.plan_next(node.works)
