"""Buffer the outputs of one Generate call between the scheduler, which never waits, and a slow client."""

import asyncio
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final

from coordinator.control.instructions import Chunk
from protos import inference_pb2
from serving_core.errors import RequestError
from serving_core.reasons import SLOW_READER

MAX_UNSENT_TOKENS: Final = 1024  # for each output of the call
MAX_CHUNK_TOKENS: Final = 64


@dataclass(slots=True)
class Message:
    """A chunk of one output, or its end."""

    index: int  # of the output
    chunk: Chunk | None = None
    complete: inference_pb2.Complete | None = None

    def fields(self) -> dict[str, Any]:
        """Return the fields of the GenerateResponse, without the request id."""
        if (chunk := self.chunk) is None:
            return {"index": self.index, "complete": self.complete}
        told = {
            "first_token_index": chunk.first_token_index,
            "token_ids": chunk.token_ids,
            "text": chunk.text,
            "cached_tokens": chunk.cached_tokens,
            "finish_reason": chunk.finish_reason,
        }
        if chunk.logprobs or chunk.prompt_logprobs:
            told |= {"logprobs": chunk.logprobs, "prompt_logprobs": chunk.prompt_logprobs}
        return {"index": self.index, "chunk": told}


Deliver = Callable[[int, Chunk], bool]
"""Send a chunk of the output of this number to the client at once, or return False: it is to be queued."""


class Generation:
    """Queue the messages of one call. Consecutive chunks of one output that the reader has not taken yet are joined."""

    def __init__(
        self,
        request_id: str,
        num_sequences: int,
        *,
        num_ended: int = 0,
        max_unsent_tokens: int = MAX_UNSENT_TOKENS,
        stream_interval: int = 1,
        wake: Callable[["Generation"], None] | None = None,
        deliver: Deliver | None = None,
    ) -> None:
        """Create the queue of the `num_sequences` outputs of a call; `num_ended` of them have ended and send nothing.

        The first tokens of an output are sent at once, later tokens when there are `stream_interval` of them or the
        output ends. At most `max_unsent_tokens` for each output may wait. `wake` is called when there is something to
        take, and `deliver` for each chunk while nothing is unsent, by a reader that does not wait in `next`.
        """
        self.request_id = request_id
        self._wake = wake
        self._deliver = deliver  # in use while nothing is unsent
        self.sequence_ids = [f"{request_id}/{index}" for index in range(num_sequences)]
        self._max_unsent_tokens = max_unsent_tokens * num_sequences
        self._num_unsent_tokens = 0
        self._num_open = num_sequences - num_ended
        self._unsent: deque[Message] = deque()
        self._stream_interval = stream_interval
        self._begun = set[int]()  # outputs of which a chunk has been queued
        self._held: dict[int, Chunk] = {}  # chunks with too few tokens to send, by output
        self.error: RequestError | None = None  # of `fail`
        self._waiting: asyncio.Future[None] | None = None  # of a reader in `next`

    def push_chunk(self, index: int, chunk: Chunk) -> None:
        """Queue a chunk of the output number `index`, or keep it until `stream_interval` tokens are there.

        Raises RequestError with reason SLOW_READER when the unsent tokens of the whole call exceed the limit.
        """
        self._num_unsent_tokens += len(chunk.token_ids)
        if self._num_unsent_tokens > self._max_unsent_tokens:
            message = f"the reader is {self._num_unsent_tokens} tokens behind, the limit is {self._max_unsent_tokens}"
            raise RequestError(SLOW_READER, message)
        if (held := self._held.pop(index, None)) is not None:
            held.append(chunk)
            chunk = held
        if index in self._begun and len(chunk.token_ids) < self._stream_interval:
            self._held[index] = chunk
        else:
            self._begun.add(index)
            self._push_or_join(index, chunk)

    def push_complete(self, index: int, complete: inference_pb2.Complete) -> None:
        """Queue the end of the output number `index`, after all of its chunks."""
        self._num_open -= 1
        self._release(index)
        self._push(Message(index, complete=complete))

    def fail(self, error: RequestError) -> None:
        """End the whole call with an error after the queued messages.

        With reason SLOW_READER the queued messages are dropped. Only the first call has an effect.
        """
        if self.error is None:
            self.error = error
            for index in list(self._held):
                self._release(index)
            if error.reason == SLOW_READER:
                self._unsent.clear()
            self._notify()

    @property
    def num_unsent(self) -> int:
        """Return the number of messages that the reader has not taken yet."""
        return len(self._unsent)

    async def next(self, deliver: Deliver | None = None) -> Message | None:
        """Wait for the next message to the client and return it, or return None when every output has ended.

        Chunks that come during the wait are given to `deliver`; those that it sends are not returned. Raises the
        RequestError given to `fail`, once the queue is empty, and what `deliver` has raised.
        """
        while not self._unsent:
            if self.error is not None:
                raise self.error
            if self._num_open == 0:
                return None
            self._waiting = asyncio.get_running_loop().create_future()
            self._deliver = deliver
            try:
                await self._waiting
            finally:
                self._deliver = None
        message = self._unsent.popleft()
        if message.chunk is not None:
            self._num_unsent_tokens -= len(message.chunk.token_ids)
        return message

    def take_all(self) -> Collection[Message]:
        """Remove and return all messages that the reader has not taken, oldest first.

        Does not wait and raises nothing.
        """
        unsent, self._unsent = self._unsent, deque()
        self._num_unsent_tokens = sum(len(chunk.token_ids) for chunk in self._held.values())
        return unsent

    def _release(self, index: int) -> None:
        """Queue the chunk that was too small to send."""
        if (chunk := self._held.pop(index, None)) is not None:
            self._push_or_join(index, chunk)

    def _push_or_join(self, index: int, chunk: Chunk) -> None:
        if not self._unsent and self._deliver is not None and self._delivers(self._deliver, index, chunk):
            self._num_unsent_tokens -= len(chunk.token_ids)
            return
        last = self._unsent[-1] if self._unsent else None
        before = last.chunk if last is not None and last.index == index else None
        if before is not None and len(before.token_ids) < MAX_CHUNK_TOKENS:
            before.append(chunk)
        else:
            self._push(Message(index, chunk))

    def _delivers(self, deliver: Deliver, index: int, chunk: Chunk) -> bool:
        """Return what `deliver` does. Its failure is the reader's, not that of the node whose tokens came."""
        try:
            return deliver(index, chunk)
        except Exception as failure:
            if self._waiting is None:
                raise
            self._deliver = None
            if not self._waiting.done():  # else the reader has left
                self._waiting.set_exception(failure)
            return True

    def _push(self, message: Message) -> None:
        self._unsent.append(message)
        self._notify()

    def _notify(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
        if self._wake is not None:
            self._wake(self)
