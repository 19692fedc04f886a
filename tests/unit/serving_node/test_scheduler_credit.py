"""Who gets credit first, and whose grant is taken back: what is read elsewhere does not wait for what is yet to be."""

import math

import pytest

from serving_core.node.requests import RequestState
from serving_core.slo import Due
from serving_node.admission import credit_order
from tests.toy_kv import answer_of
from tests.unit.serving_node.node_requests_kit import House
from tests.unit.serving_node.scheduler_kit import Node, prompt_of

SCARCE = {"slots": {"slots": 1}, "blocks": {"num_blocks": 6}}  # room for one prompt of 12 tokens


@pytest.mark.parametrize("scarce", SCARCE)
def test_a_prompt_that_is_read_gets_the_room_of_one_that_is_not(scarce):
    node = Node(**SCARCE[scarce])
    batch = node.reserve("batch", 12, age=1, priority=10)
    chat = node.reserve("chat", 12, age=2)
    assert node.cancelled == []
    node.begun(chat)
    assert node.cancelled == [batch.epoch]
    node.receive_fails(batch)
    assert node.words("batch") == ["reserved", "revoked"]
    node.arrive(chat)
    assert node.tokens("chat") == []
    node.steps()
    assert node.tokens("chat") == answer_of(prompt_of(12), 4)[1:]
    assert node.words("batch") == ["reserved", "revoked", "reserved"]
    node.arrive(batch)
    node.steps()
    assert node.tokens("batch") == answer_of(prompt_of(12), 4)[1:]
    node.check_empty()


@pytest.mark.parametrize("what", ["is coming", "is read", "moves here"])
def test_a_grant_that_is_of_use_stays(what):
    node = Node(slots=1)
    older = node.reserve("older", 4, age=1, priority=10, ahead=2 if what == "moves here" else 0)
    if what == "is coming":
        node.coming(older)
    elif what == "is read":
        node.begun(older)
    younger = node.reserve("younger", 4, age=2)
    node.begun(younger)
    assert node.cancelled == []
    assert node.step() == []
    assert node.cancelled == []


def test_the_first_of_its_kv_counts_for_this_grant_alone():
    node = Node(slots=1)
    batch = node.reserve("batch", 4, age=2)
    node.coming(batch)
    older = node.reserve("older", 4, age=1)
    node.begun(older)
    node.step()
    node.receive_fails(batch)
    node.cancel(older)
    node.receive_fails(older)
    assert node.words("batch") == ["reserved", "revoked", "reserved"]
    chat = node.reserve("chat", 4, age=3)
    node.begun(chat)
    assert node.cancelled == [batch.epoch, older.epoch, batch.epoch]


def test_credits_are_taken_back_one_by_one_from_the_last_to_be_read():
    node = Node(slots=3)
    credits = {
        name: node.reserve(name, 4, age=age, priority=priority)
        for name, age, priority in (("first", 1, 10), ("second", 2, 10), ("urgent", 3, 0))
    }
    chats = [node.reserve(f"chat {index}", 4, age=10 + index) for index in range(4)]
    for chat in chats:
        node.begun(chat)
    for place, name in enumerate(["second", "first", "urgent"]):
        assert node.cancelled == [credits[each].epoch for each in ["second", "first", "urgent"][: place + 1]]
        node.receive_fails(credits[name])
        assert node.words(f"chat {place}") == ["reserved"]
    assert len(node.cancelled) == 3, "what is read gives nothing up for younger ones"
    for chat in chats[:3]:
        node.arrive(chat)
    node.steps()
    assert [node.words(name)[2:] for name in credits] == [["reserved"], [], ["reserved"]], "and the last one waits"


def test_what_nobody_has_read_takes_nothing_from_others_however_old_it_is():
    node = Node(slots=1)
    oldest = node.reserve("oldest", 4, age=1)
    chat = node.reserve("chat", 4, age=2)
    node.begun(chat)
    node.receive_fails(oldest)
    assert node.words("chat") == ["reserved"]
    for _ in range(3):
        assert node.step() == []
    assert node.cancelled == [oldest.epoch]
    node.begun(oldest)
    assert node.step() == []
    assert node.cancelled == [oldest.epoch, chat.epoch], "now it could go on"


def test_a_prompt_that_is_read_waits_for_the_older_one_that_others_gave_way_to():
    """Which has not been read, but is first in its turn: what was taken for it goes to nobody else."""
    node = Node(9)
    rest = node.allocator.allocate(1)
    node.prefill("first", 2, age=1)
    node.local("second", 23, age=2, max_tokens=1)  # 6 blocks
    grant = node.reserve("granted", 8, age=3)
    node.step()
    rest.release()
    node.step()
    node.receive_fails(grant)
    node.begun(grant)
    assert node.words("granted") == ["reserved", "revoked"]
    assert node.step() == [("second", 0, 23)]
    assert node.words("granted") == ["reserved", "revoked", "reserved"]


def test_the_order_of_credit():
    """Of those that are read the oldest; then as nodes read: limits, priorities, ages."""
    house, limited = House(16), {"due": Due(first_s=5.0)}
    told = {
        "old": (1, {"priority": 10}),
        "important": (8, {"priority": -1}),
        "usual": (7, {"due": Due(math.inf, 1.0)}),
        "usual too": (9, {}),
        "limited": (20, limited),
        "limited and important": (21, {**limited, "priority": -1}),
        "read": (30, {"priority": 10, "has_first_token": True}),
        "migrations": (31, {"num_ahead": 3}),
        "read too": (32, {"has_first_token": True}),
    }
    for name, (age, facts) in told.items():
        house.add(name, age, RequestState.WAITING_FOR_BLOCKS, 4, **facts)
    names = [each.request.request_id for each in sorted(house.node_requests, key=credit_order)]
    expected = [
        "read",
        "migrations",
        "read too",
        "limited and important",
        "limited",
        "important",
        "usual",
        "usual too",
        "old",
    ]
    assert names == expected


def test_an_answer_that_moves_here_gets_the_slot_of_a_prompt_that_nobody_has_read():
    node = Node(slots=1)
    batch = node.reserve("batch", 4, age=1)
    migrating = node.reserve("migrating", prompt_of(6), num_prompt_tokens=4, age=2, ahead=2, max_tokens=8)
    assert node.cancelled == [batch.epoch]
    node.receive_fails(batch)
    assert node.words("migrating") == ["reserved"]
    node.arrive(migrating)
    assert node.step()
