"""What happens in the rows of the matrix. Each takes a scene under load, and returns when the fault is over."""

import asyncio
import contextlib
import random
import resource
from collections.abc import Awaitable, Callable

import grpc
import psutil
import zmq

from protos.inference_pb2 import AbortRequest
from serving_core.process.failpoints import ENVIRONMENT
from splitserve import AsyncClient
from splitserve.client.errors import ClientError
from tests.faults.load import Habits, Load
from tests.faults.proxy import End, Fault
from tests.faults.scene import DEADLINE_S, Scene
from tests.faults.stalled_reader import StalledReader
from tests.system.answers import details, outcome, request, stream
from tests.system.cluster import FLEET_SECRET
from tests.system.test_bad_input import BAD_PARAMETERS, GENERATE, JUNK, MALFORMED
from tests.tiny_models import write_fake_model

Strike = Callable[[Scene], Awaitable[None]]

STOPPED_S = 6.0  # twice what a node may be silent
NUM_STALLED = 4
CROWD = Habits(num_clients=96, lengths=(300,), max_tokens=(4, 30))
CROWDED_S = 6.0


# ---- processes ----


def at_failpoint(name: str) -> Strike:
    """A process comes to its failpoint."""

    async def strike(scene: Scene) -> None:
        await scene.until_at_failpoint(name)

    return strike


async def drain_to_failpoint(scene: Scene) -> None:
    """The answers of decode-0 move away, until it comes to its failpoint."""
    await scene.load.in_swing()
    draining = asyncio.create_task(_drain(scene, "decode-0"))
    await scene.until_at_failpoint("decode-0")
    await draining


async def kill_target(scene: Scene) -> None:
    """The answers of decode-0 move to a fresh decode-1, which dies before the first of them is its own."""
    scene.cluster.kill("decode-1")
    await scene.load.in_swing()
    scene.start("decode-1", env={ENVIRONMENT: "commit:1=kill"})
    await scene.complete()
    scene.child("decode-1")
    draining = asyncio.create_task(_drain(scene, "decode-0"))
    await scene.until_at_failpoint("decode-1")
    await _undrain(scene, "decode-0")
    await draining


async def _drain(scene: Scene, name: str) -> None:
    """Ends with the last answer that moves away, or with the node."""
    async with AsyncClient(scene.cluster.target) as client:
        with contextlib.suppress(ClientError):
            async for _ in client.drain(name, deadline_s=DEADLINE_S):
                pass


async def _undrain(scene: Scene, name: str) -> None:
    async with AsyncClient(scene.cluster.target) as client:
        await client.set_role(name, "decode")


async def kill_decode(scene: Scene) -> None:
    await scene.load.in_swing()
    scene.kill("decode-0")


async def kill_rank(scene: Scene) -> None:
    """The second of two."""
    await scene.load.in_swing()
    node = scene.child("decode-0")
    [follower] = psutil.Process(node.process.pid).children(recursive=True)
    scene.strike()
    follower.kill()
    assert await asyncio.to_thread(node.wait, DEADLINE_S) != 0


def stop(name: str) -> Strike:
    """SIGSTOP for a while, and until a node is given up, which a busy coordinator may do late."""

    async def strike(scene: Scene) -> None:
        await scene.load.in_swing()
        async with scene.stopped(name):
            await asyncio.sleep(STOPPED_S)
            if name != "coordinator":
                await scene.until_says("coordinator", f"{name} lost")
        await scene.complete()

    return strike


async def engine_stands_still(scene: Scene) -> None:
    """Until the node is back by itself."""
    await scene.until_at_failpoint("decode-0")
    await scene.until_says("coordinator", "decode-0 attached")


async def restart_coordinator(scene: Scene) -> None:
    """What ran is gone, and unknown to the next one."""
    await scene.load.in_swing()
    running = [asked.stream for asked in scene.load.asked if not asked.stream.has_ended]
    scene.kill("coordinator")
    for answering in running:
        await answering.end()
    scene.start("coordinator")
    await scene.complete()
    lost = [answering.answer.request_id for answering in running if answering.error and answering.answer.request_id]
    reply = await scene.stub.Abort(AbortRequest(request_ids=lost), wait_for_ready=True, timeout=DEADLINE_S)
    assert sorted(reply.unknown) == sorted(lost)


def clients_know(scene: Scene) -> bool:
    """Whether a call has failed."""
    return any(asked.stream.error is not None for asked in scene.load.asked)


async def two_of_a_name(scene: Scene) -> None:
    """A node hangs, another one takes its place, and the first one wakes: it is told to wait."""
    await scene.load.in_swing()
    hung = scene.child("decode-0")
    async with scene.stopped("decode-0"):
        scene.start("decode-0")
        await scene.until_says("coordinator", "decode-0 attached")
    await scene.until_says("decode-0", "another process is attached as decode-0")
    await scene.until_answered()
    hung.kill()


async def roll(scene: Scene) -> None:
    """A node of each role leaves in good order and comes back."""
    await scene.load.in_swing()
    for name in ("decode-0", "prefill-0"):
        assert await scene.end(name) == 0
        scene.start(name)
        await scene.complete()


def all_gone(role: str, *, is_back: bool) -> Strike:
    """Both nodes of a role, at once. They are back soon, or when requests have been told that there is none."""
    names = (f"{role}-0", f"{role}-1")

    async def strike(scene: Scene) -> None:
        await scene.load.in_swing()
        scene.kill(*names)
        if not is_back:
            await scene.until_says("coordinator", f"NO_{role.upper()}_WORKER")
        for name in names:
            scene.start(name)
        await scene.complete()

    return strike


async def intrude(scene: Scene) -> None:
    await scene.load.in_swing()
    model = write_fake_model(scene.cluster.folder / "another model", num_layers=2)
    scene.strike()
    intruder = scene.cluster.start_intruder(model, "decode-9")
    assert await asyncio.to_thread(intruder.wait, DEADLINE_S) == 2
    assert "the coordinator refuses this node" in intruder.output()


async def goes_on(scene: Scene) -> None:
    """The fault is there from the beginning."""
    scene.strike()
    await scene.load.in_swing()
    await asyncio.sleep(3.0)


def has_preempted(scene: Scene) -> bool:
    return any(load.num_preemptions for load in scene.cluster.loads().values())


async def fill_disk(scene: Scene) -> None:
    """No process may write a byte more to any file."""
    await scene.load.in_swing()
    children = list(scene.cluster.children.values())
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    scene.strike()
    for child in children:
        resource.prlimit(child.process.pid, resource.RLIMIT_FSIZE, (0, hard))
    sizes = [child.log.stat().st_size for child in children]
    await scene.until_answered()
    assert [child.log.stat().st_size for child in children] == sizes
    for child in children:
        resource.prlimit(child.process.pid, resource.RLIMIT_FSIZE, (hard, hard))


# ---- networks ----


def proxy_strikes(name: str, *, for_s: float = 0.0) -> Strike:
    """The proxy before a node does what the row says, and after a while no more."""

    async def strike(scene: Scene) -> None:
        proxy = scene.proxies[name]
        await asyncio.wait_for(proxy.struck.wait(), DEADLINE_S)
        scene.strike()
        await asyncio.sleep(for_s)
        if for_s:
            proxy.fault = Fault()

    return strike


def dialled_again(name: str) -> Callable[[Scene], bool]:
    """Whether a sender has given a connection up for another: there are two senders."""
    return lambda scene: scene.proxies[name].num_connections > 2


async def cut_fleet(scene: Scene) -> None:
    """A node hears no more of the coordinator, nor the coordinator of it, on the connection that they have."""
    await scene.load.in_swing()
    scene.proxies["decode-0"].fault = Fault(end=End.CUT)
    scene.strike()
    await scene.until_says("coordinator", "decode-0 attached")


# ---- clients ----


async def stall_readers(scene: Scene) -> None:
    await scene.load.in_swing()
    reader = await StalledReader.dial(scene.cluster.port)
    scene.strike()
    for number in range(NUM_STALLED):
        reader.ask(request([number], request_id=f"stalled-{number}", max_tokens=3000, temperature=0, ignore_eos=True))
    for number in range(NUM_STALLED):
        await scene.until_says("coordinator", f'"request_id": "stalled-{number}"')  # its nodes are told
    await scene.until_says("coordinator", "a client has read nothing")
    await reader.close()


async def leave(scene: Scene) -> None:
    """Clients cancel what waits, is read, is handed over, is written and moves."""
    await scene.load.in_swing()
    scene.strike()
    rng = random.Random(9)
    asked = [scene.load.ask([rng.randrange(256)] * 300, 200) for _ in range(24)]
    for number, each in enumerate(asked[:12]):
        if number % 2:
            await asyncio.sleep(0.05)
        each.stream.cancel()
    for number, each in enumerate(asked[12:]):
        await each.stream.tokens(1 + 20 * (number % 2))
        each.stream.cancel()
    migrating = [scene.load.ask([rng.randrange(256)] * 30, 400) for _ in range(8)]
    for each in migrating:
        await each.stream.tokens(10)
    draining = asyncio.create_task(_drain(scene, "decode-0"))
    for each in migrating:
        await asyncio.sleep(0.01)
        each.stream.cancel()
    await draining
    await _undrain(scene, "decode-0")


async def ask_the_impossible(scene: Scene) -> None:
    await scene.load.in_swing()
    scene.strike()
    messages = [request([1, 2, 3], **{"max_tokens": 8, **sampling}) for sampling in BAD_PARAMETERS.values()]
    messages.append(request([1] * 5000))  # the context has 4096
    for ended in [await stream(scene.stub, message).end() for message in messages]:
        assert outcome(ended).split()[0] == "INVALID_ARGUMENT", outcome(ended)
        assert not ended.answers


async def send_garbage(scene: Scene) -> None:
    """To the public port, the fleet's, and the data plane's of decode-0."""
    await scene.load.in_swing()
    scene.strike()
    cluster = scene.cluster
    async with grpc.aio.insecure_channel(cluster.target) as channel:
        for payload in MALFORMED.values():
            call = channel.unary_stream(GENERATE)(payload, timeout=DEADLINE_S)
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    secret = (("authorization", f"Bearer {FLEET_SECRET}"),)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{cluster.fleet_port}") as channel:
        attach = channel.stream_stream("/splitserve.v1.Fleet/Attach")(metadata=secret, timeout=DEADLINE_S)
        await attach.write(b"\xff" * 100)
        assert await attach.code() is grpc.StatusCode.INVALID_ARGUMENT
    [address] = {
        f"tcp://127.0.0.1:{connection.laddr.port}"
        for connection in psutil.Process(cluster.children["decode-0"].process.pid).net_connections("tcp4")
        if connection.status == psutil.CONN_LISTEN
    }
    with zmq.Context() as context:
        for frames in JUNK.values():
            with context.socket(zmq.DEALER) as junk:
                junk.setsockopt(zmq.LINGER, 2000)
                junk.connect(address)
                junk.send_multipart(frames)


async def overload(scene: Scene) -> None:
    """Many more clients with long prompts for a while. Whoever is refused hears when to come back."""
    await scene.load.in_swing()
    crowd = Load(scene.stub, CROWD, scene.load.asked)
    scene.strike()
    crowding = asyncio.create_task(crowd.run(seed=20))
    await asyncio.sleep(CROWDED_S)
    crowd.stop()
    await crowding
    errors = [asked.stream.error for asked in scene.load.asked if asked.stream.error is not None]
    assert all("RetryInfo" in details(error) for error in errors)
