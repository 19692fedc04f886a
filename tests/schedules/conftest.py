"""What runs in simulated time takes the time, its randomness and its connections from the loop that it runs on."""

import asyncio
from types import SimpleNamespace

import grpc
import pytest

import coordinator.dispatcher
import engine.stepper
import kv_transfer.descriptor
import serving_core.node.leases
import serving_node.link
import serving_node.ranks.follower
import serving_node.runner
import serving_node.step_loop
from tests.schedules.streams import Channel


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    clock = SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
    for module in (
        coordinator.dispatcher,
        serving_node.runner,
        serving_node.step_loop,
        serving_node.link,
        engine.stepper,
    ):
        monkeypatch.setattr(module, "time", clock)
    draws = SimpleNamespace(token_bytes=lambda count: _draw(count), token_hex=lambda count: _draw(count).hex())
    for module in (kv_transfer.descriptor, serving_node.runner):
        monkeypatch.setattr(module, "secrets", draws)
    monkeypatch.setattr(serving_core.node.leases, "MIN_CHECKPOINT_TOKENS", 4)  # one block
    monkeypatch.setattr(serving_node.runner, "resident_bytes", lambda: 0)
    monkeypatch.setattr(serving_node.ranks.follower, "resident_bytes", lambda: 0)
    monkeypatch.setattr(grpc.aio, "insecure_channel", Channel)
    monkeypatch.setattr(serving_node.link.fleet_pb2_grpc, "FleetStub", lambda channel: channel)


def _draw(num_bytes):
    return asyncio.get_running_loop().network.random.randbytes(num_bytes)
