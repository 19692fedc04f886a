"""Puts one prefill node together and runs it."""

from engine.engine import Engine
from kv_transfer.sender import KVSender
from kv_transfer.transports.zmq import ZmqDialer
from prefill_node.node import PrefillNode
from prefill_node.settings import PrefillSettings
from protos.attach import FleetLink
from protos.serving import serve


async def serve_prefill(settings: PrefillSettings, name: str) -> None:
    """Serves until SIGTERM. Raises SettingsError or ModelError when the node cannot start."""
    engine = Engine(settings.engine)
    engine.warm_up()
    sender = KVSender(ZmqDialer(), engine.pool, deadline_s=settings.transfer_timeout_s)
    link = FleetLink(settings.link)
    try:
        await serve(PrefillNode(settings, name, engine, sender, link), link, drain_s=settings.link.drain_s)
    finally:
        await sender.close()
