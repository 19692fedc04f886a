"""Connect an API server process to control over a local socket.

The API server checks and tokenizes a request, announces it (NewCall), and control replies whether it has begun
(Admitted). Tokens of all outputs come in batches. Control sends the next batch when the API server has acknowledged the
previous one; an API server that falls behind gets several tokens of an output at once.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from coordinator.api.connections import Sheds
from coordinator.api.exchange import write
from coordinator.api.generation import Generation
from coordinator.api.messages import (
    Situation,
    call_to_wire,
    error_from_wire,
    error_to_wire,
    framed,
    info_to_wire,
    read_frame,
    situation_from_wire,
)
from coordinator.api.validation import AnswerPlan
from coordinator.control.nodes import Capacity
from coordinator.control.request import SoFar
from coordinator.control.request_log import CallRecord
from coordinator.text.answers import Answer, AnswerText
from coordinator.traces.carrier import CARRIER
from protos import api_servers_pb2, fleet_pb2, inference_pb2, inference_pb2_grpc
from serving_core.errors import RequestError
from serving_core.net.numbering import Numbering
from serving_core.reasons import DEADLINE_EXCEEDED, DRAINING
from serving_core.tasks import first_to_end

logger = logging.getLogger(__name__)

ADMIT_DEADLINE_S: Final = 30.0
MAX_UNSENT_EVENTS: Final = 100_000


@dataclass(slots=True)
class _Call:
    """A call that control knows of, or will know of."""

    generation: Generation
    answers: list[Answer | None]  # None: the output has ended
    admitted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class RemoteControl:
    """Implement Control (api/control.py) by one API server's stream to the control process."""

    def __init__(self, path: str, *, number: int, stream_interval: int) -> None:
        """Create the connection. `path` is control's socket; `number` identifies this API server."""
        self._path = path
        self._number = number
        self._stream_interval = stream_interval
        self._situation = Situation()
        self.changed = asyncio.Event()  # set when the fleet has changed; the waiting task clears it
        self._unsent: asyncio.Queue[api_servers_pb2.ApiServerEvent] = asyncio.Queue()
        self._is_overrun = asyncio.Event()
        self._numbering = Numbering()
        self._numbers = itertools.count(1)
        self._calls: dict[int, _Call] = {}
        self._by_generation: dict[Generation, int] = {}
        self.sheds = Sheds()  # counts that control has yet to get

    async def run(self) -> None:
        """Exchange messages with control until it ends the stream.

        Raises ConnectionError when the stream breaks, MessageLost when a message is missing.
        """
        reader, writer = await asyncio.open_unix_connection(self._path)
        writer.write(
            self._framed(api_servers_pb2.ApiServerEvent(hello=api_servers_pb2.ApiServerHello(number=self._number)))
        )
        try:
            await first_to_end(self._read(reader), self._write(writer), self._is_overrun.wait())
        finally:
            writer.close()
            gone = RequestError(DRAINING, "the server has stopped")
            for call in self._calls.values():
                _refuse(call, gone)

    def opened(self) -> None:
        """Tell control that the API server listens."""
        self._send(opened=api_servers_pb2.Opened())

    @property
    def num_calls(self) -> int:
        """Number of this API server's calls that have begun or wait for control to admit them."""
        return len(self._calls)

    # ---- Control ----

    @property
    def num_live(self) -> int:
        return self._situation.num_live

    @property
    def is_serving(self) -> bool:
        return self._situation.is_serving

    def capacity(self) -> Capacity:
        return self._situation.capacity

    def why_not_ready(self) -> str:
        return self._situation.why_not_ready

    def is_ready(self, node_name: str) -> bool:
        return node_name in self._situation.ready_nodes

    @contextmanager
    def recorded(self, record: CallRecord) -> Iterator[None]:
        try:
            yield
        finally:
            if record.number:
                self._send(over=api_servers_pb2.CallOver(number=record.number, failure=record.failure))

    def refused(self, record: CallRecord, error: RequestError) -> None:
        info = info_to_wire(record, CARRIER.get())
        self._send(refused=api_servers_pb2.Refused(info=info, error=error_to_wire(error)))

    def count_call(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Report a finished HTTP call to control, for the metrics."""
        self._send(http_call=api_servers_pb2.HttpCall(handler=handler, method=method, status=status, seconds=seconds))

    async def begin(
        self,
        plan: AnswerPlan,
        beginnings: Sequence[tuple[SoFar, AnswerText]],
        asked: inference_pb2.GenerateRequest,
        *,
        deadline_s: float,
        record: CallRecord,
    ) -> Generation:
        so_fars = [so_far for so_far, _ in beginnings]
        num_ended = sum(so_far.has_ended for so_far in so_fars)
        generation = Generation(
            plan.request_id, len(plan.samplings), num_ended=num_ended, stream_interval=self._stream_interval
        )
        number = record.number = next(self._numbers)
        answers = [
            None if so_far.has_ended else Answer(generation, index, text)
            for index, (so_far, text) in enumerate(beginnings)
        ]
        call = self._calls[number] = _Call(generation, list(answers))
        self._by_generation[generation] = number
        info, now = info_to_wire(record, CARRIER.get()), time.monotonic()
        self._send(begin=call_to_wire(info, plan, so_fars, asked, number=number, begun_s=now, deadline_s=deadline_s))
        try:
            async with asyncio.timeout(ADMIT_DEADLINE_S):
                await call.admitted
        except RequestError:
            record.number = 0  # control has no such call
            self.close(generation)
            raise
        except TimeoutError as error:
            self.close(generation)
            raise RequestError(DRAINING, f"control has not answered within {ADMIT_DEADLINE_S:g} s") from error
        except asyncio.CancelledError:
            self.close(generation)
            raise
        return generation

    def close(self, generation: Generation) -> None:
        """Send nothing more to the call. Control learns of its end when `recorded` exits."""
        del self._calls[self._by_generation.pop(generation)]

    # ---- the stream ----

    def _send(self, **event: Any) -> None:
        if self._unsent.qsize() >= MAX_UNSENT_EVENTS:
            logger.error("%d events unsent: control does not read them, and this API server ends", MAX_UNSENT_EVENTS)
            self._is_overrun.set()
            return
        self._unsent.put_nowait(api_servers_pb2.ApiServerEvent(**event))

    async def _write(self, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(self._framed(await self._unsent.get()))
            while not self._unsent.empty():
                writer.write(self._framed(self._unsent.get_nowait()))
            await writer.drain()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while (message := await read_frame(reader)) is not None:
            batch = api_servers_pb2.ControlBatch.FromString(message)
            self._numbering.check(batch)
            self._take(batch)
            await asyncio.sleep(0)  # lets the tasks that wait for this batch run first
            self._send(taken=api_servers_pb2.BatchTaken(cpu_s=time.process_time(), sheds=_sheds_to_wire(self.sheds)))

    def _framed(self, event: api_servers_pb2.ApiServerEvent) -> bytes:
        self._numbering.stamp(event)
        return framed(event.SerializeToString())

    def _take(self, batch: api_servers_pb2.ControlBatch) -> None:
        if batch.HasField("fleet"):
            self._situation = situation_from_wire(batch.fleet)
            self.changed.set()
        for admitted in batch.admitted:
            self._admitted(admitted)
        for run in batch.runs:
            self._run_came(run)
        for ended in batch.ended:
            if (call := self._calls.get(ended.number)) is not None:
                answer, call.answers[ended.index] = call.answers[ended.index], None
                call.generation.embedding = ended.embedding
                if answer is not None:
                    answer.end(ended.complete)
        for failed in batch.failed:
            if (call := self._calls.get(failed.number)) is not None:
                _refuse(call, error_from_wire(failed.error))

    def _admitted(self, admitted: api_servers_pb2.Admitted) -> None:
        call = self._calls.get(admitted.number)
        if call is None or call.admitted.done():
            return
        if admitted.HasField("error"):
            call.admitted.set_exception(error_from_wire(admitted.error))
        else:
            call.admitted.set_result(None)

    def _run_came(self, run: api_servers_pb2.TokenRun) -> None:
        plain: dict[tuple[int, int], list[fleet_pb2.SampledToken]] = {}
        for number, index, token_id in zip(run.numbers, run.indexes, run.token_ids, strict=True):
            plain.setdefault((number, index), []).append(fleet_pb2.SampledToken(token_id=token_id))
        for (number, index), tokens in plain.items():
            self._tokens_came(number, index, tokens)
        for each in run.others:
            num_cached_tokens = each.num_cached_tokens if each.HasField("num_cached_tokens") else None
            self._tokens_came(each.number, each.index, each.tokens, num_cached_tokens)

    def _tokens_came(
        self,
        number: int,
        index: int,
        tokens: Sequence[fleet_pb2.SampledToken],
        num_cached_tokens: int | None = None,
    ) -> None:
        call = self._calls.get(number)
        answer = call.answers[index] if call is not None else None
        if call is None or answer is None or answer.matched_stop is not None:
            return
        try:
            answer.add(tokens, num_cached_tokens)
        except RequestError as slow_reader:
            _refuse(call, slow_reader)
            self._send(failed=api_servers_pb2.CallFailed(number=number, error=error_to_wire(slow_reader)))
            return
        if answer.matched_stop is not None:
            stop, num_tokens = answer.matched_stop, answer.num_tokens
            self._send(stopped=api_servers_pb2.Stopped(number=number, index=index, stop=stop, num_tokens=num_tokens))


def _sheds_to_wire(sheds: Sheds) -> list[api_servers_pb2.Shed]:
    return [api_servers_pb2.Shed(port=port, reason=reason, number=n) for (port, reason), n in sheds.taken().items()]


def _refuse(call: _Call, error: RequestError) -> None:
    """End the call with the error, whether it has begun or not."""
    call.answers = [None] * len(call.answers)
    if not call.admitted.done():
        call.admitted.set_exception(error)
    call.generation.fail(error)


# ---- calls that control answers: forwarded unchanged, and the responses passed back ----

DEADLINE_S: Final = 30.0


class ForwardedStatus:
    """Forward the status methods to `StatusService` (api/admin_service.py) at control."""

    def __init__(self, stub: inference_pb2_grpc.InferenceStub) -> None:
        self._stub = stub

    async def Abort(self, request: Any, context: Any) -> Any:
        return await _ask(self._stub.Abort, request, context)

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        return await _ask(self._stub.GetServerInfo, request, context)

    async def GetLoads(self, request: Any, context: Any) -> Any:
        return await _ask(self._stub.GetLoads, request, context)


class ForwardedAdmin(inference_pb2_grpc.AdminServicer):  # type: ignore[misc]
    """Forward the Admin service to control (api/admin_service.py)."""

    def __init__(self, stub: inference_pb2_grpc.AdminStub) -> None:
        self._stub = stub

    async def SetRole(self, request: Any, context: Any) -> Any:
        return await _ask(self._stub.SetRole, request, context)

    async def GetOverview(self, request: Any, context: Any) -> Any:
        return await _ask(self._stub.GetOverview, request, context)

    async def Drain(self, request: Any, context: Any) -> None:
        async with _passing_back(context):
            async for progress in self._stub.Drain(request):
                await write(context, progress)


async def asked(method: Any, request: Any) -> Any:
    """Return control's response to a unary call.

    The deadline is asyncio's, since gRPC's depends on the wall clock. Raises RequestError or AioRpcError.
    """
    try:
        async with asyncio.timeout(DEADLINE_S):
            return await method(request)
    except TimeoutError as error:
        raise RequestError(DEADLINE_EXCEEDED, f"control has not answered within {DEADLINE_S:g} s") from error


async def _ask(method: Any, request: Any, context: Any) -> Any:
    async with _passing_back(context):
        return await asked(method, request)


@asynccontextmanager
async def _passing_back(context: Any) -> AsyncIterator[None]:
    """End the call with the status and details that control returned."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE and not error.trailing_metadata():
            raise RequestError(DRAINING, "control cannot be reached") from error
        await context.abort(error.code(), error.details(), tuple(error.trailing_metadata() or ()))
