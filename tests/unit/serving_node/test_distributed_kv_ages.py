"""Long and short requests of any age on nodes that hold tiles for each other: older ones have room before younger
ones, whatever these hold, and everyone gets the whole answer."""

from functools import partial
from random import Random

import pytest

from serving_core import reasons
from serving_core.node.requests import RequestState
from serving_node.distributed_kv.holder import HOLD_S
from serving_node.distributed_kv.source import RETRY_S
from tests.effort import few
from tests.unit.serving_node.remote_kv_kit import Fellows, LongNode
from tests.unit.serving_node.scheduler_kit import LAYOUT

MOST_ROUNDS = 6000
ASK_AGAIN_S = 1.0


class Load(Fellows):
    """Requests in a random order of ages. Those that are turned away ask again after a while, wherever."""

    def __init__(self, seed, num_nodes, share_long=0.25, num_requests=24):
        super().__init__(num_nodes)
        for node in self.nodes:
            node.on_failed = partial(self.turned_away, node)
        self.random, self.share_long = Random(seed), share_long
        self.ages = self.random.sample(range(100), num_requests)
        self.live = {}  # by name: what was asked
        self.waiting = []  # when it is asked again, and what
        self.num_outputs = {}
        self.num_failed = 0
        self.unfair = []  # who was turned away, though younger ones alone held what it lacked

    def ask_next(self):
        age = self.ages.pop()
        is_long = self.random.random() < self.share_long
        sizes = self.random.randint(1, 30 if is_long else 16), self.random.randint(1, 24 if is_long else 12)
        self.ask(str(age), age, *sizes, LongNode.HOLDERS * is_long)

    def ask(self, name, *facts, num_given=0):
        node = self.random.choice(self.nodes)
        self.live[name] = node.ask(name, *facts, num_given=num_given), facts

    def go_on(self):
        super().go_on()
        now = max(node.now for node in self.nodes)
        for node in self.nodes:
            node.now = now
        while self.waiting and now >= self.waiting[0][0]:
            _, name, facts, num_given = self.waiting.pop(0)
            self.ask(name, *facts, num_given=num_given)

    def turned_away(self, node, event):
        assert event.reason == reasons.QUEUE_FULL
        self.num_failed += 1
        name = event.attempt.request_id
        node_request, facts = self.live.pop(name)
        num_needed = -(-(len(node_request.request.token_ids) + 1) // LAYOUT.block_size)
        if not node_request.distributed and num_needed <= 8 - self.num_held_before(node, node_request.age):
            self.unfair.append(name)
        self.waiting.append((node.now + ASK_AGAIN_S, name, facts, node_request.request.num_output_tokens))

    def num_held_before(self, node, age):
        """Blocks of the node that older requests of others have."""
        older = [each for other in self.nodes for each in other.scheduler.node_requests if each.age < age]
        remote_kvs = [remote_kv for each in older for remote_kv in each.request.remote_kvs if remote_kv.holder is node]
        return sum(len(remote_kv.block_ids) for remote_kv in remote_kvs)

    def run(self):
        while self.ages:
            self.ask_next()
            for _ in range(self.random.randrange(6)):
                self.go_on()
        for number in range(MOST_ROUNDS):
            self.go_on()
            if not self.waiting and all(node.scheduler.is_idle for node in self.nodes):
                return number
        raise AssertionError("no end")


@pytest.mark.parametrize("num_nodes", [2, 3])
@pytest.mark.parametrize("first_seed", few(range(0, 400, 5)))
def test_who_is_turned_away_is_so_for_older_ones_alone_and_everyone_ends(first_seed, num_nodes):
    for seed in range(first_seed, first_seed + 5):
        load = Load(seed, num_nodes, share_long=0.8 if seed % 2 else 0.25)
        load.run()
        assert not load.unfair, seed
        assert len(load.live) == 24
        for node_request, (_, num_tokens, max_tokens, _) in load.live.values():
            assert node_request.request.token_ids[num_tokens:] == [1] * max_tokens
        assert all(node.allocator.num_free == 8 for node in load.nodes)


def stand(node):
    """Until nothing can be computed."""
    while node.compute():
        pass


@pytest.mark.parametrize("num_tokens", [9, 15])
def test_an_older_one_gets_the_blocks_of_younger_tiles_and_nobody_else_does(num_tokens):
    """Six of eight blocks are another node's. It has none to begin with, or grows out of the two that are left."""
    node = LongNode()
    [first, last] = [node.lease_remote_kv(most, age=9) and node.num_asked for most in (1, 2)]
    older = node.ask("older", 5, num_tokens, max_tokens=12)
    node.ask("younger", 7, 2, max_tokens=12)
    stand(node)
    assert node.revoked == [first, last]
    stand(node)
    assert node.revoked == [first, last]  # once
    for number in (first, last):
        node.worker.release_remote_kv(number)
        assert not node.lease_remote_kv(1, age=6, is_again=True)
    node.compute()
    assert older.lease is not None
    assert node.allocator.num_free > 2
    assert not node.lease_remote_kv(1, age=6, is_again=True)  # they would be revoked again
    node.run()
    assert older.request.num_output_tokens == 12
    assert "failed" not in node.told
    assert len(node.lease_remote_kv(1, age=6)) == 2


def test_the_youngest_request_gives_its_tiles_up_first_and_no_more_than_needed():
    node = LongNode()
    numbers = {age: node.lease_remote_kv(1, age) and node.num_asked for age in (7, 9, 8)}
    node.ask("older", 5, 13, max_tokens=3)  # four blocks, of which there are two
    stand(node)
    assert node.revoked == [numbers[9]]
    node.worker.release_remote_kv(numbers[9])
    node.run()
    assert node.revoked == [numbers[9]]
    assert "failed" not in node.told


@pytest.mark.parametrize(
    ("ages", "num_tokens", "num_revoked"),
    [
        ((3, 4, 9), 16, 0),
        ((3, 9, 9), 16, 2),
        ((3, 9, 9), 23, 2),
        ((3, 9, 9), 24, 0),
        ((5, 5, 5), 16, 0),
        ((3, 4, 5), 16, 0),
    ],
)
def test_nobody_gives_tiles_up_in_vain_nor_for_a_younger_one(ages, num_tokens, num_revoked):
    """Two blocks are left beside three tiles, and the first token of the answer needs a place too."""
    node = LongNode()
    for age in ages:
        node.lease_remote_kv(1, age)
    node.ask("waiting", 5, num_tokens, max_tokens=1)
    stand(node)
    assert len(node.revoked) == node.load().num_remote_kvs_revoked == num_revoked
    assert node.told.count("failed") == (not num_revoked)


def test_whose_tiles_are_revoked_begins_again_and_has_the_whole_answer():
    node = LongNode()
    long = node.long(28, max_tokens=50)
    while long.num_remote_blocks < 4:
        if node.opening is not None:
            node.put(1)
        node.compute()
    num_tokens = len(long.request.token_ids)
    revoked, kept = long.request.remote_kvs
    revoked.is_revoked = True
    node.compute()
    assert long.state is RequestState.WAITING
    assert node.closed == [revoked, kept]
    assert len(long.request.token_ids) == num_tokens  # what that step gave means nothing
    node.run()
    assert long.request.num_output_tokens == 50
    assert "failed" not in node.told
    assert node.allocator.num_free == 8


@pytest.mark.parametrize(("age", "waits"), [(5, True), (9, False)])
def test_tiles_of_younger_requests_make_room_for_those_of_an_older_one_that_has_waited(age, waits):
    """All that are for others are had by two of age 7."""
    node = LongNode()
    numbers = [node.lease_remote_kv(most, age=7) and node.num_asked for most in (2, 1)]
    begun_s = node.now
    while node.now < begun_s + 2 * HOLD_S and not node.revoked:
        assert not node.lease_remote_kv(1, age, is_again=True)
        node.compute()
        node.tick(node.now + RETRY_S)
    assert (node.revoked == numbers) == waits
    if waits:
        assert node.now - begun_s == pytest.approx(HOLD_S, abs=3 * RETRY_S)
        for number in numbers:
            node.worker.release_remote_kv(number)
        assert len(node.lease_remote_kv(3, age=6)) == 4  # it leaves the blocks of a tile
        assert len(node.lease_remote_kv(1, age, is_again=True)) == 2


def test_nobody_gives_way_to_one_whose_tiles_may_not_come():
    """They were revoked for an older one, which is still here."""
    node = LongNode()
    node.lease_remote_kv(3, age=9)
    node.ask("older", 5, 10, max_tokens=20)
    stand(node)
    node.worker.release_remote_kv(node.num_asked)
    younger = node.ask("younger", 7, 12, max_tokens=2)
    node.compute()
    while node.now < 2 * HOLD_S:
        assert not node.lease_remote_kv(3, age=6, is_again=True)
        node.tick(node.now + RETRY_S)
    node.compute()
    assert younger.state is RequestState.RUNNING


def test_nobody_waits_for_one_that_older_ones_leave_no_place():
    """All that are for others are had by an older one."""
    node = LongNode()
    node.lease_remote_kv(3, age=4)
    assert not node.lease_remote_kv(1, age=5, is_again=True)
    assert node.scheduler.wake_at_s is None
