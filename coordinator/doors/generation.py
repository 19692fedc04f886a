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
        self, request_id: str, num_answers: int, *, num_ended: int = 0, max_unsent_tokens: int = MAX_UNSENT_TOKENS
    ) -> None:
        """`num_ended` of the answers have ended before: nothing comes of them."""
        self.request_id = request_id
        self.answer_ids = [f"{request_id}/{index}" for index in range(num_answers)]
        self._max_unsent_tokens = max_unsent_tokens * num_answers
        self._num_unsent_tokens = 0
        self._num_open = num_answers - num_ended
        self._unsent: deque[inference_pb2.GenerateResponse] = deque()
        self._error: RequestError | None = None
        self._news = asyncio.Event()
        self.embedding = b""  # where that is the answer: float32, little-endian

    def push_chunk(self, index: int, chunk: inference_pb2.Chunk) -> None:
        """Queues a chunk of one answer. Raises RequestError when the reader is too far behind."""
        self._num_unsent_tokens += len(chunk.token_ids)
        if self._num_unsent_tokens > self._max_unsent_tokens:
            message = f"the reader is {self._num_unsent_tokens} tokens behind, the limit is {self._max_unsent_tokens}"
            raise RequestError(SLOW_READER, message)
        if not self._join(index, chunk):
            self._push(inference_pb2.GenerateResponse(request_id=self.request_id, index=index, chunk=chunk))

    def push_complete(self, index: int, complete: inference_pb2.Complete) -> None:
        """Queues the end of one answer."""
        self._num_open -= 1
        self._push(inference_pb2.GenerateResponse(request_id=self.request_id, index=index, complete=complete))

    def fail(self, error: RequestError) -> None:
        """Ends the whole call with an error, after what is queued; a slow reader loses that too."""
        if self._error is None:
            self._error = error
            if error.reason == SLOW_READER:
                self._unsent.clear()
            self._news.set()

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

    def _join(self, index: int, chunk: inference_pb2.Chunk) -> bool:
        if not self._unsent:
            return False
        last = self._unsent[-1]
        if last.index != index or not last.HasField("chunk") or len(last.chunk.token_ids) >= MAX_CHUNK_TOKENS:
            return False
        text = last.chunk.text + chunk.text
        first_token_index = last.chunk.first_token_index
        last.chunk.MergeFrom(chunk)
        last.chunk.text, last.chunk.first_token_index = text, first_token_index
        return True

    def _push(self, response: inference_pb2.GenerateResponse) -> None:
        self._unsent.append(response)
        self._news.set()
