"""Serve one call of a generating endpoint, from its requests to the last byte of its response.

A failure before the first message of an output is an HTTP status: the headers of a stream wait for that message. A
later failure is an event with an error object, after which the stream breaks off without [DONE] and without the last
chunk, unless the API has a final error event of its own. When the client disconnects, its outputs end.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coordinator.api.http import sse
from coordinator.api.http.api_adapters import ApiAdapter, Object, Translation
from coordinator.api.http.errors import internal_error, renamed
from coordinator.api.http.responses import ChoiceFormatter, Output, Usage
from coordinator.api.preprocess import Call, Prepared, Preprocessor
from protos.inference_pb2 import FINISH_REASON_ABORT, FINISH_REASON_LENGTH, Chunk, GenerateResponse
from serving_core.errors import RequestError
from serving_core.json_fields import json_line
from serving_core.tasks import first_to_end

logger = logging.getLogger(__name__)

R = TypeVar("R")

MOST_SCORES_AT_ONCE: Final = 256  # tokens with logprobs; a larger response is serialized in a thread


class GenerationApp:
    """ASGI application for exactly one call."""

    def __init__(
        self, preprocessor: Preprocessor, formatter: ChoiceFormatter, request_id: str, api_adapter: ApiAdapter
    ) -> None:
        self._preprocessor = preprocessor
        self._formatter = formatter
        self._api_adapter = api_adapter
        self._parsed = formatter.parsed
        self._request_id = request_id
        self._envelope = formatter.envelope(
            request_id, preprocessor.model.name_in_responses(self._parsed.requests[0].model)
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await first_to_end(self._answer(scope, receive, send), _until_gone(receive))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with AsyncExitStack() as stack:
                calls = await self._begin(stack)
                if self._parsed.stream:
                    await self._stream(calls, sse.EventStream(scope, send))
                    return
                if isinstance(self._api_adapter, Translation):
                    response = await self._fold(calls, self._api_adapter)
                else:
                    response = await self._collect(calls)
        except RequestError as error:
            raise self._named(error) from error
        await response(scope, receive, send)

    async def _begin(self, stack: AsyncExitStack) -> list[Call]:
        """Begin all prompts together, after all are tokenized: nobody reads the outputs of the first while others are
        tokenized."""
        prepared, calls = list[Prepared](), list[Call]()
        for num_before, request in enumerate(self._parsed.requests):
            terms = replace(self._parsed.terms, num_prompts_behind=len(self._parsed.requests) - num_before - 1)
            prepared.append(await stack.enter_async_context(self._preprocessor.prepared(request, terms=terms)))
            await asyncio.sleep(0)  # lets other calls run before the next prompt
        for each in prepared:
            calls.append(await stack.enter_async_context(self._preprocessor.begun(each)))
            await asyncio.sleep(0)
        return calls

    async def _collect(self, calls: Sequence[Call]) -> Response:
        num_sequences = self._parsed.num_sequences
        outputs = [self._formatter.new_output(call.prompt) for call in calls for _ in range(num_sequences)]
        usage = _usage(calls)
        async with aclosing(self._arrivals(calls)) as arrivals:
            async for arrival in arrivals:
                index = arrival.call_index * num_sequences + arrival.response.index
                output = outputs[index]
                _set_cached(usage, arrival)
                self._count(usage, index, output.prompt, arrival.response.chunk)
                if arrival.response.HasField("complete"):
                    output.complete = arrival.response.complete
                else:
                    output.add(arrival.response.chunk)
        if sum(len(output.scores) + len(output.logprobs) for output in outputs) > MOST_SCORES_AT_ONCE:
            return await asyncio.to_thread(self._whole, outputs, usage)
        return self._whole(outputs, usage)

    def _whole(self, outputs: Sequence[Output], usage: Usage) -> Response:
        choices = [self._formatter.whole(index, output) for index, output in enumerate(outputs)]
        extras = self._formatter.envelope_extras(outputs[0].prompt) | self._formatter.envelope_scores(outputs[0].scores)
        return written(self._envelope.whole(choices, usage, **extras))

    async def _fold(self, calls: Sequence[Call], translation: Translation[Any]) -> Response:
        """Return the response that the events of a stream add up to."""
        async with aclosing(self._events(calls, translation.read)) as told:
            async for _ in told:
                pass
        return await asyncio.to_thread(lambda: written(translation.whole()))

    async def _stream(self, calls: Sequence[Call], stream: sse.EventStream) -> None:
        try:
            await self._write_events(calls, stream)
            await stream.end()
        except RequestError as error:
            if not stream.has_begun:
                raise
            await self._fail(stream, self._named(error))
        except Exception:
            if not stream.has_begun:
                raise
            logger.exception("a stream failed", extra={"request_id": self._request_id})
            await self._fail(stream, internal_error())

    async def _fail(self, stream: sse.EventStream, error: RequestError) -> None:
        events = self._api_adapter.failure(error)
        if not self._api_adapter.failure_is_end:
            await stream.break_off(events)
            return
        await stream.write(events)
        await stream.end()

    def _named(self, error: RequestError) -> RequestError:
        return self._api_adapter.named(renamed(error, self._parsed.names))

    async def _write_events(self, calls: Sequence[Call], stream: sse.EventStream) -> None:
        async with aclosing(self._events(calls, self._api_adapter.event)) as told:
            async for events in told:
                await stream.write(b"".join(events))
        await stream.write(self._api_adapter.end())

    async def _events(self, calls: Sequence[Call], take: Callable[[Object], R]) -> AsyncGenerator[list[R]]:
        """Yield `take` of the events of each message, and last of the event with the usage."""
        usage, opened = _usage(calls), set[int]()
        async with aclosing(self._arrivals(calls)) as arrivals:
            async for arrival in arrivals:
                index = arrival.call_index * self._parsed.num_sequences + arrival.response.index
                prompt = calls[arrival.call_index].prompt
                _set_cached(usage, arrival)
                opening = [] if index in opened else [*map(take, self._opening(index, prompt, usage))]
                opened.add(index)
                self._count(usage, index, prompt, arrival.response.chunk)
                response = arrival.response
                if response.chunk.prompt_logprobs:  # which are large
                    yield opening + await asyncio.to_thread(self._taken, take, index, response, prompt, usage)
                else:
                    yield opening + self._taken(take, index, response, prompt, usage)
        if self._parsed.include_usage:
            yield [take(self._envelope.event([], usage=usage.to_json()))]

    def _count(self, usage: Usage, index: int, prompt: list[int], chunk: Chunk) -> None:
        usage.add_tokens(len(chunk.token_ids))
        usage.num_thought_tokens = self._formatter.num_thought_tokens(index, prompt, chunk)

    def _arrivals(self, calls: Sequence[Call]) -> AsyncGenerator["Arrival"]:
        return without_output(calls) if self._parsed.terms.drops_answers else merged(calls)

    def _opening(self, index: int, prompt: list[int], usage: Usage) -> list[Object]:
        choice = self._formatter.opening(index)
        return [] if choice is None else [self._event(choice, usage, **self._formatter.envelope_extras(prompt))]

    def _taken(
        self, take: Callable[[Object], R], index: int, response: GenerateResponse, prompt: list[int], usage: Usage
    ) -> list[R]:
        if response.HasField("complete"):
            choices = self._formatter.closing(index, response.complete)
        else:
            choices = self._formatter.events(index, prompt, response.chunk)
        return [take(self._event(choice, usage)) for choice in choices]

    def _event(self, choice: Object, usage: Usage, **others: Any) -> Object:
        event = self._envelope.event([choice], **others)
        if self._parsed.continuous_usage:
            event["usage"] = usage.to_json()
        elif self._parsed.include_usage:
            event["usage"] = None
        return event


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message and the index of its call."""

    call_index: int
    response: GenerateResponse


async def merged(calls: Sequence[Call]) -> AsyncGenerator[Arrival]:
    """Yield the messages of all calls as they come, until every call has ended.

    Raises the RequestError of the first call that fails.
    """
    if len(calls) == 1:  # no tasks for the common case
        while (response := await calls[0].generation.next()) is not None:
            yield Arrival(0, response)
        return
    waits = {asyncio.create_task(call.generation.next()): index for index, call in enumerate(calls)}
    try:
        while waits:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waits.__getitem__):
                response = task.result()
                index = waits.pop(task)
                if response is not None:
                    waits[asyncio.create_task(calls[index].generation.next())] = index
                    yield Arrival(index, response)
    finally:
        for task in waits:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


async def without_output(calls: Sequence[Call]) -> AsyncGenerator[Arrival]:
    """Yield what `merged` does, without the generated text."""
    async with aclosing(merged(calls)) as arrivals:
        async for arrival in arrivals:
            _drop_output(arrival.response)
            yield arrival


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, R]) -> R:
    """Return the result of `work`. Requires that the request's body has been read.

    If the client disconnects first, `work` is cancelled and ClientDisconnect is raised.
    """
    results: list[R] = []

    async def keep_result() -> None:
        results.append(await work)

    await first_to_end(keep_result(), _until_gone(receive))
    if not results:
        raise ClientDisconnect
    return results[0]


async def _until_gone(receive: Receive) -> None:
    """Return when the client has disconnected. Requires that the request's body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def written(document: Mapping[str, Any]) -> Response:
    """Return a document as a JSON response. Choices are serialized one by one, so that other threads run in between."""
    choices = document.get("choices")
    if not isinstance(choices, list):
        return Response(json_line(document), media_type="application/json")
    parts = [
        f"{json_line(name)}:" + (f"[{','.join(map(json_line, choices))}]" if name == "choices" else json_line(value))
        for name, value in document.items()
    ]
    return Response("{" + ",".join(parts) + "}", media_type="application/json")


def _drop_output(response: GenerateResponse) -> None:
    """Remove the generated text; keep prompt logprobs, and the finish reason of an aborted request."""
    if response.HasField("complete"):
        if response.complete.finish_reason != FINISH_REASON_ABORT:
            response.complete.finish_reason = FINISH_REASON_LENGTH
        response.complete.completion_tokens = 0
        response.complete.ClearField("matched_stop")
    else:
        for name in ("token_ids", "text", "logprobs"):
            response.chunk.ClearField(name)


def _usage(calls: Sequence[Call]) -> Usage:
    return Usage(sum(len(call.prompt) for call in calls))


def _set_cached(usage: Usage, arrival: Arrival) -> None:
    """Add the cached tokens of an output, which its first and last message report; outputs of a prompt share them."""
    response = arrival.response
    if response.index != 0:
        return
    if response.HasField("complete"):
        usage.set_cached(arrival.call_index, response.complete.cached_tokens)
    elif response.chunk.HasField("cached_tokens"):
        usage.set_cached(arrival.call_index, response.chunk.cached_tokens)
