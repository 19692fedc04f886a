"""What the oldest request of another node that waits for a tile of four blocks holds back, of 16."""

import pytest

from serving_core.node.requests import Outgoing, RequestState
from serving_node.distributed_kv.holder import HOLD_S, LAPSE_S, HeldKV, TileReservation
from tests.unit.serving_node.node_requests_kit import LAYOUT, House


class Node(House):
    def __init__(self, num_blocks=16):
        super().__init__(num_blocks)
        self.revoked = []
        self.held_kv = HeldKV(self.allocator, LAYOUT.block_size, 4 * LAYOUT.block_size, self.revoked.append)
        self.reservation = TileReservation(self.node_requests, self.leases, self.held_kv)

    def hold(self, name, age, num_blocks, stage=RequestState.RUNNING, **facts):
        return self.add(name, age, stage, num_blocks * LAYOUT.block_size, **facts)

    def wait(self, age=5):
        """One has asked in vain for so long that others give way."""
        self.reservation.put(age, 0.0, 0.0)
        self.reservation.put(age, HOLD_S, 0.0)

    def victims(self):
        return list(self.reservation.victims())


def test_the_youngest_give_way_and_no_more_than_a_tile_takes():
    node = Node()
    node.hold("older", 4, 6)
    younger = [node.hold(str(age), age, 3) for age in (6, 7, 8)]  # and one is free
    node.reservation.put(5, 0.0, 0.0)
    assert node.victims() == []  # not yet
    node.reservation.put(5, HOLD_S, 0.0)
    assert node.victims() == younger[:1:-1]
    node.leases.give_back(younger[2])
    assert node.victims() == []


def test_nobody_gives_way_where_that_would_not_be_enough():
    node = Node()
    node.hold("older", 4, 13)
    younger = node.hold("younger", 6, 3)
    node.wait()
    assert node.victims() == []
    assert node.reservation.num_kept_from(9) == 0
    node.node_requests.remove(node.node_requests.in_state(RequestState.RUNNING).__next__())
    younger.outgoing = Outgoing(is_sending=True)  # it cannot
    assert node.victims() == []


def test_nobody_gives_way_to_one_that_has_what_it_asked_for():
    node = Node()
    younger = node.hold("younger", 6, 14)
    node.wait()
    assert node.victims() == [younger]
    node.reservation.serve(5, HOLD_S, 0.0)
    assert node.victims() == []
    node.reservation.put(5, HOLD_S, 0.0)
    assert node.victims() == [younger]  # for the next tile nobody waits again


def test_while_a_grant_is_taken_back_nobody_else_gives_way():
    node = Node()
    node.hold("granted", 6, 7, RequestState.RECEIVING_KV, is_receiving=True, is_revoked=True)
    node.hold("younger", 7, 7)
    node.wait()
    assert node.victims() == []


@pytest.mark.parametrize(
    ("facts", "gives_way"), [({}, True), ({"is_coming": True}, False), ({"is_receiving": False}, False)]
)
def test_credits_of_which_nothing_has_come_give_way_before_others(facts, gives_way):
    node = Node()
    granted = node.hold("granted", 6, 14, RequestState.RECEIVING_KV, **{"is_receiving": True, **facts})
    node.reservation.put(5, 0.0, 0.0)
    assert node.victims() == [granted] * gives_way


def test_blocks_that_an_older_one_shares_do_not_come_free():
    node = Node()
    older = node.hold("older", 4, 14, salt="alike")
    older.num_computed = 14 * LAYOUT.block_size
    node.leases.publish(older)
    younger = node.add("younger", 6, RequestState.WAITING, 15 * LAYOUT.block_size, salt="alike")
    assert node.leases.take(younger, 15 * LAYOUT.block_size, num_cacheable=14 * LAYOUT.block_size, num_spare=0)
    node.wait()
    assert node.reservation.num_kept_from(9) == 0
    assert node.victims() == []


@pytest.mark.parametrize(("age", "num_kept"), [(4, 0), (5, 0), (6, 4)])
def test_younger_ones_leave_a_tile_and_older_ones_nothing(age, num_kept):
    node = Node()
    node.hold("younger", 9, 10)
    assert node.reservation.num_kept_from(age) == 0
    node.reservation.put(5, 0.0, 0.0)
    assert node.reservation.num_kept_from(age) == num_kept
    for num_blocks in (2, 3):
        rule = node.reservation.reserve_rule(lambda _, num_blocks=num_blocks: num_blocks)
        assert rule(node.add(f"asks-{num_blocks}", age, RequestState.WAITING, 1)) == (num_blocks == 2 or not num_kept)


def test_the_oldest_has_the_claim_until_it_lapses():
    node = Node()
    younger = node.hold("younger", 9, 14)
    node.wait(7)
    node.reservation.put(5, HOLD_S, 0.0)
    assert node.reservation.age == 5
    assert node.victims() == []  # nobody has waited for this one yet
    node.reservation.put(7, 9.0, 60.0)
    node.reservation.serve(7, 9.0, 60.0)
    assert node.reservation.wake_at_s == HOLD_S + LAPSE_S
    node.reservation.tick(HOLD_S + LAPSE_S - 0.1)
    assert node.reservation.age == 5
    node.reservation.tick(HOLD_S + LAPSE_S)
    assert node.reservation.wake_at_s is None
    node.reservation.put(7, 20.0, 0.0)
    node.reservation.put(7, 20.0 + HOLD_S - 0.1, 0.0)
    assert node.victims() == []
    node.reservation.put(7, 20.0 + HOLD_S, 0.0)
    assert node.victims() == [younger]


# What holds the 16 blocks: an older one here, a younger one here, tiles of an older request, tiles of a younger one.
@pytest.mark.parametrize(
    ("held", "revokes"),
    [
        ((5, 3, 0, 8), True),
        ((4, 4, 0, 8), False),  # the younger one here is enough
        ((4, 4, 0, 12), True),  # but more than these are never others'
        ((8, 0, 8, 0), False),
        ((13, 3, 0, 0), False),
        ((9, 3, 0, 4), True),
        ((2, 0, 8, 4), True),  # blocks are free, but others may have no more
        ((2, 0, 12, 0), False),
        ((0, 0, 12, 0), False),
        ((0, 0, 0, 12), True),
    ],
)
def test_tiles_are_revoked_where_those_who_are_here_hold_too_little(held, revokes):
    older, younger, num_older, num_younger = held
    node = Node(max(16, sum(held)))
    for number, (age, num_tiles) in enumerate([(4, num_older // 4), (6, num_younger // 4)]):
        assert len(node.held_kv.lease(number, num_tiles, age)) == num_tiles * 4
    for age, num_blocks in ((4, older), (6, younger)):
        node.hold(str(age), age, num_blocks, holds=num_blocks > 0)
    node.reservation.put(5, 0.0, 0.0)
    assert not node.reservation.revokes()
    node.reservation.put(5, HOLD_S, 0.0)
    assert node.reservation.revokes() == revokes
    if revokes:
        node.reservation.serve(5, HOLD_S, 0.0)
        assert not node.reservation.revokes()
        node.reservation.put(5, HOLD_S, 0.0)
        node.held_kv.revoke()
        assert not node.reservation.revokes()  # they come
        node.reservation.tick(99.0)
        assert not node.reservation.revokes()
