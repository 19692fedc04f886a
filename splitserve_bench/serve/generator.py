"""The load generator: `python -m splitserve_bench.serve.generator`, a process of its own that does nothing else.

It reads an order and its requests from stdin, connects, sends every request when it is due whether or not earlier ones
are answered, and writes what becomes of them to stdout, both as `wire` says. With a bound on concurrency, what is due
waits for a free place and its `sent_s` is when it got one. Each sending of a request that is sent again after a refusal
has an outcome of its own.
"""

import asyncio
import gc
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, BinaryIO, Final

import msgpack
import uvloop

from serving_core.errors import SplitServeError
from splitserve_bench.serve import wire
from splitserve_bench.serve.backends import Backend, open_backend
from splitserve_bench.serve.records import Outcome, returns_at_s
from splitserve_bench.serve.reply import Reply, RequestFailed
from splitserve_bench.serve.target import Progress
from splitserve_bench.serve.wire import Order, OrderedRequest

PROGRESS_S: Final = 0.25
CONNECT_S: Final = 30.0
MOST_WARM_CONNECTIONS: Final = 32  # at the same time; more are made when they are needed
READ_BYTES: Final = 2**20

Write = Callable[[bytes], None]


class Load:
    """One run of all requests against one backend."""

    def __init__(self, order: Order, requests: Sequence[OrderedRequest], backend: Backend, write: Write) -> None:
        self._order = order
        self._requests = sorted(requests, key=lambda request: (request.send_at_s, request.index))
        self._backend = backend
        self._bodies = [backend.prepare(request) for request in self._requests]
        self._write = write
        self._places = asyncio.Semaphore(order.max_concurrency or len(requests) or 1)
        self._start_s = 0.0
        self._num_sent = self._num_completed = self._num_failed = self._num_output_tokens = 0

    async def run(self) -> None:
        """Sends every request and returns when all have ended."""
        self._start_s = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            reporting = tasks.create_task(self._report())
            async with asyncio.TaskGroup() as sending:
                for request, body in zip(self._requests, self._bodies, strict=True):
                    await self._until(request.send_at_s)
                    sending.create_task(self._send(request, body))
            reporting.cancel()
        self._write(wire.progress_line(self._progress()))

    def _now_s(self) -> float:
        return time.perf_counter() - self._start_s

    async def _until(self, moment_s: float) -> None:
        """Timers of an event loop count in whole milliseconds and may ring early: then what is left is asked again."""
        while True:
            wait_s = moment_s - self._now_s()
            if wait_s <= 0:
                return
            await asyncio.sleep(wait_s)

    async def _send(self, request: OrderedRequest, body: bytes) -> None:
        """Sends the request, and again after a refusal as often as the order says."""
        outcome = await self._send_once(request, body)
        most_repeats, patience_s = self._order.obey_retry_after, self._order.request_timeout_s
        while (again_s := returns_at_s(outcome, most_repeats, patience_s)) is not None:
            await self._until(again_s)
            num_before = outcome.num_refusals_before + 1
            outcome = await self._send_once(replace(request, send_at_s=again_s, num_refusals_before=num_before), body)
        self._num_completed += not outcome.error
        self._num_failed += bool(outcome.error)
        self._num_output_tokens += outcome.num_output_tokens

    async def _send_once(self, request: OrderedRequest, body: bytes) -> Outcome:
        async with self._places:
            self._num_sent += not request.num_refusals_before
            reply = Reply(request, self._now_s)
            timeout_s = self._order.request_timeout_s
            error, is_refused, retry_after_s = "", False, None
            try:
                await self._backend.answer(body, reply, timeout_s)
            except RequestFailed as failure:
                error, is_refused = str(failure) or "failed", failure.is_refused
                retry_after_s = failure.retry_after_s
            except TimeoutError:
                error = f"no complete answer within {timeout_s:g} s"
            outcome = reply.outcome(error, is_refused=is_refused, retry_after_s=retry_after_s)
        self._write(wire.outcome_line(outcome))
        return outcome

    async def _report(self) -> None:
        while True:
            self._write(wire.progress_line(self._progress()))
            await asyncio.sleep(PROGRESS_S)

    def _progress(self) -> Progress:
        return Progress(
            num_planned=len(self._requests),
            num_sent=self._num_sent,
            num_completed=self._num_completed,
            num_failed=self._num_failed,
            num_output_tokens=self._num_output_tokens,
            elapsed_s=self._now_s(),
        )


async def run_order(order: Order, requests: Sequence[OrderedRequest], write: Write) -> None:
    """Connects and runs the load. Raises SplitServeError when the server does not answer at all."""
    backend = open_backend(order.target)
    try:
        num_connections = min(order.max_concurrency or MOST_WARM_CONNECTIONS, MOST_WARM_CONNECTIONS, len(requests))
        await backend.warm_up(num_connections, CONNECT_S)
        load = Load(order, requests, backend, write)
        gc.collect()
        gc.freeze()  # the plan is not looked at again while requests are timed
        await load.run()
    finally:
        await backend.close()


def read_plan(stream: BinaryIO) -> tuple[Order, list[OrderedRequest]]:
    """Raises EOFError when the plan does not come to its end."""
    unpacker = msgpack.Unpacker(max_buffer_size=wire.MOST_BYTES)
    messages = _messages(stream, unpacker)
    order = wire.unpack_order(next(messages, None) or _ended())
    requests = [wire.unpack_request(message) for message in messages]
    return (order, requests) if len(requests) == order.num_requests else _ended()


def _messages(stream: BinaryIO, unpacker: Any) -> Any:
    while data := stream.read(READ_BYTES):
        unpacker.feed(data)
        yield from unpacker


def _ended() -> Any:
    raise EOFError("the plan ended before its end")


def _allow_many_connections() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some systems call it unlimited and mean less
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _main() -> None:
    order, requests = read_plan(sys.stdin.buffer)
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    transport, protocol = await asyncio.get_running_loop().connect_write_pipe(_Output, pipe)
    try:
        await run_order(order, requests, transport.write)
    except SplitServeError as error:
        transport.write(wire.failure_line(str(error)))
    finally:
        transport.close()
        await protocol.closed


class _Output(asyncio.BaseProtocol):
    """Nothing waits for the reader while requests are timed; what it has not read yet is bounded by the plan."""

    def __init__(self) -> None:
        self.closed = asyncio.get_running_loop().create_future()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


if __name__ == "__main__":
    _allow_many_connections()
    uvloop.run(_main())
