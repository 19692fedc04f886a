"""Puts one rank of a decode node together and runs it."""

from contextlib import closing

import torch

from decode_node.node import DecodeNode
from decode_node.ranks import DecodeFollower
from decode_node.settings import DecodeSettings
from engine.engine import Engine
from engine.parallel import choose_device, join
from engine.stepper import Stepper
from kv_transfer.endpoints import endpoint_of, host_of
from kv_transfer.ends.receiver import KVReceiver
from kv_transfer.transports.zmq import ZmqListener
from protos.attach import FleetLink
from protos.follower import Follower
from protos.ranks import Followers, Leader
from protos.reports import rank_load
from protos.serving import serve
from serving_core.exposure import check_exposure
from serving_core.rates import StepRates
from serving_core.requests import Share


async def serve_decode(settings: DecodeSettings, name: str) -> None:
    """Serves until SIGTERM. Raises SettingsError or ModelError when the node cannot start, RankLost when a rank is
    gone before it has."""
    endpoint = endpoint_of(settings.kv_transport, settings.kv_bind, 0)
    if host := host_of(endpoint):
        check_exposure(host, "fleet_secret", settings.link.fleet_secret)
    device = choose_device(settings.engine.device)
    with closing(join(device, settings.engine.tensor_parallel_size, settings.engine.rank_timeout_s)) as group:
        engine = Engine(settings.engine, group)
        prefill_tokens_per_s = engine.warm_up()
        receiver = _receiver(settings, engine, device)
        try:
            if group.rank:
                leader = await Leader.join(group.exchange, receiver.address, rank_load(engine))
                stepper: Stepper[Share, None] = Stepper(engine.follow)
                await Follower(leader, stepper, DecodeFollower(receiver, leader)).run()
            else:
                followers = Followers(group.size - 1)
                await followers.gather(group.exchange)
                link = FleetLink(settings.link)
                rates = StepRates(prefill_tokens_per_s)
                node = DecodeNode(settings, name, engine, receiver, followers, link, rates)
                await serve(node, link, drain_s=settings.link.drain_s)
                followers.stop()
        finally:
            await receiver.close()


def _receiver(settings: DecodeSettings, engine: Engine, device: torch.device) -> KVReceiver:
    rank, tp_size = engine.group.rank, engine.group.size
    endpoint = endpoint_of(settings.kv_transport, settings.kv_bind, rank)
    if settings.kv_transport == "zmq":
        return KVReceiver(ZmqListener(endpoint), engine.pool, rank=rank, tp_size=tp_size)
    from kv_transfer.transports.tensor_payload import TensorStore
    from kv_transfer.transports.torch_dist import TorchDistListener

    listener = TorchDistListener(endpoint, device)
    return KVReceiver(listener, TensorStore(engine.pool), rank=rank, tp_size=tp_size)
