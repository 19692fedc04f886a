"""Requests that are longer than a node's pool, driven by hand: their oldest tiles leave as the pool fills up."""

from types import SimpleNamespace

import numpy as np
import pytest

from protos import convert, fleet_pb2
from serving_core.blocks import BlockAllocator
from serving_core.costs import StepCosts
from serving_core.errors import SettingsError
from serving_core.rates import StepRates
from serving_core.requests import Request, SampledToken, SamplingParams
from serving_core.residents import Stage
from serving_core.shapes import preset
from serving_core.tls_settings import TlsSettings
from serving_node.annex_ends import tile_tokens
from serving_node.annexing import PATIENCE_S, RETRY_S
from serving_node.claim import HOLD_S, LAPSE_S
from serving_node.decisions import CloseAnnexes, OpenAnnex, Tell
from serving_node.exposure import check_network
from serving_node.hosting import Hosting
from serving_node.link import LinkSettings
from serving_node.logic import Limits, NodeLogic
from serving_node.settings import NodeSettings
from tests.tls_kit import authority, flags_of
from tests.toy_kv import FINGERPRINT, HERE
from tests.unit.serving_node.logic_kit import LAYOUT, prompt_of

TILE = 8  # tokens, two blocks


class LongNode:
    """One whose pool of eight blocks holds 32 tokens. Nothing is computed, but where it would be is noted."""

    HOSTS = (fleet_pb2.AnnexHost(address="host:1", key=bytes(32)),)

    def __init__(self, num_seats=8, tile=TILE, num_blocks=8):
        self.allocator, self.now = BlockAllocator(num_blocks), 0.0
        self.kv = {}  # by block and place in it: which token, behind which others
        self.logic = NodeLogic(
            self.allocator,
            LAYOUT,
            Limits(16, num_seats, 100, 30.0, 60.0, tile_tokens=tile),
            preset("both", max_num_batched_tokens=16, max_num_seqs=num_seats),
            block_bytes=1,
            fingerprint=FINGERPRINT,
            origin=HERE,
            is_history_free=True,
            eos_token_ids=(),
            rates=StepRates(),
            costs=StepCosts(),
        )
        self.openings, self.closed, self.told = [], [], []
        self.num_asked = 0

    def long(self, num_tokens, max_tokens, age=1):
        """A request that comes with a host."""
        return self.ask("long", age, num_tokens, max_tokens, self.HOSTS)

    def ask(self, name, age, num_tokens, max_tokens, hosts=()):
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(name, age, prompt_of(num_tokens, age), num_tokens, sampling)
        wire = convert.job_to_wire(request, age)
        wire.hosts.extend(hosts)
        self.do(fleet_pb2.NodeCommand(reserve=fleet_pb2.Reserve(job=wire, local_prefill=True)))
        return self.logic.residents.find(request)

    def read_for_another(self, name, age, num_tokens):
        request = Request(
            name, age, prompt_of(num_tokens, age), num_tokens, SamplingParams(max_tokens=4, ignore_eos=True)
        )
        job = convert.job_to_wire(request, age)
        self.do(fleet_pb2.NodeCommand(prefill=fleet_pb2.Prefill(job=job), attempt=job.attempt))
        return self.logic.residents.find(request)

    def await_prompt(self, name, age, num_tokens=3):
        """Another node reads it, and it is to be answered here."""
        sampling = SamplingParams(max_tokens=4, ignore_eos=True)
        request = Request(name, age, prompt_of(num_tokens, age), num_tokens, sampling)
        reserve = fleet_pb2.Reserve(job=convert.job_to_wire(request, age), prefill_tp_size=1)
        self.do(fleet_pb2.NodeCommand(reserve=reserve))
        return self.logic.residents.find(request)

    def do(self, command):
        self.logic.handle(command, self.now)
        self.take()

    def take(self):
        for decision in self.logic.take_decisions():
            match decision:
                case OpenAnnex():
                    self.openings.append(decision)
                case CloseAnnexes(annexes=annexes):
                    self.closed += annexes
                case Tell(event=event):
                    self.told += event
        self.allocator.check_integrity()
        self.logic.residents.check_integrity()

    def compute(self, beside=lambda: None):
        works = self.logic.plan(self.now)
        self.take()
        beside()
        for work in works:
            self._put_kv(work)
        self.now += 0.1
        self.logic.step_done(works, [SampledToken(1) for work in works if work.samples], 0.1, self.now)
        self.take()
        return sum(work.num_tokens for work in works)

    def _put_kv(self, work):
        """All of it that is here and was computed before lies where it was."""
        token_ids = work.request.token_ids
        num_away = self.logic.residents.of(work.request).num_annexed_blocks
        for at in range(num_away * LAYOUT.block_size, work.start + work.num_tokens):
            place = work.block_ids[at // LAYOUT.block_size], at % LAYOUT.block_size
            last = at, *token_ids[max(0, at - TILE) : at + 1]
            assert at >= work.start or self.kv[place] == last
            self.kv[place] = last

    @property
    def opening(self):
        """What is to leave first."""
        return self.openings[0] if self.openings else None

    def put(self, num_tiles, number=0):
        decision = self.openings.pop(0)
        annex = SimpleNamespace(num_tiles=num_tiles, number=number) if num_tiles else None
        self.logic.opened(decision.resident, annex, self.now)
        self.take()
        return len(decision.block_ids) * LAYOUT.block_size // TILE

    def host(self, most_tiles, age, *, is_again=False):
        """Another node's request asks for so much."""
        self.num_asked += 1
        block_ids = self.logic.host(self.num_asked, most_tiles, age, self.now, is_again=is_again)
        self.take()
        return block_ids

    def tick(self, now):
        self.now = now
        self.logic.tick(now)
        self.take()

    def run(self, most=500):
        """Every annex holds what it is asked to."""
        for _ in range(most):
            if self.opening is not None:
                self.put(1)
            if not self.compute() and self.opening is None:
                return
        raise AssertionError("it goes on without end")


def test_a_long_answer_leaves_its_oldest_tiles_and_ends():
    node = LongNode()
    resident = node.long(20, max_tokens=80)
    node.run()
    assert len(resident.request.token_ids) == 100
    assert len(node.closed) >= (100 - 32) // TILE
    assert "step_tokens" in node.told
    assert node.allocator.num_free == 8
    assert node.logic.is_idle


def test_a_long_prompt_is_read_in_what_fits():
    node = LongNode()
    resident = node.long(90, max_tokens=2)
    node.run()
    assert resident.request.num_output_tokens == 2
    assert node.allocator.num_free == 8


def test_it_holds_still_while_tiles_leave_and_others_go_on():
    node = LongNode()
    long = node.long(20, max_tokens=50)
    short = node.ask("short", 2, 2, max_tokens=20)
    while node.opening is None:
        node.compute()
    assert long.is_annexing
    num_long, num_short = len(long.request.token_ids), len(short.request.token_ids)
    assert node.compute() == 1
    assert [len(each.request.token_ids) for each in (long, short)] == [num_long, num_short + 1]
    assert node.put(2) >= 2
    assert long.num_annexed_blocks == 4
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
    node.host(9, age=0)
    node.ask("large", 1, num_prompt, 4)
    node.ask("small", 2, 2, 4)
    while node.compute():
        pass
    assert not len(node.logic.residents)
    assert node.told.count("failed") == 1
    assert node.told.count("first_token") == (1 if num_prompt == 14 else 2)


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_long_one_that_is_older_gets_room_from_those_that_are_read(is_kept):
    """One that was begun elsewhere, and comes to a node where one block is left."""
    node = LongNode(num_seats=1 if is_kept else 8)
    younger = [node.read_for_another(name, age, tokens) for name, age, tokens in (("a", 2, 18), ("b", 3, 5))]
    while node.compute():
        pass
    assert [each.stage for each in younger] == [Stage.READ] * 2
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
    assert long not in node.logic.residents


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
        node.tick(node.logic.wake_at_s)
    assert "failed" in node.told
    assert asked_again == [False] + [True] * (len(asked_s) - 1)
    assert asked_s[1] == asked_s[0]  # at once, so that room is made
    assert np.diff(asked_s[1:]) == pytest.approx(RETRY_S)
    assert 0 < node.now - asked_s[0] - PATIENCE_S <= 2 * RETRY_S
    assert node.logic.is_idle
    assert node.allocator.num_free == 8


class TwoNodes:
    """Of which each is the other one's host."""

    def __init__(self):
        self.nodes = [LongNode(), LongNode()]

    def go_on(self):
        """Each computes, has its tiles go to the other, and lets time pass where there is nothing to compute."""
        for node, other in (self.nodes, self.nodes[::-1]):
            if not node.compute():
                node.tick(node.now + RETRY_S)
            while node.opening is not None:
                self._ask(node, other)
            for annex in node.closed:
                other.logic.hosted(annex.number)
            node.closed.clear()

    def _ask(self, node, other):
        opening = node.opening
        most_tiles = len(opening.block_ids) * LAYOUT.block_size // TILE
        block_ids = other.host(most_tiles, opening.resident.age, is_again=opening.is_again)
        node.put(len(block_ids) * LAYOUT.block_size // TILE, other.num_asked)


def test_of_those_that_wait_for_each_others_blocks_the_younger_gives_way():
    """Each of two requests has filled the pool of its own node. The older one goes on at once; the other one ends here
    too, or is turned away."""
    two = TwoNodes()
    older, _ = (node.long(28, max_tokens=24, age=age) for age, node in enumerate(two.nodes))
    while not all(node.logic.is_idle for node in two.nodes):
        two.go_on()
        if older in two.nodes[0].logic.residents:
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
    assert not node.host(1, age=0)  # it may get room yet
    node.put(0)
    assert bool(node.host(1, age)) == bool(num_hosted)
    assert (long.stage is Stage.QUEUED) == bool(num_hosted)
    node.logic.hosting.release(2)
    assert len(node.host(9, age=2)) == 6 * num_hosted  # three quarters, or nothing


def test_a_lost_annex_fails_the_attempt_and_its_token_is_not_told():
    node = LongNode()
    long = node.long(28, max_tokens=50)
    while not long.num_annexed_blocks:
        if node.opening is not None:
            node.put(1)
        node.compute()
    assert long.stage is Stage.WRITING
    num_tokens, node.told = len(long.request.token_ids), []
    long.request.annex_error = "it is gone"
    node.compute()
    assert node.told == ["failed"]
    assert len(long.request.token_ids) == num_tokens
    assert len(node.closed) == 1
    assert node.allocator.num_free == 8


class BusyHost(LongNode):
    """Of two tiles, for one of another node. It is asked while steps run."""

    def __init__(self):
        super().__init__(tile=16)
        self.given, self._next_age = [], 100

    def ask_for(self, age, *, is_again=True):
        def ask():
            self.given = self.given or self.host(1, age, is_again=is_again)

        return ask

    def go_on(self, beside=lambda: None):
        """One step of short ones that come and go, without end; and a tick, if one is due."""
        while self.logic.residents.count(Stage.QUEUED) < 3:
            self._next_age += 1
            self.ask(f"short-{self._next_age}", self._next_age, 5, max_tokens=3)
        if (wake_at_s := self.logic.wake_at_s) is not None and self.now >= wake_at_s:
            self.tick(self.now)
        self.compute(beside)

    def go_on_asked(self, age, num_s, *, is_again=True):
        """Until there is a tile, or so many seconds are over."""
        begun_s, asked_s = self.now, -RETRY_S
        while not self.given and self.now < begun_s + num_s:
            is_due = self.now >= asked_s + RETRY_S
            asked_s = self.now if is_due else asked_s
            self.go_on(*[self.ask_for(age, is_again=is_again)] * is_due)


@pytest.mark.parametrize(("age", "is_again", "has_room"), [(1, True, True), (1, False, False), (10**6, True, False)])
def test_younger_prompts_that_come_and_go_leave_room_for_an_older_one_that_waits(age, is_again, has_room):
    node = BusyHost()
    node.go_on_asked(age, HOLD_S - 1, is_again=is_again)
    assert len(node.given) == 4 * has_room
    num_begun = node.told.count("first_token")
    for _ in range(30):
        node.go_on()
    assert node.told.count("first_token") > num_begun
    assert "failed" not in node.told


def test_nobody_waits_for_one_that_does_not_ask_any_more():
    node = BusyHost()
    node.go_on()
    asked_s = node.now
    node.go_on(node.ask_for(1))
    assert not node.given
    large = node.ask("large", 99, 17, max_tokens=1)  # it would leave less than a tile
    while node.compute():
        assert node.now < asked_s + LAPSE_S
    assert large.stage is Stage.QUEUED
    assert node.logic.wake_at_s == asked_s + LAPSE_S
    node.tick(asked_s + LAPSE_S)
    assert node.logic.wake_at_s is None
    assert node.compute()


def test_room_that_is_made_for_one_is_not_taken_by_a_younger_one():
    node = BusyHost()
    node.go_on()
    node.go_on(node.ask_for(1))
    while node.compute():
        pass
    assert not node.host(1, age=2, is_again=True)
    assert len(node.host(1, age=1, is_again=True)) == 4


def test_what_another_node_reads_gets_no_credit_before_an_older_one_that_waits():
    node = BusyHost()
    node.go_on()
    node.go_on(node.ask_for(1))
    younger, older = node.await_prompt("younger", 50, num_tokens=17), node.await_prompt("older", 0)
    while node.compute():
        pass
    assert [older.stage, younger.stage] == [Stage.GRANTED, Stage.AWAITING]
    node.tick(node.now + LAPSE_S)
    assert younger.stage is Stage.GRANTED


def test_nobody_gives_way_to_what_may_not_start():
    """A prompt of the node's own waits for the older one of another node, for which there is room by now."""
    node = BusyHost()
    filling = node.ask("filling", 3, 13, max_tokens=2)
    read = node.read_for_another("read", 6, 10)
    node.compute()
    node.compute(node.ask_for(1))
    assert not node.given
    waiting = node.ask("waiting", 5, 20, max_tokens=2)
    while node.compute():
        pass
    assert filling not in node.logic.residents
    assert [waiting.stage, read.stage] == [Stage.QUEUED, Stage.READ]
    assert len(node.host(1, age=1)) == 4


def test_a_long_answer_gives_way_to_an_older_one_that_has_waited():
    """It would end long after the older one has lost patience."""
    node = BusyHost()
    younger = node.ask("younger", 5, 17, max_tokens=14)
    node.compute()
    while not node.given:
        assert node.now < PATIENCE_S
        node.tick(node.now + 0.5)
        node.compute(node.ask_for(1))
    assert node.now >= HOLD_S
    assert younger.stage is Stage.QUEUED
    node.logic.hosted(node.num_asked)
    node.tick(node.now + LAPSE_S)
    while younger in node.logic.residents:
        assert node.compute()
    assert younger.request.num_output_tokens == 14


def test_nobody_waits_where_older_ones_leave_too_little():
    node = BusyHost()
    older = node.ask("older", 1, 18, max_tokens=10)
    node.compute()
    node.ask_for(2)()
    node.ask("short", 3, 2, max_tokens=1)
    node.compute()
    assert node.told.count("first_token") == 2
    assert older in node.logic.residents


def test_a_younger_one_that_is_longer_than_this_pool_leaves_room_too():
    """As its own tiles leave it takes no more of what is free."""
    node = BusyHost()
    younger = node.long(20, max_tokens=400, age=5)
    asked_s = -RETRY_S
    while not node.given:
        assert node.now < HOLD_S
        if node.opening is not None:
            node.put(1)
        is_due = younger.num_annexed_blocks and node.now >= asked_s + RETRY_S
        asked_s = node.now if is_due else asked_s
        node.compute(*[node.ask_for(1)] * bool(is_due))
    assert younger.stage is Stage.WRITING


@pytest.mark.parametrize(("most", "given"), [(1, 1), (3, 3), (9, 3)])
def test_a_host_keeps_a_quarter_of_its_pool(most, given):
    allocator = BlockAllocator(8)
    hosting = Hosting(allocator, LAYOUT.block_size, TILE)
    assert len(hosting.lease(1, most)) == 2 * given
    assert hosting.num_blocks == 2 * given
    assert len(hosting.lease(2, 9)) == 2 * (3 - given)
    hosting.release(1)
    hosting.release(2)
    hosting.release(3)  # which never got any
    allocator.check_integrity()
    assert allocator.num_free == 8


def test_a_node_that_cannot_says_so():
    engine = SimpleNamespace(takes_annexes=False)
    assert tile_tokens(NodeSettings(), engine) == 0
    with pytest.raises(SettingsError, match="compiled kernels"):
        tile_tokens(NodeSettings(kv_annexes=True), engine)


def test_annexes_in_the_open_are_refused_beside_tls(tmp_path):
    tls = TlsSettings(**flags_of(authority(tmp_path, "node"), "node"))
    fields = {"kv_bind": "tcp://192.0.2.1:1", "link": LinkSettings(fleet_secret="s", tls=tls)}
    check_network(NodeSettings(**fields))
    with pytest.raises(SettingsError, match="in the open"):
        check_network(NodeSettings(**fields, kv_annexes=True))
