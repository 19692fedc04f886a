"""The answers of one Generate call on their way to its client: between a tracker that never waits and a reader who
may be slow."""

import asyncio
from collections import deque
from typing import Final

from protos import inference_pb2
from serving_core.errors import RequestError
from serving_core.reasons import SLOW_READER

MAX_UNSENT_TOKENS: Final = 1024  # for each answer of the call
MAX_CHUNK_TOKENS: Final = 64


class Generation:
    """The outbox of one call. Messages that the reader has not taken yet are joined where they follow each other."""

    def __init__(
        self,
        request_id: str,
        num_answers: int,
        *,
        num_ended: int = 0,
        max_unsent_tokens: int = MAX_UNSENT_TOKENS,
        stream_interval: int = 1,
    ) -> None:
        """`num_ended` of the answers have ended before: nothing comes of them. An answer's first tokens go out at once,
        the others when they are `stream_interval`, or the last."""
        self.request_id = request_id
        self.answer_ids = [f"{request_id}/{index}" for index in range(num_answers)]
        self._max_unsent_tokens = max_unsent_tokens * num_answers
        self._num_unsent_tokens = 0
        self._num_open = num_answers - num_ended
        self._unsent: deque[inference_pb2.GenerateResponse] = deque()
        self._stream_interval = stream_interval
        self._begun = set[int]()  # answers of which something has gone out
        self._held: dict[int, inference_pb2.Chunk] = {}  # too few tokens to go out, by answer
        self._error: RequestError | None = None
        self._news = asyncio.Event()
        self.embedding = b""  # where that is the answer: float32, little-endian

    def push_chunk(self, index: int, chunk: inference_pb2.Chunk) -> None:
        """Queues a chunk of one answer. Raises RequestError when the reader is too far behind."""
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
        """Queues the end of one answer."""
        self._num_open -= 1
        self._release(index)
        self._push(inference_pb2.GenerateResponse(request_id=self.request_id, index=index, complete=complete))

    def fail(self, error: RequestError) -> None:
        """Ends the whole call with an error, after what is queued; a slow reader loses that too."""
        if self._error is None:
            self._error = error
            for index in list(self._held):
                self._release(index)
            if error.reason == SLOW_READER:
                self._unsent.clear()
            self._news.set()

    @property
    def num_unsent(self) -> int:
        """Messages that the reader has yet to take."""
        return len(self._unsent)

    async def next(self) -> inference_pb2.GenerateResponse | None:
        """The next message for the client; None when every answer has ended. Raises the RequestError of `fail`."""
        while not self._unsent:
            if self._error is not None:
                raise self._error
            if self._num_open == 0:
                return None
            self._news.clear()
            await self._news.wait()
        response = self._unsent.popleft()
        self._num_unsent_tokens -= len(response.chunk.token_ids)
        return response

    def _release(self, index: int) -> None:
        """What was held of the answer goes out."""
        if (chunk := self._held.pop(index, None)) is not None:
            self._push_or_join(index, chunk)

    def _push_or_join(self, index: int, chunk: inference_pb2.Chunk) -> None:
        last = self._unsent[-1] if self._unsent else None
        is_joined = last is not None and last.index == index and last.HasField("chunk")
        if last is not None and is_joined and len(last.chunk.token_ids) < MAX_CHUNK_TOKENS:
            _append(last.chunk, chunk)
        else:
            self._push(inference_pb2.GenerateResponse(request_id=self.request_id, index=index, chunk=chunk))

    def _push(self, response: inference_pb2.GenerateResponse) -> None:
        self._unsent.append(response)
        self._news.set()


def _append(chunk: inference_pb2.Chunk, more: inference_pb2.Chunk) -> None:
    """Adds what follows the chunk to it."""
    text, first_token_index = chunk.text + more.text, chunk.first_token_index
    chunk.MergeFrom(more)
    chunk.text, chunk.first_token_index = text, first_token_index
