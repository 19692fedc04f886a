"""What control has to say to one API server, gathered until the API server has taken what was said before. Bounded."""

import asyncio
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from coordinator.api.messages import error_to_wire
from coordinator.control.request_log import CallRecord
from protos import api_servers_pb2, fleet_pb2, inference_pb2
from serving_core.errors import RequestError
from serving_core.figures import Figure, counter, gauge
from serving_core.numbering import Numbering

if TYPE_CHECKING:  # what it imports is of an extra
    from coordinator.traces.export import Trace

BEAT_S: Final = 1.0  # between two batches at most, so that an API server that hangs is found
TAKE_DEADLINE_S: Final = 20.0
MAX_UNTAKEN_TOKENS: Final = 2**20


class ApiServerLost(Exception):
    """The API server does not take what it is told."""


class ApiServerLink:
    """The batches on their way to one API server, and its live calls by number."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.numbering = Numbering()
        self.calls: dict[int, ApiServerCall] = {}
        self.cpu_s = 0.0  # of CPU time, that the API server has used
        self._batch = api_servers_pb2.ControlBatch()
        self._runs: list[_Run] = []  # of the batch
        self._num_tokens = 0
        self._news = asyncio.Event()
        self._taken = asyncio.Event()
        self._taken.set()
        self._is_over = False

    def fleet(self, state: api_servers_pb2.FleetState) -> None:
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
        if not self._runs:
            self._runs.append(_Run())
            self._news.set()
        run = self._runs[-1]
        self._num_tokens += len(tokens)
        if num_cached_tokens is not None or not all(map(_is_plain, tokens)):
            run.add_others(number, index, tokens, num_cached_tokens)
            return
        if run.others and (number, index) in run.others:  # which these follow
            run = _Run()
            self._runs.append(run)
        for token in tokens:
            run.numbers.append(number)
            run.indexes.append(index)
            run.token_ids.append(token.token_id)

    def ended(self, number: int, index: int, complete: inference_pb2.Complete, embedding: bytes) -> None:
        """The end of an answer."""
        self._batch.ended.add(number=number, index=index, complete=complete, embedding=embedding)
        self._news.set()

    def failed(self, number: int, error: RequestError) -> None:
        """The end of a call."""
        self._batch.failed.add(number=number, error=error_to_wire(error))
        self._news.set()

    def taken(self, cpu_s: float) -> None:
        """The API server has taken a batch, and used so much CPU time by now."""
        self.cpu_s = cpu_s
        self._taken.set()

    def end(self) -> None:
        """Nothing more will follow."""
        self._is_over = True
        self._news.set()

    async def within(self, taking: Awaitable[object]) -> None:
        """Waits for what the API server does soon if it does anything. Raises ApiServerLost."""
        try:
            async with asyncio.timeout(TAKE_DEADLINE_S):
                await taking
        except TimeoutError as error:
            raise ApiServerLost(f"it has taken nothing for {TAKE_DEADLINE_S:g} s") from error

    async def next(self) -> api_servers_pb2.ControlBatch | None:
        """What there is to say, when the API server has taken what was said before; after BEAT_S it may be nothing.
        None at the end. Raises ApiServerLost."""
        if not self._taken.is_set():
            await self.within(self._taken.wait())
        try:
            async with asyncio.timeout(BEAT_S):
                await self._news.wait()
        except TimeoutError:
            pass
        if self._num_tokens > MAX_UNTAKEN_TOKENS:
            raise ApiServerLost(f"{self._num_tokens} tokens are untaken, the limit is {MAX_UNTAKEN_TOKENS}")
        batch, self._batch = self._batch, api_servers_pb2.ControlBatch()
        batch.runs.extend(run.to_wire() for run in self._runs)
        if self._is_over and not batch.ByteSize():
            return None
        self._runs, self._num_tokens = [], 0
        if not self._is_over:
            self._news.clear()
        self._taken.clear()
        return batch


@dataclass(slots=True)
class _Run:
    """Tokens to be told: lists of those of which there is nothing else to tell, and then the others."""

    numbers: list[int] = field(default_factory=list)
    indexes: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    others: dict[tuple[int, int], api_servers_pb2.AnswerTokens] = field(default_factory=dict)  # by call and answer

    def add_others(
        self, number: int, index: int, tokens: Sequence[fleet_pb2.SampledToken], num_cached_tokens: int | None
    ) -> None:
        told = self.others.get((number, index))
        if told is None:
            told = self.others[number, index] = api_servers_pb2.AnswerTokens(
                number=number, index=index, num_cached_tokens=num_cached_tokens
            )
        for token in tokens:
            token.ClearField("attempt")
        told.tokens.extend(tokens)

    def to_wire(self) -> api_servers_pb2.TokenRun:
        others = self.others.values()
        return api_servers_pb2.TokenRun(
            numbers=self.numbers, indexes=self.indexes, token_ids=self.token_ids, others=others
        )


def _is_plain(token: fleet_pb2.SampledToken) -> bool:
    """Whether there is nothing to tell of the token but itself."""
    return not (token.finish_reason or token.HasField("logprob") or token.prompt_logprobs)


class ApiServerCall:
    """Stands for a call of an API server, whose own Generation is there, and knows what is written down of it."""

    def __init__(self, link: ApiServerLink, number: int, num_answers: int, record: CallRecord) -> None:
        self.link = link
        self.number = number
        self.request_id = record.request_id
        self.answer_ids = [f"{self.request_id}/{index}" for index in range(num_answers)]
        self.answers = [ApiServerAnswer(self, index) for index in range(num_answers)]
        self.embedding = b""
        self.record = record
        self.trace: Trace | None = None

    def fail(self, error: RequestError) -> None:
        self.link.failed(self.number, error)


class ApiServerAnswer:
    """Stands for one answer of such a call."""

    matched_stop: str | None = None  # the API server finds stop strings, and ends the answer then

    def __init__(self, call: ApiServerCall, index: int) -> None:
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


def api_server_figures(links: Iterable[ApiServerLink]) -> Iterator[Figure]:
    """What each API server has to do."""

    def by_api_server(values: Iterable[float]) -> list[tuple[dict[str, str], float]]:
        return [({"api_server": str(link.number)}, value) for link, value in zip(api_servers, values, strict=True)]

    api_servers = sorted(links, key=lambda link: link.number)
    yield gauge(
        "api_server_calls",
        "Calls that are live at an API server.",
        by_api_server(len(each.calls) for each in api_servers),
    )
    yield counter(
        "api_server_cpu_seconds",
        "CPU time that an API server has used.",
        by_api_server(each.cpu_s for each in api_servers),
    )
