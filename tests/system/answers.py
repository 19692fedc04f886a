"""Asking and listening: requests by keyword, streams read with the rules that every stream must keep.

The rules: token indices of an answer go up by one without gap or repeat; every answer ends with exactly one
Complete message and nothing after it; or the whole stream ends with one gRPC status.
"""

import asyncio
import time
from collections.abc import AsyncIterable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from protos import inference_pb2
from protos.inference_pb2 import FINISH_REASON_UNSPECIFIED, GenerateRequest, SamplingParams

CALL_TIMEOUT_S = 240.0


def request(
    prompt: str | Sequence[int] | Sequence[dict[str, str]] = (),
    *,
    request_id: str = "",
    model: str = "",
    **sampling: Any,
) -> GenerateRequest:
    """A request for text, for token ids or for a conversation."""
    message = GenerateRequest(request_id=request_id, model=model, sampling_params=SamplingParams(**sampling))
    if isinstance(prompt, str):
        message.text = prompt
    elif prompt and isinstance(prompt[0], dict):
        turns = [inference_pb2.ChatMessage(**turn) for turn in prompt]
        message.chat.CopyFrom(inference_pb2.ChatInput(messages=turns))
    else:
        message.tokenized.CopyFrom(inference_pb2.TokenizedInput(input_ids=prompt))
    return message


@dataclass
class Answer:
    """One answer as its client saw it."""

    request_id: str = ""
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # the pieces, as they came
    logprobs: list[inference_pb2.TokenLogprobs] = field(default_factory=list)
    complete: inference_pb2.Complete | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def finish_reason(self) -> str:
        assert self.complete is not None, "the answer has not ended"
        return inference_pb2.FinishReason.Name(self.complete.finish_reason).removeprefix("FINISH_REASON_")

    def take(self, response: inference_pb2.GenerateResponse) -> None:
        """Adds one message, which must keep the rules."""
        assert self.complete is None, "a message after Complete"
        assert self.request_id in ("", response.request_id), "the request id changed"
        self.request_id = response.request_id
        if response.HasField("complete"):
            self._take_complete(response.complete)
            return
        chunk = response.chunk
        if chunk.token_ids:
            assert chunk.first_token_index == len(self.token_ids), "a gap or a repeat"
        self.token_ids += chunk.token_ids
        self.texts.append(chunk.text)
        self.logprobs += chunk.logprobs

    def _take_complete(self, complete: inference_pb2.Complete) -> None:
        assert complete.finish_reason != FINISH_REASON_UNSPECIFIED
        assert complete.completion_tokens == len(self.token_ids), "usage does not count the tokens that came"
        self.complete = complete


class Stream:
    """One call, read in the background. `arrivals` are the monotonic times of its messages and of its end."""

    def __init__(
        self,
        call: AsyncIterable[inference_pb2.GenerateResponse],
        make_answer: Callable[[], Answer] = Answer,
    ) -> None:
        self.answers: dict[int, Answer] = {}
        self.error: grpc.aio.AioRpcError | None = None
        self.arrivals: list[float] = []
        self.has_ended = False
        self._call = call
        self._make_answer = make_answer
        self._news = asyncio.Condition()
        self._task = asyncio.create_task(self._read())

    @property
    def answer(self) -> Answer:
        return self.answers.setdefault(0, self._make_answer())

    async def tokens(self, count: int, deadline_s: float = CALL_TIMEOUT_S) -> None:
        """Returns when the first answer has that many tokens."""
        async with asyncio.timeout(deadline_s), self._news:
            await self._news.wait_for(lambda: len(self.answer.token_ids) >= count or self.has_ended)
        assert len(self.answer.token_ids) >= count, f"the stream ended early: {self.error or self.answer.complete}"

    async def end(self, deadline_s: float = CALL_TIMEOUT_S) -> "Stream":
        """Returns when the stream has ended; fails when it ended without a status and without Complete."""
        await asyncio.wait_for(asyncio.shield(self._task), deadline_s)
        if self.error is None:
            assert self.answers, "the stream ended silently"
            assert all(answer.complete for answer in self.answers.values()), "an answer ended silently"
        return self

    async def complete(self, deadline_s: float = CALL_TIMEOUT_S) -> Answer:
        """The first answer, which must end well."""
        await self.end(deadline_s)
        assert self.error is None, self.error
        return self.answer

    def cancel(self) -> None:
        self._call.cancel()  # type: ignore[attr-defined]

    async def _read(self) -> None:
        try:
            async for response in self._call:
                self.answers.setdefault(response.index, self._make_answer()).take(response)
                await self._notify()
        except grpc.aio.AioRpcError as error:
            self.error = error
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():  # ours, not the call's
                raise
            self.error = grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, grpc.aio.Metadata(), grpc.aio.Metadata())
        finally:
            self.has_ended = True
            await self._notify()

    async def _notify(self) -> None:
        self.arrivals.append(time.monotonic())
        async with self._news:
            self._news.notify_all()


def stream(stub: Any, message: GenerateRequest, *, make_answer: Callable[[], Answer] = Answer, **call: Any) -> Stream:
    """Starts reading an answer."""
    return Stream(stub.Generate(message, **{"timeout": CALL_TIMEOUT_S, **call}), make_answer)


async def ask(stub: Any, *prompt: Any, **fields: Any) -> Answer:
    """The one answer to a request that must succeed."""
    return await stream(stub, request(*prompt, **fields)).complete()


async def ask_all(stub: Any, messages: Iterable[GenerateRequest]) -> list[Answer]:
    """The answers to concurrent requests that must all succeed."""
    return await asyncio.gather(*[stream(stub, message).complete() for message in messages])


async def refusal(stub: Any, message: GenerateRequest, **call: Any) -> grpc.aio.AioRpcError:
    """The error of a request that must be refused before any message."""
    ended = await stream(stub, message, **call).end()
    assert ended.error is not None, f"not refused: {ended.answers}"
    assert not ended.answers, "messages before the refusal"
    return ended.error


def details(error: Any) -> dict[str, Any]:
    """The rich error details by the names of their types."""
    status = rpc_status.from_call(error)
    found: dict[str, Any] = {}
    for detail in status.details if status is not None else ():
        kind = detail.TypeName().rpartition(".")[2]
        message = getattr(error_details_pb2, kind)()
        detail.Unpack(message)
        found[kind] = message
    return found


def reason(error: Any) -> str:
    """ErrorInfo.reason; empty where there is none."""
    info = details(error).get("ErrorInfo")
    return info.reason if info is not None else ""


def outcome(ended: Stream) -> str:
    """How a stream ended, in a word or two: its finish reason, or its status and reason."""
    if ended.error is None:
        return ended.answer.finish_reason
    return f"{ended.error.code().name} {reason(ended.error)}".strip()
