"""Puts one rank of a node together and runs it."""

from contextlib import closing

import torch

from engine.engine import Engine
from engine.parallel import choose_device, join
from engine.stepper import Stepper
from kv_transfer.endpoints import endpoint_of, host_of
from kv_transfer.ends.receiver import KVReceiver
from kv_transfer.ends.sender import KVSender
from kv_transfer.transports.zmq import ZmqDialer, ZmqListener
from serving_core.exposure import check_exposure
from serving_core.rates import StepRates
from serving_core.requests import Share
from serving_node.link import FleetLink
from serving_node.process import serve
from serving_node.ranks.follower import Follower
from serving_node.ranks.leading import Followers, Leader
from serving_node.ranks.transfers import FollowerTransfers
from serving_node.reports import rank_load
from serving_node.runner import NodeRunner
from serving_node.settings import NodeSettings


async def serve_node(settings: NodeSettings, role: str, name: str) -> None:
    """Serves until SIGTERM. Raises SettingsError or ModelError when the node cannot start, RankLost when a rank is
    gone before it has."""
    endpoint = endpoint_of(settings.kv_transport, settings.kv_bind, 0)
    if host := host_of(endpoint):
        check_exposure(host, "fleet_secret", settings.link.fleet_secret)
    device = choose_device(settings.engine.device)
    with closing(join(device, settings.engine.tensor_parallel_size, settings.engine.rank_timeout_s)) as group:
        engine = Engine(settings.engine, group)
        prefill_tokens_per_s = engine.warm_up()
        sender, receiver = _ends(settings, engine, device)
        try:
            if group.rank:
                await _follow(settings, engine, sender, receiver)
            else:
                followers = Followers(group.size - 1)
                await followers.gather(group.exchange)
                link, rates = FleetLink(settings.link), StepRates(prefill_tokens_per_s)
                node = NodeRunner(settings, role, name, engine, sender, receiver, followers, link, rates)
                await serve(node, link, drain_s=settings.link.drain_s)
                followers.stop()
        finally:
            await sender.close()
            await receiver.close()


async def _follow(settings: NodeSettings, engine: Engine, sender: KVSender, receiver: KVReceiver) -> None:
    leader = await Leader.join(engine.group.exchange, receiver.address, rank_load(engine))
    stepper: Stepper[Share, None] = Stepper(engine.follow)
    transfers = FollowerTransfers(engine.layout, sender, receiver, leader, settings.overlap_min_tokens)
    await Follower(leader, stepper, transfers).run()


def _ends(settings: NodeSettings, engine: Engine, device: torch.device) -> tuple[KVSender, KVReceiver]:
    """What this rank sends and receives blocks with."""
    rank, tp_size, deadline_s = engine.group.rank, engine.group.size, settings.transfer_timeout_s
    endpoint = endpoint_of(settings.kv_transport, settings.kv_bind, rank)
    if settings.kv_transport == "zmq":
        return (
            KVSender(ZmqDialer(), engine.pool, rank=rank, tp_size=tp_size, deadline_s=deadline_s),
            KVReceiver(ZmqListener(endpoint), engine.pool, rank=rank, tp_size=tp_size),
        )
    from kv_transfer.transports.tensor_payload import TensorStore
    from kv_transfer.transports.torch_dist import TorchDistDialer, TorchDistListener

    store = TensorStore(engine.pool)
    return (
        KVSender(TorchDistDialer(device), store, rank=rank, tp_size=tp_size, deadline_s=deadline_s),
        KVReceiver(TorchDistListener(endpoint, device), store, rank=rank, tp_size=tp_size),
    )
