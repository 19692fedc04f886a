"""Requests that are longer than a node's pool, driven by hand: their oldest tiles leave as the pool fills up."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import numpy as np
import pytest

from engine.attention.distributed import TILE_KEYS
from engine.build import build_engine
from kv_transfer.distributed_kv.wire import TileRequest
from protos import convert, fleet_pb2
from serving_core.errors import SettingsError
from serving_core.net.tls import TlsSettings
from serving_core.node.blocks import BlockAllocator
from serving_core.node.requests import Distributed, HolderEndpoint, RequestState
from serving_core.settings import EngineSettings
from serving_node.decisions import OpenRemoteKV
from serving_node.distributed_kv.ends import RemoteKVEnds, tile_tokens
from serving_node.distributed_kv.holder import HOLD_S, LAPSE_S, MOST_STEP_S, HeldKV
from serving_node.distributed_kv.source import PATIENCE_S, RETRY_S
from serving_node.link import LinkSettings
from serving_node.settings import NodeSettings, check_network
from tests.tls_kit import authority, flags_of
from tests.unit.serving_node.remote_kv_kit import TILE, Fellows, LongNode
from tests.unit.serving_node.runner_kit import DEADLINE_S
from tests.unit.serving_node.scheduler_kit import LAYOUT


def test_a_long_answer_leaves_its_oldest_tiles_and_ends():
    node = LongNode()
    node_request = node.long(20, max_tokens=80)
    node.run()
    assert len(node_request.request.token_ids) == 100
    assert len(node.closed) >= (100 - 32) // TILE
    assert "step_tokens" in node.told
    assert node.allocator.num_free == 8
    assert node.scheduler.is_idle


def test_a_long_prompt_is_read_in_what_fits():
    node = LongNode()
    node_request = node.long(90, max_tokens=2)
    node.run()
    assert node_request.request.num_output_tokens == 2
    assert node.allocator.num_free == 8


def test_it_holds_still_while_tiles_leave_and_others_go_on():
    node = LongNode()
    long = node.long(20, max_tokens=50)
    short = node.ask("short", 2, 2, max_tokens=20)
    while node.opening is None:
        node.compute()
    assert long.is_moving
    num_long, num_short = len(long.request.token_ids), len(short.request.token_ids)
    assert node.compute() == 1
    assert [len(each.request.token_ids) for each in (long, short)] == [num_long, num_short + 1]
    assert node.put(2) >= 2
    assert long.num_remote_blocks == 4
    assert node.compute() == 2


def test_nothing_is_freed_before_the_tiles_have_arrived_even_when_it_ends():
    node = LongNode()
    long = node.long(28, max_tokens=50)
    while node.opening is None:
        node.compute()
    node.do(fleet_pb2.NodeCommand(cancel=fleet_pb2.Cancel(attempt=convert.attempt_of(long.request))))
    assert node.allocator.num_free == 0
    assert "cancelled" not in node.told
    node.put(1)
    assert "cancelled" in node.told
    assert len(node.closed) == 1
    assert node.allocator.num_free == 8


@pytest.mark.parametrize("num_prompt", [14, 7])
def test_what_does_not_fit_beside_the_tiles_of_others_is_told_so_and_the_rest_goes_on(num_prompt):
    """Six of eight blocks are another node's: the one of 14 tokens cannot even start, that of 7 grows out."""
    node = LongNode()
    node.lease_remote_kv(9, age=0)
    node.ask("large", 1, num_prompt, 4)
    node.ask("small", 2, 2, 4)
    while node.compute():
        pass
    assert not len(node.scheduler.node_requests)
    assert node.told.count("failed") == 1
    assert node.told.count("first_token") == (1 if num_prompt == 14 else 2)


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_long_one_that_is_older_gets_room_from_those_that_are_read(is_kept):
    """One that was begun elsewhere, and comes to a node where one block is left."""
    node = LongNode(num_slots=1 if is_kept else 8)
    younger = [node.read_for_another(name, age, tokens) for name, age, tokens in (("a", 2, 18), ("b", 3, 5))]
    while node.compute():
        pass
    assert [each.state for each in younger] == [RequestState.PREFILLED] * 2
    long = node.long(46, max_tokens=2)
    node.compute()
    for each in younger * is_kept:
        attempt = convert.attempt_of(each.request)
        node.do(fleet_pb2.NodeCommand(keep=fleet_pb2.Keep(attempt=attempt), attempt=attempt))
    for _ in range(20):
        node.compute()
        if node.opening is not None:
            node.put(1)
    assert long.request.num_output_tokens == 2
    assert long not in node.scheduler.node_requests


def test_its_longest_step_is_told_to_hosts():
    node = LongNode()
    long = node.long(28, max_tokens=50)
    node.ask("beside", 0, 2, max_tokens=50)
    for step_s in (0.3, 5.5, 0.2):
        node.compute(step_s=step_s)
    assert long.distributed.longest_step_s == 5.5


def test_hosts_without_room_are_asked_again_and_then_it_fails():
    node = LongNode()
    node.long(28, max_tokens=50)
    while node.opening is None:
        node.compute()
    asked_s, asked_again = [], []
    while node.opening is not None:
        asked_s.append(node.now)
        asked_again.append(node.opening.is_again)
        node.put(0)
        node.tick(node.scheduler.wake_at_s)
    assert "failed" in node.told
    assert asked_again == [False] + [True] * (len(asked_s) - 1)
    assert asked_s[1] == asked_s[0]  # at once, so that room is made
    assert np.diff(asked_s[1:]) == pytest.approx(RETRY_S)
    assert 0 < node.now - asked_s[0] - PATIENCE_S <= 2 * RETRY_S
    assert node.scheduler.is_idle
    assert node.allocator.num_free == 8


def test_of_those_that_wait_for_each_others_blocks_the_younger_gives_way():
    """Each of two requests has filled the pool of its own node. The older one goes on at once; the other one ends here
    too, or is turned away."""
    two = Fellows()
    older, _ = (node.long(28, max_tokens=24, age=age) for age, node in enumerate(two.nodes))
    while not all(node.scheduler.is_idle for node in two.nodes):
        two.go_on()
        if older in two.nodes[0].scheduler.node_requests:
            assert two.nodes[0].now < PATIENCE_S
    assert older.request.num_output_tokens == 24
    assert "failed" not in two.nodes[0].told
    assert all(node.allocator.num_free == 8 for node in two.nodes)


@pytest.mark.parametrize(("age", "num_hosted"), [(0, 1), (2, 0)])
def test_nobody_gives_way_to_a_younger_one_nor_in_vain(age, num_hosted):
    node = LongNode()
    long = node.long(28, max_tokens=50)
    while node.opening is None:
        node.compute()
    assert not node.lease_remote_kv(1, age=0)  # it may get room yet
    node.put(0)
    assert bool(node.lease_remote_kv(1, age)) == bool(num_hosted)
    assert (long.state is RequestState.WAITING) == bool(num_hosted)
    node.scheduler.distributed_kv.held_kv.release(2)
    assert len(node.lease_remote_kv(9, age=2)) == 6 * num_hosted  # three quarters, or nothing


def test_a_lost_remote_kv_fails_the_attempt_and_its_token_is_not_told():
    node = LongNode()
    long = node.long(28, max_tokens=50)
    while not long.num_remote_blocks:
        if node.opening is not None:
            node.put(1)
        node.compute()
    assert long.state is RequestState.RUNNING
    num_tokens, node.told = len(long.request.token_ids), []
    long.request.remote_kv_error = "it is gone"
    node.compute()
    assert node.told == ["failed"]
    assert len(long.request.token_ids) == num_tokens
    assert len(node.closed) == 1
    assert node.allocator.num_free == 8


class BusyHolder(LongNode):
    """Of two tiles, for one of another node. It is asked while steps run."""

    def __init__(self):
        super().__init__(tile=16)
        self.given, self._next_age = [], 100

    def ask_for(self, age, *, is_again=True, step_s=0.0):
        def ask():
            self.given = self.given or self.lease_remote_kv(1, age, is_again=is_again, step_s=step_s)

        return ask

    def go_on(self, beside=lambda: None):
        """One step of short ones that come and go, without end; and a tick, if one is due."""
        while self.scheduler.node_requests.count(RequestState.WAITING) < 3:
            self._next_age += 1
            self.ask(f"short-{self._next_age}", self._next_age, 5, max_tokens=3)
        if (wake_at_s := self.scheduler.wake_at_s) is not None and self.now >= wake_at_s:
            self.tick(self.now)
        self.compute(beside)

    def go_on_asked(self, age, num_s, *, is_again=True, step_s=0.0):
        """Until there is a tile, or so many seconds are over."""
        begun_s, ask_s = self.now, 0.0
        while not self.given and self.now < begun_s + num_s:
            is_due = self.now >= ask_s
            ask_s = self.now + max(RETRY_S, step_s) if is_due else ask_s
            self.go_on(*[self.ask_for(age, is_again=is_again, step_s=step_s)] * is_due)


@pytest.mark.parametrize(("age", "is_again", "has_room"), [(1, True, True), (1, False, False), (10**6, True, False)])
def test_younger_prompts_that_come_and_go_leave_room_for_an_older_one_that_waits(age, is_again, has_room):
    node = BusyHolder()
    node.go_on_asked(age, HOLD_S - 1, is_again=is_again)
    assert len(node.given) == 4 * has_room
    num_begun = node.told.count("first_token")
    for _ in range(30):
        node.go_on()
    assert node.told.count("first_token") > num_begun
    assert "failed" not in node.told


@pytest.mark.parametrize("step_s", [3, 6])
def test_room_is_left_for_one_that_does_not_ask_while_it_is_in_a_step(step_s):
    node = BusyHolder()
    node.go_on_asked(1, 2 * step_s, step_s=step_s)
    assert node.given
    assert node.now == pytest.approx(step_s, abs=0.2)  # when it asks again


@pytest.mark.parametrize(("step_s", "waits_s"), [(0, LAPSE_S), (6, LAPSE_S + 6), (1e6, LAPSE_S + MOST_STEP_S)])
def test_nobody_waits_for_one_that_does_not_ask_any_more(step_s, waits_s):
    node = BusyHolder()
    node.go_on()
    ends_s = node.now + waits_s
    node.go_on(node.ask_for(1, step_s=step_s))
    assert not node.given
    large = node.ask("large", 99, 17, max_tokens=1)  # it would leave less than a tile
    while node.compute():
        assert node.now < ends_s
    assert large.state is RequestState.WAITING
    assert node.scheduler.wake_at_s == pytest.approx(ends_s)
    node.tick(ends_s)
    assert node.scheduler.wake_at_s is None
    assert node.compute()


def test_room_that_is_made_for_one_is_not_taken_by_a_younger_one():
    node = BusyHolder()
    node.go_on()
    node.go_on(node.ask_for(1))
    while node.compute():
        pass
    assert not node.lease_remote_kv(1, age=2, is_again=True)
    assert len(node.lease_remote_kv(1, age=1, is_again=True)) == 4


def test_what_another_node_reads_gets_no_credit_before_an_older_one_that_waits():
    node = BusyHolder()
    node.go_on()
    node.go_on(node.ask_for(1))
    younger, older = node.await_prompt("younger", 50, num_tokens=17), node.await_prompt("older", 0)
    while node.compute():
        pass
    assert [older.state, younger.state] == [RequestState.RECEIVING_KV, RequestState.WAITING_FOR_BLOCKS]
    node.tick(node.now + LAPSE_S)
    assert younger.state is RequestState.RECEIVING_KV


def test_nobody_gives_way_to_what_may_not_start():
    """A prompt of the node's own waits for the older one of another node, for which there is room by now."""
    node = BusyHolder()
    filling = node.ask("filling", 3, 13, max_tokens=2)
    read = node.read_for_another("read", 6, 10)
    node.compute()
    node.compute(node.ask_for(1))
    assert not node.given
    waiting = node.ask("waiting", 5, 20, max_tokens=2)
    while node.compute():
        pass
    assert filling not in node.scheduler.node_requests
    assert [waiting.state, read.state] == [RequestState.WAITING, RequestState.PREFILLED]
    assert len(node.lease_remote_kv(1, age=1)) == 4


def test_a_long_answer_gives_way_to_an_older_one_that_has_waited():
    """It would end long after the older one has lost patience."""
    node = BusyHolder()
    younger = node.ask("younger", 5, 17, max_tokens=14)
    node.compute()
    while not node.given:
        assert node.now < PATIENCE_S
        node.tick(node.now + 0.5)
        node.compute(node.ask_for(1))
    assert node.now >= HOLD_S
    assert younger.state is RequestState.WAITING
    node.worker.release_remote_kv(node.num_asked)
    node.tick(node.now + LAPSE_S)
    while younger in node.scheduler.node_requests:
        assert node.compute()
    assert younger.request.num_output_tokens == 14


def test_nobody_gives_way_to_one_that_has_asked_once():
    """Another node may have had room for it since."""
    node = BusyHolder()
    younger = node.ask("younger", 5, 17, max_tokens=14)
    node.compute(node.ask_for(1, step_s=MOST_STEP_S))
    while node.compute():
        node.tick(node.now + 1)
    assert node.now > HOLD_S
    assert younger not in node.scheduler.node_requests
    assert younger.request.num_output_tokens == 14
    assert node.scheduler.steps.num_prompt_tokens == 17  # it was read once


def test_nobody_waits_where_older_ones_leave_too_little():
    node = BusyHolder()
    older = node.ask("older", 1, 18, max_tokens=10)
    node.compute()
    node.ask_for(2)()
    node.ask("short", 3, 2, max_tokens=1)
    node.compute()
    assert node.told.count("first_token") == 2
    assert older in node.scheduler.node_requests


def test_a_younger_one_that_is_longer_than_this_pool_leaves_room_too():
    """As its own tiles leave it takes no more of what is free."""
    node = BusyHolder()
    younger = node.long(20, max_tokens=400, age=5)
    asked_s = -RETRY_S
    while not node.given:
        assert node.now < HOLD_S
        if node.opening is not None:
            node.put(1)
        is_due = younger.num_remote_blocks and node.now >= asked_s + RETRY_S
        asked_s = node.now if is_due else asked_s
        node.compute(*[node.ask_for(1)] * bool(is_due))
    assert younger.state is RequestState.RUNNING


@pytest.mark.parametrize(("most", "given"), [(1, 1), (3, 3), (9, 3)])
def test_a_host_keeps_a_quarter_of_its_pool(most, given):
    allocator = BlockAllocator(8)
    held_kv = HeldKV(allocator, LAYOUT.block_size, TILE)
    assert len(held_kv.lease(1, most, age=0)) == 2 * given
    assert held_kv.num_blocks == 2 * given
    assert len(held_kv.lease(2, 9, age=0)) == 2 * (3 - given)
    held_kv.release(1)
    held_kv.release(2)
    held_kv.release(3)  # which never got any
    allocator.check_integrity()
    assert allocator.num_free == 8


def test_a_node_that_cannot_says_so():
    engine = SimpleNamespace(holds_remote_kv=False)
    assert tile_tokens(NodeSettings(), engine) == 0
    with pytest.raises(SettingsError, match="compiled kernels"):
        tile_tokens(NodeSettings(distributed_kv=True), engine)


def test_remote_kvs_in_the_open_are_refused_beside_tls(tmp_path):
    tls = TlsSettings(**flags_of(authority(tmp_path, "node"), "node"))
    fields = {"kv_bind": "tcp://192.0.2.1:1", "link": LinkSettings(fleet_secret="s", tls=tls)}
    check_network(NodeSettings(**fields))
    with pytest.raises(SettingsError, match="in the open"):
        check_network(NodeSettings(**fields, distributed_kv=True))


# ---- both ends of remote KV ----

BLOCK_SIZE = 16


@asynccontextmanager
async def remote_kv_ends(model):
    """Both ends of remote KV of a node, and what they have told it: what others ask for, and what was opened."""
    engine, told = (
        EngineSettings(model=str(model), device="cpu", dtype="bfloat16", block_size=BLOCK_SIZE, num_kv_blocks=64),
        [],
    )
    ends = RemoteKVEnds(
        NodeSettings(engine=engine, distributed_kv=True).resolved("decode", "cpu"),
        build_engine(engine),
        lambda number, most_tiles, tile_request: told.append((most_tiles, tile_request)) or [],
        lambda number: None,
        lambda node_request, remote_kv: told.append(remote_kv),
    )
    try:
        yield ends, told
    finally:
        await asyncio.to_thread(ends.close)


async def until(condition):
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_host_that_cannot_even_be_asked_has_no_room(tiny_model):
    async with remote_kv_ends(tiny_model) as (ends, told):
        tile_request = SimpleNamespace(age=0, distributed=Distributed((HolderEndpoint("127.0.0.1:99999", bytes(32)),)))
        ends.carry_out(OpenRemoteKV(tile_request, list(range(64)), is_again=False))
        await until(lambda: told == [None])


async def test_a_host_is_told_what_is_to_be_known_of_whoever_asks(tiny_model):
    async with remote_kv_ends(tiny_model) as (ends, told):
        tile_request = SimpleNamespace(
            age=7, distributed=Distributed((HolderEndpoint(ends.address, ends.key),), longest_step_s=5.5)
        )
        ends.carry_out(OpenRemoteKV(tile_request, list(range(2 * TILE_KEYS // BLOCK_SIZE)), is_again=True))
        await until(lambda: len(told) == 2)
        assert told == [(2, TileRequest(7, True, 5.5)), None]
