"""Provide two clients of a server: `AsyncClient` for asyncio and the blocking `Client`.

Errors are those of `splitserve.client.errors`. Leaving the loop over an output (break, exception, close, a cancelled
task) cancels the call on the server. A call that fails as UNAVAILABLE before a server has taken it is tried up to three
times. An output whose call breaks off later, by a lost connection or a restart of the server, continues at the next
token (resuming.py).

A target is HOST:PORT, or https://HOST:PORT for TLS. The server's certificate is verified against the CAs in `tls_ca`,
which implies TLS, or against gRPC's default CAs; it must be for the host of the target, or for `tls_server_name`.
`tls_cert` and `tls_key` are for a server that asks for a client certificate. All are PEM files; an unusable file raises
SettingsError.
"""

import asyncio
import itertools
import json
import time
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager, suppress
from functools import partial, wraps
from typing import Any, Concatenate, Final, ParamSpec, Self, TypedDict, TypeVar, Unpack

import grpc
import grpc.aio
from anyio.from_thread import start_blocking_portal
from grpc.aio import UsageError
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import inference_pb2, inference_pb2_grpc
from protos.convert import shape_to_wire
from serving_core.net.channels import CLIENT_OPTIONS, Option
from serving_core.net.tls import TlsFiles
from serving_core.shapes import Shape
from splitserve.client import answers
from splitserve.client.answers import Aborted, Chunk, Embedding, Loads, ModelInfo, NodeLoad, Scores, ServerInfo
from splitserve.client.dialling import Dialling
from splitserve.client.errors import Cancelled, ClientError, from_rpc_error
from splitserve.client.overview import Overview, to_overview
from splitserve.client.questions import (
    TIMEOUT_S,
    Message,
    Prompt,
    Sampling,
    abort_request,
    embed_request,
    generate_request,
    score_request,
)
from splitserve.client.resuming import Course

Params = ParamSpec("Params")
Part = TypeVar("Part")
Result = TypeVar("Result")

READINESS: Final = "splitserve.v1.Inference"  # the service's full name, which is its name in the health service, too
LIVENESS: Final = ""
_END: Final[Any] = object()  # end of an iteration

_RETRY_POLICY: Final = {
    "maxAttempts": 3,
    "initialBackoff": "0.1s",
    "maxBackoff": "1s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}
_OPTIONS: Final[tuple[Option, ...]] = (
    *CLIENT_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),  # finds a server that is starting or restarting soon
    ("grpc.max_reconnect_backoff_ms", 2000),
    (
        "grpc.service_config",
        json.dumps({"methodConfig": [{"name": [{"service": READINESS}], "retryPolicy": _RETRY_POLICY}]}),
    ),
)


def _options(num_channels: int) -> tuple[Option, ...]:
    """Return the channel options. Without a local subchannel pool, channels with equal options share a connection."""
    if num_channels < 1:
        raise ValueError(f"num_channels must be at least 1, not {num_channels}")
    return (*_OPTIONS, ("grpc.use_local_subchannel_pool", 1)) if num_channels > 1 else _OPTIONS


class AsyncClient:
    """Asynchronous client of one server. Must be created and used within one running event loop.

    `timeout_s` is the default deadline of each call, in seconds. Calls use `num_channels` connections in turn; each
    connection stays with one API server process of a server that has several.
    """

    def __init__(
        self,
        target: str,
        *,
        api_key: str | None = None,
        timeout_s: float = TIMEOUT_S,
        tls_ca: str = "",
        tls_cert: str = "",
        tls_key: str = "",
        tls_server_name: str = "",
        num_channels: int = 1,
    ) -> None:
        dialling = Dialling.of(target, TlsFiles(tls_cert, tls_key, tls_ca), tls_server_name)
        self._target = str(dialling)
        self._timeout_s = timeout_s
        self._metadata = _metadata(api_key)
        self._channels = [dialling.aio_channel(_options(num_channels)) for _ in range(num_channels)]
        self._stubs = itertools.cycle([inference_pb2_grpc.InferenceStub(channel) for channel in self._channels])
        self._admin = inference_pb2_grpc.AdminStub(self._channels[0])
        self._health = health_pb2_grpc.HealthStub(self._channels[0])
        self._closed = asyncio.Event()

    @property
    def _inference(self) -> inference_pb2_grpc.InferenceStub:
        """Stub of the next channel."""
        return next(self._stubs)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the client and cancel its running calls."""
        self._closed.set()
        for channel in self._channels:
            await channel.close()

    def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        request_id: str = "",
        cache_salt: str = "",
        ttft_ms: float | None = None,
        tpot_ms: float | None = None,
        slo_class: str = "",
        priority: int | None = None,
        deadline_s: float | None = None,
        resume: bool = True,
        chat: bool = False,
        **sampling: Unpack[Sampling],
    ) -> AsyncGenerator[Chunk]:
        """Stream the outputs of a prompt: text, token ids or a conversation. The call starts with the first iteration.

        Text is used unchanged, or with `chat` as a user message in the chat template, as `splitserve generate` does for
        a model with a template unless --raw is given.

        Requests share cached prefixes only with requests of the same cache_salt. ttft_ms and tpot_ms are the SLO,
        slo_class is an SLO class of the server; the last chunk's completion has the attainment. Among queued requests,
        a lower priority value is prefilled earlier. With `resume`, a stream whose call breaks off continues within
        deadline_s, by default timeout_s; without, it raises Unavailable. Raises ClientError when the
        server refuses the request or does not reply.
        """
        request = generate_request(
            prompt,
            model=model,
            request_id=request_id,
            cache_salt=cache_salt,
            sampling=sampling,
            ttft_ms=ttft_ms,
            tpot_ms=tpot_ms,
            slo_class=slo_class,
            priority=priority,
            chat=chat,
        )
        return self._answers(request, deadline_s, resume)

    async def embed(
        self,
        text: str | Sequence[int],
        *,
        model: str = "",
        request_id: str = "",
        cache_salt: str = "",
        priority: int | None = None,
        truncate_prompt_tokens: int | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
    ) -> Embedding:
        """Return the embedding of a text or of token ids, from an embedding model.

        An input that is too long is refused, or truncated to its first truncate_prompt_tokens tokens (-1: as many as
        fit). dimensions keeps the leading numbers only, for a model trained for it. normalize defaults to the model's
        own setting. Raises ClientError when the server refuses the request or does not reply.
        """
        request = embed_request(
            text,
            model=model,
            request_id=request_id,
            cache_salt=cache_salt,
            priority=priority,
            truncate_prompt_tokens=truncate_prompt_tokens,
            dimensions=dimensions,
            normalize=normalize,
        )
        return answers.to_embedding(await self._call(self._inference.Embed, request))

    async def score(
        self,
        prompt: str | Sequence[Message],
        items: Sequence[tuple[str, Sequence[str]]],
        *,
        model: str = "",
        request_id: str = "",
        cache_salt: str = "",
        ttft_ms: float | None = None,
        slo_class: str = "",
        priority: int | None = None,
    ) -> Scores:
        """Return the logprobs of replies, the labels, for each of several items that are asked of one prompt.

        An item is a text and its labels. The text is appended to the prompt: to a text, or to the content of the last
        message of a conversation. Nothing is generated, and no other item changes a logprob.
        """
        request = score_request(
            prompt,
            items,
            model=model,
            request_id=request_id,
            cache_salt=cache_salt,
            ttft_ms=ttft_ms,
            slo_class=slo_class,
            priority=priority,
        )
        return answers.to_scores(await self._call(self._inference.Score, request))

    async def abort(self, request_ids: str | Sequence[str]) -> Aborted:
        """Abort live requests by id, also those of other clients; return which were live.

        Raises ClientError when the server does not reply.
        """
        return answers.to_aborted(await self._call(self._inference.Abort, abort_request(request_ids)))

    async def model_info(self) -> ModelInfo:
        request = inference_pb2.GetModelInfoRequest()
        return answers.to_model_info(await self._call(self._inference.GetModelInfo, request))

    async def server_info(self) -> ServerInfo:
        request = inference_pb2.GetServerInfoRequest()
        return answers.to_server_info(await self._call(self._inference.GetServerInfo, request))

    async def loads(self) -> Loads:
        return answers.to_loads(await self._call(self._inference.GetLoads, inference_pb2.GetLoadsRequest()))

    async def overview(self, *, after: int | None = None) -> Overview:
        """Return the server's state. With `after`, the state has request histories.

        These are the live requests, and the ended ones whose number is above `after`. Raises ClientError when the
        server does not reply.
        """
        return to_overview(await self._call(self._admin.GetOverview, inference_pb2.GetOverviewRequest(after=after)))

    async def set_role(self, node: str, to: str | Shape) -> NodeLoad:
        """Give a node another role, or any shape, while it serves; return its load once it has confirmed the change.

        Raises ClientError if the change is refused or not confirmed in time.
        """
        return answers.to_node_load((await self._call(self._admin.SetRole, _set_role_request(node, to))).node)

    async def health(self, service: str = READINESS) -> bool:
        """Return whether the server accepts requests; with LIVENESS as `service`, whether it runs.

        Raises ClientError if no server answers.
        """
        return _serving(await self._call(self._health.Check, health_pb2.HealthCheckRequest(service=service)))

    def drain(self, node: str | None, *, deadline_s: float | None = None) -> AsyncGenerator[int]:
        """Drain a node, or the whole fleet with None; yield the number of requests left at each change, down to 0.

        A fleet that drains refuses new calls until its coordinator is restarted. Raises ClientError when the server
        refuses or does not reply. The drain continues when the loop is left, or after `deadline_s` seconds.
        """
        request = inference_pb2.DrainRequest(node=node or "", all=node is None)
        return self._stream(self._admin.Drain, request, _num_left, deadline_s)

    async def wait_until_healthy(self, *, deadline_s: float) -> None:
        """Wait until the server accepts requests; it may not have started yet.

        Raises DeadlineExceeded after `deadline_s` seconds.
        """
        request = health_pb2.HealthCheckRequest(service=READINESS)
        with _calling(self._target, self._closed):
            call = self._health.Watch(request, timeout=deadline_s, metadata=self._metadata, wait_for_ready=True)
            try:
                async for reply in call:
                    if _serving(reply):
                        return
            finally:
                call.cancel()

    async def _call(self, method: Any, request: Any) -> Any:
        with _calling(self._target, self._closed):
            return await method(request, timeout=self._timeout_s, metadata=self._metadata)

    async def _answers(
        self, request: inference_pb2.GenerateRequest, deadline_s: float | None, resume: bool
    ) -> AsyncGenerator[Chunk]:
        ends_s = time.monotonic() + (self._timeout_s if deadline_s is None else deadline_s)
        course = Course(request, ends_s=ends_s, resumes=resume)
        while True:
            now = time.monotonic()
            responses = self._stream(self._inference.Generate, course.question(now), _itself, course.left_s(now))
            try:
                async with aclosing(responses):
                    async for response in responses:
                        yield course.take(response, time.monotonic())
                course.check_end()
                return
            except ClientError as error:
                pause_s = course.pause_after(error, time.monotonic())
            if pause_s is None:
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), pause_s)
                raise _closed()

    async def _stream(
        self, method: Any, request: Any, read: Callable[[Any], Part], deadline_s: float | None
    ) -> AsyncGenerator[Part]:
        timeout_s = self._timeout_s if deadline_s is None else deadline_s
        with _calling(self._target, self._closed):
            call = method(request, timeout=timeout_s, metadata=self._metadata)
            try:
                async for response in call:
                    yield read(response)
            finally:
                call.cancel()


class Options(TypedDict, total=False):
    """Keyword arguments of `AsyncClient`, which defines their defaults."""

    api_key: str | None
    timeout_s: float
    tls_ca: str
    tls_cert: str
    tls_key: str
    tls_server_name: str
    num_channels: int


def _blocking(
    method: Callable[Concatenate[AsyncClient, Params], Awaitable[Result]],
) -> Callable[Concatenate["Client", Params], Result]:
    """Return the method of `Client` that waits for the result of a method of `AsyncClient`."""

    @wraps(method)
    def call(self: "Client", /, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        return self._wait(partial(method, self._client, *args, **kwargs))

    return call


def _iterating(
    method: Callable[Concatenate[AsyncClient, Params], AsyncGenerator[Part]],
) -> Callable[Concatenate["Client", Params], Generator[Part]]:
    """Return the method of `Client` that iterates over the items of a method of `AsyncClient`."""

    @wraps(method)
    def call(self: "Client", /, *args: Params.args, **kwargs: Params.kwargs) -> Generator[Part]:
        return self._iterate(method(self._client, *args, **kwargs))

    return call


class Client:
    """Blocking client of one server, for any number of threads.

    Runs an `AsyncClient` on an event loop in a thread of its own until `close`. Methods take and return the same values
    as those of `AsyncClient`.
    """

    def __init__(self, target: str, **options: Unpack[Options]) -> None:
        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal())
            self._client = self._portal.call(partial(AsyncClient, target, **options))
            stack.callback(self._portal.call, self._client.close)
            self._close = weakref.finalize(self, stack.pop_all().close)  # at the latest at the end of the process

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the client and cancel its running calls."""
        self._close()

    generate = _iterating(AsyncClient.generate)
    embed = _blocking(AsyncClient.embed)
    score = _blocking(AsyncClient.score)
    abort = _blocking(AsyncClient.abort)
    model_info = _blocking(AsyncClient.model_info)
    server_info = _blocking(AsyncClient.server_info)
    loads = _blocking(AsyncClient.loads)
    overview = _blocking(AsyncClient.overview)
    set_role = _blocking(AsyncClient.set_role)
    health = _blocking(AsyncClient.health)
    wait_until_healthy = _blocking(AsyncClient.wait_until_healthy)
    drain = _iterating(AsyncClient.drain)

    def _wait(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """Return the result of `work`, which is cancelled if the wait ends early, as by Ctrl-C."""
        try:
            future = self._portal.start_task_soon(work)
        except RuntimeError as error:  # the portal is closed
            raise _closed() from error
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _iterate(self, parts: AsyncGenerator[Part]) -> Generator[Part]:
        try:
            while (part := self._wait(partial(anext, parts, _END))) is not _END:
                yield part
        except GeneratorExit:
            with suppress(Cancelled):
                self._wait(parts.aclose)
            raise


@contextmanager
def _calling(target: str, closed: asyncio.Event) -> Iterator[None]:
    """Convert gRPC errors of a call to ClientError.

    A cancellation from elsewhere than this task, and any error of a channel that was closed meanwhile, become
    Cancelled.
    """
    if closed.is_set():
        raise _closed()
    try:
        yield
    except grpc.RpcError as error:
        raise (_closed() if closed.is_set() else from_rpc_error(error, target)) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise _closed() from error
    except (ValueError, UsageError) as error:
        if not closed.is_set():
            raise
        raise _closed() from error


def _closed() -> Cancelled:
    return Cancelled("the client was closed", code=grpc.StatusCode.CANCELLED)


def _itself(response: inference_pb2.GenerateResponse) -> inference_pb2.GenerateResponse:
    return response


def _metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def _set_role_request(node: str, to: str | Shape) -> inference_pb2.SetRoleRequest:
    if isinstance(to, str):
        return inference_pb2.SetRoleRequest(node=node, role=to)
    return inference_pb2.SetRoleRequest(node=node, shape=shape_to_wire(to))


def _num_left(progress: inference_pb2.DrainProgress) -> int:
    return progress.num_left


def _serving(reply: health_pb2.HealthCheckResponse) -> bool:
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
