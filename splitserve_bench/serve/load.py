"""Sends a planned load to a server, from a process of its own, and collects what becomes of it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

from splitserve_bench.child import start_child
from splitserve_bench.errors import BenchError
from splitserve_bench.serve import wire
from splitserve_bench.serve.records import Outcome, PlannedRequest, returns_at_s
from splitserve_bench.serve.target import OPENAI, Progress, ServedModel, Target

__all__ = ["Progress", "ServedModel", "Target", "describe", "run_load"]

DESCRIBE_S: Final = 30.0
START_S: Final = 120.0  # for the generator to read its plan and to connect, before it says anything
SILENCE_S: Final = 60.0  # it reports four times a second
STOP_S: Final = 10.0


async def run_load(
    target: Target,
    planned: Sequence[PlannedRequest],
    *,
    max_concurrency: int | None,
    request_timeout_s: float,
    on_progress: Callable[[Progress], None],
    on_outcome: Callable[[Outcome], None] | None = None,
    obey_retry_after: int = 0,
) -> list[Outcome]:
    """Sends every request when it is due; the outcomes in the order of `planned`, whose indices must differ.

    With max_concurrency, what is due waits until fewer are under way. request_timeout_s counts from when a request is
    sent. A request that is refused, and told to come back within request_timeout_s, is sent again then, at most
    obey_retry_after times, and has an outcome of each sending, which follow each other. `on_progress` is told four
    times a second how far it is, `on_outcome` each outcome as it comes. Cancelling ends the generator, and with it
    every request. Raises BenchError when the server cannot be reached at the start, or the generator fails.
    """
    assert len({request.index for request in planned}) == len(planned)
    outcomes: dict[int, list[Outcome]] = {request.index: [] for request in planned}
    async with _generator() as process:
        order = wire.Order(target, len(planned), max_concurrency, request_timeout_s, obey_retry_after)
        await _send_plan(process, order, planned)
        deadline_s = _whole_s(planned, max_concurrency, request_timeout_s, obey_retry_after)
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
    ended = [
        bool(each) and returns_at_s(each[-1], obey_retry_after, request_timeout_s) is None for each in outcomes.values()
    ]
    if missing := ended.count(False):
        raise BenchError(f"the load generator ended without the outcomes of {missing} requests")
    return [outcome for each in outcomes.values() for outcome in each]


async def describe(target: Target) -> ServedModel:
    """What the server serves. Raises BenchError when it does not answer, or serves another model than target's."""
    if target.backend == OPENAI:
        from splitserve_bench.serve.openai_backend import describe_openai

        return await describe_openai(target, DESCRIBE_S)
    from splitserve_bench.serve.grpc_backend import describe_grpc

    return await describe_grpc(target, DESCRIBE_S)


def _whole_s(
    planned: Sequence[PlannedRequest], max_concurrency: int | None, request_timeout_s: float, obey_retry_after: int
) -> float:
    """The longest that a load may take: all are sent, and then every one in its turn takes all its time; as often as it
    is sent again it waits for that first."""
    last_s = max((request.send_at_s for request in planned), default=0.0)
    turns = 1 if max_concurrency is None else -(-len(planned) // max_concurrency)
    num_times = turns * (1 + obey_retry_after) + obey_retry_after
    return START_S + last_s + num_times * request_timeout_s + SILENCE_S


@asynccontextmanager
async def _generator() -> AsyncIterator[asyncio.subprocess.Process]:
    """The process, which is killed unless it has ended."""
    process = await start_child("splitserve_bench.serve.generator", limit=wire.MOST_LINE_BYTES)
    try:
        yield process
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError as error:
        raise BenchError(f"the load generator did not end within {STOP_S:g} s after its last word") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _send_plan(process: asyncio.subprocess.Process, order: wire.Order, planned: Sequence[PlannedRequest]) -> None:
    assert process.stdin is not None
    try:
        async with asyncio.timeout(START_S):
            process.stdin.write(wire.pack_order(order))
            for request in planned:
                process.stdin.write(wire.pack_request(request))
                await process.stdin.drain()
            process.stdin.close()
            await process.stdin.wait_closed()
    except TimeoutError as error:
        raise BenchError(f"the load generator did not take its plan within {START_S:g} s") from error
    except ConnectionError as error:
        raise BenchError("the load generator ended before it had its plan") from error


async def _lines(process: asyncio.subprocess.Process) -> AsyncIterator[Outcome | Progress]:
    """What the generator says, to its end. Raises BenchError when that is a failure, or nothing for too long."""
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
        said = wire.read_line(line)
        if isinstance(said, str):
            raise BenchError(said)
        yield said
        patience_s = SILENCE_S
