"""How long a request that is longer than its node's pool waits for blocks, there and on other nodes."""

from random import Random

import pytest

from kv_transfer.results import TransferFailed
from serving_core.node.requests import RequestState
from serving_core.requests import MEAN, Pooling
from serving_node.distributed_kv.holder import HOLD_S
from serving_node.distributed_kv.source import PATIENCE_S, RETRY_S
from tests.unit.serving_node.remote_kv_kit import TILE, Fellows, LongNode
from tests.unit.serving_node.scheduler_kit import LAYOUT


class Refused(LongNode):
    """One whose holders have no room."""

    def refuse(self):
        """They are asked, and asked again at once."""
        while self.opening is not None:
            self.put(0)
            if self.scheduler.wake_at_s is not None and self.now >= self.scheduler.wake_at_s:
                self.tick(self.now)

    def fill(self, num_prompt, max_tokens, age=2):
        """A long one takes what there is."""
        long = self.long(num_prompt, max_tokens, age)
        while self.opening is None:
            self.compute()
        return long

    def go_on(self):
        """A step, or time until holders are asked again."""
        self.refuse()
        if not self.compute():
            self.tick(self.now + RETRY_S)


@pytest.mark.parametrize("num_tiles", [0, 1])
@pytest.mark.parametrize("num_prompt", [10, 70])
def test_an_older_answer_takes_no_more_of_a_long_request_than_it_lacks(num_tiles, num_prompt):
    """It is read or written, with a tile elsewhere or without."""
    node = Refused()
    older = node.ask("older", 1, 2, max_tokens=20)
    long = node.fill(num_prompt, max_tokens=100)
    node.put(num_tiles)
    most, num_lost = 0, 0
    while older in node.scheduler.node_requests:
        num_left = 32 + num_tiles * TILE - len(older.lease.block_ids) * LAYOUT.block_size
        most = max(most, long.num_computed)
        assert long.num_computed >= min(most, num_left - 2 * LAYOUT.block_size)
        num_lost = max(num_lost, most - long.num_computed)
        node.refuse()
        assert node.compute()
        assert long.num_remote_blocks * LAYOUT.block_size == num_tiles * TILE
    assert "failed" not in node.told
    assert num_lost > 0


def test_a_prompt_whose_mean_is_wanted_begins_again():
    """What is added up of the tokens that are taken would be added twice."""
    node = Refused()
    older = node.ask("older", 1, 2, max_tokens=20)
    long = node.fill(70, max_tokens=2)
    node.refuse()
    long.request.pooling = Pooling(MEAN)
    num_before = 0
    while long.num_computed >= num_before:
        assert older in node.scheduler.node_requests
        num_before = long.num_computed
        node.go_on()
    assert num_before > long.num_computed + 2 * LAYOUT.block_size


def test_an_older_long_answer_takes_a_block_of_a_younger_one_where_hosts_have_none():
    node = Refused()
    younger = node.ask("younger", 5, 6, max_tokens=24)
    long = node.fill(6, max_tokens=60)
    node.refuse()
    num_before = long.request.num_output_tokens
    for _ in range(3):
        node.compute()
        node.refuse()
    assert long.request.num_output_tokens == num_before + 3
    assert younger.state is RequestState.WAITING


def test_hosts_are_asked_again_as_soon_as_a_step_is_done_that_was_running():
    """A block has come free, and it was computed in that when it was to ask."""
    node = Refused()
    rest = node.allocator.allocate(1)
    node.fill(70, max_tokens=2)
    node.refuse()
    assert node.compute() == 12
    rest.release()

    def is_due():
        node.tick(node.now + 2 * RETRY_S)
        assert node.opening is None
        assert node.scheduler.wake_at_s is None  # or it would be woken without end

    assert node.compute(is_due) == 4
    assert node.opening.is_again


def test_one_that_gets_a_block_now_and_then_loses_patience_too():
    node = Refused(num_blocks=32)
    others = [node.allocator.allocate(1) for _ in range(24)]
    long = node.fill(20, max_tokens=1000)
    for block in others:
        block.release()
        until_s = node.now + 5
        while node.now < until_s:
            node.go_on()
    assert long not in node.scheduler.node_requests
    assert node.told.count("failed") == 1


def test_one_whose_hosts_have_room_now_and_then_is_patient_for_each():
    node = Refused()
    long = node.fill(70, max_tokens=2)
    for _ in range(5):
        asked_s = node.now
        while node.now < asked_s + PATIENCE_S / 2 or node.opening is None:
            node.go_on()
        node.put(1)
    assert long in node.scheduler.node_requests


def test_blocks_that_come_free_are_not_granted_to_what_is_younger_than_a_prompt_that_lacks_some():
    node = Refused()
    older = node.ask("older", 1, 2, max_tokens=10)
    long = node.fill(70, max_tokens=2)
    node.refuse()
    younger = node.await_prompt("younger", 5)
    while older in node.scheduler.node_requests:
        node.go_on()
    node.go_on()
    assert younger.state is RequestState.WAITING_FOR_BLOCKS
    assert len(long.lease.block_ids) == 8
    while long in node.scheduler.node_requests:
        node.tick(node.now + RETRY_S)
        if node.opening is not None:
            node.put(1)
        node.compute()
    assert younger.state is RequestState.RECEIVING_KV


@pytest.mark.parametrize("step_s", [0.1, 6.0])
def test_what_has_only_its_hosts_to_go_on_with_is_turned_away_once_they_have_had_time(step_s):
    """Six of eight blocks are another node's, and nothing else is here that could be computed. Hosts may have to wait
    for a step like its own."""
    node = Refused()
    node.lease_remote_kv(9, age=0)
    long = node.fill(20, max_tokens=2)
    long.distributed.longest_step_s, asked_s = step_s, node.now
    while long in node.scheduler.node_requests:
        assert node.now < PATIENCE_S / 2
        node.go_on()
    assert "failed" in node.told
    assert node.now > asked_s + HOLD_S + step_s


class Holder(LongNode):
    """Of three tiles at most, for others."""

    def asked(self, age=1):
        """Twice, as the first time it makes no room."""
        return self.lease_remote_kv(3, age) or self.lease_remote_kv(3, age, is_again=True)


@pytest.mark.parametrize(("has_begun", "waits_s"), [(False, 0), (True, HOLD_S)])
def test_a_grant_of_which_nothing_has_come_gives_way_at_once(has_begun, waits_s):
    """The node that is to read it may be full of the one that waits."""
    node = Holder()
    node.allocator.allocate(1)
    granted = [node.await_prompt(str(age), age, num_tokens=11) for age in (5, 6)]
    assert [each.state for each in granted] == [RequestState.RECEIVING_KV] * 2
    for each in granted * has_begun:
        node.worker.receiving(each.request.epoch)
    assert not node.asked()
    while not any(each.is_revoked for each in granted):
        assert not node.compute()
        node.tick(node.now + RETRY_S)
        node.asked()
    assert [each.is_revoked for each in granted] == [False, True]  # no more than a tile takes
    assert waits_s <= node.now < waits_s + 3 * RETRY_S
    node.worker.received(granted[1].request.epoch, TransferFailed("TRANSFER_FAILED", "revoked"))
    node.check()
    assert len(node.asked()) == 4
    assert granted[1].state is RequestState.WAITING_FOR_BLOCKS


def test_for_each_further_tile_nobody_waits_so_long_again():
    node = Holder()
    younger = [node.ask(str(age), age, num_tokens, max_tokens=9) for age, num_tokens in ((5, 17), (6, 5))]
    node.compute()
    node.compute()
    assert [len(each.lease.block_ids) for each in younger] == [5, 2]
    given_s = []
    while len(given_s) < 2:
        if node.asked():
            given_s.append(node.now)
        node.tick(node.now + 1)
        if node.now >= HOLD_S:
            node.compute()
    assert given_s[0] >= HOLD_S
    assert given_s[1] < given_s[0] + HOLD_S
    assert younger[0].state is RequestState.WAITING


@pytest.mark.parametrize("seed", range(6))
def test_long_and_short_ones_that_come_in_any_order_all_end(seed):
    """On two nodes that are each other's holders, as an answer or turned away. Each step finds what it needs."""
    random, two = Random(seed), Fellows()
    asked = []
    for age in random.sample(range(100), 24):
        node = random.choice(two.nodes)
        is_long = random.random() < 0.25
        num_tokens, max_tokens = random.randint(1, 30 if is_long else 16), random.randint(1, 24 if is_long else 12)
        holders = node.HOLDERS * is_long
        asked.append(node.ask(str(age), age, num_tokens, max_tokens, holders))
        for _ in range(random.randrange(6)):
            two.go_on()
    for _ in range(2000):
        two.go_on()
        if all(node.scheduler.is_idle for node in two.nodes):
            break
    assert all(node.allocator.num_free == 8 for node in two.nodes)
    num_whole = sum(each.request.num_output_tokens == each.request.sampling.max_tokens for each in asked)
    assert num_whole + sum(node.told.count("failed") for node in two.nodes) == len(asked)
