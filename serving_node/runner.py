"""Run rank 0 of a node in its process.

Everything here runs on one event loop; step_loop.py runs the steps.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping
from typing import Final

from decode_node.speculation import SpeculationCounts
from engine.cache.tier_store import TierStore
from engine.drafting import Drafter
from engine.engine import Engine, StepClock
from kv_transfer.receiver import Alarm, KVReceiver
from kv_transfer.sender import KVSender
from protos import convert, fleet_pb2, inference_pb2
from protos.convert import PROTOCOL_VERSION
from serving_core.node.blocks import BlockAllocator, BlockLease
from serving_core.node.costs import StepCosts, StepRates
from serving_core.node.requests import Key, NodeRequests
from serving_core.process.memory import resident_bytes
from serving_core.shapes import preset
from serving_core.tasks import first_to_end
from serving_core.version import VERSION
from serving_node.adapters import NodeAdapters
from serving_node.distributed_kv.ends import RemoteKVEnds, tile_tokens
from serving_node.distributed_kv.holder import most_hosted_tokens
from serving_node.grammar_compiler import GrammarCompiler
from serving_node.kv_offload import NO_OFFLOAD, OffloadPlan
from serving_node.outputs import StepCounts
from serving_node.ranks.follower import rank_load
from serving_node.ranks.leading import Followers
from serving_node.ranks.tiers import NodeTier
from serving_node.ranks.transfers import NodeTransfers
from serving_node.scheduler import Limits, NodeScheduler
from serving_node.settings import OFF, NodeSettings
from serving_node.step_loop import Stepping, draft_model_of
from serving_node.worker import Link, Worker

logger = logging.getLogger(__name__)

QUIET_S: Final = 5.0  # idle time after which a node does work that would delay requests


class NodeRunner:
    """Runs rank 0 of a node: a Worker with the ports of a process."""

    def __init__(
        self,
        settings: NodeSettings,
        role: str,
        name: str,
        engine: Engine,
        sender: KVSender,
        receiver: KVReceiver,
        followers: Followers,
        link: Link,
        rates: StepRates,
        store: TierStore | None = None,
        tier: OffloadPlan = NO_OFFLOAD,
        drafter: Drafter | None = None,
    ) -> None:
        """Create the runner from `resolved` settings.

        `store` holds this rank's slots of `tier`. Raises SettingsError for settings that the engine does not support.
        """
        self._limits = limits = _limits_of(settings, engine, drafter)
        _log_modes(settings, engine)
        self._role = role
        self._name = name
        self._incarnation: Final = secrets.token_hex(16)
        self._engine = engine
        self._drafter = drafter
        self._fingerprint = {**engine.fingerprint, "kv_transport": settings.kv_transport}
        self._followers = followers
        is_caching = settings.engine.enable_prefix_caching and engine.reuses_prefixes
        self._allocator = BlockAllocator(engine.num_blocks, caching=is_caching)
        self._scheduler = scheduler = NodeScheduler(
            self._allocator,
            engine.layout,
            limits,
            preset(role, max_num_batched_tokens=limits.max_num_batched_tokens, max_num_seqs=limits.max_num_seqs),
            block_bytes=engine.model_layout.block_bytes,
            fingerprint=self._fingerprint,
            numerics=engine.numerics,
            is_batch_invariant=engine.is_batch_invariant,
            eos_token_ids=engine.eos_token_ids,
            rates=rates,
            costs=StepCosts(rates.prefill_tokens_per_s),
            tier=tier,
        )
        self.time = time.monotonic  # as the worker's clock
        self._worker = worker = Worker(scheduler, link, self)
        self._pp_size: Final = settings.engine.pipeline_parallel_size
        self._tp_size: Final = (1 + len(followers)) // self._pp_size
        worker.transfers = self._transfers = NodeTransfers(
            engine.model_layout,
            sender,
            receiver,
            followers,
            worker,
            pp_size=self._pp_size,
            overlap_min_tokens=settings.overlap_min_tokens,
            ttl_s=settings.reservation_ttl_s,
        )
        self._store, self._num_tier_blocks = store, tier.num_host + tier.num_disk
        worker.offload = NodeTier(store, followers, worker.loaded, scheduler.lost)
        self._remote_kvs: RemoteKVEnds | None = None
        if limits.tile_tokens:
            self._remote_kvs = RemoteKVEnds(
                settings, engine, worker.lease_remote_kv, worker.release_remote_kv, worker.opened
            )
        worker.remote_kvs = self._remote_kvs
        worker.grammars = self._compiler = GrammarCompiler(engine.grammars, worker.compiled)
        worker.engine = self
        self._stepping = Stepping(
            engine, worker, self._transfers, followers, drafter, stuck_exit_s=settings.stuck_exit_s
        )
        worker.adapters = self._adapters = NodeAdapters(
            engine,
            self._stepping.run_between_steps,
            followers,
            self._fingerprint,
            settings.engine.lora_root,
            report=lambda changed: link.send(adapter_changed=changed),
        )
        self._idle = asyncio.Event()
        self._idle.set()
        self._alarm: Alarm | None = None

    # ---- for the link ----

    def hello(self) -> fleet_pb2.Hello:
        """Return the message by which the node introduces itself to the coordinator: its identity and sizes.

        The fingerprint must be equal on all nodes of a fleet; the engine's description and numerics may differ. The
        next report of the prefix cache is a whole one.
        """
        self._scheduler.attached()
        engine, limits = self._engine, self._limits
        return fleet_pb2.Hello(
            node=inference_pb2.NodeInfo(
                name=self._name,
                role=self._role,
                incarnation=self._incarnation,
                version=VERSION,
                fingerprint={"protocol_version": PROTOCOL_VERSION, **self._fingerprint},
                engine=engine.description,
                numerics=engine.numerics_facts,
            ),
            num_blocks=engine.num_blocks,
            block_size=engine.layout.block_size,
            max_model_len=engine.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            max_num_queued=limits.max_num_queued,
            tp_size=self._tp_size,
            pp_size=self._pp_size,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            shape=convert.shape_to_wire(self._scheduler.shape),
            home=convert.shape_to_wire(self._scheduler.home),
            kv_keys=self._transfers.keys,
            num_tier_blocks=self._num_tier_blocks,
            remote_kvs=self._remote_kv_offer(),
            adapter_folders=self._adapters.folders,
        )

    def _remote_kv_offer(self) -> fleet_pb2.HolderOffer | None:
        if self._remote_kvs is None:
            return None
        most = most_hosted_tokens(self._engine.num_blocks, self._engine.layout.block_size, self._limits.tile_tokens)
        holder = fleet_pb2.KVHolder(address=self._remote_kvs.address, key=self._remote_kvs.key)
        return fleet_pb2.HolderOffer(holder=holder, num_tokens=most)

    @property
    def num_blocks_free(self) -> int:
        return self._allocator.num_free

    def heartbeat(self) -> fleet_pb2.Heartbeat:
        return self._worker.heartbeat()

    def handle(self, command: fleet_pb2.NodeCommand) -> None:
        self._transfers.admit([*command.reserve.sender_keys, *_job_of(command).fetch_prefix.sender_keys])
        self._worker.handle(command)

    def detached(self) -> None:
        self._worker.detached()

    async def stuck(self) -> str:
        return await self._stepping.stuck()

    async def recovered(self) -> None:
        await self._stepping.recovered()

    # ---- ports of the worker: engine and clock ----

    @property
    def step_age_s(self) -> float:
        return self._stepping.stepper.step_age_s

    def measured_load(self) -> inference_pb2.NodeLoad:
        store, stepper = self._store, self._stepping.stepper
        engines = [self._engine] if self._drafter is None else [self._engine, self._drafter.engine]
        others = self._followers.loads
        tier = inference_pb2.TierLoad(num_unwritten=store.num_unwritten, write_s=store.write_s) if store else None
        return inference_pb2.NodeLoad(
            name=self._name,
            num_steps=stepper.num_steps,
            step_s=stepper.step_s,
            rss_bytes=resident_bytes(),
            ranks=[rank_load(*engines), *(others[rank] for rank in sorted(others))],
            tier=tier,
        )

    def wake(self) -> None:
        self._stepping.wake()

    def wake_at(self, moment_s: float | None) -> None:
        if self._scheduler.is_idle:
            self._idle.set()
        else:
            self._idle.clear()
        if self._alarm is not None:
            loop = asyncio.get_running_loop()
            # Subtract first: a sum that is rounded down would fire again and again at the same time.
            self._alarm.set(None if moment_s is None else loop.time() + (moment_s - time.monotonic()))

    # ---- for metrics and tests ----

    @property
    def name(self) -> str:
        return self._name

    @property
    def steps(self) -> StepCounts:
        return self._scheduler.steps

    @property
    def speculation(self) -> SpeculationCounts:
        return self._scheduler.speculation.counts

    @property
    def is_stuck(self) -> bool:
        return self._stepping.is_stuck

    @property
    def num_divided_passes(self) -> int:
        """Return how often a batch passed through the layers with sequence parallelism."""
        return self._engine.num_divided_passes

    @property
    def clock(self) -> StepClock:
        return self._stepping.clock

    @property
    def engine(self) -> Mapping[str, str]:
        return self._engine.description

    @property
    def node_requests(self) -> NodeRequests:
        return self._scheduler.node_requests

    def load(self) -> inference_pb2.NodeLoad:
        """Return the load that the next heartbeat would report, without reporting anything."""
        load = self.measured_load()
        self._scheduler.fill(load)
        return load

    @property
    def leases(self) -> list[tuple[Key, BlockLease]]:
        """Return every lease of the pool's blocks, each with its holder (see NodeScheduler.leases)."""
        return self._scheduler.leases

    def num_held(self) -> dict[str, int]:
        """Return, by name, how many blocks, requests, transfers and timers the node holds, recounted from scratch.

        All values are 0 once all requests and transfers are over. Raises AssertionError if the counts differ.
        """
        self._scheduler.check_integrity()
        load, known = self.load(), {each.key for each in self.node_requests}
        return {
            "blocks": load.num_blocks - load.num_blocks_free,
            "requests": len(self.node_requests),
            "transfer descriptors": self._transfers.num_unopened,
            "transfers": self._transfers.num_open,
            "leases without a request": sum(holder not in known for holder, _ in self.leases),
            "timers": int(self._scheduler.wake_at_s is not None),
        }

    # ---- for the process ----

    def drain(self) -> None:
        """Report from the next heartbeat on that the node drains, so that it gets no new attempts."""
        self._scheduler.is_draining = True

    @property
    def is_draining(self) -> bool:
        return self._scheduler.is_draining

    async def idle(self) -> None:
        """Wait until the node holds no request and no distributed KV of other nodes.

        Does not keep new requests away: call `drain` first.
        """
        await self._idle.wait()

    async def run(self) -> None:
        """Run steps until cancelled. A failed step fails its requests, and the next step follows.

        The process ends at once if a rank is lost, an error is fatal, or MOST_FAILED_STEPS steps in a row fail.
        """
        self._alarm = Alarm(self._worker.tick)
        self._worker.carry_out()
        warming = asyncio.create_task(self._warm_up())
        try:
            await first_to_end(self._stepping.run(), self._followers.watch(), self._adapters.run())
        finally:
            warming.cancel()
            self._alarm.set(None)

    async def _warm_up(self) -> None:
        """Load the tokenizer for grammars in a quiet moment."""
        is_quiet = False
        while not is_quiet:
            await self._idle.wait()
            await asyncio.sleep(QUIET_S)
            is_quiet = self._idle.is_set()
        self._compiler.warm_up()

    async def close(self) -> None:
        """Close both ends of distributed KV, if it is switched on."""
        if self._remote_kvs is not None:
            await asyncio.to_thread(self._remote_kvs.close)


def _log_modes(settings: NodeSettings, engine: Engine) -> None:
    if settings.speculation != OFF and not engine.is_batch_invariant:
        logger.warning("--speculation does nothing here: the bits of outputs depend on the batch (docs/design/bits.md)")
    if (min_tokens := settings.engine.sequence_parallel_min_tokens) and settings.engine.tensor_parallel_size > 1:
        logger.info("sequence parallelism: the ranks divide steps with prompts from %d tokens on", min_tokens)


def _limits_of(settings: NodeSettings, engine: Engine, drafter: Drafter | None) -> Limits:
    """Return the limits that follow from the settings. Raises SettingsError."""
    return Limits(
        settings.max_num_batched_tokens,
        min(settings.max_num_seqs, settings.max_num_batched_tokens),
        settings.max_num_queued,
        settings.credit_timeout_s,
        settings.descriptor_timeout_s,
        settings.num_speculative_tokens if settings.speculation != OFF else 0,
        draft_model_of(drafter),
        tile_tokens(settings, engine),
    )


def _job_of(command: fleet_pb2.NodeCommand) -> fleet_pb2.Job:
    """Return the job of a command that brings a prompt; an empty job for other commands."""
    return command.prefill.job if command.HasField("prefill") else command.reserve.job
