"""Servers that answer as a test tells them to, over HTTP and over gRPC, and keep their own record of what they did.

A request is known by the first token of its prompt, or by the first letter of one that is text. One script drives
either server.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import grpc.aio

from protos import inference_pb2, inference_pb2_grpc
from serving_core import reasons
from splitserve_bench.serve.records import Target
from tests.scripted_server import refusal

MODEL = "scripted"
VOCAB_SIZE = 777
MAX_MODEL_LEN = 4096
ANSWER, SHORT, DROP, REFUSE, FAIL, BREAK, HANG = "answer", "short", "drop", "refuse", "fail", "break", "hang"
NO_NODE, LOST = "no node", "lost"  # before the first token
CROWDED = "crowded"  # after it
REFUSE_ONCE = "refuse once"  # and answer afterwards
RETRY_AFTER_S = 1  # of a full queue
TIMELINE = {"prefill_queue_s": 0.25, "prefill_s": 0.5, "decode_s": 1.0, "e2e_s": 1.75, "ttft_s": 0.75}
TIMELINE |= {"expected_ttft_s": 0.625, "deferred_s": 0.125, "is_late": True}
EXPECTED = {"expected_ttft_s": 0.5, "deferred_s": 0.25}  # of a refused request; over gRPC alone


@dataclass
class Seen:
    """One request as the server saw it. Moments are of time.perf_counter."""

    asked: dict
    received_s: float
    wrote_s: list[float] = field(default_factory=list)
    was_left: bool = False  # whether the client went away


class Script:
    """What to do with each request: ANSWER, unless `does` says otherwise by the prompt's first token."""

    def __init__(self, does=None, *, tokens_at_once=1, hold=None):
        self.does = does or {}
        self.tokens_at_once = tokens_at_once
        self.hold = hold  # an async function, called with a request's key before its first token
        self.seen: dict[int, Seen] = {}
        self.order: list[int] = []
        self.asked: list[dict] = []  # all that came, of which some may begin alike
        self.num_live = self.most_live = 0

    async def play(self, asked):
        """Numbers of tokens to send now. Raises Fault."""
        key = asked["prompt"][0]
        seen = self.seen[key] = Seen(asked, time.perf_counter())
        self.order.append(key)
        self.asked.append(asked)
        self.num_live += 1
        self.most_live = max(self.most_live, self.num_live)
        try:
            async for num_tokens in self._tokens(self.does.get(key, ANSWER), key, asked["max_tokens"]):
                seen.wrote_s.append(time.perf_counter())
                yield num_tokens
        except (asyncio.CancelledError, GeneratorExit):
            seen.was_left = True
            raise
        finally:
            self.num_live -= 1

    async def _tokens(self, does, key, max_tokens):
        if does == REFUSE_ONCE:
            self.does[key], does = ANSWER, REFUSE
        if does in (REFUSE, FAIL, NO_NODE, LOST):
            raise Fault(does)
        if does == HANG:
            await asyncio.Event().wait()
        if self.hold is not None:
            await self.hold(key)
        wanted = max_tokens - 1 if does == SHORT else max_tokens
        for sent in range(0, wanted, self.tokens_at_once):
            yield min(self.tokens_at_once, wanted - sent)
            await asyncio.sleep(0)  # others have their turn
            if does in (DROP, BREAK, CROWDED):
                raise Fault(does)


class Fault(Exception):
    """The request ends in this way."""


# ---- HTTP ----


@asynccontextmanager
async def http_server(script, *, is_own=False, with_token_ids=False, with_usage=True) -> AsyncIterator[Target]:
    """Speaks as vLLM does, or as a server that tells no usage, or, is_own, as SplitServe; `script.num_connections` is
    how many have been made."""
    script.num_connections = 0
    script.headers = []
    tasks, writers = [], []

    def connected(reader, writer):
        script.num_connections += 1
        writers.append(writer)
        tasks.append(asyncio.create_task(serve(reader, writer)))

    async def serve(reader, writer):
        try:
            while await _serve_one(script, reader, writer, is_own, with_token_ids, with_usage):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield Target("openai", f"http://127.0.0.1:{port}", model=MODEL)
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in writers:  # of a task that was cancelled before it began, too
            writer.transport.abort()
        for task in tasks:
            assert task.cancelled() or task.exception() is None


async def _serve_one(script, reader, writer, is_own, with_token_ids, with_usage):
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    request_line, *lines = head.split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    script.headers.append(headers)
    if request_line.startswith("GET /v1/models "):
        owner = "splitserve" if is_own else "vllm"
        models = {"data": [{"id": MODEL, "owned_by": owner, "max_model_len": MAX_MODEL_LEN}]}
        _write_json(writer, 200, models)
        return True
    if not request_line.startswith("POST /v1/completions "):
        _write_json(writer, 404, {"detail": "Not Found"})
        return True
    answering = asyncio.ensure_future(_stream(script, json.loads(body), writer, is_own, with_token_ids, with_usage))
    leaving = asyncio.ensure_future(reader.read(1))  # ends when the client goes away
    await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
    if not answering.done():
        answering.cancel()
        await asyncio.wait([answering])
        return False
    leaving.cancel()
    await asyncio.wait([leaving])
    return answering.result()


async def _stream(script, asked, writer, is_own, with_token_ids, tells_usage):
    """Whether the connection can be used again."""
    num_tokens, wanted = 0, asked["max_tokens"]
    with_usage = asked["stream_options"].get("continuous_usage_stats", False)

    def write(choices, *, is_usage=False):
        details = {"cached_tokens": 1} if is_usage else None
        counts = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": num_tokens}
        usage = {**counts, "prompt_tokens_details": details}
        _write_event(writer, {"choices": choices, "usage": usage if is_usage or with_usage else None})

    try:
        async for count in script.play(asked):
            if not num_tokens:
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                )
            num_tokens += count
            ends = num_tokens == wanted and not is_own
            choice = {"index": 0, "text": "x" * count, "finish_reason": "length" if ends else None}
            write([choice | ({"token_ids": [7] * count} if with_token_ids else {"token_ids": None})])
            await writer.drain()
    except Fault as fault:
        return _write_fault(writer, str(fault))
    if is_own or num_tokens < wanted:
        closing = {"index": 0, "text": "", "finish_reason": "length" if num_tokens == wanted else "stop"}
        told = {"timeline": TIMELINE | {"prefill_node": "p", "num_restarts": 0}}
        write([closing | (told if asked.get("include_timeline") else {})])
    if tells_usage:
        write([], is_usage=True)
    _write_chunk(writer, b": a comment\r\ndata: [DONE]\r\n\r\n")
    writer.write(b"0\r\n\r\n")
    await writer.drain()
    return True


def _write_fault(writer, kind):
    if kind == REFUSE:
        _write_json(writer, 429, {"error": {"message": "the queue is full", "code": 429}}, retry_after=RETRY_AFTER_S)
    elif kind in (NO_NODE, LOST):
        _write_json(writer, 503, {"error": {"message": kind, "code": REASONS[kind]}})
    elif kind == FAIL:
        _write_json(writer, 500, {"detail": "it broke " * 200})
    elif kind in (BREAK, CROWDED):
        message, code = ("a node was lost", 500) if kind == BREAK else ("no room came", "rate_limit_exceeded")
        _write_event(writer, {"error": {"message": message, "code": code}})
        writer.write(b"0\r\n\r\n")
    return kind != DROP


def _write_json(writer, status, value, retry_after=None):
    body = json.dumps(value).encode()
    header = "" if retry_after is None else f"retry-after: {retry_after}\r\n"
    writer.write(f"HTTP/1.1 {status} X\r\n{header}content-length: {len(body)}\r\n\r\n".encode() + body)


def _write_event(writer, value):
    _write_chunk(writer, b"data: " + json.dumps(value).encode() + b"\n\n")


def _write_chunk(writer, data):
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


# ---- gRPC ----


class _Service(inference_pb2_grpc.InferenceServicer):
    def __init__(self, script):
        self._script = script

    async def GetModelInfo(self, request, context):
        return inference_pb2.GetModelInfoResponse(
            served_model_name=MODEL, vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN
        )

    async def Generate(self, request, context):
        self._script.headers.append(dict(context.invocation_metadata()))
        params = request.sampling_params
        prompt = request.text or list(request.tokenized.input_ids)
        asked = {
            "prompt": prompt,
            "max_tokens": params.max_tokens,
            "ignore_eos": params.ignore_eos,
            "temperature": params.temperature,
            "repetition_penalty": params.repetition_penalty,
            "model": request.model,
            "slo_class": request.slo_class,
            "priority": request.priority,
            **{name: getattr(request, name) for name in ("ttft_ms", "tpot_ms") if request.HasField(name)},
        }
        num_tokens = 0
        try:
            async for count in self._script.play(asked):
                chunk = inference_pb2.Chunk(first_token_index=num_tokens, token_ids=[7] * count, text="x" * count)
                num_tokens += count
                yield inference_pb2.GenerateResponse(chunk=chunk)
        except Fault as fault:
            await context.abort_with_status(STATUSES[str(fault)])
        complete = inference_pb2.Complete(
            finish_reason=inference_pb2.FINISH_REASON_LENGTH,
            prompt_tokens=len(prompt),
            completion_tokens=num_tokens,
            cached_tokens=1,
            timeline=inference_pb2.Timeline(**TIMELINE, prefill_node="p", decode_node="d"),
        )
        yield inference_pb2.GenerateResponse(complete=complete)


REASONS = {NO_NODE: reasons.NO_DECODE_WORKER, LOST: reasons.WORKER_LOST}
STATUSES = {
    NO_NODE: refusal(grpc.StatusCode.UNAVAILABLE, NO_NODE, REASONS[NO_NODE]),
    LOST: refusal(grpc.StatusCode.UNAVAILABLE, LOST, REASONS[LOST]),
    REFUSE: refusal(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "the queue is full",
        reasons.QUEUE_FULL,
        retry_after_s=RETRY_AFTER_S,
        **{name: str(seconds) for name, seconds in EXPECTED.items()},
    ),
    FAIL: refusal(grpc.StatusCode.INTERNAL, "it broke " * 200, reasons.ENGINE_ERROR),
    DROP: refusal(grpc.StatusCode.UNAVAILABLE, "a node was lost", reasons.WORKER_LOST),
    BREAK: refusal(grpc.StatusCode.UNAVAILABLE, "a node was lost", reasons.WORKER_LOST),
    CROWDED: refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room came", reasons.QUEUE_FULL, retry_after_s=9),
}


@asynccontextmanager
async def grpc_server(script) -> AsyncIterator[Target]:
    script.headers = []
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(_Service(script), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield Target("splitserve", f"127.0.0.1:{port}")
    finally:
        await server.stop(0)


SERVERS = {"openai": http_server, "splitserve": grpc_server}
