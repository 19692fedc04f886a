"""Serve the streams of API servers. The end of a stream is the end of the API server's calls.

Everything here runs on the event loop, beside the streams of nodes.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import grpc

from coordinator.api.connections import Sheds
from coordinator.api.control import LocalControl
from coordinator.api.generation import Deliver, Generation, Message
from coordinator.api.http.middleware import CountCall
from coordinator.api.messages import (
    Situation,
    error_from_wire,
    error_to_wire,
    info_from_wire,
    plan_from_wire,
    situation_to_wire,
)
from coordinator.api.statuses import failures_as_statuses
from coordinator.control.instructions import Chunk
from coordinator.control.nodes import MAX_NAME_CHARS, Registry, check_version
from coordinator.control.request_log import CallRecord
from coordinator.control.slo import SloClasses
from coordinator.dispatcher import Dispatcher
from coordinator.fleet_service import NumberedStream, read_hello
from coordinator.text.answers import check_follows
from coordinator.traces.carrier import CARRIER
from protos import api_servers_pb2, inference_pb2
from protos.convert import PROTOCOL_VERSION
from serving_core.errors import RequestError
from serving_core.figures import Figure, counter, gauge
from serving_core.net.numbering import MessageLost
from serving_core.reasons import ENGINE_ERROR, PAIRING_MISMATCH, WORKER_LOST
from serving_core.tasks import first_to_end

logger = logging.getLogger(__name__)

MAX_BATCH_TOKENS: Final = 2**12  # beyond these, tokens wait in their generations, which have limits of their own
SILENCE_S: Final = 20.0  # without a heartbeat, or with a batch that is not taken


class ApiServerLost(Exception):
    """Raised when an API server is silent, or takes no batch, for SILENCE_S."""


@dataclass(slots=True)
class _OpenCall:
    generation: Generation
    record: CallRecord
    recorded: ExitStack


class TokenOutput:
    """One output of a Generation, as token ids without text."""

    def __init__(self, generation: Generation, index: int, num_tokens: int) -> None:
        """Create output number `index` of `generation`, of which an earlier call has sent `num_tokens` tokens."""
        self.generation = generation
        self._index = index
        self._num_tokens = num_tokens

    def add(self, chunk: Chunk) -> bool:
        """Queue the next tokens, and return False: the API server finds stop strings, not this output.

        Raises RequestError when the reader is too slow, or the tokens do not follow those sent before.
        """
        check_follows(chunk.first_token_index, self._num_tokens)
        self._num_tokens += len(chunk.token_ids)
        self.generation.push_chunk(self._index, chunk)
        return False

    def end(self, complete: inference_pb2.Complete) -> None:
        self.generation.push_complete(self._index, complete)


class _PlainTokens:
    """Collect tokens that have nothing else with them, in lists: adding to a message token by token costs more."""

    def __init__(self) -> None:
        self._calls, self._outputs, self._indexes = list[int](), list[int](), list[int]()
        self.token_ids = list[int]()

    def add(self, call_number: int, index: int, chunk: Chunk) -> None:
        """Add the tokens of output number `index` of a call."""
        for token_index, token_id in enumerate(chunk.token_ids, chunk.first_token_index):
            self._calls.append(call_number)
            self._outputs.append(index)
            self._indexes.append(token_index)
            self.token_ids.append(token_id)

    def write(self, batch: api_servers_pb2.ApiServerBatch) -> None:
        """Add all tokens to a batch."""
        batch.calls.extend(self._calls)
        batch.outputs.extend(self._outputs)
        batch.indexes.extend(self._indexes)
        batch.token_ids.extend(self.token_ids)


class ApiServerLink:
    """Keep the calls of one API server, and collect the messages for it until `next` returns them as one batch."""

    def __init__(self, name: str, *, resumes: bool = False) -> None:
        self.name = name
        self.resumes: Final = resumes  # its calls go on at the next coordinator
        self.cpu_s = 0.0  # CPU time of the API server
        self.calls: dict[str, _OpenCall] = {}
        self._batch = api_servers_pb2.ApiServerBatch()
        self._plain = _PlainTokens()  # of the batch, before its responses
        self._awake: dict[Generation, str] = {}  # generations with messages, and the ids of their calls
        self._has_news = asyncio.Event()
        self._is_over = False

    def fleet(self, state: api_servers_pb2.FleetState) -> None:
        """Add the new state of the fleet to the batch, in place of an earlier state."""
        self._batch.fleet.CopyFrom(state)
        self._has_news.set()

    def begun(self, call_id: str) -> None:
        """Add to the batch that a call has been admitted."""
        self._batch.begun.append(call_id)
        self._has_news.set()

    def failed(self, call_id: str, error: RequestError) -> None:
        """Add to the batch that a call has failed with an error."""
        self._batch.failed.add(id=call_id, error=error_to_wire(error))
        self._has_news.set()

    def wake(self, call_id: str) -> Callable[[Generation], None]:
        """Return a function for Generation's `wake`: it makes `next` return the messages of this call's generation."""

        def add(generation: Generation) -> None:
            self._awake[generation] = call_id
            self._has_news.set()

        return add

    def deliver(self, call_id: str) -> Deliver:
        """Return a function for Generation's `deliver`: it adds plain tokens of this call to the batch."""
        number = int(call_id)

        def add(index: int, chunk: Chunk) -> bool:
            if not chunk.is_plain or len(self._plain.token_ids) >= MAX_BATCH_TOKENS:
                return False
            self._plain.add(number, index, chunk)
            self._has_news.set()
            return True

        return add

    def end(self) -> None:
        """Let `next` return what has been added until here, and then None."""
        self._is_over = True
        self._has_news.set()

    def _add(self, call_id: str, messages: Collection[Message]) -> None:
        """Add the messages of a call to the batch, in order: after the first that is not plain, none is."""
        is_plain = True
        for message in messages:
            chunk = message.chunk
            is_plain = is_plain and chunk is not None and chunk.is_plain
            if chunk is None or not is_plain:
                self._batch.responses.add(request_id=call_id, **message.fields())
            else:
                self._plain.add(int(call_id), message.index, chunk)

    async def next(self) -> api_servers_pb2.ApiServerBatch | None:
        """Wait for messages, and return the batch of all that came since the last batch; None after `end`."""
        await self._has_news.wait()
        awake, self._awake = self._awake, {}
        for generation, call_id in awake.items():
            self._add(call_id, generation.take_all())
            if generation.error is not None:
                self.failed(call_id, generation.error)
        batch, self._batch = self._batch, api_servers_pb2.ApiServerBatch()
        plain, self._plain = self._plain, _PlainTokens()
        plain.write(batch)
        if not self._is_over:
            self._has_news.clear()
        elif not batch.ByteSize():
            return None
        return batch


class ApiServerService:
    """Serve the API server processes: ApiServers.Attach, one stream for each, and ApiServers.Metrics."""

    def __init__(
        self,
        registry: Registry,
        dispatcher: Dispatcher,
        control: LocalControl,
        slo_classes: SloClasses,
        *,
        count_call: CountCall,
        sheds: Sheds,
        metrics: Callable[[], bytes],
    ) -> None:
        self._registry = registry
        self._dispatcher = dispatcher
        self._control = control
        self._slo_classes = slo_classes
        self._count_call = count_call
        self._sheds = sheds
        self._metrics = metrics
        self._links: dict[str, ApiServerLink] = {}
        self._told = b""
        self.listens: Callable[[str], None] = lambda name: None  # called with the name of an API server that listens
        self.lose: Callable[[str], None] = lambda name: None  # called with the name of a stuck API server

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the gRPC handler of the service ApiServers, to register with a server."""
        service = api_servers_pb2.DESCRIPTOR.services_by_name["ApiServers"].full_name
        attach: Any = grpc.stream_stream_rpc_method_handler(
            self._attach, response_serializer=api_servers_pb2.ApiServerBatch.SerializeToString
        )
        metrics: Any = grpc.unary_unary_rpc_method_handler(
            self._get_metrics,
            request_deserializer=api_servers_pb2.MetricsRequest.FromString,
            response_serializer=api_servers_pb2.MetricsResponse.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(service, {"Attach": attach, "Metrics": metrics})

    @property
    def is_serving(self) -> bool:
        return self._control.is_serving

    def tell(self) -> None:
        """Send the state of the fleet to all attached API servers, if it has changed since the last call."""
        if not self._links:
            return
        state = self._state()
        if (told := state.SerializeToString(deterministic=True)) != self._told:
            self._told = told
            for link in self._links.values():
                link.fleet(state)

    def end(self) -> None:
        """End the streams of all API servers after the messages that are still to be sent."""
        for link in self._links.values():
            link.end()

    def figures(self) -> Iterator[Figure]:
        """Yield the metrics of the attached API servers."""
        return api_server_figures(self._links.values())

    async def _get_metrics(self, _request: Any, _context: Any) -> api_servers_pb2.MetricsResponse:
        return api_servers_pb2.MetricsResponse(text=self._metrics())

    async def _attach(self, _: Any, context: Any) -> None:
        stream = NumberedStream(context, api_servers_pb2.ApiServerEvent)
        async with failures_as_statuses(context):
            hello = await read_hello(stream)
            name = f"API server {hello.name[:MAX_NAME_CHARS]}"
            check_version(name, hello.version)
            if hello.protocol_version != PROTOCOL_VERSION:
                differ = f"{hello.protocol_version or 'none'} and not {PROTOCOL_VERSION}"
                raise RequestError(PAIRING_MISMATCH, f"{name} has protocol_version {differ}")
            link = ApiServerLink(hello.name, resumes=hello.resumes)
            if (before := self._links.get(link.name)) is not None:
                before.end()
                self._lost(before)
            self._links[link.name] = link
            link.fleet(self._state())
            logger.info("API server %s attached", link.name)
            try:
                await first_to_end(self._read(link, stream), self._write(link, stream))
            except ApiServerLost as error:
                logger.error("API server %s is given up: %s", link.name, error)
                self.lose(link.name)
            except MessageLost as error:
                raise RequestError(WORKER_LOST, str(error)) from error
            finally:
                if self._links.get(link.name) is link:
                    del self._links[link.name]
                self._lost(link)

    async def _write(self, link: ApiServerLink, stream: NumberedStream) -> None:
        while (batch := await link.next()) is not None:
            try:
                async with asyncio.timeout(SILENCE_S):
                    await stream.write(batch)
            except TimeoutError as error:
                raise ApiServerLost(f"it has taken nothing for {SILENCE_S:g} s") from error

    async def _read(self, link: ApiServerLink, stream: NumberedStream) -> None:
        while True:
            try:
                async with asyncio.timeout(SILENCE_S):
                    event = await stream.read()
            except TimeoutError as error:
                raise ApiServerLost(f"it has been silent for {SILENCE_S:g} s") from error
            if event is None:
                return
            kind = event.WhichOneof("event")
            self._handle(link, kind, getattr(event, kind))

    def _handle(self, link: ApiServerLink, kind: str, body: Any) -> None:
        match kind:
            case "heartbeat":
                self._heartbeat(link, body)
            case "call":
                self._begin(link, body)
            case "over":
                self._over(link, body.id, body.failure)
            case "stopped":
                if (call := link.calls.get(body.id)) is not None:
                    self._dispatcher.stopped(call.generation, body.index)
            case "failed":
                if (call := link.calls.get(body.id)) is not None:
                    self._dispatcher.give_up(call.generation, error_from_wire(body.error))
            case "refused":
                self._refused(body)
            case "http_call":
                self._count_call(body.handler, body.method, body.status, body.seconds)
            case _:
                logger.warning("API server %s has sent %s, which is for another version", link.name, kind)

    def _heartbeat(self, link: ApiServerLink, heartbeat: api_servers_pb2.ApiServerHeartbeat) -> None:
        link.cpu_s = heartbeat.cpu_s
        for shed in heartbeat.sheds:
            self._sheds.count(shed.port, shed.reason, shed.number)
        if heartbeat.listens:
            self.listens(link.name)

    def _begin(self, link: ApiServerLink, wire: api_servers_pb2.ForwardedCall) -> None:
        """Start a call, or send the error with which it is refused; the API server answers the client either way."""
        plan, so_fars = plan_from_wire(wire)
        now = time.monotonic()
        record, carrier = info_from_wire(wire.info, now)
        num_outputs, num_ended = len(plan.samplings), sum(so_far.has_ended for so_far in so_fars)
        generation = Generation(
            plan.request_id, num_outputs, num_ended=num_ended, wake=link.wake(wire.id), deliver=link.deliver(wire.id)
        )
        outputs = [TokenOutput(generation, index, len(each.token_ids)) for index, each in enumerate(so_fars)]
        deadline_s = now + wire.left_s
        try:
            slo = self._slo_classes.slo_of(wire.request, plan.num_prompt_tokens, self._registry.nodes)
            self._dispatcher.begin(
                plan,
                so_fars,
                generation,
                outputs,
                slo,
                arrived_s=record.arrived_s,
                deadline_s=deadline_s,
                record=record,
                goes_on=link.resumes,
            )
        except RequestError as error:
            link.failed(wire.id, error)
            return
        except Exception:
            logger.exception("a call could not begin", extra={"request_id": plan.request_id})
            link.failed(wire.id, RequestError(ENGINE_ERROR, "internal error"))
            return
        record.begun_s, record.num_prompt_tokens = now - wire.begun_age_s, plan.num_prompt_tokens
        record.sampling, record.num_sequences = plan.samplings[0], num_outputs
        CARRIER.set(carrier)
        recorded = ExitStack()  # closed at the end of the call
        recorded.enter_context(self._control.recorded(record))
        link.calls[wire.id] = _OpenCall(generation, record, recorded)
        link.begun(wire.id)

    def _lost(self, link: ApiServerLink) -> None:
        """Fail the calls of an API server that is gone. Their clients did not end them."""
        for call_id, call in list(link.calls.items()):
            self._dispatcher.give_up(call.generation, RequestError(WORKER_LOST, "the API server of the call was lost"))
            self._over(link, call_id, WORKER_LOST)  # nodes release its requests

    def _over(self, link: ApiServerLink, call_id: str, failure: str) -> None:
        if (call := link.calls.pop(call_id, None)) is None:
            return
        self._dispatcher.close(call.generation)
        call.record.failure = failure
        call.recorded.close()

    def _refused(self, wire: api_servers_pb2.RefusedCall) -> None:
        """Log a call that the API server has refused. A call without an operation could not be parsed and has no
        trace."""
        record, carrier = info_from_wire(wire.info, time.monotonic())
        error = error_from_wire(wire.error)
        record.failure = error.reason
        CARRIER.set(carrier)
        if record.operation:
            with self._control.recorded(record):
                self._control.refused(record, error)
        else:
            self._control.refused(record, error)

    def _state(self) -> api_servers_pb2.FleetState:
        control = self._control
        ready = frozenset(node.name for node in self._registry.nodes if node.is_ready)
        return situation_to_wire(
            Situation(control.capacity(), control.is_serving, control.why_not_ready(), ready, control.num_live)
        )


def api_server_figures(links: Iterable[ApiServerLink]) -> Iterator[Figure]:
    """Yield two metrics with a value for each API server: its live calls, and the CPU seconds that it has used."""
    api_servers = sorted(links, key=lambda link: link.name)
    calls = [({"api_server": each.name}, float(len(each.calls))) for each in api_servers]
    cpu_s = [({"api_server": each.name}, each.cpu_s) for each in api_servers]
    yield gauge("api_server_calls", "Calls that are live at an API server.", calls)
    yield counter("api_server_cpu_seconds", "CPU time that an API server has used.", cpu_s)
