"""The node's end of Fleet.Attach against a real gRPC server that is scripted by the test, and against other ports."""

import asyncio
import logging
import socket
import ssl
from contextlib import asynccontextmanager

import grpc
import pytest
from starlette.applications import Starlette

from coordinator.api.connections import Sheds
from coordinator.api.http.serving import HttpServer
from protos import fleet_pb2, fleet_pb2_grpc, inference_pb2, inference_pb2_grpc
from serving_core.errors import SettingsError
from serving_core.net.channels import SERVER_OPTIONS
from serving_core.net.numbering import Numbering
from serving_core.net.tls import TlsSettings
from serving_node.link import MAX_JOINED_BYTES, RETRY_MIN_S, FleetLink, LinkSettings
from tests.tls_kit import authority, flags_of

DEADLINE_S = 60.0


class Numbered:
    """The context of a call of Attach that numbers what is written."""

    def __init__(self, context):
        self._context = context
        self._numbering = Numbering()

    def __getattr__(self, name):
        return getattr(self._context, name)

    async def write(self, command):
        self._numbering.stamp(command)
        await self._context.write(command)

    def lose(self):
        """Number a command that never comes."""
        self._numbering.stamp(fleet_pb2.NodeCommand())


class Coordinator(fleet_pb2_grpc.FleetServicer):
    """Answers each attachment with the next script, a coroutine function of (self, context)."""

    def __init__(self, *scripts):
        self.scripts = list(scripts)
        self.events = []
        self.secrets = []
        self.num_welcomes = 0

    async def Attach(self, _, context):
        self.secrets.append(dict(context.invocation_metadata()).get("authorization"))
        await self.scripts.pop(0)(self, Numbered(context))

    async def read(self, context):
        event = await context.read()
        if event is not grpc.aio.EOF:
            self.events.append(event)
        return event


class Node:
    """What the link asks of a node."""

    num_blocks_free = 7

    def __init__(self):
        self.commands = []
        self.num_detached = 0
        self.is_stuck, self.is_well = asyncio.Event(), asyncio.Event()
        self.is_well.set()

    async def stuck(self):
        await self.is_stuck.wait()
        return "one step takes very long"

    async def recovered(self):
        await self.is_well.wait()

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
    coordinator.num_welcomes += 1
    welcome = fleet_pb2.Welcome(heartbeat_s=60.0, timeout_s=10 * DEADLINE_S, session=100 + coordinator.num_welcomes)
    await context.write(fleet_pb2.NodeCommand(welcome=welcome))


async def stay(coordinator, context):
    await welcome(coordinator, context)
    while await coordinator.read(context) is not grpc.aio.EOF:
        continue


async def name_taken(coordinator, context):
    await coordinator.read(context)
    refusal = fleet_pb2.Refusal(reason="NAME_TAKEN", message="another process is attached as n")
    await context.write(fleet_pb2.NodeCommand(refusal=refusal))


async def welcome_then_break(coordinator, context):
    await welcome(coordinator, context)
    await coordinator.read(context)  # a heartbeat: gRPC loses a welcome that is still unread when the status comes
    await context.abort(grpc.StatusCode.UNAVAILABLE, "broken")


@asynccontextmanager
async def serving(coordinator, credentials=None, **settings):
    server = grpc.aio.server(options=SERVER_OPTIONS)
    fleet_pb2_grpc.add_FleetServicer_to_server(coordinator, server)
    where = "127.0.0.1:0"
    port = server.add_secure_port(where, credentials) if credentials else server.add_insecure_port(where)
    await server.start()
    try:
        yield FleetLink(LinkSettings(coordinator=f"127.0.0.1:{port}", **settings))
    finally:
        await server.stop(None)


def cancelled(name):
    return fleet_pb2.Cancelled(attempt=fleet_pb2.Attempt(request_id=name))


@pytest.mark.parametrize("most_bytes", [MAX_JOINED_BYTES, 1])
async def test_steps_that_wait_travel_together_and_pass_nothing_else(most_bytes, monkeypatch):
    monkeypatch.setattr("serving_node.link.MAX_JOINED_BYTES", most_bytes)
    read, node = [], Node()

    async def read_all(coordinator, context):
        await welcome(coordinator, context)
        await context.write(fleet_pb2.NodeCommand(cancel=fleet_pb2.Cancel()))
        while (event := await coordinator.read(context)) is not grpc.aio.EOF:
            read.append(event)

    coordinator = Coordinator(read_all)
    async with asyncio.timeout(DEADLINE_S), serving(coordinator) as link:
        running = asyncio.create_task(link.run(node))
        while not node.commands:
            await asyncio.sleep(0.01)
        for index in range(3):
            link.send(step_tokens=step_of(index))
        link.send(cancelled=cancelled("a"))
        for index in range(3, 5):
            link.send(step_tokens=step_of(index))
        link.stop()
        await running
    told = [event for event in read if not event.HasField("heartbeat")]
    steps = [[token.index for token in event.step_tokens.tokens] for event in told]
    assert [index for step in steps for index in step] == [0, 1, 2, 3, 4]
    told_apart = ([0, 3], [0, 1, 3]) if most_bytes > 1 else ([0, 1, 2, 3, 4],)  # one may have been on its way already
    assert [step[0] for step in steps if step] in told_apart
    assert sum(event.HasField("cancelled") for event in told) == 1
    assert steps.index([]) == next(i for i, step in enumerate(steps) if 3 in step) - 1


def step_of(index):
    attempt = fleet_pb2.Attempt(request_id="r/0", epoch=1)
    return fleet_pb2.StepTokens(tokens=[fleet_pb2.SampledToken(attempt=attempt, index=index)], step_s=0.1)


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
    assert {event.num_blocks_free for event in coordinator.events[1:]} == {node.num_blocks_free}
    assert coordinator.secrets == ["Bearer s3cret"]
    assert node.commands == ["cancel"]


async def test_the_node_that_reads_a_suspect_says_that_it_has_it():
    suspect = fleet_pb2.Job(attempt=fleet_pb2.Attempt(request_id="r", epoch=7), is_suspect=True)
    harmless = fleet_pb2.Job(attempt=fleet_pb2.Attempt(request_id="s", epoch=8))
    commands = [
        fleet_pb2.NodeCommand(reserve=fleet_pb2.Reserve(job=suspect)),  # another node reads
        fleet_pb2.NodeCommand(prefill=fleet_pb2.Prefill(job=harmless)),
        fleet_pb2.NodeCommand(prefill=fleet_pb2.Prefill(job=suspect)),
        fleet_pb2.NodeCommand(reserve=fleet_pb2.Reserve(job=suspect, local_prefill=True)),
    ]

    async def give(coordinator, context):
        await welcome(coordinator, context)
        for command in commands:
            await context.write(command)
        while await coordinator.read(context) is not grpc.aio.EOF:
            continue

    coordinator, node = Coordinator(give), Node()
    async with asyncio.timeout(DEADLINE_S), serving(coordinator) as link:
        running = asyncio.create_task(link.run(node))
        while len(node.commands) < len(commands):
            await asyncio.sleep(0.01)
        link.stop()
        await running
    kinds = [event.WhichOneof("event") for event in coordinator.events]
    assert kinds == ["hello", "heartbeat", "taken", "taken"]
    assert {event.taken.attempt.request_id for event in coordinator.events[2:]} == {"r"}
    assert node.commands == ["reserve", "prefill", "prefill", "reserve"]


async def test_a_broken_stream_detaches_the_node_and_it_attaches_again():
    coordinator, node = Coordinator(welcome_then_break, welcome_then_break, stay), Node()
    async with asyncio.timeout(DEADLINE_S), serving(coordinator) as link:
        running = asyncio.create_task(link.run(node))
        while coordinator.num_welcomes < 3:
            await asyncio.sleep(0.01)
        assert node.num_detached == 2
        link.stop()
        await running
    assert shown_sessions(coordinator) == [0, 101, 102]


async def test_a_lost_command_ends_the_attachment_and_the_node_attaches_again():
    async def lose_one(coordinator, context):
        await welcome(coordinator, context)
        context.lose()
        await context.write(fleet_pb2.NodeCommand(cancel=fleet_pb2.Cancel()))
        while await coordinator.read(context) is not grpc.aio.EOF:
            continue

    coordinator, node = Coordinator(lose_one, stay), Node()
    async with asyncio.timeout(DEADLINE_S), serving(coordinator) as link:
        running = asyncio.create_task(link.run(node))
        while coordinator.num_welcomes < 2:
            await asyncio.sleep(0.01)
        assert (node.commands, node.num_detached) == ([], 1)
        link.stop()
        await running


async def test_no_proxy_is_asked_for_the_coordinator(monkeypatch):
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")  # nobody listens there
    coordinator, node = Coordinator(stay), Node()
    async with asyncio.timeout(DEADLINE_S), serving(coordinator) as link:
        running = asyncio.create_task(link.run(node))
        while not coordinator.num_welcomes:
            await asyncio.sleep(0.01)
        link.stop()
        await running


async def test_a_node_that_is_stuck_leaves_and_is_not_back_before_it_has_recovered():
    coordinator, node = Coordinator(stay, stay), Node()
    async with asyncio.timeout(DEADLINE_S), serving(coordinator) as link:
        running = asyncio.create_task(link.run(node))
        while coordinator.num_welcomes < 1:
            await asyncio.sleep(0.01)
        node.is_well.clear()
        node.is_stuck.set()
        while node.num_detached < 1:
            await asyncio.sleep(0.01)
        await asyncio.sleep(5 * RETRY_MIN_S)
        assert (coordinator.num_welcomes, node.num_detached) == (1, 1)
        node.is_stuck.clear()
        node.is_well.set()
        while coordinator.num_welcomes < 2:
            await asyncio.sleep(0.01)
        link.stop()
        await running
    assert shown_sessions(coordinator) == [0, 0]  # as if it had died of that step


async def test_each_attachment_shows_the_certificate_that_there_is(tmp_path):
    certs, shown = authority(tmp_path), []

    async def note_and_break(coordinator, context):
        [pem] = context.auth_context()["x509_pem_cert"]
        shown.append(pem)
        await welcome_then_break(coordinator, context)

    async def note_and_stay(coordinator, context):
        [pem] = context.auth_context()["x509_pem_cert"]
        shown.append(pem)
        await stay(coordinator, context)

    pairs = [((certs / "coordinator.key").read_bytes(), (certs / "coordinator.crt").read_bytes())]
    credentials = grpc.ssl_server_credentials(pairs, (certs / "ca.crt").read_bytes(), require_client_auth=True)
    coordinator, node = Coordinator(note_and_break, note_and_stay), Node()
    given = []
    tls = TlsSettings(**flags_of(certs, "node"))
    async with asyncio.timeout(DEADLINE_S), serving(coordinator, credentials, tls=tls) as link:

        def exchange():
            given.append((certs / "node.crt").read_bytes())
            authority(certs)

        node.detached = exchange
        running = asyncio.create_task(link.run(node))
        while coordinator.num_welcomes < 2:
            await asyncio.sleep(0.01)
        given.append((certs / "node.crt").read_bytes())
        link.stop()
        await running
    assert shown == given[:2]
    assert shown[0] != shown[1]


async def test_files_that_do_not_fit_together_keep_a_node_away_until_they_do(tmp_path, caplog):
    certs = authority(tmp_path)
    whole = (certs / "node.key").read_bytes()
    (certs / "node.key").write_bytes((certs / "client.key").read_bytes())
    pairs = [((certs / "coordinator.key").read_bytes(), (certs / "coordinator.crt").read_bytes())]
    credentials = grpc.ssl_server_credentials(pairs, (certs / "ca.crt").read_bytes(), require_client_auth=True)
    coordinator, tls = Coordinator(stay), TlsSettings(**flags_of(certs, "node"))
    async with asyncio.timeout(DEADLINE_S), serving(coordinator, credentials, tls=tls) as link:
        running = asyncio.create_task(link.run(Node()))
        sentence = f"not attached: --tls-key {certs}/node.key is not the key of --tls-cert {certs}/node.crt"
        while sentence not in said(caplog, logging.WARNING):
            await asyncio.sleep(0.01)
        (certs / "node.key").write_bytes(whole)
        while coordinator.num_welcomes < 1:
            await asyncio.sleep(0.01)
        link.stop()
        await running


def shown_sessions(coordinator):
    return [event.hello.session for event in coordinator.events if event.HasField("hello")]


def said(caplog, level):
    records = [record for record in caplog.records if record.name == "serving_node.link"]
    return [record.message for record in records if record.levelno == level]


async def test_a_node_whose_name_is_taken_asks_again_until_it_is_let_in_and_says_so_once(caplog):
    caplog.set_level(logging.INFO)
    coordinator, node = Coordinator(name_taken, name_taken, name_taken, stay), Node()
    async with asyncio.timeout(DEADLINE_S), serving(coordinator) as link:
        running = asyncio.create_task(link.run(node))
        while coordinator.num_welcomes < 1:
            await asyncio.sleep(0.01)
        link.stop()
        await running
    assert shown_sessions(coordinator) == [0] * 4
    waits = (
        "not attached: another process is attached as n: give this one another --name, or it waits for that one to go"
    )
    assert said(caplog, logging.WARNING) == [waits]
    assert said(caplog, logging.INFO) == ["attached to the coordinator, session 101"]


@asynccontextmanager
async def a_closed_port():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@asynccontextmanager
async def the_public_port():
    server = grpc.aio.server(options=SERVER_OPTIONS)
    inference_pb2_grpc.add_InferenceServicer_to_server(inference_pb2_grpc.InferenceServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield port
    await server.stop(None)


class HangsUp(asyncio.Protocol):
    """Answers whatever comes with these bytes, and says no more."""

    def __init__(self, answer, live):
        self._answer, self._live = answer, live
        self._has_answered = False

    def connection_made(self, transport):
        self._transport = transport
        self._live.add(transport)

    def data_received(self, data):
        if not self._has_answered:
            self._has_answered = True
            self._transport.write(self._answer)
            self._transport.write_eof()  # and reads on: what is unread at the end would have the answer thrown away

    def connection_lost(self, error):
        self._live.remove(self._transport)


@asynccontextmanager
async def a_port(answer=b"", **options):
    live = set()
    loop = asyncio.get_running_loop()
    async with await loop.create_server(lambda: HangsUp(answer, live), "127.0.0.1", 0, **options) as server:
        yield server.sockets[0].getsockname()[1]
    for transport in live:  # who has come and said nothing yet
        transport.abort()


@asynccontextmanager
async def an_http_port():
    server = HttpServer(Starlette(), Sheds(), max_connections=10, max_per_peer=10)
    port = server.listen("127.0.0.1", 0)
    await server.start()
    yield port
    await server.stop(1.0)


def a_tls_port():
    return a_port(ssl=ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))


@pytest.mark.parametrize(
    ("somewhere", "sentence"),
    [
        (a_closed_port, "nothing listens there"),
        (the_public_port, "a gRPC port answers that is not the fleet's, such as the public one"),
        (an_http_port, "an HTTP port answers there, not a gRPC one"),
        (a_tls_port, "what listens there hangs up at once, as a TLS port does"),
        (lambda: a_port(b"220 mail.test ESMTP\r\n"), "what listens there does not speak gRPC"),
    ],
)
async def test_a_node_at_a_wrong_port_says_what_it_found_and_goes_on_trying(somewhere, sentence, caplog):
    async with asyncio.timeout(DEADLINE_S), somewhere() as port:
        advice = "--coordinator must name its fleet port, by default 50052"
        warning = f"not attached: no coordinator at 127.0.0.1:{port}: {sentence}; {advice}"
        link, node = FleetLink(LinkSettings(coordinator=f"127.0.0.1:{port}", fleet_secret="s3cret")), Node()
        running = asyncio.create_task(link.run(node))
        while warning not in said(caplog, logging.WARNING):
            await asyncio.sleep(0.01)
        num_tries = node.num_detached
        while node.num_detached < num_tries + 2:
            await asyncio.sleep(0.01)
        link.stop()
        await running
    hung_up = "not attached: the coordinator ended the stream"  # all that gRPC tells when it was still writing
    assert [text for text in said(caplog, logging.WARNING) if text != hung_up] == [warning]


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


@pytest.mark.parametrize(("secret", "how"), [("", "is not set here"), ("simsim", "is another one here")])
async def test_a_wrong_secret_is_final_and_the_sentence_says_what_to_set(secret, how):
    async def refuse(coordinator, context):
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no")

    coordinator = Coordinator(*[refuse] * 50)  # gRPC loses a status that comes while hello is written; the next is read
    async with asyncio.timeout(DEADLINE_S), serving(coordinator, fleet_secret=secret) as link:
        with pytest.raises(SettingsError) as error:
            await link.run(Node())
    assert str(error.value) == f"SPLITSERVE_FLEET_SECRET {how}: it must be the coordinator's"


async def test_the_secret_is_checked_before_a_start_that_takes_long():
    async def refuse(coordinator, context):
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no")

    async with asyncio.timeout(DEADLINE_S), serving(Coordinator(*[refuse] * 20), fleet_secret="simsim") as link:
        with pytest.raises(SettingsError, match="SPLITSERVE_FLEET_SECRET is another one here"):
            await link.check()


async def test_a_check_of_the_right_secret_attaches_nothing(caplog):
    async def wait_for_hello(coordinator, context):
        assert (await coordinator.read(context)).WhichOneof("event") is None
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "an event is empty")

    async with asyncio.timeout(DEADLINE_S), serving(Coordinator(wait_for_hello)) as link:
        await link.check()
        assert not link.is_attached
    assert said(caplog, logging.WARNING) == []


async def test_a_check_without_a_coordinator_is_logged_alone(caplog):
    async with asyncio.timeout(DEADLINE_S), a_closed_port() as port:
        await FleetLink(LinkSettings(coordinator=f"127.0.0.1:{port}", fleet_secret="s3cret")).check()
    [warning] = said(caplog, logging.WARNING)
    assert warning.startswith("the coordinator does not answer yet: ")
    assert "nothing listens there" in warning


async def test_a_refusal_by_message_is_final():
    async def refuse(coordinator, context):
        await coordinator.read(context)
        refusal = fleet_pb2.Refusal(reason="PAIRING_MISMATCH", message="dtype: float32 here, bfloat16 in the fleet")
        await context.write(fleet_pb2.NodeCommand(refusal=refusal))

    async with asyncio.timeout(DEADLINE_S), serving(Coordinator(refuse)) as link:
        with pytest.raises(SettingsError, match="dtype: float32 here, bfloat16 in the fleet"):
            await link.run(Node())
