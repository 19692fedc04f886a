"""How calls of both clients end: refused, nobody there, too late, left, closed; and the short calls."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
import psutil
import pytest
from google.rpc import status_pb2
from grpc.aio import AioRpcError, Metadata
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_status import rpc_status

from serving_core.errors import SettingsError
from splitserve import AsyncClient, Client
from splitserve.client import answers
from splitserve.client.errors import (
    Cancelled,
    DeadlineExceeded,
    Overloaded,
    Refused,
    ServerFault,
    Unauthenticated,
    Unavailable,
    from_rpc_error,
)
from tests.scripted_server import Script, chunk, refusal, serving

DEADLINE_S = 60.0
OWN_ADDRESSES = sorted(
    {entry.address for entries in psutil.net_if_addrs().values() for entry in entries if entry.family == socket.AF_INET}
)


@pytest.mark.parametrize(
    ("code", "reason", "expected"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG", Refused),
        (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND", Refused),
        (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID", Refused),
        (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED", Unauthenticated),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", Overloaded),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, "", Unavailable),
        (grpc.StatusCode.INTERNAL, "ENGINE_ERROR", ServerFault),
        (grpc.StatusCode.DATA_LOSS, "KV_CHECKSUM_MISMATCH", ServerFault),
    ],
)
def test_a_status_becomes_its_exception(script, target, asked, code, reason, expected):
    script.failures = [refusal(code, "the sentence", reason, retry_after_s=0.25, deferred_s="0.5")]
    with pytest.raises(expected, match="the sentence") as caught:
        asked(target, request_id="r")
    error = caught.value
    assert (error.code, error.reason, error.message, error.retry_after_s) == (code, reason, "the sentence", 0.25)
    assert error.metadata == {"deferred_s": "0.5"}


def test_a_status_without_details_still_has_its_exception(script, target, asked):
    script.failures = [rpc_status.to_status(status_pb2.Status(code=grpc.StatusCode.INTERNAL.value[0]))]
    with pytest.raises(ServerFault, match="INTERNAL") as caught:
        asked(target)
    assert (caught.value.reason, caught.value.retry_after_s, caught.value.metadata) == ("", None, {})


def test_unavailable_before_the_first_message_is_tried_three_times(script, target, asked):
    script.failures = [refusal(grpc.StatusCode.UNAVAILABLE, "draining", "DRAINING")] * 2
    script.replies = [chunk("ok")]
    assert "".join(item.text for item in asked(target)) == "ok"
    assert len(script.requests) == 3


def test_and_not_a_fourth_time(script, target, asked):
    script.failures = [refusal(grpc.StatusCode.UNAVAILABLE, "draining", "DRAINING")] * 3
    with pytest.raises(Unavailable, match="draining"):
        asked(target)
    assert len(script.requests) == 3


def test_a_refusal_is_not_repeated(script, target, asked):
    script.failures = [refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", "QUEUE_FULL")]
    with pytest.raises(Overloaded):
        asked(target)
    assert len(script.requests) == 1


def test_nobody_listening_is_a_sentence(asked):
    with pytest.raises(Unavailable, match=r"no server answers at 127\.0\.0\.1:1; start one with: splitserve up"):
        asked("127.0.0.1:1")


def test_a_server_that_is_too_busy_to_shake_hands_is_not_said_to_be_down():
    """The call may take as long as it was given."""
    with (
        socket.create_server(("127.0.0.1", 0)) as mute,
        Client(f"127.0.0.1:{mute.getsockname()[1]}", timeout_s=6.0) as client,
        pytest.raises(DeadlineExceeded, match="did not finish the call before its deadline"),
    ):
        client.loads()
    details = "failed to connect to all addresses; last error: timed out before receiving SETTINGS frame"
    error = AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), details)
    told = str(from_rpc_error(error, "localhost:50051"))
    assert told == "localhost:50051 takes connections, but does not answer: it is busy, or hangs"


def test_an_http_port_is_no_server_that_is_down(asked):
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with pytest.raises(Unavailable, match="does not speak gRPC, as a server's HTTP port"):
                asked(f"127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()
            thread.join()


def test_a_name_of_several_addresses_may_have_an_http_port_at_another_one():
    """Of these gRPC tells of the last."""
    details = "failed to connect to all addresses; last error: UNKNOWN: ipv6:%5B::1%5D:1: Connection refused"
    error = AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata(), details)
    told = str(from_rpc_error(error, "localhost:8000"))
    assert told == (
        "no server answers at localhost:8000 in gRPC, whose port is 50051 by default; start one with: splitserve up"
    )


def test_an_address_may_say_that_it_is_without_tls(script, target, asked):
    asked(f"http://{target}/")
    assert [request.text for request in script.requests] == ["hi"]


@pytest.mark.parametrize("nowhere", ["ftp://localhost:1", "localhost:port", "nowhere.invalid:1"])
def test_what_is_no_address_is_called_so(nowhere, asked):
    with pytest.raises(Unavailable, match=f"{nowhere} is not an address that can be resolved"):
        asked(nowhere)


@pytest.mark.parametrize("nowhere", [None, "", "http://", "https:///"])
@pytest.mark.parametrize("client", [Client, AsyncClient])
def test_an_address_that_is_missing_is_refused_when_the_client_is_made(client, nowhere):
    with pytest.raises(SettingsError, match=r"a server is HOST:PORT or https://HOST:PORT, not "):
        client(nowhere)


def test_the_deadline_ends_an_endless_answer(script, target, asked):
    script.endless = True
    for deadline_s in (0.2, 2.0, 20.0):
        with pytest.raises(DeadlineExceeded, match="deadline"):
            asked(target, deadline_s=deadline_s)
        if script.requests:  # else the call never came that far
            break
    assert script.cancelled.wait(DEADLINE_S)


def test_the_api_key_goes_with_every_call(script, target):
    with Client(target, api_key="k") as client:
        list(client.generate("hi"))
    assert script.metadata[0]["authorization"] == "Bearer k"


def test_break_cancels_on_the_server(script, target):
    script.endless = True
    with Client(target) as client:
        for _ in client.generate("hi"):
            break
        assert script.cancelled.wait(DEADLINE_S)


def test_an_exception_in_the_loop_cancels_on_the_server(script, target):
    script.endless = True

    def fail_in_the_loop() -> None:
        for _ in client.generate("hi"):
            raise ZeroDivisionError

    with Client(target) as client:
        with pytest.raises(ZeroDivisionError):
            fail_in_the_loop()
        assert script.cancelled.wait(DEADLINE_S)


def test_close_of_the_iterator_cancels_on_the_server(script, target):
    script.endless = True
    with Client(target) as client:
        stream = client.generate("hi")
        next(stream)
        stream.close()
        assert script.cancelled.wait(DEADLINE_S)


def test_a_client_that_nobody_closes_ends_with_its_process(script, target):
    """Its thread and its calls too."""
    script.endless = True
    code = (
        "import sys, splitserve; client = splitserve.Client(sys.argv[1]); stream = client.generate('hi'); "
        "print(next(stream).index)"
    )
    done = subprocess.run([sys.executable, "-c", code, target], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
    assert script.cancelled.wait(DEADLINE_S)


class Interrupting(Script):
    """Interrupts its client, who is in this process, while that waits for the first chunk."""

    def Generate(self, request, context):
        context.add_callback(self.cancelled.set)
        os.kill(os.getpid(), signal.SIGINT)
        self.cancelled.wait(DEADLINE_S)
        yield chunk("too late")


def test_ctrl_c_cancels_on_the_server_and_the_client_goes_on():
    script = Interrupting()
    with serving(script) as target, Client(target) as client:
        with pytest.raises(KeyboardInterrupt):
            next(client.generate("hi"))
        assert script.cancelled.wait(DEADLINE_S)
        assert client.model_info().served_model_name == "m"


@pytest.mark.parametrize("host", OWN_ADDRESSES)
def test_no_proxy_is_asked_for_a_server_on_this_machine(asked, script, host, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # nobody listens there
    monkeypatch.delenv("no_proxy", raising=False)
    with serving(script, host) as target:
        assert [item.text for item in asked(target)] == [""]  # what the script says


async def wait_for(event: threading.Event) -> bool:
    return await asyncio.get_running_loop().run_in_executor(None, event.wait, DEADLINE_S)


def test_async_break_cancels_on_the_server(script, target):
    script.endless = True

    async def leave() -> bool:
        async with AsyncClient(target) as client:
            async for _ in client.generate("hi"):
                break
            return await wait_for(script.cancelled)

    assert asyncio.run(leave())


def test_a_cancelled_task_cancels_on_the_server(script, target):
    script.endless = True

    async def cancel() -> bool:
        async with AsyncClient(target) as client:
            started = asyncio.Event()

            async def read() -> None:
                async for _ in client.generate("hi"):
                    started.set()

            task = asyncio.create_task(read())
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return await wait_for(script.cancelled)

    assert asyncio.run(cancel())


def test_closing_the_client_under_a_reader_raises_cancelled(script, target):
    script.endless = True

    async def close_in_the_loop() -> None:
        client = AsyncClient(target)
        async for _ in client.generate("hi"):
            await client.close()

    with pytest.raises(Cancelled):
        asyncio.run(close_in_the_loop())


@pytest.mark.parametrize("call", ["embed", "wait_until_healthy"])
def test_closing_the_client_ends_a_short_call_as_one_of_its_own_errors(call):
    """At a port that takes connections and says nothing."""

    async def close_meanwhile(port):
        client = AsyncClient(f"127.0.0.1:{port}")
        calls = {"embed": client.embed("x"), "wait_until_healthy": client.wait_until_healthy(deadline_s=60)}
        waiting = asyncio.create_task(calls.pop(call))
        calls.popitem()[1].close()
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(Cancelled, match="closed"):
            await waiting

    with socket.create_server(("127.0.0.1", 0)) as mute:
        asyncio.run(close_meanwhile(mute.getsockname()[1]))


def test_a_closed_client_says_so(target):
    async def ask_when_closed():
        client = AsyncClient(target)
        await client.close()
        with pytest.raises(Cancelled, match="closed"):
            await client.loads()
        with pytest.raises(Cancelled, match="closed"):
            await anext(client.generate("hi"))

    asyncio.run(ask_when_closed())
    client = Client(target)
    client.close()
    with pytest.raises(Cancelled, match="closed"):
        client.loads()
    with pytest.raises(Cancelled, match="closed"):
        next(client.generate("hi"))


def test_the_short_calls(script, target):
    async def call() -> tuple[object, ...]:
        async with AsyncClient(target) as client:
            return (
                await client.abort(["a", "b"]),
                await client.model_info(),
                await client.server_info(),
                await client.loads(),
                await client.health(),
            )

    with Client(target) as client:
        replies = client.abort(["a", "b"]), client.model_info(), client.server_info(), client.loads(), client.health()
    assert asyncio.run(call()) == replies
    aborted, model, server, loads, healthy = replies
    assert aborted == answers.Aborted(("a",), ("b",))
    assert (model.served_model_name, model.eos_token_ids, model.has_chat_template) == ("m", (2, 3), True)
    assert (server.uptime_s, server.nodes[0].fingerprint) == (2.5, {"dtype": "bfloat16"})
    assert loads.nodes[0].ranks == (
        answers.RankLoad(0, 9 * 2**20, 2**20, 3 * 2**20),
        answers.RankLoad(1, 8 * 2**20, 0, 0),
    )
    assert (loads.num_live_requests, loads.nodes[0].num_blocks_free, loads.nodes[0].step_s) == (1, 7, 0.5)
    assert healthy


async def drain_async(target, *args, **options):
    async with AsyncClient(target, api_key="k") as client:
        return [num_left async for num_left in client.drain(*args, **options)]


def drain(target, *args, **options):
    with Client(target, api_key="k") as client:
        return list(client.drain(*args, **options))


@pytest.mark.parametrize(
    "drain", [drain, lambda *args, **options: asyncio.run(drain_async(*args, **options))], ids=["sync", "async"]
)
def test_a_drain_counts_down(script, target, drain):
    script.drained = [7, 2, 0]
    assert drain(target, "d0", deadline_s=DEADLINE_S) == [7, 2, 0]
    assert (script.requests[-1].node, script.metadata[-1]["authorization"]) == ("d0", "Bearer k")
    script.failures = [refusal(grpc.StatusCode.NOT_FOUND, "no node 'd9' is attached", "NODE_NOT_FOUND")]
    with pytest.raises(Refused, match="no node 'd9' is attached") as caught:
        drain(target, "d9")
    assert caught.value.reason == "NODE_NOT_FOUND"


def test_health_follows_the_server(script, target):
    script.set_health(HealthCheckResponse.NOT_SERVING)
    with Client(target) as client:
        assert not client.health()

    async def wait() -> None:
        async with AsyncClient(target) as client:
            with pytest.raises(DeadlineExceeded):
                await client.wait_until_healthy(deadline_s=0.2)
            asyncio.get_running_loop().call_later(0.05, script.set_health, HealthCheckResponse.SERVING)
            await client.wait_until_healthy(deadline_s=DEADLINE_S)

    asyncio.run(wait())


def test_short_calls_raise_the_same_exceptions(target):
    with Client("127.0.0.1:1", timeout_s=DEADLINE_S) as client, pytest.raises(Unavailable, match="no server answers"):
        client.loads()


def test_the_client_needs_no_torch():
    probe = (
        "import json, sys, splitserve; splitserve.Client; splitserve.AsyncClient; print(json.dumps(list(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, check=True, timeout=DEADLINE_S)
    assert not {"torch", "transformers", "numpy"} & set(json.loads(done.stdout))
