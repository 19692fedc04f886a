"""What control has to say to one door, gathered until the door has taken what was said before. Bounded."""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Final

from coordinator.control.calls import CallRecord
from coordinator.doors.messages import error_to_wire
from protos import doors_pb2, fleet_pb2, inference_pb2
from serving_core.errors import RequestError

if TYPE_CHECKING:  # what it imports is of an extra
    from coordinator.traces.export import Trace

BEAT_S: Final = 1.0  # between two batches at most, so that a door that hangs is found
TAKE_DEADLINE_S: Final = 20.0
MAX_UNTAKEN_TOKENS: Final = 2**20


class DoorLost(Exception):
    """The door does not take what it is told."""


class DoorLink:
    """The batches on their way to one door, and its live calls by number."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.calls: dict[int, DoorCall] = {}
        self._batch = doors_pb2.ControlBatch()
        self._tokens: dict[tuple[int, int], doors_pb2.AnswerTokens] = {}  # of the batch, by call and answer
        self._num_tokens = 0
        self._news = asyncio.Event()
        self._taken = asyncio.Event()
        self._taken.set()
        self._is_over = False

    def fleet(self, state: doors_pb2.FleetState) -> None:
        """The fleet has changed."""
        self._batch.fleet.CopyFrom(state)
        self._news.set()

    def admitted(self, number: int, error: RequestError | None) -> None:
        """The call has begun, or cannot."""
        self._batch.admitted.add(number=number, error=None if error is None else error_to_wire(error))
        self._news.set()

    def tokens(
        self, number: int, index: int, tokens: Sequence[fleet_pb2.SampledToken], num_cached_tokens: int | None
    ) -> None:
        """The next tokens of an answer; they belong to the link from now on."""
        told = self._tokens.get((number, index))
        if told is None:
            told = self._tokens[number, index] = self._batch.tokens.add(
                number=number, index=index, num_cached_tokens=num_cached_tokens
            )
        for token in tokens:
            token.ClearField("attempt")
        told.tokens.extend(tokens)
        self._num_tokens += len(tokens)
        self._news.set()

    def ended(self, number: int, index: int, complete: inference_pb2.Complete, embedding: bytes) -> None:
        """The end of an answer."""
        self._batch.ended.add(number=number, index=index, complete=complete, embedding=embedding)
        self._news.set()

    def failed(self, number: int, error: RequestError) -> None:
        """The end of a call."""
        self._batch.failed.add(number=number, error=error_to_wire(error))
        self._news.set()

    def taken(self) -> None:
        """The door has taken a batch."""
        self._taken.set()

    def end(self) -> None:
        """Nothing more will follow."""
        self._is_over = True
        self._news.set()

    async def within(self, taking: Awaitable[object]) -> None:
        """Waits for what the door does soon if it does anything. Raises DoorLost."""
        try:
            async with asyncio.timeout(TAKE_DEADLINE_S):
                await taking
        except TimeoutError as error:
            raise DoorLost(f"it has taken nothing for {TAKE_DEADLINE_S:g} s") from error

    async def next(self) -> doors_pb2.ControlBatch | None:
        """What there is to say, when the door has taken what was said before; after BEAT_S it may be nothing. None at
        the end. Raises DoorLost."""
        await self.within(self._taken.wait())
        try:
            async with asyncio.timeout(BEAT_S):
                await self._news.wait()
        except TimeoutError:
            pass
        if self._num_tokens > MAX_UNTAKEN_TOKENS:
            raise DoorLost(f"{self._num_tokens} tokens are untaken, the limit is {MAX_UNTAKEN_TOKENS}")
        batch, self._batch = self._batch, doors_pb2.ControlBatch()
        if self._is_over and not batch.ByteSize():
            return None
        self._tokens, self._num_tokens = {}, 0
        if not self._is_over:
            self._news.clear()
        self._taken.clear()
        return batch


class DoorCall:
    """Stands for a call of a door, whose own Generation is there, and knows what is written down of it."""

    def __init__(self, link: DoorLink, number: int, num_answers: int, record: CallRecord) -> None:
        self.link = link
        self.number = number
        self.request_id = record.request_id
        self.answer_ids = [f"{self.request_id}/{index}" for index in range(num_answers)]
        self.answers = [DoorAnswer(self, index) for index in range(num_answers)]
        self.embedding = b""
        self.record = record
        self.trace: Trace | None = None

    def fail(self, error: RequestError) -> None:
        self.link.failed(self.number, error)


class DoorAnswer:
    """Stands for one answer of such a call."""

    matched_stop: str | None = None  # the door finds stop strings, and ends the answer then

    def __init__(self, call: DoorCall, index: int) -> None:
        self.generation = call
        self._index = index
        self._stop: tuple[str, int] | None = None

    def add(self, tokens: Sequence[fleet_pb2.SampledToken], num_cached_tokens: int | None) -> None:
        self.generation.link.tokens(self.generation.number, self._index, tokens, num_cached_tokens)

    def stopped(self, stop: str, num_tokens: int) -> None:
        """By this string, in the last of so many tokens."""
        self._stop = stop, num_tokens

    def end(self, complete: inference_pb2.Complete) -> None:
        if self._stop is not None:
            complete.finish_reason = inference_pb2.FINISH_REASON_STOP
            complete.matched_stop_str, complete.completion_tokens = self._stop
        call = self.generation
        call.link.ended(call.number, self._index, complete, call.embedding)
