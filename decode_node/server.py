"""Puts one decode node together and runs it."""

from decode_node.node import DecodeNode
from decode_node.settings import DecodeSettings
from engine.engine import Engine
from kv_transfer.receiver import KVReceiver
from kv_transfer.transports.zmq import ZmqListener
from protos.attach import FleetLink
from protos.exposure import check_exposure
from protos.serving import serve


async def serve_decode(settings: DecodeSettings, name: str) -> None:
    """Serves until SIGTERM. Raises SettingsError or ModelError when the node cannot start."""
    if settings.kv_bind.startswith("tcp://"):
        check_exposure(settings.kv_bind[len("tcp://") :].rpartition(":")[0], "fleet_secret", settings.link.fleet_secret)
    engine = Engine(settings.engine)
    engine.warm_up()
    receiver = KVReceiver(ZmqListener(settings.kv_bind), engine.pool)
    link = FleetLink(settings.link)
    try:
        await serve(DecodeNode(settings, name, engine, receiver, link), link, drain_s=settings.link.drain_s)
    finally:
        await receiver.close()
