"""The HTTP API and clients that leave, dawdle, do not read, send what is no HTTP, or try again by themselves."""

import asyncio
import json
import re
import socket

import pytest

from coordinator.api.http import body, serving
from coordinator.api.http.serving import HttpServer
from tests.scripted_nodes import DEADLINE_S, begin, begin_to_write, run, step, transfer
from tests.tiny_models import CHAT_TEMPLATE
from tests.unit.coordinator.http_kit import (
    HI,
    LENGTH,
    completion_bytes,
    ended,
    http_cluster,
    openai_cluster,
    post,
)
from tests.unit.coordinator.later import openai

pytestmark = pytest.mark.usefixtures("programs_here")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("has_tokens", [True, False])
def test_a_client_that_leaves_ends_its_answer(tmp_path, stream, has_tokens):
    async def scenario():
        async with http_cluster(tmp_path) as (c, client):
            call = post(client, stream=stream)
            attempt, _ = await begin(c)
            if has_tokens:
                await transfer(c, attempt, "a")  # which the coordinator has heard of: else p0 were cancelled too
            call.cancel()
            for node in [c.nodes["d0"]] if has_tokens else c.nodes.values():
                await node.answer_cancel(attempt)
            await c.until_nothing_is_live()

    run(scenario())


def test_a_client_that_leaves_before_its_answer_is_no_failure_of_the_server(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path) as (c, client):
            call = post(client)
            attempt, _ = await begin(c)
            call.cancel()
            for node in c.nodes.values():
                await node.answer_cancel(attempt)
            async with asyncio.timeout(DEADLINE_S):
                while not (counted := await counted_calls(client)):
                    await asyncio.sleep(0.01)
            assert counted == ['status="4xx"} 1.0']

    run(scenario())


async def counted_calls(client):
    lines = (await client.get("/metrics")).text.splitlines()
    begin = 'http_requests_total{handler="/v1/completions",method="POST",'
    return [line.removeprefix(begin) for line in lines if line.startswith(begin)]


@pytest.mark.parametrize("sent_ahead", [b"\r\n", b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_a_client_that_leaves_is_noticed_whatever_it_has_sent_ahead(tmp_path, sent_ahead):
    async def scenario():
        async with http_cluster(tmp_path) as (c, _):
            _, writer = await asyncio.open_connection("127.0.0.1", c.server.http_port)
            writer.write(completion_bytes(max_tokens=5))
            attempt, _ = await begin(c)
            writer.write(sent_ahead)
            writer.close()
            for node in c.nodes.values():
                await node.answer_cancel(attempt)
            await c.until_nothing_is_live()

    run(scenario())


def test_calls_sent_ahead_are_answered_in_order(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path, nodes=()) as (c, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", c.server.http_port)
            get = "GET {} HTTP/1.1\r\nHost: x\r\n{}\r\n"
            paths = [f"/v1/models/{index}" for index in range(20)]
            writer.write("".join(get.format(path, "") for path in paths).encode())
            writer.write(get.format("/ping", "Connection: close\r\n").encode())
            text = (await ended(reader)).decode()
            assert re.findall(r"there is no model '(\d+)'", text) == [str(index) for index in range(20)]
            assert text.count("HTTP/1.1 503") == 1
            writer.close()

    run(scenario())


async def half_closed(c, request):
    """The connection of a client that has asked, and says that it will ask no more."""
    reader, writer = await asyncio.open_connection("127.0.0.1", c.server.http_port)
    writer.write(request)
    writer.write_eof()
    return reader, writer


def last_response_of(sent):
    """What follows interim responses: the status line, and the body."""
    while sent.startswith(b"HTTP/1.1 100 Continue\r\n\r\n"):
        sent = sent.partition(b"\r\n\r\n")[2]
    head, _, body = sent.partition(b"\r\n\r\n")
    return head.partition(b"\r\n")[0], body


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_has_ended_its_side_gets_its_answer(tmp_path, stream):
    async def scenario():
        async with http_cluster(tmp_path) as (c, _):
            reader, writer = await half_closed(c, completion_bytes(max_tokens=2, stream=stream))
            attempt, _ = await begin(c)
            await asyncio.sleep(3 * serving.PROBE_S)  # enough to lose a client that is gone
            await transfer(c, attempt, "a")
            await step(c.nodes["d0"], attempt, 1, "b", LENGTH)
            status, body = last_response_of(await ended(reader))
            assert status == b"HTTP/1.1 200 OK"
            if stream:
                assert b"data: [DONE]" in body
            else:
                assert json.loads(body)["choices"][0]["text"] == "ab"
            writer.close()

    run(scenario())


def test_a_client_that_has_ended_its_side_and_then_leaves_ends_its_answer(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path) as (c, _):
            _, writer = await half_closed(c, completion_bytes(max_tokens=5))
            attempt, _ = await begin(c)
            writer.close()
            for node in c.nodes.values():
                await node.answer_cancel(attempt)
            await c.until_nothing_is_live()

    run(scenario())


def test_calls_sent_ahead_of_the_end_of_a_side_are_answered(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path, nodes=()) as (c, _):
            reader, writer = await half_closed(c, 3 * b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await ended(reader)).count(b"HTTP/1.1 200 OK") == 3
            writer.close()

    run(scenario())


def test_a_client_that_does_not_read_is_cut_off(tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "WRITE_TIMEOUT_S", 0.2)
    listen = HttpServer.listen

    def with_small_buffer(self, *args, **options):
        port = listen(self, *args, **options)
        self.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # inherited by its connections
        return port

    monkeypatch.setattr(HttpServer, "listen", with_small_buffer)

    async def scenario():
        async with http_cluster(tmp_path) as (c, _):
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.connect(("127.0.0.1", c.server.http_port))
                client.sendall(completion_bytes(max_tokens=900, stream=True))
                attempt = await begin_to_write(c, "a")
                for index in range(1, 800):  # each an event of its own, some 170 bytes long
                    await step(c.nodes["d0"], attempt, index, "x")
                    await asyncio.sleep(0)
                await c.nodes["d0"].answer_cancel(attempt)
                await c.until_nothing_is_live()

    run(scenario())


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow:"])
def test_headers_that_do_not_come_end_the_connection(tmp_path, monkeypatch, sent):
    monkeypatch.setattr(serving, "HEAD_TIMEOUT_S", 0.1)

    async def scenario():
        async with http_cluster(tmp_path, nodes=()) as (c, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", c.server.http_port)
            writer.write(sent)
            assert await ended(reader) == b""
            writer.close()

    run(scenario())


def test_a_body_that_does_not_come_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(body, "BODY_TIMEOUT_S", 0.1)

    async def scenario():
        async with http_cluster(tmp_path, nodes=()) as (c, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", c.server.http_port)
            writer.write(completion_bytes()[:-1])
            async with asyncio.timeout(DEADLINE_S):
                assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
            writer.close()

    run(scenario())


def test_bytes_that_are_no_http_are_refused(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path, nodes=()) as (c, _):
            for sent in (b"\x16\x03\x01\x02\x00\n\n", CHUNKED + b"not a length\r\n"):
                reader, writer = await asyncio.open_connection("127.0.0.1", c.server.http_port)
                writer.write(sent)
                head, _, body = (await ended(reader)).partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
                assert json.loads(body)["error"]["code"] == "MALFORMED_REQUEST"
                writer.close()

    run(scenario())


CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
)


def test_headers_without_end_are_refused(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path, nodes=()) as (c, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", c.server.http_port)
            begun = b"GET / HTTP/1.1\r\nX: "
            writer.write(begun + b"x" * (serving.MAX_HEAD_BYTES + 1 - len(begun)))
            head, _, body = (await ended(reader)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
            message = "the headers have 65537 bytes or more, the limit is 65536"
            assert json.loads(body)["error"]["message"] == message
            writer.close()

    run(scenario())


# ---- OpenAI's client, with the retries that it has unless told otherwise ----


def ask_with_retries(client, **fields):
    retrying = client.with_options(max_retries=openai.DEFAULT_MAX_RETRIES)
    return asyncio.create_task(retrying.chat.completions.create(model="m", messages=[HI], **fields))


async def statuses(c, client):
    """How many calls of chats ended with which class of status."""
    text = await client.with_options(base_url=f"http://127.0.0.1:{c.server.http_port}").get("/metrics", cast_to=str)
    lines = [line for line in text.splitlines() if line.startswith("http_requests_total") and "completions" in line]
    return {line.partition('status="')[2][:3]: float(line.rpartition(" ")[2]) for line in lines}


def test_who_has_had_its_time_does_not_come_again(tmp_path):
    async def scenario():
        async with openai_cluster(tmp_path, CHAT_TEMPLATE, request_timeout_s=0.1) as (c, client):
            with pytest.raises(openai.APIStatusError) as caught:
                await ask_with_retries(client)
            assert caught.value.code == "DEADLINE_EXCEEDED"
            assert await statuses(c, client) == {"5xx": 1}

    run(scenario())


def test_an_id_that_is_live_and_an_answer_that_was_aborted_do_not_come_again(tmp_path):
    async def scenario():
        async with openai_cluster(tmp_path, CHAT_TEMPLATE) as (c, client):
            first = ask_with_retries(client, extra_headers={"x-request-id": "r"})
            attempt, _ = await begin(c)
            with pytest.raises(openai.APIStatusError) as caught:
                await ask_with_retries(client, extra_headers={"x-request-id": "r"})
            assert caught.value.code == "DUPLICATE_REQUEST_ID"
            await transfer(c, attempt, "a")
            await step(c.nodes["d0"], attempt, 1, "b", LENGTH)
            await first
            assert await statuses(c, client) == {"2xx": 1, "4xx": 1}

    run(scenario())


def test_who_finds_no_node_comes_again(tmp_path):
    async def scenario():
        async with openai_cluster(tmp_path, CHAT_TEMPLATE) as (c, client):
            for node in c.nodes.values():
                await node.close()
            await c.until_loads(lambda loads: not loads.nodes)
            with pytest.raises(openai.APIStatusError) as caught:
                await ask_with_retries(client)
            assert caught.value.code == "NO_PREFILL_WORKER"
            assert await statuses(c, client) == {"5xx": 1 + openai.DEFAULT_MAX_RETRIES}

    run(scenario())
