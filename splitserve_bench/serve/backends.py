"""Send requests over SplitServe's gRPC, or over HTTP to any server with OpenAI's API.

Over HTTP they go to /v1/completions, with token ids (with text where the data set is text), or to /v1/chat/completions.
"""

import asyncio
import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from itertools import cycle
from typing import Any, Final, Protocol

import grpc
import grpc.aio
import httpx2

from protos import inference_pb2, inference_pb2_grpc
from serving_core import reasons
from serving_core.errors import SettingsError
from serving_core.net.channels import CLIENT_OPTIONS
from serving_core.net.tls import TlsFiles, client_context
from splitserve.client.answers import to_chunk
from splitserve.client.dialling import Dialling
from splitserve.client.errors import from_rpc_error
from splitserve.client.questions import generate_request
from splitserve_bench.errors import BenchError
from splitserve_bench.prompts import GREEDY
from splitserve_bench.serve.records import (
    BACKENDS,
    REFUSALS,
    SPLITSERVE,
    PlannedRequest,
    Reply,
    RequestFailed,
    ServedModel,
    Target,
    bounded,
    times_of,
)

GENERATE: Final = "/splitserve.v1.Inference/Generate"
RETRIES: Final = "grpc.enable_retries"  # off: a request that is turned away is one
OPTIONS: Final = (*(option for option in CLIENT_OPTIONS if option[0] != RETRIES), (RETRIES, 0))
REFUSAL_STATUSES: Final = (429, 503, 529)  # of a server that turns requests away: too many, no room
# Shorter than the 5 s after which uvicorn closes an idle connection: one that is being closed is not used again.
KEEPALIVE_S: Final = 3.0
# A pool looks through all its connections for each request: of many at a time each pool has a part.
NUM_POOLS: Final = 32
POOL_SIZE: Final = 64
MAX_ERROR_BYTES: Final = 2**16
MAX_MODELS_BYTES: Final = 2**22
DONE: Final = "[DONE]"
HTTP_ERRORS: Final = (httpx2.HTTPError, httpx2.StreamError)
# What reading JSON raises that is not as expected.
JSON_ERRORS: Final = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


class Backend(Protocol):
    """A client of one server, made, used and closed within one running event loop."""

    async def describe(self, deadline_s: float) -> ServedModel:
        """Return what the server serves.

        Raises BenchError when it does not reply within `deadline_s` seconds, or does not serve the target's model.
        """
        ...

    async def warm_up(self, num_connections: int, deadline_s: float) -> None:
        """Make so many connections.

        Raises BenchError when the server does not reply within `deadline_s` seconds, or does not serve the target's
        model.
        """
        ...

    def prepare(self, request: PlannedRequest) -> bytes:
        """Return the request as the bytes to send. To be called after the warm-up and before the load starts."""
        ...

    async def answer(self, body: bytes, reply: Reply, timeout_s: float) -> None:
        """Send a prepared request, and record in `reply` what comes back.

        Raises RequestFailed when the server refuses it or the output is not complete, and TimeoutError or RequestFailed
        when that takes more than `timeout_s` seconds. Cancelling ends the request on the server too.
        """
        ...

    async def close(self) -> None: ...


def open_backend(target: Target) -> Backend:
    """Return a client of the target's server.

    Raises SettingsError for an unknown backend or an address that is no URL.
    """
    if target.backend not in BACKENDS:
        raise SettingsError(f"{target.backend!r} is no backend: there are {', '.join(BACKENDS)}")
    return GrpcBackend(target) if target.backend == SPLITSERVE else OpenAIBackend(target)


def _checked(served: ServedModel, target: Target, names: str) -> ServedModel:
    if target.model not in ("", served.model) or not served.model:
        raise BenchError(f"{target.address} does not serve {target.model!r} but {names or 'nothing'}")
    return served


# ---- gRPC ----


class GrpcBackend:
    """Send all requests of a load over one gRPC channel."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._metadata = (("authorization", f"Bearer {target.api_key}"),) if target.api_key else ()
        self._dialling = Dialling.of(target.address, target.tls)
        self._channel = self._dialling.aio_channel(OPTIONS)
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._generate: Any = self._channel.unary_stream(
            GENERATE, request_serializer=None, response_deserializer=inference_pb2.GenerateResponse.FromString
        )

    async def describe(self, deadline_s: float) -> ServedModel:
        request = inference_pb2.GetModelInfoRequest()
        try:
            info = await self._inference.GetModelInfo(request, timeout=deadline_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise BenchError(str(from_rpc_error(error, str(self._dialling)))) from error
        served = ServedModel(info.served_model_name, info.max_model_len, info.vocab_size)
        return _checked(served, self._target, served.model)

    async def warm_up(self, num_connections: int, deadline_s: float) -> None:
        await self.describe(deadline_s)

    def prepare(self, request: PlannedRequest) -> bytes:
        """Return the serialized GenerateRequest of a planned request."""
        message = generate_request(
            request.text or request.prompt,
            model=self._target.model,
            request_id="",
            cache_salt="",
            sampling={**GREEDY, "max_tokens": request.output_tokens, "ignore_eos": request.ignore_eos},
            **{"ttft_ms": request.ttft_ms, "tpot_ms": request.tpot_ms, **self._target.extra_body},
        )
        return message.SerializeToString()

    async def answer(self, body: bytes, reply: Reply, timeout_s: float) -> None:
        call = self._generate(body, timeout=timeout_s, metadata=self._metadata)
        try:
            async for response in call:
                _take_response(response, reply)
        except grpc.RpcError as error:
            failure = from_rpc_error(error, str(self._dialling))
            is_refused = failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            if failure.reason:
                is_refused = failure.reason in REFUSALS
            reply.timeline = times_of(failure.metadata) or None
            raise RequestFailed(str(failure), is_refused=is_refused, retry_after_s=failure.retry_after_s) from error
        finally:
            call.cancel()
        reply.check_complete()

    async def close(self) -> None:
        await self._channel.close()


def _take_response(response: inference_pb2.GenerateResponse, reply: Reply) -> None:
    moment_s = reply.now_s()
    if num_tokens := len(response.chunk.token_ids):
        reply.arrived(moment_s, num_tokens)
        reply.token_ids += response.chunk.token_ids
    if response.HasField("complete"):
        completion = to_chunk(response).completion
        assert completion is not None
        reply.num_prompt_tokens = completion.prompt_tokens
        reply.num_output_tokens = completion.completion_tokens
        reply.timeline = times_of(asdict(completion.timeline))
        reply.num_cached_tokens = completion.cached_tokens
        reply.decode_node = completion.timeline.decode_node
        reply.is_ended = True


# ---- HTTP ----


class OpenAIBackend:
    """Send requests by HTTP over as many connections as requests run at a time, in as few pools as hold them."""

    def __init__(self, target: Target) -> None:
        self._target = target
        # Once: it reads the system's certificates.
        context = httpx2.create_ssl_context() if target.tls == TlsFiles() else client_context(target.tls)
        self._clients = [_client(target, context) for _ in range(NUM_POOLS)]
        self._num_under_way = [0] * NUM_POOLS
        self._is_own = False

    async def describe(self, deadline_s: float) -> ServedModel:
        models = await self._models(deadline_s)
        self._is_own = any(model.get("owned_by") == SPLITSERVE for model in models)
        by_name = {str(model.get("id", "")): model for model in models}
        name = self._target.model if self._target.model in by_name else next(iter(by_name), "")
        length, vocab_size = (by_name.get(name, {}).get(key) for key in ("max_model_len", "vocab_size"))
        served = ServedModel(
            name, length if isinstance(length, int) else None, vocab_size if isinstance(vocab_size, int) else None
        )
        return _checked(served, self._target, ", ".join(by_name))

    async def warm_up(self, num_connections: int, deadline_s: float) -> None:
        await self.describe(deadline_s)
        await asyncio.gather(*(self._models(deadline_s) for _ in range(num_connections)))

    def prepare(self, request: PlannedRequest) -> bytes:
        fields: dict[str, Any] = {"prompt": request.text or list(request.prompt)}
        if self._target.takes_chats:
            roles = cycle(("user", "assistant"))
            texts = (*request.messages, request.text)
            fields = {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]}
        elif request.session is not None:
            fields["return_token_ids"] = True  # the next turn continues them
        options: dict[str, Any] = {"include_usage": True}
        if self._target.model:
            fields["model"] = self._target.model
        if self._is_own:
            options["continuous_usage_stats"] = fields["include_timeline"] = True
            limits = {"ttft_ms": request.ttft_ms, "tpot_ms": request.tpot_ms}
            fields |= {name: limit for name, limit in limits.items() if limit is not None}
        usual = {**GREEDY, "max_tokens": request.output_tokens, "ignore_eos": request.ignore_eos}
        body = {**fields, **usual, "stream": True, "stream_options": options, **self._target.extra_body}
        return json.dumps(body, separators=(",", ":")).encode()

    async def answer(self, body: bytes, reply: Reply, timeout_s: float) -> None:
        headers = {"content-type": "application/json"}
        try:
            async with asyncio.timeout(timeout_s):
                with self._pool() as client:
                    async with client.stream("POST", self._target.endpoint, content=body, headers=headers) as response:
                        await read_answer(response, reply)
        except HTTP_ERRORS as error:
            raise RequestFailed(f"the connection failed: {type(error).__name__} {error}") from error
        reply.check_complete()

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()

    @contextmanager
    def _pool(self) -> Iterator[httpx2.AsyncClient]:
        """Return a context manager that yields the first client whose pool is not full, or the least full one.

        So connections are used again.
        """
        number = min(range(NUM_POOLS), key=lambda number: self._num_under_way[number] // POOL_SIZE)
        self._num_under_way[number] += 1
        try:
            yield self._clients[number]
        finally:
            self._num_under_way[number] -= 1

    async def _models(self, deadline_s: float) -> list[Mapping[str, Any]]:
        address = self._target.address
        try:
            async with asyncio.timeout(deadline_s), self._clients[0].stream("GET", "/v1/models") as response:
                body = await _body(response, MAX_MODELS_BYTES)
        except TimeoutError as error:
            raise BenchError(f"{address} did not answer within {deadline_s:g} s") from error
        except HTTP_ERRORS as error:
            raise BenchError(f"no server answers at {address}: {error}") from error
        if response.status_code != httpx2.codes.OK:
            raise BenchError(f"{address}/v1/models answers {response.status_code}: {_words(body)[0]}")
        try:
            return [dict(model) for model in json.loads(body)["data"]]
        except JSON_ERRORS as error:
            raise BenchError(f"{address}/v1/models is not a list of models") from error


def _client(target: Target, context: ssl.SSLContext) -> httpx2.AsyncClient:
    headers = {"accept-encoding": "identity"}  # what is compressed is held back to be compressed
    if target.api_key:
        headers["authorization"] = f"Bearer {target.api_key}"
    try:  # deadlines are set around whole requests; a proxy of the environment would be measured too
        limits = httpx2.Limits(keepalive_expiry=KEEPALIVE_S)
        return httpx2.AsyncClient(
            base_url=target.address, headers=headers, timeout=None, limits=limits, verify=context, trust_env=False
        )
    except httpx2.InvalidURL as error:
        raise SettingsError(f"{target.address!r} is no URL: {error}") from error


async def read_answer(response: httpx2.Response, reply: Reply) -> None:
    """Read the events of a streamed response to its end, and record them in `reply`.

    Raises RequestFailed for an error status or event, and httpx2's errors when the connection breaks.
    """
    if response.status_code != httpx2.codes.OK:
        message, code = _words(await _body(response, MAX_ERROR_BYTES))
        is_refused = response.status_code in REFUSAL_STATUSES and code != reasons.WORKER_LOST
        after = response.headers.get("retry-after", "")  # a number of seconds, or a date, which nobody sends
        retry_after_s = float(after) if after.isascii() and after.isdecimal() else None
        raise RequestFailed(
            f"HTTP {response.status_code}: {message}", is_refused=is_refused, retry_after_s=retry_after_s
        )
    async for event in httpx2.EventSource(response):
        if event.data and event.data != DONE:
            take_event(event.data, reply.now_s(), reply)


async def _body(response: httpx2.Response, most_bytes: int) -> bytes:
    """Return the body of a response, cut off at a number of bytes."""
    body = b""
    async for data in response.aiter_bytes():
        body += data
        if len(body) > most_bytes:
            return body[:most_bytes]
    return body


def _words(body: bytes | str) -> tuple[str, Any]:
    """Return an error's message and code from OpenAI's form or FastAPI's, else the text as it is, and None."""
    text = body.decode(errors="replace") if isinstance(body, bytes) else body
    try:
        said = json.loads(text)
        error = said.get("error", said)
        if isinstance(error, str):
            return bounded(error), None
        return bounded(str(error.get("message") or said.get("detail") or text)), error.get("code")
    except JSON_ERRORS:
        return bounded(text), None


def take_event(event: str, moment_s: float, reply: Reply) -> None:
    """Record the tokens of one event in `reply`. `event` is the JSON text of its data.

    It came at `moment_s`, a time of the reply's clock. Raises RequestFailed if the event reports an error or is no
    completion.
    """
    try:
        said = json.loads(event)
        if said.get("error"):
            raise RequestFailed(_words(event)[0])
        _count(said, moment_s, reply)
    except JSON_ERRORS as error:
        raise RequestFailed(f"an event that is no completion: {event[:100]}") from error


def _count(said: Mapping[str, Any], moment_s: float, reply: Reply) -> None:
    """Record an event's tokens: by their ids where the server sends them, else by usage, else as one an event.

    Usage in a later event shows whether an end without text was a token.
    """
    usage, choices = said.get("usage"), said.get("choices")
    before = reply.num_arrived_tokens if usage else 0
    if usage:
        reply.num_prompt_tokens, reply.num_output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        if details := usage.get("prompt_tokens_details"):  # null where the server does not tell, or not yet
            reply.num_cached_tokens = details.get("cached_tokens")
    if not choices:
        num_silent = usage["completion_tokens"] - before if usage else 0
        if reply.silent_end_s is not None and num_silent > 0:
            reply.arrived(reply.silent_end_s, num_silent)
        return
    (choice,) = choices
    ends = choice.get("finish_reason") is not None
    if (token_ids := choice.get("token_ids")) is not None:  # vLLM sends a null unless the request wants them
        num_tokens = len(token_ids)
        reply.token_ids += token_ids
    elif usage:
        num_tokens = usage["completion_tokens"] - before
    else:
        num_tokens = 0 if _is_silent(choice, ends=ends) else 1
    if num_tokens:
        reply.arrived(moment_s, num_tokens)
    elif ends:
        reply.silent_end_s = moment_s
    reply.is_ended |= ends
    reply.is_stopped |= ends and choice["finish_reason"] != "length"
    _take_rest(choice, reply)


def _take_rest(choice: Mapping[str, Any], reply: Reply) -> None:
    """Record the text of a chat's event, and the timeline of the last one."""
    if content := (choice.get("delta") or {}).get("content"):
        reply.text += content
    if timeline := choice.get("timeline"):
        reply.timeline = times_of(timeline)
        reply.decode_node = str(timeline.get("decode_node", ""))


def _is_silent(choice: Mapping[str, Any], *, ends: bool) -> bool:
    """Return whether an event stands for no token: the end of an output without text, or a chat's event without any."""
    if (delta := choice.get("delta")) is None:
        return ends and not choice["text"]
    return not any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))
