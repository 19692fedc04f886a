"""Buffer the outputs of one Generate call between the scheduler, which never waits, and a slow client."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from protos import inference_pb2
from serving_core.errors import RequestError
from serving_core.reasons import SLOW_READER

MAX_UNSENT_TOKENS: Final = 1024  # for each output of the call
MAX_CHUNK_TOKENS: Final = 64


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
        wire_id: str = "",
        wake: Callable[["Generation"], None] | None = None,
    ) -> None:
        """Create the queue of the `num_sequences` outputs of a call; `num_ended` of them have ended and send nothing.

        The first tokens of an output are sent at once, later tokens when there are `stream_interval` of them or the
        output ends. At most `max_unsent_tokens` for each output may wait. Messages have `wire_id` as their request id
        if given, else `request_id`. `wake` is called when there is something to take, for a reader that does not wait
        in `next`.
        """
        self.request_id = request_id
        self._wire_id = wire_id or request_id
        self._wake = wake
        self.sequence_ids = [f"{request_id}/{index}" for index in range(num_sequences)]
        self._max_unsent_tokens = max_unsent_tokens * num_sequences
        self._num_unsent_tokens = 0
        self._num_open = num_sequences - num_ended
        self._unsent: deque[inference_pb2.GenerateResponse] = deque()
        self._stream_interval = stream_interval
        self._begun = set[int]()  # outputs of which a chunk has been queued
        self._held: dict[int, inference_pb2.Chunk] = {}  # chunks with too few tokens to send, by output
        self.error: RequestError | None = None  # of `fail`
        self._waiting: asyncio.Future[None] | None = None  # of a reader in `next`

    def push_chunk(self, index: int, chunk: inference_pb2.Chunk) -> None:
        """Queue a chunk of the output number `index`, or keep it until `stream_interval` tokens are there.

        Raises RequestError with reason SLOW_READER when the unsent tokens of the whole call exceed the limit.
        """
        self._num_unsent_tokens += len(chunk.token_ids)
        if self._num_unsent_tokens > self._max_unsent_tokens:
            message = f"the reader is {self._num_unsent_tokens} tokens behind, the limit is {self._max_unsent_tokens}"
            raise RequestError(SLOW_READER, message)
        if (held := self._held.pop(index, None)) is not None:
            _append(held, chunk)
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
        self._push(inference_pb2.GenerateResponse(request_id=self._wire_id, index=index, complete=complete))

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

    async def next(self) -> inference_pb2.GenerateResponse | None:
        """Wait for the next message to the client and return it, or return None when every output has ended.

        Raises the RequestError given to `fail`, once the queue is empty.
        """
        while not self._unsent:
            if self.error is not None:
                raise self.error
            if self._num_open == 0:
                return None
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        response = self._unsent.popleft()
        self._num_unsent_tokens -= len(response.chunk.token_ids)
        return response

    def take_all(self) -> Iterable[inference_pb2.GenerateResponse]:
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

    def _push_or_join(self, index: int, chunk: inference_pb2.Chunk) -> None:
        last = self._unsent[-1] if self._unsent else None
        is_joined = last is not None and last.index == index and last.HasField("chunk")
        if last is not None and is_joined and len(last.chunk.token_ids) < MAX_CHUNK_TOKENS:
            _append(last.chunk, chunk)
        else:
            self._push(inference_pb2.GenerateResponse(request_id=self._wire_id, index=index, chunk=chunk))

    def _push(self, response: inference_pb2.GenerateResponse) -> None:
        self._unsent.append(response)
        self._notify()

    def _notify(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
        if self._wake is not None:
            self._wake(self)


def _append(chunk: inference_pb2.Chunk, more: inference_pb2.Chunk) -> None:
    """Append the following chunk to `chunk` in place."""
    text, first_token_index = chunk.text + more.text, chunk.first_token_index
    chunk.MergeFrom(more)
    chunk.text, chunk.first_token_index = text, first_token_index
