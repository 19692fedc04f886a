"""Batch the messages of the control process to one API server. One batch is under way at a time; its size is
bounded."""

import asyncio
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from coordinator.api.messages import error_to_wire
from coordinator.control.request_log import CallRecord
from protos import api_servers_pb2, fleet_pb2, inference_pb2
from serving_core.errors import RequestError
from serving_core.figures import Figure, counter, gauge
from serving_core.net.numbering import Numbering

if TYPE_CHECKING:  # needs the extra otel
    from coordinator.traces.export import Trace

BEAT_S: Final = 1.0  # longest interval between two batches, so that a stuck API server is found
TAKE_DEADLINE_S: Final = 20.0
MAX_UNTAKEN_TOKENS: Final = 2**20


class ApiServerLost(Exception):
    """Raised when an API server takes no batch within TAKE_DEADLINE_S, or too many tokens wait for it."""


class ApiServerLink:
    """Collect the next batch for one API server, and keep its live calls by number."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.numbering = Numbering()
        self.calls: dict[int, ApiServerCall] = {}
        self.cpu_s = 0.0  # CPU time of the API server
        self._batch = api_servers_pb2.ControlBatch()
        self._runs: list[_Run] = []  # tokens of the batch
        self._num_tokens = 0
        self._news = asyncio.Event()
        self._taken = asyncio.Event()
        self._taken.set()
        self._is_over = False

    def fleet(self, state: api_servers_pb2.FleetState) -> None:
        """Add the state of the fleet, which has changed."""
        self._batch.fleet.CopyFrom(state)
        self._news.set()

    def admitted(self, number: int, error: RequestError | None) -> None:
        """Add that the call has begun, or with an error that it cannot."""
        self._batch.admitted.add(number=number, error=None if error is None else error_to_wire(error))
        self._news.set()

    def tokens(
        self, number: int, index: int, tokens: Sequence[fleet_pb2.SampledToken], num_cached_tokens: int | None
    ) -> None:
        """Add the next tokens of a sequence. The link owns the messages from now on and may change them."""
        if not self._runs:
            self._runs.append(_Run())
            self._news.set()
        run = self._runs[-1]
        self._num_tokens += len(tokens)
        if num_cached_tokens is not None or not all(map(_is_plain, tokens)):
            run.add_others(number, index, tokens, num_cached_tokens)
            return
        if run.others and (number, index) in run.others:  # these tokens follow them, so they need a new run
            run = _Run()
            self._runs.append(run)
        for token in tokens:
            run.numbers.append(number)
            run.indexes.append(index)
            run.token_ids.append(token.token_id)

    def ended(self, number: int, index: int, complete: inference_pb2.Complete, embedding: bytes) -> None:
        """Add the end of a sequence."""
        self._batch.ended.add(number=number, index=index, complete=complete, embedding=embedding)
        self._news.set()

    def failed(self, number: int, error: RequestError) -> None:
        """Add the end of a call by an error."""
        self._batch.failed.add(number=number, error=error_to_wire(error))
        self._news.set()

    def taken(self, cpu_s: float) -> None:
        """Note that the API server has taken a batch, and its CPU time since its start, in seconds."""
        self.cpu_s = cpu_s
        self._taken.set()

    def end(self) -> None:
        """Note that nothing more will be added."""
        self._is_over = True
        self._news.set()

    async def within(self, taking: Awaitable[object]) -> None:
        """Wait for the API server at most TAKE_DEADLINE_S. Raise ApiServerLost."""
        try:
            async with asyncio.timeout(TAKE_DEADLINE_S):
                await taking
        except TimeoutError as error:
            raise ApiServerLost(f"it has taken nothing for {TAKE_DEADLINE_S:g} s") from error

    async def next(self) -> api_servers_pb2.ControlBatch | None:
        """Return the next batch once the API server has taken the one before.

        After BEAT_S the batch may be empty. Return None at the end. Raise ApiServerLost.
        """
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
    """Tokens of a batch: plain tokens as parallel lists, then tokens with logprobs or an end."""

    numbers: list[int] = field(default_factory=list)
    indexes: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    others: dict[tuple[int, int], api_servers_pb2.AnswerTokens] = field(default_factory=dict)  # by call and sequence

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
    """Return whether the token has no finish reason and no logprobs."""
    return not (token.finish_reason or token.HasField("logprob") or token.prompt_logprobs)


class ApiServerCall:
    """Stand in for a call whose Generation lives in an API server process, with its record for logs and traces."""

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
    """Stand in for one sequence of an ApiServerCall."""

    def __init__(self, call: ApiServerCall, index: int) -> None:
        self.generation = call
        self._index = index
        self._stop: tuple[str, int] | None = None

    def add(self, tokens: Sequence[fleet_pb2.SampledToken], num_cached_tokens: int | None) -> bool:
        """Pass the next tokens on. Return False: the API server finds stop strings and ends the sequence."""
        self.generation.link.tokens(self.generation.number, self._index, tokens, num_cached_tokens)
        return False

    def stopped(self, stop: str, num_tokens: int) -> None:
        """Note that the API server has found this stop string in the last of `num_tokens` tokens."""
        self._stop = stop, num_tokens

    def end(self, complete: inference_pb2.Complete) -> None:
        if self._stop is not None:
            complete.finish_reason = inference_pb2.FINISH_REASON_STOP
            complete.matched_stop_str, complete.completion_tokens = self._stop
        call = self.generation
        call.link.ended(call.number, self._index, complete, call.embedding)


def api_server_figures(links: Iterable[ApiServerLink]) -> Iterator[Figure]:
    """Yield the metrics of each API server."""

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
