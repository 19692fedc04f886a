"""Connect an API server process to the coordinator: one stream has all of its calls.

The API server validates and tokenizes a request and forwards it; the coordinator answers that the call has begun, and
then with its token ids, those of all calls in one batch. Where the coordinator goes, the API server keeps its calls,
waits for it or for its standby, and resumes each call by the tokens that have come.
"""

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from coordinator.api.authentication import check_admin_key
from coordinator.api.connections import Sheds
from coordinator.api.exchange import write
from coordinator.api.generation import Generation
from coordinator.api.messages import (
    Situation,
    call_to_wire,
    error_from_wire,
    error_to_wire,
    info_to_wire,
    situation_from_wire,
    so_far_to_wire,
)
from coordinator.api.validation import RequestPlan
from coordinator.control.adapters import LOAD_DEADLINE_S
from coordinator.control.instructions import Chunk
from coordinator.control.nodes import Capacity
from coordinator.control.request import SoFar
from coordinator.control.request_log import CallRecord
from coordinator.text.answers import Answer, AnswerText, check_follows
from coordinator.traces.carrier import CARRIER, Carrier
from protos import api_servers_pb2, api_servers_pb2_grpc, inference_pb2, inference_pb2_grpc
from protos.convert import PROTOCOL_VERSION
from serving_core import reasons
from serving_core.errors import RequestError
from serving_core.net.backoff import Reminder
from serving_core.net.numbering import MessageLost, Numbering
from serving_core.reasons import DEADLINE_EXCEEDED, DRAINING
from serving_core.tasks import first_to_end
from serving_core.version import VERSION

logger = logging.getLogger(__name__)

ADMIT_DEADLINE_S: Final = 30.0
RESUME_DEADLINE_S: Final = 30.0  # for a coordinator to come back and take the calls again
AGAIN_S: Final = 0.25  # between two tries to attach, or to have a call resumed
BEAT_S: Final = 1.0
MAX_UNSENT_EVENTS: Final = 100_000
MAX_OWED_EVENTS: Final = 10_000  # that are kept while no coordinator is there
_OWED: Final = ("http_call", "refused")  # kinds of events that any coordinator may count

# Reasons that may pass when a call resumes: the nodes, or enough of them, are not attached yet.
_PASSING: Final = (reasons.NO_PREFILL_WORKER, reasons.NO_DECODE_WORKER, reasons.PROMPT_TOO_LONG, reasons.QUEUE_FULL)

_STREAM_ENDED: Final = (grpc.aio.AioRpcError, asyncio.InvalidStateError)  # the latter for a write behind the end

Metadata = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class _Output:
    """One output of a call, and what has come of it."""

    answer: Answer
    so_far: SoFar  # as the call began
    token_ids: list[int]
    finish_reason: inference_pb2.FinishReason
    first_s: float  # time of the first token; 0 before it
    has_ended: bool

    def take(self, chunk: Chunk) -> None:
        """Take the next tokens. Raises RequestError for a slow reader, and where they do not follow the ones before."""
        check_follows(chunk.first_token_index, len(self.token_ids))
        self.token_ids += chunk.token_ids
        self.finish_reason = chunk.finish_reason
        self.first_s = self.first_s or time.monotonic()
        self.answer.add(chunk)

    def end(self, complete: inference_pb2.Complete) -> None:
        self.has_ended = True
        complete.resumed_tokens = len(self.so_far.token_ids)
        self.answer.end(complete)

    def now_so_far(self, now: float) -> SoFar:
        if self.has_ended:
            return SoFar(has_ended=True)
        since_first_s = now - self.first_s if self.first_s else 0.0
        has_stopped = self.answer.matched_stop is not None
        finish_reason = inference_pb2.FINISH_REASON_STOP if has_stopped else self.finish_reason
        return SoFar(tuple(self.token_ids), 0, finish_reason, since_first_s)


@dataclass(slots=True)
class _Call:
    """A call that the coordinator knows of, or will know of."""

    wire: api_servers_pb2.ForwardedCall  # without what depends on the time
    generation: Generation
    outputs: list[_Output]
    record: CallRecord
    carrier: Carrier
    begun_s: float
    deadline_s: float
    is_attached: bool = False  # whether the coordinator has begun it
    resume_until_s: float = 0.0  # set when the coordinator has gone
    admitted: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def to_wire(self, now: float) -> api_servers_pb2.ForwardedCall:
        """Return the message that begins the call, or resumes it by what has come."""
        wire = api_servers_pb2.ForwardedCall()
        wire.CopyFrom(self.wire)
        wire.info.CopyFrom(info_to_wire(self.record, self.carrier, now))
        wire.left_s, wire.begun_age_s = self.deadline_s - now, now - self.begun_s
        if self.admitted.done():
            del wire.request.so_far[:]
            wire.request.so_far.extend(so_far_to_wire(output.now_so_far(now)) for output in self.outputs)
        return wire

    def fail(self, error: RequestError) -> None:
        """End the call with the error, whether it has begun or not."""
        for output in self.outputs:
            output.has_ended = True
        if not self.admitted.done():
            self.admitted.set_exception(error)
        self.generation.fail(error)


class RemoteControl:
    """Implement Control (api/control.py) by one API server's stream to the coordinator."""

    def __init__(
        self, stub: api_servers_pb2_grpc.ApiServersStub, name: str, *, metadata: Metadata = (), stream_interval: int = 1
    ) -> None:
        """Create a connection that is not attached yet. `name` identifies this API server at the coordinator.

        `metadata` goes with the stream, for authentication. Outputs are sent to clients `stream_interval` tokens at a
        time.
        """
        self._stub = stub
        self._name = name
        self._metadata = metadata
        self._stream_interval = stream_interval
        self._situation = Situation()
        self.changed = asyncio.Event()  # set when the fleet has changed; the waiting task clears it
        self._unsent: asyncio.Queue[api_servers_pb2.ApiServerEvent] | None = None  # None: detached
        self._is_overrun = asyncio.Event()
        self._numbers = itertools.count(1)
        self._calls: dict[str, _Call] = {}
        self._ids: dict[Generation, str] = {}
        self._listens = False
        self.sheds = Sheds()  # counts that the coordinator has yet to get
        self._owed: deque[tuple[float, api_servers_pb2.ApiServerEvent]] = deque()  # events, and when they were kept
        self._num_dropped = 0  # events for which there was no room in `_owed`
        self._resumes = False  # whether calls go on at the next coordinator

    async def run(self) -> None:
        """Attach once the coordinator can be reached, exchange messages until the stream ends, and then fail all calls.

        Does not attach again. Raises MessageLost if a message of the stream is missing.
        """
        try:
            await self._attach(waits=True)
        except _STREAM_ENDED as error:
            logger.info("the stream to the coordinator has ended: %s", _details(error))
        finally:
            for call in self._calls.values():
                call.fail(RequestError(DRAINING, "the server has stopped"))

    async def run_again(self) -> None:
        """Attach to the coordinator, and attach again whenever the stream ends, to whichever coordinator answers.

        Never returns. Calls continue at the next coordinator; those without one for RESUME_DEADLINE_S fail.
        """
        reminder = Reminder()
        self._resumes = True
        while True:
            try:
                await self._attach()
                why = "it has ended the stream"
            except (*_STREAM_ENDED, MessageLost) as error:
                why = _details(error)
            if reminder.is_due(why, time.monotonic()):
                logger.warning("not attached to a coordinator: %s", why)
            self._give_up_late()
            await asyncio.sleep(AGAIN_S)

    def opened(self) -> None:
        """Report to the coordinator that this API server listens, by a heartbeat."""
        self._listens = True
        self._beat()

    @property
    def num_calls(self) -> int:
        """Return the number of this API server's calls that have begun or wait for the coordinator to admit them."""
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
                self._send(over=api_servers_pb2.CallOver(id=str(record.number), failure=record.failure))

    def refused(self, record: CallRecord, error: RequestError) -> None:
        info = info_to_wire(record, CARRIER.get(), time.monotonic())
        self._send(refused=api_servers_pb2.RefusedCall(info=info, error=error_to_wire(error)))

    def count_call(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Report a finished HTTP call to the coordinator, for its metrics; while not attached, to the next one."""
        self._send(http_call=api_servers_pb2.HttpCall(handler=handler, method=method, status=status, seconds=seconds))

    async def begin(
        self,
        plan: RequestPlan,
        beginnings: Sequence[tuple[SoFar, AnswerText]],
        asked: inference_pb2.GenerateRequest,
        *,
        deadline_s: float,
        record: CallRecord,
    ) -> Generation:
        record.number = next(self._numbers)
        call_id = str(record.number)
        call = self._new_call(call_id, plan, beginnings, asked, deadline_s, record)
        self._calls[call_id] = call
        self._ids[call.generation] = call_id
        self._send(call=call.to_wire(call.begun_s))
        try:
            async with asyncio.timeout(ADMIT_DEADLINE_S):
                await call.admitted
        except BaseException as error:
            self.close(call.generation)
            if isinstance(error, RequestError):
                record.number = 0  # the coordinator has no such call
            if isinstance(error, TimeoutError):
                message = f"the coordinator has not answered within {ADMIT_DEADLINE_S:g} s"
                raise RequestError(DRAINING, message) from error
            raise
        return call.generation

    def _new_call(
        self,
        call_id: str,
        plan: RequestPlan,
        beginnings: Sequence[tuple[SoFar, AnswerText]],
        asked: inference_pb2.GenerateRequest,
        deadline_s: float,
        record: CallRecord,
    ) -> _Call:
        now, so_fars = time.monotonic(), [so_far for so_far, _ in beginnings]
        num_ended = sum(so_far.has_ended for so_far in so_fars)
        generation = Generation(
            plan.request_id, len(plan.samplings), num_ended=num_ended, stream_interval=self._stream_interval
        )
        outputs = [
            _Output(
                Answer(generation, index, text),
                so_far,
                list(so_far.token_ids),
                so_far.finish_reason,
                now - so_far.since_first_s if so_far.token_ids else 0.0,
                so_far.has_ended,
            )
            for index, (so_far, text) in enumerate(beginnings)
        ]
        wire = call_to_wire(call_id, plan, asked, so_fars)
        return _Call(wire, generation, outputs, record, CARRIER.get(), now, deadline_s)

    def close(self, generation: Generation) -> None:
        """Forget a call, so that nothing more is put into its queue.

        The coordinator learns of its end when `recorded` exits.
        """
        del self._calls[self._ids.pop(generation)]

    # ---- the stream ----

    async def _attach(self, *, waits: bool = False) -> None:
        stream = self._stub.Attach(metadata=self._metadata, wait_for_ready=waits)
        unsent = self._unsent = asyncio.Queue()
        self._is_overrun.clear()
        now = time.monotonic()
        versions = {"version": VERSION, "protocol_version": PROTOCOL_VERSION}
        self._send(hello=api_servers_pb2.ApiServerHello(name=self._name, resumes=self._resumes, **versions))
        for call in self._calls.values():
            self._send(call=call.to_wire(now))
        self._send_owed(now)
        try:
            await first_to_end(self._read(stream), self._write(stream, unsent), self._beats(), self._is_overrun.wait())
        finally:
            stream.cancel()
            self._detached()

    def _detached(self) -> None:
        unsent, self._unsent = self._unsent, None
        while unsent is not None and not unsent.empty():
            self._keep(unsent.get_nowait())
        self._situation = Situation(self._situation.capacity, why_not_ready="the coordinator cannot be reached")
        self.changed.set()
        until_s = time.monotonic() + RESUME_DEADLINE_S
        for call in self._calls.values():
            call.is_attached = False
            call.resume_until_s = call.resume_until_s or until_s

    def _give_up_late(self) -> None:
        """Fail the calls for which no coordinator has come back in time."""
        now = time.monotonic()
        for call in list(self._calls.values()):
            if call.admitted.done() and not call.is_attached and now >= call.resume_until_s:
                call.fail(RequestError(DRAINING, "no coordinator has come back"))

    def _send(self, **event: Any) -> None:
        """Queue an event, named by its oneof field. While detached, counts are kept and other events dropped: `_attach`
        sends the calls."""
        put = self._keep if self._unsent is None else self._queue
        put(api_servers_pb2.ApiServerEvent(**event))

    def _queue(self, event: api_servers_pb2.ApiServerEvent) -> None:
        assert self._unsent is not None, "no coordinator is there"
        if self._unsent.qsize() >= MAX_UNSENT_EVENTS:
            logger.error("%d events unsent: the coordinator does not read them", MAX_UNSENT_EVENTS)
            self._is_overrun.set()
            return
        self._unsent.put_nowait(event)

    def _keep(self, event: api_servers_pb2.ApiServerEvent) -> None:
        """Keep what an event counts for the next coordinator, if there is room."""
        for shed in event.heartbeat.sheds:
            self.sheds.count(shed.port, shed.reason, shed.number)
        if event.WhichOneof("event") not in _OWED:
            return
        if len(self._owed) < MAX_OWED_EVENTS:
            self._owed.append((time.monotonic(), event))
        else:
            self._num_dropped += 1

    def _send_owed(self, now: float) -> None:
        """Queue the events that were kept while no coordinator was there."""
        if self._num_dropped:
            message = "%d counts of calls and refusals are lost: %d were kept while no coordinator was there"
            logger.warning(message, self._num_dropped, MAX_OWED_EVENTS)
            self._num_dropped = 0
        owed, self._owed = self._owed, deque()
        for kept_s, event in owed:
            if event.HasField("refused"):
                event.refused.info.age_s += now - kept_s
            self._queue(event)

    async def _beats(self) -> None:
        while True:
            self._beat()
            await asyncio.sleep(BEAT_S)

    def _beat(self) -> None:
        sheds = [api_servers_pb2.Shed(port=port, reason=why, number=n) for (port, why), n in self.sheds.taken().items()]
        cpu_s = time.process_time()
        heartbeat = api_servers_pb2.ApiServerHeartbeat(cpu_s=cpu_s, listens=self._listens, sheds=sheds)
        self._send(heartbeat=heartbeat)

    async def _write(self, stream: Any, unsent: asyncio.Queue[api_servers_pb2.ApiServerEvent]) -> None:
        numbering = Numbering()
        while True:
            event = await unsent.get()
            numbering.stamp(event)
            await stream.write(event)

    async def _read(self, stream: Any) -> None:
        numbering = Numbering()
        while (batch := await stream.read()) is not grpc.aio.EOF:
            numbering.check(batch)
            self._take(batch)

    def _take(self, batch: api_servers_pb2.ApiServerBatch) -> None:
        if batch.HasField("fleet"):
            self._situation = situation_from_wire(batch.fleet)
            self.changed.set()
        for call_id in batch.begun:
            if (call := self._calls.get(call_id)) is not None:
                self._begun(call)
        plain = zip(batch.calls, batch.outputs, batch.indexes, batch.token_ids, strict=True)
        for number, index, token_index, token_id in plain:
            self._chunk(str(number), index, Chunk(token_index, [token_id]))
        for response in batch.responses:
            if response.HasField("chunk"):
                self._chunk(response.request_id, response.index, _chunk_from_wire(response.chunk))
            elif (output := self._output(response.request_id, response.index)) is not None:
                output.end(response.complete)
        for failed in batch.failed:
            if (call := self._calls.get(failed.id)) is not None:
                self._failed(call, error_from_wire(failed.error))

    def _begun(self, call: _Call) -> None:
        call.is_attached, call.resume_until_s = True, 0.0
        if not call.admitted.done():
            call.admitted.set_result(None)

    def _output(self, call_id: str, index: int) -> _Output | None:
        """Return an output of an attached call that has not ended."""
        if (call := self._calls.get(call_id)) is None or not call.is_attached:
            return None
        output = call.outputs[index]
        return None if output.has_ended else output

    def _chunk(self, call_id: str, index: int, chunk: Chunk) -> None:
        output = self._output(call_id, index)
        if output is None or output.answer.matched_stop is not None:
            return
        try:
            output.take(chunk)
        except RequestError as error:
            self._calls[call_id].fail(error)
            self._send(failed=api_servers_pb2.FailedCall(id=call_id, error=error_to_wire(error)))
            return
        if output.answer.matched_stop is not None:
            self._send(stopped=api_servers_pb2.OutputStopped(id=call_id, index=index))

    def _failed(self, call: _Call, error: RequestError) -> None:
        """End a call, or have it resumed again where that may help."""
        now = time.monotonic()
        if error.reason == DRAINING and self._resumes:  # the next coordinator takes it
            call.is_attached, call.resume_until_s = False, call.resume_until_s or now + RESUME_DEADLINE_S
            asyncio.get_running_loop().call_later(call.resume_until_s - now, self._give_up_late)
        elif error.reason in _PASSING and call.admitted.done() and now < call.resume_until_s:
            asyncio.get_running_loop().call_later(AGAIN_S, self._resume, call)
        else:
            call.fail(error)

    def _resume(self, call: _Call) -> None:
        if not call.is_attached and call.wire.id in self._calls:
            self._send(call=call.to_wire(time.monotonic()))


def _chunk_from_wire(wire: inference_pb2.Chunk) -> Chunk:
    return Chunk(
        wire.first_token_index,
        list(wire.token_ids),
        logprobs=wire.logprobs,
        prompt_logprobs=wire.prompt_logprobs,
        cached_tokens=wire.cached_tokens if wire.HasField("cached_tokens") else None,
        finish_reason=wire.finish_reason,
    )


def _details(error: Exception) -> str:
    return error.details() or error.code().name if isinstance(error, grpc.aio.AioRpcError) else str(error)


# ---- calls that the coordinator answers: forwarded unchanged, and the responses passed back ----

DEADLINE_S: Final = 30.0


class ForwardedStatus:
    """Forward the status methods to `StatusService` (api/admin_service.py) at the coordinator."""

    def __init__(self, stub: inference_pb2_grpc.InferenceStub, metadata: Metadata) -> None:
        self._stub = stub
        self._metadata = metadata

    async def Abort(self, request: Any, context: Any) -> Any:
        return await _ask(self._stub.Abort, request, context, self._metadata)

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        return await _ask(self._stub.GetServerInfo, request, context, self._metadata)

    async def GetLoads(self, request: Any, context: Any) -> Any:
        return await _ask(self._stub.GetLoads, request, context, self._metadata)


class ForwardedAdmin(inference_pb2_grpc.AdminServicer):  # type: ignore[misc]
    """Forward the Admin service to the coordinator (api/admin_service.py)."""

    def __init__(self, stub: inference_pb2_grpc.AdminStub, metadata: Metadata, *, has_admin_key: bool) -> None:
        self._stub = stub
        self._metadata = metadata
        self._has_admin_key = has_admin_key

    async def SetRole(self, request: Any, context: Any) -> Any:
        return await _ask(self._stub.SetRole, request, context, self._metadata)

    async def LoadAdapter(self, request: Any, context: Any) -> Any:
        async with _passing_back(context):
            return await self.change_adapters("LoadAdapter", request)

    async def UnloadAdapter(self, request: Any, context: Any) -> Any:
        async with _passing_back(context):
            return await self.change_adapters("UnloadAdapter", request)

    async def change_adapters(self, method: str, request: Any) -> Any:
        """Send `request` to the coordinator by its method LoadAdapter or UnloadAdapter, and return the response.

        Raises RequestError without an admin key or in time, and AioRpcError when the coordinator refuses.
        """
        check_admin_key(has_admin_key=self._has_admin_key)
        return await asked(getattr(self._stub, method), request, self._metadata, LOAD_DEADLINE_S + DEADLINE_S)

    async def GetOverview(self, request: Any, context: Any) -> Any:
        return await _ask(self._stub.GetOverview, request, context, self._metadata)

    async def Drain(self, request: Any, context: Any) -> None:
        async with _passing_back(context):
            async for progress in self._stub.Drain(request, metadata=self._metadata):
                await write(context, progress)


async def asked(method: Any, request: Any, metadata: Metadata, deadline_s: float = DEADLINE_S) -> Any:
    """Send `request` to the coordinator by the stub's unary `method`, and return the response.

    Raises RequestError after `deadline_s`, and AioRpcError if the call fails. The deadline is asyncio's, since gRPC's
    depends on the wall clock.
    """
    try:
        async with asyncio.timeout(deadline_s):
            return await method(request, metadata=metadata)
    except TimeoutError as error:
        message = f"the coordinator has not answered within {deadline_s:g} s"
        raise RequestError(DEADLINE_EXCEEDED, message) from error


async def _ask(method: Any, request: Any, context: Any, metadata: Metadata) -> Any:
    async with _passing_back(context):
        return await asked(method, request, metadata)


@asynccontextmanager
async def _passing_back(context: Any) -> AsyncIterator[None]:
    """End the call with the status and details that the coordinator returned."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE and not error.trailing_metadata():
            raise RequestError(DRAINING, "the coordinator cannot be reached") from error
        await context.abort(error.code(), error.details(), tuple(error.trailing_metadata() or ()))
