"""Running answers that come to a node which holds some of their blocks, or gets them with another one; and what the
node says that they leave. Bits have no history, unless a test says so."""

import pytest

from kv_transfer.descriptor import TransferDescriptor
from serving_core import reasons
from serving_core.node.prefix import CHUNK, EITHER, MIXED_NUMERICS
from serving_core.node.requests import RequestState
from tests.toy_kv import ELSEWHERE, HERE, answer_of
from tests.unit.serving_node.scheduler_kit import BLOCK_BYTES, Node, prompt_of

COMMON = prompt_of(20)  # five blocks
MAX_TOKENS = 9


def alike(number):
    """A prompt that begins as the others do."""
    return [*COMMON, number % 3, (number + 1) % 3, number // 3 % 3]


def arrives(node, number, num_written=2, **job):
    """An answer that moves here; so many of its tokens are known."""
    prompt = alike(number)
    known = [*prompt, *answer_of(prompt, num_written)]
    job = {"salt": "one", "age": number, "ahead": 3, "max_tokens": MAX_TOKENS, **job}
    return node.reserve(f"r{number}", known, num_prompt_tokens=len(prompt), **job)


def saved(node, number):
    return node.event(f"r{number}", "committed").num_bytes_saved // BLOCK_BYTES


def finish(node, *numbers):
    node.steps()
    for number in numbers:
        told = node.tokens(f"r{number}")
        assert told == answer_of(alike(number), MAX_TOKENS)[-len(told) :]
        assert len(told) == MAX_TOKENS - 3
    node.check_empty()


def of(node, number):
    return next(each for each in node.scheduler.node_requests if each.request.request_id == f"r{number}")


def open_descriptor(node, request):
    return TransferDescriptor.decode(node.opened[request.epoch].descriptor)


# ---- where it comes to ----


def test_what_the_node_holds_does_not_come_and_is_held_once():
    node = Node(32, is_batch_invariant=True)
    node.arrive(arrives(node, 1))
    num_free = node.num_free
    second = arrives(node, 2)
    descriptor = open_descriptor(node, second)
    assert (descriptor.num_blocks, descriptor.num_cached_blocks) == (7, 5)
    assert descriptor.behind == of(node, 1).names.names[4]
    assert num_free - node.num_free == 2
    node.arrive(second)
    assert (saved(node, 1), saved(node, 2)) == (0, 5)
    assert of(node, 2).names.numerics_ids == [ELSEWHERE + EITHER] * 6
    finish(node, 1, 2)


def test_a_prompt_that_is_handed_over_may_begin_with_any_blocks_and_its_descriptor_names_none():
    node = Node(32, is_batch_invariant=True)
    node.arrive(arrives(node, 1))
    descriptor = open_descriptor(node, node.reserve("r2", alike(2), salt="one"))
    assert (descriptor.num_cached_blocks, descriptor.behind) == (5, b"")


def test_of_its_last_known_token_the_other_node_may_have_no_kv():
    node = Node(32, is_batch_invariant=True)
    node.arrive(arrives(node, 1, 4))
    again = arrives(node, 1, 1, epoch=99)
    assert len(again.token_ids) == 24
    assert open_descriptor(node, again).num_cached_blocks == 5


def test_all_of_it_comes_where_that_is_asked_for():
    node = Node(64, is_batch_invariant=True)
    first = arrives(node, 1)
    whole = arrives(node, 2, is_whole=True)
    assert node.opened.keys() == {first.epoch, whole.epoch}
    node.arrive(first)
    assert open_descriptor(node, arrives(node, 3, is_whole=True)).num_cached_blocks == 0
    node.arrive(whole)
    assert saved(node, 2) == 0


@pytest.mark.parametrize(
    ("is_batch_invariant", "numerics", "numerics_ids"),
    [(False, HERE, [ELSEWHERE + CHUNK] * 5), (True, HERE, [HERE + EITHER] + [MIXED_NUMERICS] * 4)],
    ids=["of one whose bits depend on their history", "mixed"],
)
def test_blocks_whose_bits_their_names_do_not_tell_come_all_the_same(is_batch_invariant, numerics, numerics_ids):
    node = Node(64, is_batch_invariant=is_batch_invariant, numerics=numerics)
    first = node.reserve("r1", alike(1), salt="one", max_tokens=MAX_TOKENS)
    if is_batch_invariant:  # its own block of their first tokens is found before the copy
        node.cancel(first)
        node.receive_fails(first)
        node.local("own", [*COMMON[:4], 0], max_tokens=1, salt="one")
        node.steps()
        first = node.reserve("again", alike(1), salt="one", max_tokens=MAX_TOKENS)
    node.arrive(first)
    names = [each.names for each in node.scheduler.node_requests]
    assert names[-1].numerics_ids[:5] == numerics_ids
    second = arrives(node, 2)
    num_alike = numerics_ids.count(HERE + EITHER)
    assert open_descriptor(node, second).num_cached_blocks == num_alike
    assert open_descriptor(node, second).behind == b"".join(names[-1].names[:num_alike])


# ---- several at once ----


def test_what_several_begin_with_comes_once():
    node = Node(32, is_batch_invariant=True)
    requests = [arrives(node, number) for number in range(1, 5)]
    assert list(node.opened) == [requests[0].epoch], "though nothing of it has come yet"
    assert node.num_free == 32 - 7
    node.arrive(requests[0])
    assert [node.opened[each.epoch].num_cached for each in requests[1:]] == [5, 5, 5]
    assert node.num_free == 32 - 7 - 3 * 2
    for request in requests[1:]:
        node.arrive(request)
    assert [saved(node, number) for number in range(1, 5)] == [0, 5, 5, 5]
    finish(node, 1, 2, 3, 4)


@pytest.mark.parametrize("how", ["fails", "is aborted", "is cancelled"])
def test_where_the_first_one_does_not_come_the_next_one_comes_whole(how):
    node = Node(32, is_batch_invariant=True)
    first, second, third = (arrives(node, number) for number in range(1, 4))
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
    finish(node, 2, 3)


def test_one_that_waits_can_be_called_off():
    node = Node(32, is_batch_invariant=True)
    first, second = (arrives(node, number) for number in range(1, 3))
    node.cancel(second)
    assert node.words("r2") == ["cancelled"]
    node.arrive(first)
    finish(node, 1)


def test_a_grant_that_is_taken_back_lets_go_of_what_was_here_and_finds_it_again():
    node = Node(16, is_batch_invariant=True)
    node.arrive(arrives(node, 1))
    second = arrives(node, 2)
    rest = node.allocator.allocate(node.num_free)
    node.steps()
    assert node.cancelled == [second.epoch]
    node.receive_fails(second)
    assert node.words("r2")[:2] == ["reserved", "revoked"]
    rest.release()
    node.steps()
    assert node.opened[second.epoch].num_cached == 5
    node.arrive(second)
    finish(node, 2)


@pytest.mark.parametrize("comes", [False, True])
def test_an_answer_waits_for_a_prompt_only_if_that_comes(comes):
    """One that is read may yet have to wait at its own node, and one that is not is not to be counted on."""
    node = Node(64, is_batch_invariant=True)
    first = node.reserve("r1", alike(1), salt="one", age=1)
    node.begun(first)
    if comes:
        node.coming(first)
    second = arrives(node, 2)
    assert (second.epoch in node.opened) == (not comes)
    node.arrive(first)
    assert node.opened[second.epoch].num_cached == 5 * comes


def test_a_prompt_whose_client_waits_does_not_wait_for_an_answer_that_has_not_begun_to_come():
    node = Node(64, is_batch_invariant=True)
    first = arrives(node, 1)
    read = node.reserve("r2", alike(2), salt="one", age=2)
    assert read.epoch not in node.opened, "it is yet to be read"
    node.begun(read)
    assert node.opened.keys() == {first.epoch, read.epoch}


# ---- where it leaves ----


def writes(**options):
    """A node, and an answer of which two blocks are full."""
    node = Node(**{"is_batch_invariant": True, **options})
    request = node.local("a", 9, max_tokens=MAX_TOKENS)
    node.step()
    return node, request


def name_of_block(node, index):
    (node_request,) = node.scheduler.node_requests
    return node_request.names.names[index]


def test_what_is_there_already_under_the_same_name_is_not_to_be_sent():
    node, request = writes()
    node.migrate(request, num_cached=2, behind=name_of_block(node, 1))
    assert len(node.sending[request.epoch].block_ids) == 2
    node.caught_up(request)
    assert node.sending[request.epoch].is_finished
    node.sent(request)
    node.cancel(request)
    node.check_empty()


@pytest.mark.parametrize("what", ["another name", "no name", "a block that is not full", "no caching"])
def test_behind_other_blocks_it_does_not_go_on_elsewhere(what):
    node, request = writes(caching=what != "no caching")
    name = bytes(32) if what == "no caching" else name_of_block(node, 1)
    descriptors = {
        "another name": {"num_cached": 2, "behind": name[::-1]},
        "no name": {"num_cached": 2},
        "a block that is not full": {"num_cached": 3, "behind": name},
        "no caching": {"num_cached": 2, "behind": name},
    }
    node.migrate(request, **descriptors[what])
    failed = node.event("a", "migration_failed")
    assert failed.reason == reasons.PAIRING_MISMATCH
    assert "cached blocks have other bits" in failed.message
    assert request.epoch not in node.sending
    node.steps()
    assert node.tokens("a") == answer_of(request.token_ids[:9], MAX_TOKENS)
    node.check_empty()


def test_it_can_move_whole_after_that():
    node, request = writes()
    node.migrate(request, num_cached=2, behind=bytes(32))
    node.keep(request)
    node.migrate(request)
    assert len(node.sending[request.epoch].block_ids) == 2
    assert [each.state for each in node.scheduler.node_requests] == [RequestState.RUNNING]
    node.caught_up(request)
    node.sent(request)
    node.cancel(request)
    node.check_empty()
