"""Assemble one rank of a node, and serve."""

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing

import torch

from engine.build import build_engine
from engine.cache.tier_store import TierStore
from engine.drafting import Drafter
from engine.engine import Engine
from engine.parallel import choose_device, join, on_all_ranks
from engine.stepper import Stepper, take_own_stream
from kv_transfer.descriptor import endpoint_of
from kv_transfer.receiver import KVReceiver
from kv_transfer.sender import KVSender
from kv_transfer.transports.zmq import ZmqDialer, ZmqListener
from kv_transfer.transports.zmq_keys import Keyring
from serving_core.errors import SettingsError
from serving_core.net.descriptors import Spares, kept_spares
from serving_core.node.costs import StepRates
from serving_core.requests import Share
from serving_core.settings import EngineSettings
from serving_core.shapes import PREFILL
from serving_core.units import size_of
from serving_node.adapters import FollowerAdapters
from serving_node.draft_model import draft_bytes, draft_engine
from serving_node.health import FOLLOWER_STATES, health_port, node_states
from serving_node.kv_offload import NO_OFFLOAD, OffloadPlan
from serving_node.lifetime import serve
from serving_node.link import FleetLink
from serving_node.metrics import MetricsServer, NodeExposition
from serving_node.ranks.follower import Follower, rank_load
from serving_node.ranks.leading import Followers, Leader
from serving_node.ranks.transfers import FollowerTransfers
from serving_node.runner import NodeRunner
from serving_node.settings import NodeSettings, is_encrypted

logger = logging.getLogger(__name__)


async def serve_node(settings: NodeSettings, role: str, name: str) -> None:
    """Build the engine of one rank and serve until SIGTERM; rank 0 attaches to the coordinator, others follow rank 0.

    `role` is that of the node at first, `name` its name in the fleet. Raises SettingsError or ModelError if the node
    cannot start, RankLost if a rank is lost before the start.
    """
    flags = settings.engine
    if flags.cpus:  # this process is pinned to them
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    device, tp_size, pp_size = choose_device(flags.device), flags.tensor_parallel_size, flags.pipeline_parallel_size
    settings = settings.resolved(role, device.type)
    joined = closing(join(device, tp_size, flags.rank_timeout_s, pp_size))
    draft_flags = None if role == PREFILL else draft_engine(settings)  # after a role change it drafts by prompt lookup
    with joined as group, closing(build_engine(flags, group, draft_bytes(draft_flags))) as engine:
        prefill_tokens_per_s = engine.warm_up()
        drafter = _drafter(draft_flags, engine)
        take_own_stream(device)
        async with kept_spares() as spares, _kv_offload(settings, engine) as (store, plan):
            sender, receiver = _ends(settings, engine, device, spares)
            try:
                if group.rank:
                    async with health_port(settings, FOLLOWER_STATES):
                        await _follow(settings, engine, sender, receiver, store)
                else:
                    followers = Followers(group.size - 1)
                    await followers.gather(group.exchange)
                    link, rates = FleetLink(settings.link, spares), StepRates(prefill_tokens_per_s)
                    node = NodeRunner(
                        settings, role, name, engine, sender, receiver, followers, link, rates, store, plan, drafter
                    )
                    health = health_port(settings, node_states(node, link))
                    try:
                        async with health, _metrics_port(settings, NodeExposition(node, sender, receiver)):
                            await serve(node, link, drain_s=settings.link.drain_s)
                    finally:
                        await node.close()
                        followers.stop()
            finally:
                await sender.close()
                await receiver.close()


def _drafter(flags: EngineSettings | None, engine: Engine) -> Drafter | None:
    """Return the draft model if it is set and useful. Raises SettingsError or ModelError."""
    if flags is None or not engine.is_batch_invariant:
        return None
    drafts = build_engine(flags)
    drafts.warm_up()
    weights, pool = size_of(drafts.weight_bytes), size_of(drafts.kv_pool_bytes)
    logger.info("draft model: weights %s, %d KV blocks in %s", weights, drafts.num_blocks, pool)
    return Drafter(drafts)


@asynccontextmanager
async def _metrics_port(settings: NodeSettings, exposition: NodeExposition) -> AsyncIterator[None]:
    """Serve the node's metrics if a port is set. Raises SettingsError."""
    if settings.metrics_port < 0:
        yield
        return
    server = MetricsServer(settings.metrics_host, settings.metrics_port, exposition.figures)
    logger.info("figures of this node are at port %d", server.port)
    try:
        yield
    finally:
        await server.stop()


@asynccontextmanager
async def _kv_offload(settings: NodeSettings, engine: Engine) -> AsyncIterator[tuple[TierStore | None, OffloadPlan]]:
    """Yield this rank's KV offload store and the plan for rank 0.

    Every rank has the same number of slots, computed from the largest block of all ranks. Raises SettingsError.
    """
    tier = settings.tier
    if not tier.kv_host_bytes and not tier.kv_disk_bytes:
        yield None, NO_OFFLOAD
        return
    if engine.layout.state_bytes:
        raise SettingsError("--kv-host-bytes and --kv-disk-bytes do not support models with a fixed state")
    all_bytes = engine.group.exchange(engine.layout.block_bytes.to_bytes(8, "big"))
    block_bytes = max(int.from_bytes(each, "big") for each in all_bytes)
    num_host, num_disk = tier.kv_host_bytes // block_bytes, tier.kv_disk_bytes // block_bytes
    if not num_host and not num_disk:
        raise SettingsError(f"--kv-host-bytes and --kv-disk-bytes hold no block of {block_bytes} bytes")

    def store_of_rank() -> TierStore:
        return TierStore(engine.pool, num_host, num_disk, tier.kv_disk_path)

    with closing(on_all_ranks(engine.group, SettingsError, store_of_rank, TierStore.close)) as store:
        host_s, disk_s = store.probe()
        logger.info("KV offload: %d blocks in memory, %d in a file", num_host, num_disk)
        yield store, OffloadPlan(num_host, num_disk, host_s, disk_s, reads_always=tier.kv_read_back == "always")


async def _follow(
    settings: NodeSettings, engine: Engine, sender: KVSender, receiver: KVReceiver, store: TierStore | None
) -> None:
    leader = await Leader.join(engine.group.exchange, receiver.address, sender.transport.key, rank_load(engine))
    stepper: Stepper[Share, None] = Stepper(engine.follow)
    transfers = FollowerTransfers(
        sender,
        receiver,
        leader,
        settings.overlap_min_tokens,
        may_lag=settings.engine.pipeline_parallel_size > 1,
    )
    adapters = FollowerAdapters(engine, stepper.run_between_steps, leader, settings.engine.lora_root)
    await Follower(leader, stepper, transfers, store, adapters).run()


def _ends(settings: NodeSettings, engine: Engine, device: torch.device, spares: Spares) -> tuple[KVSender, KVReceiver]:
    """Return the sender and the receiver of this rank."""
    rank, deadline_s = engine.group.rank, settings.transfer_timeout_s
    node = {"tp_size": settings.engine.tensor_parallel_size, "pp_size": settings.engine.pipeline_parallel_size}
    endpoint = endpoint_of(settings.kv_transport, settings.kv_bind, rank)
    if settings.kv_transport == "zmq":
        keyring = Keyring()
        shares_memory = settings.kv_shared_memory
        listener = ZmqListener(endpoint, keyring if is_encrypted(settings) else None, shares_memory=shares_memory)
        dialer = ZmqDialer(keyring, spares, shares_memory=shares_memory)
        return (
            KVSender(dialer, engine.pool, rank=rank, **node, deadline_s=deadline_s),
            KVReceiver(listener, engine.pool, rank=rank, **node),
        )
    from kv_transfer.transports.tensor_payload import TensorStore
    from kv_transfer.transports.torch_dist import TorchDistDialer, TorchDistListener

    store = TensorStore(engine.pool)
    return (
        KVSender(TorchDistDialer(device), store, rank=rank, **node, deadline_s=deadline_s),
        KVReceiver(TorchDistListener(endpoint, device), store, rank=rank, **node),
    )
