"""The node's end of Fleet.Attach against a real gRPC server that is scripted by the test."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest

from engine.errors import SettingsError
from protos import convert, fleet_pb2, fleet_pb2_grpc, inference_pb2
from protos.attach import FleetLink, LinkSettings
from protos.channels import SERVER_OPTIONS

DEADLINE_S = 20.0


class Coordinator(fleet_pb2_grpc.FleetServicer):
    """Answers each attachment with the next script, a coroutine function of (self, context)."""

    def __init__(self, *scripts):
        self.scripts = list(scripts)
        self.events = []
        self.secrets = []

    async def Attach(self, _, context):
        self.secrets.append(dict(context.invocation_metadata()).get("authorization"))
        await self.scripts.pop(0)(self, context)

    async def read(self, context):
        event = await context.read()
        if event is not grpc.aio.EOF:
            self.events.append(event)
        return event


class Node:
    """What the link asks of a node."""

    def __init__(self):
        self.commands = []
        self.num_detached = 0

    def hello(self):
        return fleet_pb2.Hello(node=inference_pb2.NodeInfo(name="n"))

    def heartbeat(self):
        return fleet_pb2.Heartbeat()

    def handle(self, command):
        self.commands.append(command.WhichOneof("command"))

    def detached(self):
        self.num_detached += 1


async def welcome(coordinator, context):
    event = await coordinator.read(context)
    assert event.HasField("hello")
    await context.write(fleet_pb2.NodeCommand(welcome=fleet_pb2.Welcome(heartbeat_s=60.0)))


async def welcome_then_break(coordinator, context):
    await welcome(coordinator, context)
    await context.abort(grpc.StatusCode.UNAVAILABLE, "broken")


@asynccontextmanager
async def serving(coordinator, **settings):
    server = grpc.aio.server(options=SERVER_OPTIONS)
    fleet_pb2_grpc.add_FleetServicer_to_server(coordinator, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield FleetLink(LinkSettings(coordinator=f"127.0.0.1:{port}", **settings))
    finally:
        await server.stop(None)


def cancelled(name):
    return fleet_pb2.Cancelled(attempt=fleet_pb2.Attempt(request_id=name))


async def test_hello_then_heartbeat_then_events_in_order_and_none_is_lost_at_the_end():
    done = asyncio.Event()

    async def read_slowly(coordinator, context):
        await welcome(coordinator, context)
        await context.write(fleet_pb2.NodeCommand(cancel=fleet_pb2.Cancel()))
        while await coordinator.read(context) is not grpc.aio.EOF:
            await asyncio.sleep(0.02)
        done.set()

    coordinator, node = Coordinator(read_slowly), Node()
    async with asyncio.timeout(DEADLINE_S), serving(coordinator, fleet_secret="s3cret") as link:
        running = asyncio.create_task(link.run(node))
        while not node.commands:
            await asyncio.sleep(0.01)
        for i in range(20):
            link.send(cancelled=cancelled(str(i)))
        link.stop()
        await done.wait()
        await running
    kinds = [event.WhichOneof("event") for event in coordinator.events]
    assert kinds == ["hello", "heartbeat", *["cancelled"] * 20]
    assert [event.cancelled.attempt.request_id for event in coordinator.events[2:]] == [str(i) for i in range(20)]
    assert coordinator.secrets == ["Bearer s3cret"]
    assert node.commands == ["cancel"]


async def test_a_broken_stream_detaches_the_node_and_it_attaches_again():
    attached_again = asyncio.Event()

    async def stay(coordinator, context):
        await welcome(coordinator, context)
        attached_again.set()
        await coordinator.read(context)
        await coordinator.read(context)

    coordinator, node = Coordinator(welcome_then_break, welcome_then_break, stay), Node()
    async with asyncio.timeout(DEADLINE_S), serving(coordinator) as link:
        running = asyncio.create_task(link.run(node))
        await attached_again.wait()
        assert node.num_detached == 2
        link.stop()
        await running


async def test_the_pause_before_attaching_again_starts_anew_after_a_welcome():
    coordinator = Coordinator(*[welcome_then_break] * 6)
    async with asyncio.timeout(DEADLINE_S), serving(coordinator) as link:
        running = asyncio.create_task(link.run(Node()))
        pauses = set()
        while coordinator.scripts:
            await asyncio.sleep(0.01)
            pauses.add(link._retry_s)
        running.cancel()
    assert max(pauses) <= 0.2  # the first pause, doubled once: not 6 times


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, "another fleet secret"),
        (grpc.StatusCode.FAILED_PRECONDITION, "refuses this node: no"),
    ],
)
async def test_a_refusal_by_status_is_final(code, sentence):
    async def refuse(coordinator, context):
        await context.abort(code, "no")

    async with asyncio.timeout(DEADLINE_S), serving(Coordinator(refuse)) as link:
        with pytest.raises(SettingsError, match=sentence):
            await link.run(Node())


async def test_a_refusal_by_message_is_final():
    async def refuse(coordinator, context):
        await coordinator.read(context)
        refusal = fleet_pb2.Refusal(reason="PAIRING_MISMATCH", message="dtype: float32 here, bfloat16 in the fleet")
        await context.write(fleet_pb2.NodeCommand(refusal=refusal))

    async with asyncio.timeout(DEADLINE_S), serving(Coordinator(refuse)) as link:
        with pytest.raises(SettingsError, match="dtype: float32 here, bfloat16 in the fleet"):
            await link.run(Node())


@pytest.mark.parametrize("token_id", [0, 1, 49151, 2**32 - 1])
def test_the_first_token_travels_in_the_tail(token_id):
    assert convert.token_from_tail(convert.token_to_tail(token_id)) == token_id


@pytest.mark.parametrize("tail", [b"", b"abc", b"abcde"])
def test_an_odd_tail_holds_no_token(tail):
    with pytest.raises(ValueError, match="holds no token id"):
        convert.token_from_tail(tail)
