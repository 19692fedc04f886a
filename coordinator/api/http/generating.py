"""Serve one call of a generating endpoint, from its requests to the last byte of its response.

A failure before the first message of an output is an HTTP status: the headers of a stream wait for that message. A
later failure is an event with an error object, after which the stream breaks off without [DONE] and without the last
chunk, unless the API has a final error event of its own. When the client disconnects, its outputs end.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coordinator.api.generation import Deliver, Message
from coordinator.api.http import sse
from coordinator.api.http.api_adapters import ApiAdapter, Object, Translation
from coordinator.api.http.errors import internal_error, renamed
from coordinator.api.http.responses import ChoiceFormatter, Output, Usage
from coordinator.api.preprocess import Call, Prepared, Preprocessor
from coordinator.control.instructions import Chunk
from protos.inference_pb2 import FINISH_REASON_ABORT, FINISH_REASON_LENGTH
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
        self._around_text: dict[int, tuple[bytes, bytes]] = {}  # of the events of an output, by its index
        self._usage = Usage(0)
        self._opened = set[int]()  # outputs of which events were sent
        self._envelope = formatter.envelope(
            request_id, preprocessor.model.name_in_responses(self._parsed.requests[0].model)
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await first_to_end(self._answer(scope, receive, send), _until_gone(receive))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with AsyncExitStack() as stack:
                calls = await self._begin(stack)
                self._usage = Usage(sum(len(call.prompt) for call in calls))
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
        async with aclosing(self._arrivals(calls)) as arrivals:
            async for call_index, message in arrivals:
                index = call_index * num_sequences + message.index
                output = outputs[index]
                self._set_cached(call_index, message)
                if message.chunk is None:
                    output.complete = message.complete
                else:
                    self._count(index, output.prompt, message.chunk)
                    output.add(message.chunk)
        if sum(len(output.scores) + len(output.logprobs) for output in outputs) > MOST_SCORES_AT_ONCE:
            return await asyncio.to_thread(self._whole, outputs)
        return self._whole(outputs)

    def _whole(self, outputs: Sequence[Output]) -> Response:
        choices = [self._formatter.whole(index, output) for index, output in enumerate(outputs)]
        extras = self._formatter.envelope_extras(outputs[0].prompt) | self._formatter.envelope_scores(outputs[0].scores)
        return written(self._envelope.whole(choices, self._usage, **extras))

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
        deliver = partial(self._deliver, stream, calls[0].prompt)
        async with aclosing(self._events(calls, self._api_adapter.event, deliver)) as told:
            async for events in told:
                await stream.write(b"".join(events))
        await stream.write(self._api_adapter.end())

    def _deliver(self, stream: sse.EventStream, prompt: list[int], index: int, chunk: Chunk) -> bool:
        """Send the events of a chunk without the call's task, which waits for it, unless they need more than that."""
        has_more = chunk.cached_tokens is not None or chunk.prompt_logprobs
        if has_more or index not in self._opened or not stream.is_writable:
            return False
        stream.write_at_once(b"".join(self._taken(self._api_adapter.event, index, chunk, prompt)))
        return True

    async def _events(
        self, calls: Sequence[Call], take: Callable[[Object], Any], deliver: Deliver | None = None
    ) -> AsyncGenerator[list[Any]]:
        """Yield `take` of the events of each message that `deliver` has not sent, and last of that with the usage."""
        async with aclosing(self._arrivals(calls, deliver)) as arrivals:
            async for call_index, message in arrivals:
                index = call_index * self._parsed.num_sequences + message.index
                prompt, chunk = calls[call_index].prompt, message.chunk
                self._set_cached(call_index, message)
                opening = []
                if index not in self._opened:
                    self._opened.add(index)
                    opening = [*map(take, self._opening(index, prompt))]
                if chunk is None:
                    assert message.complete is not None, "it has no chunk"
                    closing = self._formatter.closing(index, message.complete)
                    yield [*opening, *(take(self._event(choice)) for choice in closing)]
                    continue
                if chunk.prompt_logprobs:  # which are large
                    taken = await asyncio.to_thread(self._taken, take, index, chunk, prompt)
                else:
                    taken = self._taken(take, index, chunk, prompt)
                yield opening + taken
        if self._parsed.include_usage:
            yield [take(self._envelope.event([], usage=self._usage.to_json()))]

    def _count(self, index: int, prompt: list[int], chunk: Chunk) -> None:
        self._usage.add_tokens(len(chunk.token_ids))
        self._usage.num_thought_tokens = self._formatter.num_thought_tokens(index, prompt, chunk)

    def _set_cached(self, call_index: int, message: Message) -> None:
        """Add the cached tokens of an output, which its first and last message report; outputs of a prompt share
        them."""
        if message.index != 0:
            return
        if message.complete is not None:
            self._usage.set_cached(call_index, message.complete.cached_tokens)
        elif message.chunk is not None and message.chunk.cached_tokens is not None:
            self._usage.set_cached(call_index, message.chunk.cached_tokens)

    def _arrivals(self, calls: Sequence[Call], deliver: Deliver | None = None) -> AsyncGenerator[tuple[int, Message]]:
        return without_output(calls) if self._parsed.terms.drops_answers else merged(calls, deliver)

    def _opening(self, index: int, prompt: list[int]) -> list[Object]:
        choice = self._formatter.opening(index)
        return [] if choice is None else [self._event(choice, **self._formatter.envelope_extras(prompt))]

    def _taken(self, take: Callable[[Object], Any], index: int, chunk: Chunk, prompt: list[int]) -> list[Any]:
        self._count(index, prompt, chunk)
        return [
            self._text_taken(take, index, each) if isinstance(each, str) else take(self._event(each))
            for each in self._formatter.pieces(index, prompt, chunk)
        ]

    def _text_taken(self, take: Callable[[Object], Any], index: int, text: str) -> Any:
        """Return `take` of the event of a text. In OpenAI's stream, those of an output differ in the text alone."""
        if isinstance(self._api_adapter, Translation) or self._parsed.continuous_usage:
            return take(self._event(self._formatter.text_choice(index, text)))
        if (around := self._around_text.get(index)) is None:
            event: bytes = take(self._event(self._formatter.text_choice(index, _STAND_IN)))
            before, _, after = event.partition(json_line(_STAND_IN).encode())
            around = self._around_text[index] = before, after
        return b"".join((around[0], json_line(text).encode(), around[1]))

    def _event(self, choice: Object, **others: Any) -> Object:
        event = self._envelope.event([choice], **others)
        if self._parsed.continuous_usage:
            event["usage"] = self._usage.to_json()
        elif self._parsed.include_usage:
            event["usage"] = None
        return event


_STAND_IN: Final = secrets.token_hex(16)  # a text that no event has by itself


async def merged(calls: Sequence[Call], deliver: Deliver | None = None) -> AsyncGenerator[tuple[int, Message]]:
    """Yield the messages of all calls as they come, each with the index of its call, until every call has ended.

    Chunks of a single call that the reader awaits go to `deliver`, as in `Generation.next`. Raises the RequestError of
    the first call that fails.
    """
    if len(calls) == 1:  # no tasks for the common case
        while (message := await calls[0].generation.next(deliver)) is not None:
            yield 0, message
        return
    waits = {asyncio.create_task(call.generation.next()): index for index, call in enumerate(calls)}
    try:
        while waits:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waits.__getitem__):
                message = task.result()
                index = waits.pop(task)
                if message is not None:
                    waits[asyncio.create_task(calls[index].generation.next())] = index
                    yield index, message
    finally:
        for task in waits:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


async def without_output(calls: Sequence[Call]) -> AsyncGenerator[tuple[int, Message]]:
    """Yield what `merged` does, without the generated text."""
    async with aclosing(merged(calls)) as arrivals:
        async for call_index, message in arrivals:
            _drop_output(message)
            yield call_index, message


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


def _drop_output(message: Message) -> None:
    """Remove the generated text; keep prompt logprobs, and the finish reason of an aborted request."""
    if (complete := message.complete) is not None:
        if complete.finish_reason != FINISH_REASON_ABORT:
            complete.finish_reason = FINISH_REASON_LENGTH
        complete.completion_tokens = 0
        complete.ClearField("matched_stop")
    if (chunk := message.chunk) is not None:
        message.chunk = replace(chunk, token_ids=[], text="", logprobs=())
