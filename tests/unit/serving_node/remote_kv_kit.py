"""Requests that are longer than a node's pool, driven by hand: one node, or several that are each other's holders."""

from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.distributed_kv.wire import TileRequest
from protos import convert, fleet_pb2, inference_pb2
from serving_core.node.blocks import BlockAllocator
from serving_core.node.costs import StepCosts, StepRates
from serving_core.requests import Request, SampledToken, SamplingParams
from serving_core.shapes import preset
from serving_node.decisions import CloseRemoteKV, OpenRemoteKV, RevokeRemoteKV
from serving_node.distributed_kv.source import RETRY_S
from serving_node.scheduler import Limits, NodeScheduler
from serving_node.worker import Worker
from tests.toy_kv import FINGERPRINT, HERE
from tests.unit.serving_node.scheduler_kit import LAYOUT, Ports, prompt_of

TILE = 8  # tokens, two blocks


@dataclass(eq=False)
class Away:
    """remote KV. What it holds is known where there is a holder."""

    num_tiles: int
    number: int = 0
    holder: "LongNode | None" = None
    block_ids: Sequence[int] = (None,) * 64
    is_revoked: bool = False


class LongNode(Ports):
    """One whose pool of eight blocks holds 32 tokens. Nothing is computed, but where it would be is noted."""

    HOLDERS = (fleet_pb2.KVHolder(address="host:1", key=bytes(32)),)

    def __init__(self, num_slots=8, tile=TILE, num_blocks=8):
        self.allocator, self.now = BlockAllocator(num_blocks), 0.0
        self.kv = {}  # by block and place in it: which token, behind which others
        self.scheduler = NodeScheduler(
            self.allocator,
            LAYOUT,
            Limits(16, num_slots, 100, 30.0, 60.0, tile_tokens=tile),
            preset("mixed", max_num_batched_tokens=16, max_num_seqs=num_slots),
            block_bytes=1,
            fingerprint=FINGERPRINT,
            numerics=HERE,
            is_batch_invariant=True,
            eos_token_ids=(),
            rates=StepRates(),
            costs=StepCosts(),
        )
        self.worker = worker = Worker(self.scheduler, self, self)
        worker.engine = worker.transfers = worker.remote_kvs = self
        self.openings, self.closed, self.told = [], [], []
        self.revoked = []  # numbers of remote KV
        self.on_failed = lambda event: None
        self.num_asked = 0

    def long(self, num_tokens, max_tokens, age=1):
        """A request that comes with a holder."""
        return self.ask("long", age, num_tokens, max_tokens, self.HOLDERS)

    def ask(self, name, age, num_tokens, max_tokens, holders=(), num_given=0):
        """`num_given`: tokens of its answer that there are already."""
        request = _request(name, age, num_tokens, max_tokens, num_given)
        wire = convert.job_to_wire(request, age)
        wire.kv_holders.extend(holders)
        self.do(fleet_pb2.NodeCommand(reserve=fleet_pb2.Reserve(job=wire, local_prefill=True)))
        return self.scheduler.node_requests.find(request)

    def read_for_another(self, name, age, num_tokens):
        request = _request(name, age, num_tokens)
        job = convert.job_to_wire(request, age)
        self.do(fleet_pb2.NodeCommand(prefill=fleet_pb2.Prefill(job=job), attempt=job.attempt))
        return self.scheduler.node_requests.find(request)

    def await_prompt(self, name, age, num_tokens=3):
        """Another node reads it, and it is to be answered here."""
        request = _request(name, age, num_tokens)
        reserve = fleet_pb2.Reserve(job=convert.job_to_wire(request, age), prefill_tp_size=1)
        self.do(fleet_pb2.NodeCommand(reserve=reserve))
        return self.scheduler.node_requests.find(request)

    def do(self, command):
        self.worker.handle(command)
        self.check()

    # ---- the worker's other ports: link and distributed KV; its transfers are left to the tests ----

    def send(self, **event):
        self.told += event
        if "failed" in event:
            self.on_failed(event["failed"])

    def carry_out(self, decision):
        match decision:
            case OpenRemoteKV():
                self.openings.append(decision)
            case CloseRemoteKV(remote_kvs=remote_kvs):
                self.closed += remote_kvs
            case RevokeRemoteKV(number=number):
                self.revoked.append(number)

    def take(self):
        self.worker.carry_out()
        self.check()

    def check(self):
        self.allocator.check_integrity()
        self.scheduler.node_requests.check_integrity()

    def compute(self, beside=lambda: None, step_s=0.1):
        works = self.worker.plan()
        self.take()
        beside()
        for work in works:
            if any(remote_kv.is_revoked for remote_kv in work.request.remote_kvs):
                work.request.remote_kv_error = "revoked"
            else:
                self._put_kv(work)
        self.now += step_s
        self.worker.step_done(works, [SampledToken(1) for work in works if work.samples], step_s)
        self.take()
        return sum(work.num_tokens for work in works)

    def _put_kv(self, work):
        """All of it that was computed before lies where it was."""
        token_ids = work.request.token_ids
        node_request = self.scheduler.node_requests.of(work.request)
        num_away, whose = node_request.num_remote_blocks, work.request.request_id if node_request.distributed else ""
        away = [(remote_kv.holder, block) for remote_kv in work.request.remote_kvs for block in remote_kv.block_ids]
        table = away[:num_away] + [(self, block) for block in work.block_ids[num_away:]]
        for at in range(work.start + work.num_tokens):
            (node, block), slot = table[at // LAYOUT.block_size], at % LAYOUT.block_size
            last = whose, at, *token_ids[max(0, at - TILE) : at + 1]
            assert at >= work.start or node is None or node.kv[block, slot] == last
            if at >= work.start:
                self.kv[block, slot] = last

    @property
    def opening(self):
        """What is to leave first."""
        return self.openings[0] if self.openings else None

    def put(self, num_tiles):
        num_ready = _num_tiles(self.opening.block_ids)
        self.opened(Away(num_tiles) if num_tiles else None)
        return num_ready

    def opened(self, remote_kv):
        self.worker.opened(self.openings.pop(0).node_request, remote_kv)
        self.check()

    def copy_to(self, holder, block_ids):
        """As many of the blocks that are to leave."""
        for source, target in zip(self.opening.block_ids, block_ids, strict=False):
            for slot in range(LAYOUT.block_size):
                holder.kv[target, slot] = self.kv[source, slot]

    def lease_remote_kv(self, most_tiles, age, *, is_again=False, step_s=0.0):
        """Another node's request asks for so much."""
        self.num_asked += 1
        block_ids = self.worker.lease_remote_kv(self.num_asked, most_tiles, TileRequest(age, is_again, step_s))
        self.check()
        return block_ids

    def load(self):
        load = inference_pb2.NodeLoad()
        self.scheduler.fill(load)
        return load

    def tick(self, now):
        self.now = now
        self.worker.tick()
        self.check()

    def run(self, most=500):
        """Every remote KV holds what it is asked to."""
        for _ in range(most):
            if self.opening is not None:
                self.put(1)
            if not self.compute() and self.opening is None:
                return
        raise AssertionError("it goes on without end")


def _request(name, age, num_tokens, max_tokens=4, num_given=0):
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(name, age, prompt_of(num_tokens, age) + [1] * num_given, num_tokens, sampling)


def _num_tiles(block_ids):
    return len(block_ids) * LAYOUT.block_size // TILE


class Fellows:
    """Nodes of which each is a holder of all others, and what a coordinator does with those that are turned away."""

    def __init__(self, num_nodes=2):
        self.nodes = [LongNode() for _ in range(num_nodes)]

    def go_on(self):
        """Each computes, or lets time pass where there is nothing to compute, and has its tiles go to others."""
        for node in self.nodes:
            if not node.compute():
                node.tick(node.now + RETRY_S)
            self._settle()
            while node.opening is not None:
                self._ask(node)

    def _ask(self, node):
        """The first holder that has room."""
        opening = node.opening
        for holder in self.nodes:
            if holder is node:
                continue
            block_ids = holder.lease_remote_kv(
                _num_tiles(opening.block_ids), opening.node_request.age, is_again=opening.is_again
            )
            self._settle()
            if block_ids:
                node.copy_to(holder, block_ids)
                node.opened(Away(_num_tiles(block_ids), holder.num_asked, holder, block_ids))
                return
        node.opened(None)

    def _settle(self):
        """Blocks that are let go or taken back are free at once. Whose these were learns of it when it asks next."""
        for node_request in [each for node in self.nodes for each in node.scheduler.node_requests]:
            for remote_kv in node_request.request.remote_kvs:
                remote_kv.is_revoked |= remote_kv.number in remote_kv.holder.revoked
        for node in self.nodes:
            over = [(remote_kv.holder, remote_kv.number) for remote_kv in node.closed] + [
                (node, each) for each in node.revoked
            ]
            node.closed, node.revoked = [], []
            for holder, number in over:
                holder.worker.release_remote_kv(number)
                holder.check()
