"""Serve the streams of the API servers in the control process. The end of a stream is the end of the API server's
calls.

Everything here runs on the event loop, beside the streams of nodes.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from coordinator.api.connections import Sheds
from coordinator.api.control import LocalControl
from coordinator.api.http.middleware import CountCall
from coordinator.api.messages import (
    Situation,
    error_from_wire,
    framed,
    info_from_wire,
    plan_from_wire,
    read_frame,
    situation_to_wire,
)
from coordinator.api_server_link import ApiServerCall, ApiServerLink, ApiServerLost, api_server_figures
from coordinator.control.nodes import Registry
from coordinator.control.request_log import CallRecord, RequestLog
from coordinator.control.slo import SloClasses
from coordinator.dispatcher import Dispatcher
from coordinator.traces.carrier import Carrier
from protos import api_servers_pb2, api_servers_pb2_grpc
from serving_core.errors import RequestError
from serving_core.figures import Figure
from serving_core.net.numbering import MessageLost
from serving_core.reasons import ENGINE_ERROR, WORKER_LOST
from serving_core.tasks import first_to_end

if TYPE_CHECKING:  # needs the extra otel
    from coordinator.traces.export import Trace, Traces

logger = logging.getLogger(__name__)

HELLO_DEADLINE_S: Final = 10.0


class ApiServerService(api_servers_pb2_grpc.ApiServersServicer):  # type: ignore[misc]
    """Handle the events of API servers, and send them the state of the fleet and the progress of their calls."""

    def __init__(
        self,
        registry: Registry,
        dispatcher: Dispatcher,
        request_log: RequestLog,
        slo_classes: SloClasses,
        *,
        count_call: CountCall,
        sheds: Sheds,
        metrics: Callable[[], bytes],
        traces: "Traces | None",
    ) -> None:
        self._registry = registry
        self._dispatcher = dispatcher
        self._request_log = request_log
        self._slo_classes = slo_classes
        self._count_call = count_call
        self._sheds = sheds
        self._metrics = metrics
        self._traces = traces
        self._control = LocalControl(registry, dispatcher, request_log, slo_classes)
        self._links: dict[int, ApiServerLink] = {}
        self._told = b""
        self.opened: dict[int, asyncio.Event] = {}  # by number of the API server: set while it listens
        self.lose: Callable[[int], None] = lambda number: None  # called with the number of a stuck API server

    @property
    def is_serving(self) -> bool:
        return self._control.is_serving

    def tell(self) -> None:
        """Send the state of the fleet to all API servers, if it has changed."""
        state = self._state()
        if (told := state.SerializeToString(deterministic=True)) != self._told:
            self._told = told
            for link in self._links.values():
                link.fleet(state)

    def end(self) -> None:
        """End the streams after the messages that are still to be sent."""
        for link in self._links.values():
            link.end()

    def figures(self) -> Iterator[Figure]:
        """Yield the metrics of the API servers: one Figure a metric, labelled by the number of the API server."""
        return api_server_figures(self._links.values())

    async def Metrics(self, _request: Any, _context: Any) -> api_servers_pb2.MetricsResponse:
        return api_servers_pb2.MetricsResponse(text=self._metrics())

    async def attach(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one API server until its stream ends."""
        async with asyncio.timeout(HELLO_DEADLINE_S):
            hello = await read_frame(reader)
        event = api_servers_pb2.ApiServerEvent.FromString(hello or b"")
        number = event.hello.number
        link = self._links[number] = ApiServerLink(number)
        link.numbering.check(event)
        link.fleet(self._state())
        try:
            await first_to_end(self._read(link, reader), self._write(link, writer))
        except ApiServerLost as error:
            logger.error("API server %d is given up: %s", number, error)
            self.lose(number)
        except (ConnectionError, MessageLost) as error:
            logger.warning("the stream of API server %d has broken: %s", number, error)
        except Exception:
            logger.exception("the stream of API server %d has failed", number)
            self.lose(number)
        finally:
            writer.close()
            if self._links.get(number) is link:  # the API server may be back already
                del self._links[number]
            self._lost(link)

    async def _write(self, link: ApiServerLink, writer: asyncio.StreamWriter) -> None:
        while (batch := await link.next()) is not None:
            link.numbering.stamp(batch)
            writer.write(framed(batch.SerializeToString()))
            if writer.transport.get_write_buffer_size():
                await link.within(writer.drain())

    async def _read(self, link: ApiServerLink, reader: asyncio.StreamReader) -> None:
        while (message := await read_frame(reader)) is not None:
            event = api_servers_pb2.ApiServerEvent.FromString(message)
            link.numbering.check(event)
            kind = event.WhichOneof("event")
            if kind == "taken":
                link.taken(event.taken.cpu_s)
                for shed in event.taken.sheds:
                    self._sheds.count(shed.port, shed.reason, shed.number)
            elif kind == "opened":
                self.opened[link.number].set()
            else:
                self._handle(link, kind, getattr(event, kind))

    def _handle(self, link: ApiServerLink, kind: str, body: Any) -> None:
        match kind:
            case "begin":
                self._begin(link, body)
            case "over":
                self._over(link, body.number, body.failure)
            case "stopped":
                self._stopped(link, body)
            case "failed":
                if (call := link.calls.get(body.number)) is not None:
                    self._dispatcher.give_up(call, error_from_wire(body.error))
            case "refused":
                self._refused(*info_from_wire(body.info), error_from_wire(body.error))
            case "http_call":
                self._count_call(body.handler, body.method, body.status, body.seconds)
            case _:
                raise AssertionError(f"{kind} is not what an API server says")

    def _begin(self, link: ApiServerLink, asked: api_servers_pb2.NewCall) -> None:
        """Start a call, or report the error with which it is refused; the API server answers the client either way."""
        plan, so_fars = plan_from_wire(asked)
        record, carrier = info_from_wire(asked.info)
        call = ApiServerCall(link, asked.number, len(plan.samplings), record)
        call.trace = self._begin_trace(record, carrier)  # the trace of a refused call is not sent
        try:
            slo = self._slo_classes.slo_of(asked.limits, len(plan.prompt), self._registry.nodes)
            self._dispatcher.begin(
                plan,
                so_fars,
                call,
                call.answers,
                slo,
                arrived_s=record.arrived_s,
                deadline_s=asked.deadline_s,
                record=record,
            )
        except RequestError as error:
            link.admitted(asked.number, error)
            return
        except Exception:
            logger.exception("a call could not begin", extra={"request_id": plan.request_id})
            link.admitted(asked.number, RequestError(ENGINE_ERROR, "internal error"))
            return
        record.begun_s, record.num_prompt_tokens = asked.begun_s, len(plan.prompt)
        record.sampling, record.num_answers = plan.samplings[0], len(plan.samplings)
        link.calls[asked.number] = call
        link.admitted(asked.number, None)

    def _lost(self, link: ApiServerLink) -> None:
        """Fail the calls of an API server that is gone. Their clients did not end them."""
        for number, call in list(link.calls.items()):
            self._dispatcher.give_up(call, RequestError(WORKER_LOST, "the API server of the call was lost"))
            self._over(link, number, WORKER_LOST)  # nodes release its requests

    def _over(self, link: ApiServerLink, number: int, failure: str) -> None:
        if (call := link.calls.pop(number, None)) is None:
            return
        self._dispatcher.close(call)
        call.record.failure = failure
        self._end_trace(call.trace)

    def _stopped(self, link: ApiServerLink, event: api_servers_pb2.Stopped) -> None:
        if (call := link.calls.get(event.number)) is not None:
            call.answers[event.index].stopped(event.stop, event.num_tokens)
            self._dispatcher.stopped(call, event.index)

    def _refused(self, record: CallRecord, carrier: Carrier, error: RequestError) -> None:
        """Log a call that the API server has refused. A call without an operation could not be parsed and has no
        trace."""
        trace = self._begin_trace(record, carrier) if record.operation else None
        self._request_log.refused(record, error)
        record.failure = error.reason
        self._end_trace(trace)

    def _begin_trace(self, record: CallRecord, carrier: Carrier) -> "Trace | None":
        return self._traces.begin(record, carrier) if self._traces is not None else None

    def _end_trace(self, trace: "Trace | None") -> None:
        if self._traces is not None and trace is not None:
            self._traces.end(trace, time.monotonic())

    def _state(self) -> api_servers_pb2.FleetState:
        control = self._control
        ready = frozenset(node.name for node in self._registry.nodes if node.is_ready)
        return situation_to_wire(
            Situation(control.capacity(), control.is_serving, control.why_not_ready(), ready, control.num_live)
        )
