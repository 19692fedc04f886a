"""A running coordinator, and nodes that a test speaks for, command by command."""

import asyncio
import contextlib
from collections import Counter
from unittest.mock import patch

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from coordinator.dispatcher import Dispatcher
from coordinator.server import CoordinatorServer
from coordinator.settings import CoordinatorSettings
from protos import fleet_pb2, inference_pb2, inference_pb2_grpc
from serving_core.net.numbering import Numbering
from tests import fleet_events as events
from tests.tiny_models import write_fake_model

DEADLINE_S = 120.0
SETTINGS = {
    "grpc_port": 0,
    "fleet_port": 0,
    "http_port": -1,
    "heartbeat_s": 30.0,
    "node_timeout_s": 6 * DEADLINE_S,  # a test has ended before
    "node_wait_s": 0.0,
    "drain_s": DEADLINE_S,
}


def run(coroutine):
    """Runs a test's coroutine; a wait that never ends fails it."""

    async def bounded():
        async with asyncio.timeout(2 * DEADLINE_S):
            await coroutine

    asyncio.run(bounded())


class ScriptedNode:
    """One node's stream."""

    def __init__(self, channel, call):
        self._channel = channel
        self._call = call
        self._numbering = Numbering()
        self.session = 0
        self.num_sent = 0

    @classmethod
    async def dial(cls, port, first_event, secret=""):
        """Opens the stream and sends its first message, an event or raw bytes."""
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        attach = channel.stream_stream("/splitserve.v1.Fleet/Attach")
        node = cls(channel, attach(metadata=(("authorization", f"Bearer {secret}"),)))
        await node.send(first_event)
        return node

    async def send(self, event):
        self.num_sent += 1
        if not isinstance(event, bytes):
            numbered = fleet_pb2.NodeEvent.FromString(event.SerializeToString())
            self._numbering.stamp(numbered)
            event = numbered.SerializeToString()
        await self._call.write(event)

    def lose(self):
        """Number an event that never comes."""
        self._numbering.stamp(fleet_pb2.NodeEvent())

    async def command(self, kind):
        """The next command that answers no heartbeat, which must be of this kind."""
        async with asyncio.timeout(DEADLINE_S):
            while (command := await self._next(kind)).HasField("heartbeat_ack"):
                pass
        assert command.WhichOneof("command") == kind, command
        return getattr(command, kind)

    async def _next(self, kind):
        message = await self._call.read()
        assert message is not grpc.aio.EOF, f"the stream ended before {kind}"
        command = fleet_pb2.NodeCommand.FromString(message)
        self._numbering.check(command)
        return command

    async def end_of_stream(self):
        """The status with which the coordinator ends the stream, after whatever it had still to say."""
        async with asyncio.timeout(DEADLINE_S):
            with contextlib.suppress(grpc.aio.AioRpcError):
                while await self._call.read() is not grpc.aio.EOF:
                    continue
            return await self._call.code(), await self._call.details()

    async def close(self):
        """Breaks the stream."""
        self._call.cancel()
        await self._channel.close()

    async def hang_up(self):
        """Ends the stream in good order."""
        await self._call.done_writing()

    async def answer_cancel(self, attempt):
        cancel = await self.command("cancel")
        assert cancel.attempt == attempt
        await self.send(events.cancelled(attempt))


class Cluster:
    """A coordinator with a fake model's folder, its clients' stub, and scripted nodes by name."""

    def __init__(self, server, channel, num_heard):
        self.server = server
        self.channel = channel
        self.stub = inference_pb2_grpc.InferenceStub(channel)
        self.admin = inference_pb2_grpc.AdminStub(channel)
        self.nodes = {}
        self.num_reports = 0
        self._num_heard = num_heard

    async def attach(self, name, **hello):
        node = await ScriptedNode.dial(self.server.fleet_port, events.hello(name, **hello))
        node.session = (await node.command("welcome")).session
        self.nodes[name] = node
        return node

    def generate(self, prompt="hello", *, request_id="r", cache_salt="", timeout=DEADLINE_S, **params):
        request = inference_pb2.GenerateRequest(
            request_id=request_id,
            text=prompt,
            cache_salt=cache_salt,
            sampling_params=inference_pb2.SamplingParams(**params),
        )
        return self.stub.Generate(request, timeout=timeout)

    async def until_heard(self, *nodes):
        """Returns when the coordinator has handled what these nodes have said: their streams overtake each other."""
        async with asyncio.timeout(DEADLINE_S):
            while any(self._num_heard[node.session] < node.num_sent - 1 for node in nodes):  # which are without hello
                await asyncio.sleep(0.001)

    async def until_loads(self, condition):
        """Returns when a load report meets the condition."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition(await self.stub.GetLoads(inference_pb2.GetLoadsRequest())):
                await asyncio.sleep(0.01)

    async def report_blocks(self, name, stored=(), removed=()):
        """The node tells of blocks; returns when the coordinator has heard it."""
        await self.nodes[name].send(events.cache_changed(stored, removed))
        self.num_reports += 1
        mark = self.num_reports
        await self.nodes[name].send(events.heartbeat(num_steps=mark))
        await self.until_loads(lambda loads: any(load.num_steps == mark for load in loads.nodes))

    async def until_nothing_is_live(self):
        await self.until_loads(lambda loads: loads.num_live_requests == 0)


@contextlib.contextmanager
def heard():
    """Count the events that dispatchers have handled, by the session of the node."""
    receive, num_heard = Dispatcher.receive, Counter()

    def counting(self, link, event):
        receive(self, link, event)
        num_heard[link.node.session] += 1

    with patch.object(Dispatcher, "receive", counting):
        yield num_heard


@contextlib.asynccontextmanager
async def cluster(folder, nodes=("p0", "d0"), credentials=None, **settings):
    """A coordinator with these nodes attached; with `credentials` it is asked over TLS."""
    write_fake_model(folder)
    server = CoordinatorServer(CoordinatorSettings(model=str(folder), **{**SETTINGS, **settings}))
    await server.start()
    target = f"127.0.0.1:{server.port}"
    channel = grpc.aio.secure_channel(target, credentials) if credentials else grpc.aio.insecure_channel(target)
    async with channel:
        with heard() as num_heard:
            running = Cluster(server, channel, num_heard)
            try:
                await server.open()
                for name in nodes:
                    await running.attach(name)
                yield running
            finally:
                for node in running.nodes.values():
                    await node.close()
                await server.stop()


async def responses(call):
    """The rest of a stream of which some may have been read."""
    while (response := await call.read()) is not grpc.aio.EOF:
        yield response


async def read_all(call):
    """Everything that an answer's stream says: text, token ids, and the Complete messages."""
    text, token_ids, completes = "", [], []
    async for response in responses(call):
        if response.HasField("complete"):
            completes.append(response.complete)
            continue
        assert response.chunk.first_token_index == len(token_ids)
        text += response.chunk.text
        token_ids += response.chunk.token_ids
    return text, token_ids, completes


async def health_changes(c):
    """A queue of the readiness that health watchers see."""
    call = health_pb2_grpc.HealthStub(c.channel).Watch(health_pb2.HealthCheckRequest(service="splitserve.v1.Inference"))
    statuses = health_pb2.HealthCheckResponse

    async def following(expected):
        async with asyncio.timeout(DEADLINE_S):
            assert (await call.read()).status == getattr(statuses, expected)

    return following


async def until_serving(stub):
    """Return once the API server that a stub has dialed has heard of nodes: one that is a process hears of them
    soon."""
    async with asyncio.timeout(DEADLINE_S):
        while (await stub.GetModelInfo(inference_pb2.GetModelInfoRequest())).max_model_len != 1000:
            await asyncio.sleep(0.01)


async def begin(c):
    """Takes the two commands that start an answer: its attempt and its job."""
    job = (await c.nodes["d0"].command("reserve")).job
    assert (await c.nodes["p0"].command("prefill")).job == job
    return job.attempt, job


async def transfer(c, attempt, text="a", index=0, *, num_cached_tokens=0, logprob=None, **num_bytes):
    """First token, descriptor and commit of an attempt on p0 and d0, which is told that the prompt is read; the
    coordinator has heard of them, in this order."""
    p0, d0 = c.nodes["p0"], c.nodes["d0"]
    token = events.sampled(attempt, index, ord(text), logprob=logprob)
    await p0.send(events.first_token(token, num_cached_tokens=num_cached_tokens))
    assert (await d0.command("begun")).attempt == attempt
    await c.until_heard(p0)
    await d0.send(events.reserved(attempt, b"t" * 40))
    deliver = await p0.command("deliver")
    assert (deliver.attempt, deliver.descriptor) == (attempt, b"t" * 40)
    await d0.send(events.committed(attempt, **num_bytes))
    await p0.send(events.transferred(attempt))
    await c.until_heard(p0, d0)


async def begin_to_write(c, text="a", **fields):
    """Start an answer and hand it over with its first token, as `begin` and `transfer` do; return its attempt."""
    attempt, _ = await begin(c)
    await transfer(c, attempt, text, **fields)
    return attempt


async def step(node, attempt, index, text, finish_reason=0):
    """One step with one token for each character."""
    tokens = [events.sampled(attempt, index + offset, ord(char)) for offset, char in enumerate(text)]
    tokens[-1].finish_reason = finish_reason
    await node.send(events.step_tokens(*tokens))


def faults_of(caplog):
    """What was logged as one: not by asyncio, which may tell of an earlier test, for whose loop gRPC had an event."""
    return [each for each in caplog.records if (each.exc_info or each.levelname == "ERROR") and each.name != "asyncio"]


async def first_message(call):
    async with asyncio.timeout(DEADLINE_S):
        return await call.read()


async def read_to_end(call):
    return [response async for response in responses(call)]


async def refusal_of(call):
    """The status code and ErrorInfo with which a call fails."""
    reading = read_to_end(call) if hasattr(call, "read") else call
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reading
    status = rpc_status.from_call(caught.value)
    info = error_details_pb2.ErrorInfo()
    if status is not None:
        status.details[0].Unpack(info)
    return caught.value.code(), info, caught.value.details()
