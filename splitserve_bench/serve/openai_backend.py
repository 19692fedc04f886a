"""Any server with an OpenAI-compatible /v1/completions that takes token ids, or text alone where the data set is text,
or with a /v1/chat/completions, such as vLLM's or SplitServe's own."""

import asyncio
import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import httpx2

from serving_core import reasons
from serving_core.errors import SettingsError
from serving_core.tls import TlsFiles, client_context
from splitserve_bench.errors import BenchError
from splitserve_bench.prompts import GREEDY
from splitserve_bench.serve.event_stream import DONE, EventStream
from splitserve_bench.serve.reply import Reply, RequestFailed, bounded
from splitserve_bench.serve.target import SPLITSERVE, ServedModel, Target
from splitserve_bench.serve.timelines import times_of
from splitserve_bench.serve.wire import OrderedRequest

REFUSALS: Final = (429, 503, 529)  # statuses of a server that turns requests away: too many, no room
# Shorter than the 5 s after which uvicorn closes an idle connection: one that is being closed is not used again.
KEEPALIVE_S: Final = 3.0
# A pool looks through all its connections for each request: of many at a time each pool has a part.
NUM_POOLS: Final = 32
POOL_SIZE: Final = 64
MOST_BODY_BYTES: Final = 2**16  # of an error's
MOST_ANSWER_BYTES: Final = 2**22  # of anything but an answer


class OpenAIBackend:
    """As many connections as there are requests under way, in as few pools as they fill."""

    def __init__(self, target: Target) -> None:
        self._target = target
        context = _context(target)  # once: it reads the system's certificates
        self._clients = [_client(target, context) for _ in range(NUM_POOLS)]
        self._num_under_way = [0] * NUM_POOLS
        self._is_own = False

    def prepare(self, request: OrderedRequest) -> bytes:
        asked: dict[str, Any] = {"prompt": request.text or request.prompt.tolist()}
        if self._target.takes_chats:
            asked = {"messages": [{"role": "user", "content": request.text}]}
        fields: dict[str, Any] = {
            **asked,
            "max_tokens": request.output_tokens,
            **GREEDY,
            "ignore_eos": request.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._target.model:
            fields["model"] = self._target.model
        if self._is_own:
            fields["include_timeline"] = True
            fields["stream_options"]["continuous_usage_stats"] = True
            limits = {"ttft_ms": request.ttft_ms, "tpot_ms": request.tpot_ms}
            fields |= {name: limit for name, limit in limits.items() if limit is not None}
        return json.dumps({**fields, **self._target.extra_body}, separators=(",", ":")).encode()

    async def warm_up(self, num_connections: int, deadline_s: float) -> None:
        client = self._clients[0]
        served = await _models(client, self._target, deadline_s)
        self._is_own = any(model.get("owned_by") == SPLITSERVE for model in served)
        await asyncio.gather(*(_models(client, self._target, deadline_s) for _ in range(num_connections)))

    async def answer(self, body: bytes, reply: Reply, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._stream(body, reply)
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            raise RequestFailed(f"the connection failed: {type(error).__name__} {error}") from error
        reply.check_complete()

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()

    async def _stream(self, body: bytes, reply: Reply) -> None:
        headers = {"content-type": "application/json"}
        with self._pool() as client:
            async with client.stream("POST", self._target.endpoint, content=body, headers=headers) as response:
                await read_answer(response, reply)

    @contextmanager
    def _pool(self) -> Iterator[httpx2.AsyncClient]:
        """The first that is not full, so that connections are used again and again; of full ones the least so."""
        number = min(range(NUM_POOLS), key=lambda number: self._num_under_way[number] // POOL_SIZE)
        self._num_under_way[number] += 1
        try:
            yield self._clients[number]
        finally:
            self._num_under_way[number] -= 1


async def describe_openai(target: Target, deadline_s: float) -> ServedModel:
    """Raises BenchError when the server does not answer in time, or does not serve target.model."""
    async with _client(target, _context(target)) as client:
        served = await _models(client, target, deadline_s)
    by_name = {str(model.get("id", "")): model for model in served}
    name = target.model or next(iter(by_name), "")
    if name not in by_name:
        raise BenchError(f"{target.address} does not serve {name!r} but {', '.join(by_name) or 'nothing'}")
    length, vocab_size = (by_name[name].get(key) for key in ("max_model_len", "vocab_size"))
    return ServedModel(
        name, length if isinstance(length, int) else None, vocab_size if isinstance(vocab_size, int) else None
    )


def _context(target: Target) -> ssl.SSLContext:
    return httpx2.create_ssl_context() if target.tls == TlsFiles() else client_context(target.tls)


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


async def _models(client: httpx2.AsyncClient, target: Target, deadline_s: float) -> list[Mapping[str, Any]]:
    """What /v1/models tells."""
    try:
        async with asyncio.timeout(deadline_s), client.stream("GET", "/v1/models") as response:
            body = await _body(response, MOST_ANSWER_BYTES)
    except TimeoutError as error:
        raise BenchError(f"{target.address} did not answer within {deadline_s:g} s") from error
    except (httpx2.HTTPError, httpx2.StreamError) as error:
        raise BenchError(f"no server answers at {target.address}: {error}") from error
    if response.status_code != httpx2.codes.OK:
        raise BenchError(f"{target.address}/v1/models answers {response.status_code}: {_words(body)[0]}")
    try:
        return [dict(model) for model in json.loads(body)["data"]]
    except (ValueError, TypeError, KeyError) as error:
        raise BenchError(f"{target.address}/v1/models is not a list of models") from error


async def read_answer(response: httpx2.Response, reply: Reply) -> None:
    """Read an answer to its end. Raises RequestFailed for anything else."""
    if response.status_code != httpx2.codes.OK:
        raise await _refusal(response)
    events = EventStream()
    async for data in response.aiter_bytes():
        moment_s = reply.now_s()
        for event in events.feed(data):
            if event != DONE:
                _take(event, moment_s, reply)


async def _refusal(response: httpx2.Response) -> RequestFailed:
    body = await _body(response, MOST_BODY_BYTES)
    message, code = _words(body)
    is_refused = response.status_code in REFUSALS and code != reasons.WORKER_LOST
    retry_after_s = _seconds(response.headers.get("retry-after", ""))
    return RequestFailed(f"HTTP {response.status_code}: {message}", is_refused=is_refused, retry_after_s=retry_after_s)


def _seconds(retry_after: str) -> float | None:
    """Of the header; None for none, and for a date."""
    return float(retry_after) if retry_after.isascii() and retry_after.isdecimal() else None


async def _body(response: httpx2.Response, most_bytes: int) -> bytes:
    """As much of it as is allowed; what is cut off will not be read as JSON."""
    body = b""
    async for data in response.aiter_bytes():
        body += data
        if len(body) > most_bytes:
            return body[:most_bytes]
    return body


def _words(body: bytes) -> tuple[str, Any]:
    """An error's own words and its code: OpenAI's form, FastAPI's, or whatever it is."""
    text = body.decode(errors="replace")
    try:
        said = json.loads(text)
        error = said.get("error", said)
        if isinstance(error, str):
            return bounded(error), None
        return bounded(str(error.get("message") or said.get("detail") or text)), error.get("code")
    except (ValueError, AttributeError):
        return bounded(text), None


def _take(event: bytes, moment_s: float, reply: Reply) -> None:
    """One event of an answer. Raises RequestFailed for one that is an error, or is not understood."""
    try:
        said = json.loads(event)
        if said.get("error"):
            raise RequestFailed(_words(event)[0])
        _count(said, moment_s, reply)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise RequestFailed(f"an event that is no completion: {event[:100].decode(errors='replace')}") from error


def _count(said: Mapping[str, Any], moment_s: float, reply: Reply) -> None:
    """Tokens: by their ids where the server gives them, else by usage where each event has it, else one an event; of an
    end without text, as of a special token, usage tells later whether it was one."""
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
    if (token_ids := choice.get("token_ids")) is not None:  # vLLM sends a null when it was not asked for them
        num_tokens = len(token_ids)
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
    if timeline := choice.get("timeline"):
        reply.timeline = times_of(timeline)


def _is_silent(choice: Mapping[str, Any], *, ends: bool) -> bool:
    """Whether an event stands for no token: the end of an answer without text, or what else a chat says without any."""
    if (delta := choice.get("delta")) is None:
        return ends and not choice["text"]
    return not any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))
