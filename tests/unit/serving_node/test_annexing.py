"""Requests that are longer than a node's pool, driven by hand: their oldest tiles leave as the pool fills up."""

from types import SimpleNamespace

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
    """One whose pool of eight blocks holds 32 tokens; nothing is computed."""

    def __init__(self, num_seats=8):
        self.allocator, self.now = BlockAllocator(8), 0.0
        self.logic = NodeLogic(
            self.allocator,
            LAYOUT,
            Limits(16, num_seats, 100, 30.0, 60.0, tile_tokens=TILE),
            preset("both", max_num_batched_tokens=16, max_num_seqs=num_seats),
            block_bytes=1,
            fingerprint=FINGERPRINT,
            origin=HERE,
            is_history_free=True,
            eos_token_ids=(),
            rates=StepRates(),
            costs=StepCosts(),
        )
        self.opening, self.closed, self.told = None, [], []

    def long(self, num_tokens, max_tokens, age=1):
        """A request that comes with a host."""
        hosts = [fleet_pb2.AnnexHost(address="host:1", key=bytes(32))]
        return self.ask("long", age, num_tokens, max_tokens, hosts)

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

    def do(self, command):
        self.logic.handle(command, self.now)
        self.take()

    def take(self):
        for decision in self.logic.take_decisions():
            match decision:
                case OpenAnnex():
                    assert self.opening is None
                    self.opening = decision
                case CloseAnnexes(annexes=annexes):
                    self.closed += annexes
                case Tell(event=event):
                    self.told += event
        self.allocator.check_integrity()
        self.logic.residents.check_integrity()

    def compute(self):
        works = self.logic.plan(self.now)
        self.take()
        for work in works:
            held = len(work.block_ids) * LAYOUT.block_size
            assert held >= work.start + work.num_tokens
        self.now += 0.1
        self.logic.step_done(works, [SampledToken(1) for work in works if work.samples], 0.1, self.now)
        self.take()
        return sum(work.num_tokens for work in works)

    def put(self, num_tiles, number=0):
        decision, self.opening = self.opening, None
        annex = SimpleNamespace(num_tiles=num_tiles, number=number) if num_tiles else None
        self.logic.opened(decision.resident, annex, self.now)
        self.take()
        return len(decision.block_ids) * LAYOUT.block_size // TILE

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
    node.logic.host(1, 9, age=0)
    node.take()
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
    num_asked = 0
    while "failed" not in node.told:
        if node.opening is None:
            node.tick(node.now + RETRY_S)
        assert node.opening is not None
        node.put(0)
        num_asked += 1
        assert num_asked < 100
    assert node.now > PATIENCE_S
    assert node.logic.is_idle
    assert node.allocator.num_free == 8


class TwoNodes:
    """Of which each is the other one's host."""

    def __init__(self):
        self.nodes = [LongNode(), LongNode()]
        self._num_opened = 0

    def go_on(self):
        """Each computes, has its tiles go to the other, and lets time pass where there is nothing to compute."""
        for node, other in (self.nodes, self.nodes[::-1]):
            if not node.compute():
                node.tick(node.now + RETRY_S)
            if node.opening is not None:
                self._ask(node, other)
            for annex in node.closed:
                other.logic.hosted(annex.number)
            node.closed.clear()

    def _ask(self, node, other):
        self._num_opened += 1
        opening = node.opening
        most_tiles = len(opening.block_ids) * LAYOUT.block_size // TILE
        block_ids = other.logic.host(self._num_opened, most_tiles, opening.resident.age)
        other.take()
        node.put(len(block_ids) * LAYOUT.block_size // TILE, self._num_opened)


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
    assert not node.logic.host(1, 1, age=0)  # it may get room yet
    node.put(0)
    assert bool(node.logic.host(2, 1, age)) == bool(num_hosted)
    assert (long.stage is Stage.QUEUED) == bool(num_hosted)
    node.logic.hosting.release(2)
    assert len(node.logic.host(3, 9, age=2)) == 6 * num_hosted  # three quarters, or nothing


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
