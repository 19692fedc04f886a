"""Puts one rank of a prefill node together and runs it."""

from contextlib import closing

import torch

from engine.engine import Engine
from engine.parallel import choose_device, join
from engine.stepper import Stepper
from kv_transfer.ends.sender import KVSender
from kv_transfer.transports.zmq import ZmqDialer
from prefill_node.node import PrefillNode
from prefill_node.ranks import PrefillFollower
from prefill_node.settings import PrefillSettings
from protos.attach import FleetLink
from protos.follower import Follower
from protos.ranks import Followers, Leader
from protos.reports import rank_load
from protos.serving import serve
from serving_core.rates import StepRates
from serving_core.requests import Share


async def serve_prefill(settings: PrefillSettings, name: str) -> None:
    """Serves until SIGTERM. Raises SettingsError or ModelError when the node cannot start, RankLost when a rank is
    gone before it has."""
    device = choose_device(settings.engine.device)
    with closing(join(device, settings.engine.tensor_parallel_size, settings.engine.rank_timeout_s)) as group:
        engine = Engine(settings.engine, group)
        prefill_tokens_per_s = engine.warm_up()
        sender = _sender(settings, engine, device)
        try:
            if group.rank:
                leader = await Leader.join(group.exchange, "", rank_load(engine))
                stepper: Stepper[Share, None] = Stepper(engine.follow)
                rank = PrefillFollower(engine.layout, sender, leader, settings.overlap_min_tokens)
                await Follower(leader, stepper, rank).run()
            else:
                followers = Followers(group.size - 1)
                await followers.gather(group.exchange)
                link = FleetLink(settings.link)
                rates = StepRates(prefill_tokens_per_s)
                node = PrefillNode(settings, name, engine, sender, followers, link, rates)
                await serve(node, link, drain_s=settings.link.drain_s)
                followers.stop()
        finally:
            await sender.close()


def _sender(settings: PrefillSettings, engine: Engine, device: torch.device) -> KVSender:
    rank, tp_size = engine.group.rank, engine.group.size
    if settings.kv_transport == "zmq":
        return KVSender(ZmqDialer(), engine.pool, rank=rank, tp_size=tp_size, deadline_s=settings.transfer_timeout_s)
    from kv_transfer.transports.tensor_payload import TensorStore
    from kv_transfer.transports.torch_dist import TorchDistDialer

    dialer, store = TorchDistDialer(device), TensorStore(engine.pool)
    return KVSender(dialer, store, rank=rank, tp_size=tp_size, deadline_s=settings.transfer_timeout_s)
