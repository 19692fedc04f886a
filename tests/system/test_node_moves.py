"""Answers that move between node processes of unlike sizes, both ways at once, over each transport. The test itself is
the coordinator."""

import asyncio

import grpc
import pytest

from protos import convert, fleet_pb2, fleet_pb2_grpc
from serving_core.net.channels import SERVER_OPTIONS
from serving_core.net.numbering import Numbering
from tests.system.cluster import START_DEADLINE_S, Child
from tests.system.oracle import Reference
from tests.tiny_models import write_tiny_model
from tests.unit.serving_node.runner_kit import MigratingRequest, by_name, job, make_request

pytestmark = pytest.mark.nightly

ANSWER_DEADLINE_S = 240.0
NUM_MIGRATIONS = 4
NUM_TOKENS, MOST_TOKENS = 400, 4000  # a busy machine may take long to move an answer, which goes on meanwhile


class RemoteNode:
    """What a Mover asks of a node, over its stream."""

    def __init__(self, name):
        self.name = name
        self.on_event = None
        self.hello = None
        self.load = None
        self.num_committed = 0
        self.commands = asyncio.Queue()

    def handle(self, **command):
        self.commands.put_nowait(fleet_pb2.NodeCommand(**command))

    def reserve(self, request, ahead):
        self.handle(
            reserve=fleet_pb2.Reserve(
                job=job(request), prefill_tp_size=self.other.hello.tp_size, num_tokens_ahead=ahead
            )
        )

    def local(self, request):
        self.handle(reserve=fleet_pb2.Reserve(job=job(request), local_prefill=True))

    def migrate(self, request, descriptor):
        self.handle(migrate=fleet_pb2.Migrate(attempt=convert.attempt_of(request), descriptor=descriptor))

    def cancel(self, request):
        self.handle(cancel=fleet_pb2.Cancel(attempt=convert.attempt_of(request)))

    def take(self, event):
        self.num_committed += event.HasField("committed")
        if event.HasField("heartbeat"):
            self.load = event.heartbeat.load
        elif event.HasField("hello"):
            self.hello = event.hello
        else:
            self.on_event(event)


class Fleet(fleet_pb2_grpc.FleetServicer):
    def __init__(self, *names):
        self.nodes = {name: RemoteNode(name) for name in names}
        first, second = self.nodes.values()
        first.other, second.other = second, first
        self.error = None

    async def Attach(self, _, context):
        hello = await context.read()
        node = self.nodes[hello.hello.node.name]
        welcome = fleet_pb2.Welcome(heartbeat_s=0.2, timeout_s=3600.0, session=1)  # nobody acknowledges heartbeats
        node.commands.put_nowait(fleet_pb2.NodeCommand(welcome=welcome))
        node.take(hello)
        writing = asyncio.create_task(self._write(node, context))
        try:
            while (event := await context.read()) is not grpc.aio.EOF:
                node.take(event)
        except AssertionError as error:
            self.error = error
        finally:
            writing.cancel()

    async def _write(self, node, context):
        numbering = Numbering()
        while True:
            command = await node.commands.get()
            numbering.stamp(command)
            await context.write(command)

    async def until(self, condition, deadline_s):
        async with asyncio.timeout(deadline_s):
            while not condition():
                assert self.error is None, self.error
                await asyncio.sleep(0.01)

    @property
    def is_free(self):
        return all(node.load.num_blocks_free == node.load.num_blocks for node in self.nodes.values())


@pytest.mark.parametrize(
    ("transport", "x_size", "y_size", "num_kv_heads"),
    [("zmq", 2, 1, 3), ("zmq", 1, 4, 2), ("torch_dist", 2, 1, 2)],
)
async def test_answers_swap_their_nodes_again_and_again(transport, x_size, y_size, num_kv_heads, tmp_path):
    """In float32, so that the order in which two ranks' sums are added does not show in a token."""
    sizes = {"num_key_value_heads": num_kv_heads, "num_attention_heads": 6, "head_dim": 8, "intermediate_size": 72}
    model = write_tiny_model(tmp_path / "model", max_position_embeddings=MOST_TOKENS + 100, **sizes)
    fleet = Fleet("x", "y")
    server = grpc.aio.server(options=SERVER_OPTIONS)
    fleet_pb2_grpc.add_FleetServicer_to_server(fleet, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    children = [
        Child(
            name,
            "decode_node",
            str(model),
            flags={
                "coordinator": f"127.0.0.1:{port}",
                "name": name,
                "tensor_parallel_size": size,
                "block_size": 8,
                "num_kv_blocks": 1100,
                "kv_transport": transport,
                "max_num_seqs": 4,
            },
            log=tmp_path / f"{name}.log",
            env={},
        )
        for name, size in (("x", x_size), ("y", y_size))
    ]
    try:
        all_migrating = await swap(fleet, children)
        for child in children:
            assert await asyncio.to_thread(child.stop) == 0, child.output()
    except (AssertionError, TimeoutError) as error:
        error.add_note("\n".join(child.output() for child in children))
        raise
    finally:
        for child in children:
            if child.is_running:
                child.kill()
        await server.stop(None)
    reference = Reference(model)
    for migrating in all_migrating.values():
        prompt = migrating.request.token_ids[: migrating.request.num_prompt_tokens]
        expected = await asyncio.to_thread(reference.greedy, prompt, len(migrating.answer), eos_token_id=-1)
        assert [token.token_id for token in migrating.answer] == expected
        assert len(migrating.next_indexes) == NUM_MIGRATIONS
    assert [node.num_committed for node in fleet.nodes.values()] == [NUM_MIGRATIONS, NUM_MIGRATIONS]


async def swap(fleet, children):
    nodes = x, y = list(fleet.nodes.values())
    assert all(child.is_running for child in children)
    await fleet.until(lambda: all(node.hello and node.load for node in nodes), START_DEADLINE_S)
    all_migrating = {}
    for name, first, second in (("a", x, y), ("b", y, x)):
        request = make_request(name, range(len(all_migrating), 41), max_tokens=MOST_TOKENS)
        all_migrating[name] = MigratingRequest(
            first, second, request, num_migrations=NUM_MIGRATIONS, num_ahead=MOST_TOKENS
        )
    for node in nodes:
        node.on_event = by_name(node, all_migrating, {})
    x.local(all_migrating["a"].request)
    y.local(all_migrating["b"].request)
    await fleet.until(lambda: all(map(has_gone_on, all_migrating.values())), ANSWER_DEADLINE_S)
    for migrating in all_migrating.values():
        migrating.writer.cancel(migrating.request)
    await fleet.until(lambda: fleet.is_free, ANSWER_DEADLINE_S)
    return all_migrating


def has_gone_on(migrating):
    """After its last move."""
    return len(migrating.next_indexes) == NUM_MIGRATIONS and len(migrating.answer) > max(
        NUM_TOKENS, migrating.next_indexes[-1]
    )
