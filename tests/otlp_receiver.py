"""A receiver of traces as collectors are: OTLP over gRPC, with the published messages."""

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

DEADLINE_S = 240.0
STOP_S = 5.0
AT_ONCE = {"OTEL_BSP_SCHEDULE_DELAY": "50"}  # ms, for a process that is to send its spans soon


@dataclass
class Span:
    """One span as it came, with those below it, in the order of their times."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    is_error: bool
    kind: int
    trace_state: str
    children: list["Span"] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Of those right below."""
        return [child.name for child in self.children]

    def below(self, name: str) -> list["Span"]:
        """Those of this name right below."""
        return [child for child in self.children if child.name == name]


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it is sent. While `takes` is not set, it answers nobody."""

    def __init__(self) -> None:
        self.takes = threading.Event()
        self.takes.set()
        self.was_asked = threading.Event()
        self.is_over = threading.Event()
        self.resources: list[dict[str, Any]] = []
        self._spans: list[Span] = []
        self._news = threading.Condition()

    def Export(self, request: Any, context: Any) -> Any:
        self.was_asked.set()
        while not self.takes.wait(0.05) and context.is_active() and not self.is_over.is_set():
            pass
        with self._news:
            for of_resource in request.resource_spans:
                self.resources.append(_values(of_resource.resource.attributes))
                for scope in of_resource.scope_spans:
                    self._spans += map(_span, scope.spans)
            self._news.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def num_spans(self) -> int:
        return len(self._spans)

    def call(self, request_id: str, deadline_s: float = DEADLINE_S) -> Span:
        """The span of this call, with all that is below it, once it is there."""
        end = time.monotonic() + deadline_s
        with self._news:
            while not (found := [span for span in self._spans if _is_of(span, request_id)]):
                assert self._news.wait(end - time.monotonic()), f"no trace of {request_id} within {deadline_s:g} s"
            [root] = found
            return self._tree(root)

    def _tree(self, span: Span) -> Span:
        below = [each for each in self._spans if each.parent_id == span.span_id]
        span.children = [self._tree(each) for each in sorted(below, key=lambda each: each.start_ns)]
        assert all(each.trace_id == span.trace_id for each in below)
        return span


@contextlib.contextmanager
def receiving() -> Iterator[tuple[Receiver, str]]:
    """A receiver, and the endpoint that it is at."""
    receiver = Receiver()
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield receiver, f"http://127.0.0.1:{port}"
    finally:
        receiver.is_over.set()
        server.stop(0).wait(STOP_S)


def _is_of(span: Span, request_id: str) -> bool:
    return span.attributes.get("splitserve.request_id") == request_id


def _span(sent: Any) -> Span:
    return Span(
        sent.name,
        sent.trace_id.hex(),
        sent.span_id.hex(),
        sent.parent_span_id.hex(),
        sent.start_time_unix_nano,
        sent.end_time_unix_nano,
        _values(sent.attributes),
        sent.status.code == sent.status.STATUS_CODE_ERROR,
        sent.kind,
        sent.trace_state,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
