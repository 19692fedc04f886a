"""One call of a generating endpoint, from its requests to the last byte of its response.

A failure before the first message of an answer is an HTTP status: the headers of a stream wait for that message. A
later one is an event with an error object, and then the stream ends without [DONE]. A client that leaves ends its
answers.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from coordinator.doors.front import Call, Front
from coordinator.doors.http import sse
from coordinator.doors.http.errors import error_object, internal_error, renamed
from coordinator.doors.http.responses import Answered, Envelope, Form, Usage
from protos.inference_pb2 import GenerateResponse
from serving_core.errors import RequestError
from serving_core.waiting import first_to_end

logger = logging.getLogger(__name__)

R = TypeVar("R")


class Answering:
    """An ASGI application for exactly one call. `names` are the endpoint's fields by those of the gRPC door."""

    def __init__(self, front: Front, form: Form, request_id: str, names: Mapping[str, str]) -> None:
        self._front = front
        self._form = form
        self._asked = form.asked
        self._request_id = request_id
        self._names = names
        self._envelope = Envelope(form, request_id, front.model.name)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await first_to_end(self._answer(scope, receive, send), _until_gone(receive))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with AsyncExitStack() as stack:
                calls = []
                for request in self._asked.requests:
                    calls.append(await stack.enter_async_context(self._front.answer(request)))
                    await asyncio.sleep(0)  # others go on before the next prompt
                if self._asked.stream:
                    await self._stream(calls, sse.EventStream(send))
                    return
                response = await self._collect(calls)
        except RequestError as error:
            raise renamed(error, self._names) from error
        await JSONResponse(response)(scope, receive, send)

    async def _collect(self, calls: Sequence[Call]) -> dict[str, Any]:
        num_answers = self._asked.num_answers
        answers = [Answered(call.prompt) for call in calls for _ in range(num_answers)]
        usage = _usage(calls)
        async with aclosing(merged(calls)) as arrivals:
            async for arrival in arrivals:
                answered = answers[arrival.call_index * num_answers + arrival.response.index]
                _count(usage, arrival.response)
                if arrival.response.HasField("complete"):
                    answered.complete = arrival.response.complete
                else:
                    answered.add(arrival.response.chunk)
        choices = [self._form.whole(index, answered) for index, answered in enumerate(answers)]
        return self._envelope.whole(choices, usage, **self._form.envelope_extras(calls[0].prompt))

    async def _stream(self, calls: Sequence[Call], stream: sse.EventStream) -> None:
        try:
            await self._write_events(calls, stream)
        except RequestError as error:
            if not stream.has_begun:
                raise
            await stream.write(sse.event(error_object(error)))
        except Exception:
            if not stream.has_begun:
                raise
            logger.exception("a stream failed", extra={"request_id": self._request_id})
            await stream.write(sse.event(error_object(internal_error())))
        await stream.end()

    async def _write_events(self, calls: Sequence[Call], stream: sse.EventStream) -> None:
        usage, opened = _usage(calls), set[int]()
        async with aclosing(merged(calls)) as arrivals:
            async for arrival in arrivals:
                _count(usage, arrival.response)
                index = arrival.call_index * self._asked.num_answers + arrival.response.index
                events = self._events(index, arrival, calls[arrival.call_index].prompt, is_first=index not in opened)
                opened.add(index)
                await stream.write(b"".join(self._encoded(event, usage) for event in events))
        last = []
        if self._asked.include_usage:
            last.append(sse.event(self._envelope.event([], usage=usage.to_json())))
        await stream.write(b"".join([*last, sse.DONE]))

    def _events(self, index: int, arrival: "Arrival", prompt: list[int], *, is_first: bool) -> list[dict[str, Any]]:
        events = []
        if is_first and (opening := self._form.opening(index)) is not None:
            events.append(self._envelope.event([opening], **self._form.envelope_extras(prompt)))
        response = arrival.response
        if response.HasField("complete"):
            choice = self._form.closing(index, response.complete)
        else:
            choice = self._form.event(index, prompt, response.chunk)
        return [*events, self._envelope.event([choice])]

    def _encoded(self, event: dict[str, Any], usage: Usage) -> bytes:
        if self._asked.continuous_usage:
            event["usage"] = usage.to_json()
        elif self._asked.include_usage:
            event["usage"] = None
        return sse.event(event)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message, and to which of the calls it belongs."""

    call_index: int
    response: GenerateResponse


async def merged(calls: Sequence[Call]) -> AsyncGenerator[Arrival]:
    """The messages of all calls as they come, until every call has ended. Raises the RequestError of the first that
    fails."""
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


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, R]) -> R:
    """What the work gives. When the client leaves it is cancelled, and ClientDisconnect raised; the body of its
    request has been read."""
    results: list[R] = []

    async def keep_result() -> None:
        results.append(await work)

    await first_to_end(keep_result(), _until_gone(receive))
    if not results:
        raise ClientDisconnect
    return results[0]


async def _until_gone(receive: Receive) -> None:
    """Returns when the client has left; the body of its request has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _usage(calls: Sequence[Call]) -> Usage:
    return Usage(sum(len(call.prompt) for call in calls))


def _count(usage: Usage, response: GenerateResponse) -> None:
    usage.add_tokens(len(response.chunk.token_ids))
    if response.HasField("complete") and response.index == 0:  # the answers of a prompt share its cached tokens
        usage.add_cached(response.complete.cached_tokens)
