"""Send a planned load from a process of its own, which does nothing else, and collect the outcomes.

`python -m splitserve_bench.serve.generator` reads an order and its requests from stdin, connects, sends every request
when it is due whether or not earlier ones have ended, and writes the outcomes to stdout. Turns of sessions are due when
the requests that they wait for have ended (splitserve_bench/serve/turns.py). With a bound on concurrency, a due request
waits until fewer are under way, and its `sent_s` is when it was sent. Each sending of a request that is sent again
after a refusal has an outcome of its own.

Both ends write JSON, one object a line: an Order and then each PlannedRequest in; out, objects with the one key
`outcome`, `progress` or `failure`.
"""

import asyncio
import gc
import json
import os
import resource
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import uvloop

from serving_core.errors import SplitServeError
from serving_core.net.tls import TlsFiles
from splitserve_bench.child import running_child
from splitserve_bench.errors import BenchError
from splitserve_bench.serve.backends import Backend, open_backend
from splitserve_bench.serve.records import (
    Outcome,
    PlannedRequest,
    Progress,
    Reply,
    RequestFailed,
    ServedModel,
    Target,
    pack_request,
    returns_at_s,
    to_outcome,
    unpack_request,
)
from splitserve_bench.serve.turns import Ended, Turns, longest_s, not_sent

CONNECT_S: Final = 30.0
START_S: Final = 120.0  # for the generator to read its plan and to connect, before it says anything
PROGRESS_S: Final = 0.25
SILENCE_S: Final = 60.0  # of a generator that reports its progress
MAX_WARM_CONNECTIONS: Final = 32  # at the same time; more are made when they are needed
MAX_LINE_BYTES: Final = 2**26  # an outcome of a million tokens
DIGITS: Final = 9  # of arrivals: nanoseconds

Write = Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class Order:
    """Where a load is sent, and how.

    With max_concurrency, a due request waits until fewer are under way. request_timeout_s counts from the sending of a
    request. A request that is refused with a time to come back within request_timeout_s is sent again then, at most
    obey_retry_after times, and has an outcome of each sending.
    """

    target: Target
    max_concurrency: int | None
    request_timeout_s: float
    obey_retry_after: int = 0
    num_requests: int = 0  # that follow


async def describe(target: Target) -> ServedModel:
    """Return what a server serves.

    Raises BenchError when it does not reply, or serves another model than the target's.
    """
    backend = open_backend(target)
    try:
        return await backend.describe(CONNECT_S)
    finally:
        await backend.close()


async def run_load(
    order: Order,
    planned: Sequence[PlannedRequest],
    on_progress: Callable[[Progress], None],
    on_outcome: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """Send every request when it is due, from a process of its own, and return the outcomes in the order of `planned`.

    The indices of `planned` must differ; the outcomes of a request that is sent several times follow each other.
    `on_progress` is called four times a second, `on_outcome` for each outcome as it comes. Cancelling ends the process,
    and with it every request. Raises BenchError when the server cannot be reached at the start, or the process fails.
    """
    outcomes: dict[int, list[Outcome]] = {request.index: [] for request in planned}
    assert len(outcomes) == len(planned)
    order, deadline_s = replace(order, num_requests=len(planned)), _longest_s(order, planned)
    async with running_child("splitserve_bench.serve.generator", limit=MAX_LINE_BYTES) as process:
        await _send_plan(process, order, planned)
        try:
            async with asyncio.timeout(deadline_s):
                async for said in _lines(process):
                    if isinstance(said, Progress):
                        on_progress(said)
                        continue
                    outcomes[said.index].append(said)
                    if on_outcome is not None:
                        on_outcome(said)
        except TimeoutError as error:
            raise BenchError(f"the load was not over after {deadline_s:.0f} s") from error
    patience_s = order.request_timeout_s
    ended = [
        bool(each) and returns_at_s(each[-1], order.obey_retry_after, patience_s) is None for each in outcomes.values()
    ]
    if missing := ended.count(False):
        raise BenchError(f"the load generator ended without the outcomes of {missing} requests")
    return [outcome for each in outcomes.values() for outcome in each]


def order_line(order: Order) -> bytes:
    """Return the order as the line that the generator reads."""
    return _line(asdict(order))


def read_plan(lines: Iterable[bytes]) -> tuple[Order, list[PlannedRequest]]:
    """Return the order and the requests that these lines have. Raises EOFError when lines are missing."""
    order: Order | None = None
    requests = []
    for line in lines:
        if not line.endswith(b"\n"):
            break
        if order is None:
            fields = json.loads(line)
            target = Target(**{**fields["target"], "tls": TlsFiles(**fields["target"]["tls"])})
            order = Order(**{**fields, "target": target})
        else:
            requests.append(unpack_request(line))
    if order is None or len(requests) != order.num_requests:
        raise EOFError("the plan ended before its end")
    return order, requests


def read_line(line: bytes) -> Outcome | Progress | str:
    """Return the outcome, the progress, or the message of a failure that a line of the generator has."""
    ((kind, value),) = json.loads(line).items()
    if kind == "outcome":
        return to_outcome(value)
    return Progress(**value) if kind == "progress" else str(value)


def outcome_line(outcome: Outcome) -> bytes:
    """Return an outcome as a line of the generator."""
    arrivals_s = [round(moment_s, DIGITS) for moment_s in outcome.arrivals_s]
    return _line({"outcome": {**asdict(outcome), "arrivals_s": arrivals_s}})


def progress_line(progress: Progress) -> bytes:
    """Return the progress as a line of the generator."""
    return _line({"progress": asdict(progress)})


def failure_line(message: str) -> bytes:
    """Return a failure's message as a line of the generator."""
    return _line({"failure": message})


def _line(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


# ---- the process that starts the generator ----


def _longest_s(order: Order, planned: Sequence[PlannedRequest]) -> float:
    """Return an upper bound of the load's seconds.

    All requests are sent, then each takes its whole timeout in turn, and waits as long before each further sending.
    """
    rounds = 1 if order.max_concurrency is None else -(-len(planned) // order.max_concurrency)
    num_times = rounds * (1 + order.obey_retry_after) + order.obey_retry_after
    return START_S + longest_s(planned, num_times * order.request_timeout_s) + SILENCE_S


async def _send_plan(process: asyncio.subprocess.Process, order: Order, planned: Sequence[PlannedRequest]) -> None:
    assert process.stdin is not None
    try:
        async with asyncio.timeout(START_S):
            process.stdin.write(order_line(order))
            for request in planned:
                process.stdin.write(pack_request(request))
                await process.stdin.drain()
            process.stdin.close()
            await process.stdin.wait_closed()
    except TimeoutError as error:
        raise BenchError(f"the load generator did not take its plan within {START_S:g} s") from error
    except ConnectionError as error:
        raise BenchError("the load generator ended before it had its plan") from error


async def _lines(process: asyncio.subprocess.Process) -> AsyncIterator[Outcome | Progress]:
    """Yield what the generator writes, to its end.

    Raises BenchError for a failure, and when nothing comes for too long.
    """
    assert process.stdout is not None
    patience_s = START_S
    while True:
        try:
            async with asyncio.timeout(patience_s):
                line = await process.stdout.readline()
        except TimeoutError as error:
            raise BenchError(f"the load generator said nothing for {patience_s:g} s") from error
        if not line:
            return
        said = read_line(line)
        if isinstance(said, str):
            raise BenchError(said)
        yield said
        patience_s = SILENCE_S


# ---- the generator ----


class Load:
    """Send all requests of an order through one backend, and `write` the outcomes as lines."""

    def __init__(self, order: Order, requests: Sequence[PlannedRequest], backend: Backend, write: Write) -> None:
        self._order = order
        self._num_requests = len(requests)
        self._turns = Turns(requests)
        self._first = sorted(self._turns.first, key=lambda request: (request.send_at_s, request.index))
        self._backend = backend
        self._bodies = [backend.prepare(request) for request in self._first]
        self._write = write
        self._places = asyncio.Semaphore(order.max_concurrency or len(requests) or 1)
        self._start_s = 0.0
        self._num_sent = self._num_completed = self._num_failed = self._num_output_tokens = 0

    async def run(self) -> None:
        """Send every request, and return when all have ended."""
        self._start_s = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            reporting = tasks.create_task(self._report())
            async with asyncio.TaskGroup() as sending:
                for request, body in zip(self._first, self._bodies, strict=True):
                    await self._until(request.send_at_s)
                    sending.create_task(self._send(request, body, sending))
            reporting.cancel()
        self._write(progress_line(self._progress()))

    def _now_s(self) -> float:
        return time.perf_counter() - self._start_s

    async def _until(self, moment_s: float) -> None:
        """Sleep until a moment of the load. An event loop's timers count whole milliseconds and may end early."""
        while True:
            wait_s = moment_s - self._now_s()
            if wait_s <= 0:
                return
            await asyncio.sleep(wait_s)

    async def _send(self, request: PlannedRequest, body: bytes, sending: asyncio.TaskGroup) -> None:
        """Send a request, and again after a refusal as often as the order allows; then plan what waited for it."""
        outcome, reply = await self._send_once(request, body)
        most_repeats, patience_s = self._order.obey_retry_after, self._order.request_timeout_s
        while (again_s := returns_at_s(outcome, most_repeats, patience_s)) is not None:
            await self._until(again_s)
            num_before = outcome.num_refusals_before + 1
            again = replace(request, send_at_s=again_s, num_refusals_before=num_before)
            outcome, reply = await self._send_once(again, body)
        self._num_completed += not outcome.error
        self._num_failed += bool(outcome.error)
        self._num_output_tokens += outcome.num_output_tokens
        now_s = self._now_s()
        ready, dropped = self._turns.ended(
            Ended(request, None if outcome.error else reply.token_ids, reply.text), now_s
        )
        self._num_sent, self._num_failed = self._num_sent + len(dropped), self._num_failed + len(dropped)
        for each in dropped:
            self._write(outcome_line(not_sent(each, now_s)))
        for each in ready:
            sending.create_task(self._send_turn(each, sending))

    async def _send_turn(self, request: PlannedRequest, sending: asyncio.TaskGroup) -> None:
        body = self._backend.prepare(request)
        await self._until(request.send_at_s)
        await self._send(request, body, sending)

    async def _send_once(self, request: PlannedRequest, body: bytes) -> tuple[Outcome, Reply]:
        async with self._places:
            self._num_sent += not request.num_refusals_before
            reply, timeout_s = Reply(request, self._now_s), self._order.request_timeout_s
            try:
                await self._backend.answer(body, reply, timeout_s)
                self._turns.check(request, reply)
                outcome = reply.outcome()
            except RequestFailed as failure:
                outcome = reply.outcome(
                    str(failure) or "failed", is_refused=failure.is_refused, retry_after_s=failure.retry_after_s
                )
            except TimeoutError:
                outcome = reply.outcome(f"no complete output within {timeout_s:g} s")
        self._write(outcome_line(outcome))
        return outcome, reply

    async def _report(self) -> None:
        while True:
            self._write(progress_line(self._progress()))
            await asyncio.sleep(PROGRESS_S)

    def _progress(self) -> Progress:
        return Progress(
            num_planned=self._num_requests,
            num_sent=self._num_sent,
            num_completed=self._num_completed,
            num_failed=self._num_failed,
            num_output_tokens=self._num_output_tokens,
            elapsed_s=self._now_s(),
        )


async def run_order(order: Order, requests: Sequence[PlannedRequest], write: Write) -> None:
    """Connect to the server, send the load, and `write` its progress and outcomes as lines.

    Raises SplitServeError when the server does not reply at all.
    """
    backend = open_backend(order.target)
    try:
        num_connections = min(order.max_concurrency or MAX_WARM_CONNECTIONS, MAX_WARM_CONNECTIONS, len(requests))
        await backend.warm_up(num_connections, CONNECT_S)
        load = Load(order, requests, backend, write)
        gc.collect()
        gc.freeze()  # the plan is not looked at again while requests are timed
        await load.run()
    finally:
        await backend.close()


class _Output(asyncio.BaseProtocol):
    """Write to a pipe without waiting for its reader while requests are timed; the plan bounds what is not read yet."""

    def __init__(self) -> None:
        self.closed = asyncio.get_running_loop().create_future()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


async def _main() -> None:
    order, requests = read_plan(sys.stdin.buffer)
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    transport, protocol = await asyncio.get_running_loop().connect_write_pipe(_Output, pipe)
    try:
        await run_order(order, requests, transport.write)
    except SplitServeError as error:
        transport.write(failure_line(str(error)))
    finally:
        transport.close()
        await protocol.closed


def _allow_many_connections() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some systems call it unlimited and mean less
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    _allow_many_connections()
    uvloop.run(_main())
