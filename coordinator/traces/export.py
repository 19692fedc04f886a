"""Export the traces of calls to an OTLP endpoint.

No other module imports OpenTelemetry, and this one is imported only where there is an endpoint. Tracing does not delay
outputs: the spans of a call are created at its end, and a thread of the library sends them in batches. Spans that the
endpoint does not take in time are dropped, counted and logged; where too many spans wait, whole traces are dropped.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, StatusCode, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from coordinator.control.request_log import CallRecord
from coordinator.traces.carrier import Carrier
from coordinator.traces.spans import SpanRecord, call_name, call_span
from serving_core.net.backoff import Reminder
from serving_core.version import VERSION

logger = logging.getLogger(__name__)

MAX_UNSENT_SPANS: Final = 8192
EXPORT_TIMEOUT_S: Final = 10.0  # for one batch, retries included
FLUSH_S: Final = 2.0  # at the end, for the remaining spans
ABORT_S: Final = 0.5  # until the library has noticed that its channel is closed
NOT_TAKEN: Final = "the OTLP endpoint does not take spans: they are lost"
TOO_MANY: Final = "too many spans wait for the OTLP endpoint: the traces of some calls are lost"
# Their warnings quote headers of clients, or report retries; a retry that fails is logged as an error.
QUIET: Final = ("opentelemetry.trace", "opentelemetry.exporter")


@dataclass(frozen=True, slots=True)
class Trace:
    """The trace of one call that has not ended."""

    call: CallRecord
    root: Span
    epoch_ns: int  # system clock at 0 of the monotonic clock, when the call came

    def ns(self, now: float) -> int:
        """Convert a time of the monotonic clock, in seconds, to nanoseconds of the system clock."""
        return self.epoch_ns + round(now * 1e9)


class Traces:
    """Begin and end the traces of calls.

    The library's environment variables (OTEL_...) apply: sampling of calls without a traced caller, headers and
    certificates for the endpoint, and the resource attributes of this process.
    """

    def __init__(self, endpoint: str) -> None:
        """Create the exporter to `endpoint`, with TLS if it begins with https:."""
        for name in QUIET:
            logging.getLogger(name).setLevel(logging.ERROR)
        insecure = not endpoint.startswith("https:")
        self._exporter = _Counting(OTLPSpanExporter(endpoint=endpoint, insecure=insecure, timeout=EXPORT_TIMEOUT_S))
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter, max_queue_size=MAX_UNSENT_SPANS))
        self._tracer = self._provider.get_tracer("splitserve")
        self._propagator = TraceContextTextMapPropagator()
        self._reminder = Reminder()
        self._num_handed_over = 0
        self._num_dropped = 0

    @property
    def num_unsent(self) -> int:
        """Return the number of spans that wait to be sent or are being sent."""
        return self._num_handed_over - self._exporter.num_done

    @property
    def num_lost(self) -> int:
        """Return the number of spans dropped or not taken by the endpoint, since the start."""
        return self._num_dropped + self._exporter.num_lost

    def begin(self, call: CallRecord, carrier: Carrier) -> Trace | None:
        """Begin the trace of a call whose headers are `carrier`, and set `call.trace_id`. None if it is not sampled."""
        context = self._propagator.extract(carrier)
        epoch_ns = time.time_ns() - time.monotonic_ns()
        start_ns = epoch_ns + round(call.arrived_s * 1e9)
        root = self._tracer.start_span(call_name(call), context, SpanKind.SERVER, start_time=start_ns)
        if not root.is_recording():
            return None
        call.trace_id = format_trace_id(root.get_span_context().trace_id)
        return Trace(call, root, epoch_ns)

    def end(self, trace: Trace, now: float) -> None:
        """Create the spans of a call whose sequences have all ended, and queue them for the endpoint.

        If more than MAX_UNSENT_SPANS would wait, the spans of this call are dropped, counted and logged.
        """
        record = call_span(trace.call, now)
        num_spans = sum(1 for _ in record.everyone())
        if self.num_unsent + num_spans > MAX_UNSENT_SPANS:
            self._num_dropped += num_spans
            if self._reminder.is_due(TOO_MANY, now):
                logger.warning(
                    TOO_MANY, extra={"fields": {"unsent_spans": self.num_unsent, "lost_spans": self.num_lost}}
                )
            return
        self._num_handed_over += num_spans
        self._write(trace, trace.root, record)

    def _write(self, trace: Trace, span: Span, record: SpanRecord) -> None:
        span.set_attributes(record.attributes)
        if record.failure:
            span.set_attribute("error.type", record.failure)
            span.set_status(StatusCode.ERROR)
        context = set_span_in_context(span)
        for child in record.children:
            begun = self._tracer.start_span(child.name, context, start_time=trace.ns(child.start_s))
            self._write(trace, begun, child)
        span.end(trace.ns(record.end_s))

    async def stop(self) -> None:
        """Send the remaining spans as far as the endpoint takes them within FLUSH_S; log how many are lost."""
        ended, loop = asyncio.Event(), asyncio.get_running_loop()

        def flush() -> None:
            self._provider.shutdown()  # may block for long
            with suppress(RuntimeError):  # the loop is closed and does not wait any more
                loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=flush, name="last spans", daemon=True).start()
        for wait_s in (FLUSH_S, ABORT_S):
            try:
                async with asyncio.timeout(wait_s):
                    await ended.wait()
            except TimeoutError:
                self._exporter.shutdown()  # aborts the batch that is being sent
            else:
                break
        if num_lost := self.num_lost + self.num_unsent:
            logger.warning("not all spans were sent", extra={"fields": {"lost_spans": num_lost}})


class _Counting(SpanExporter):
    """Count what an exporter has done. Called in the library's thread."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._reminder = Reminder()
        self.num_done = 0  # sent or lost
        self.num_lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            self.num_done += len(spans)
            if result is not SpanExportResult.SUCCESS:
                self.num_lost += len(spans)
                self._warn()
        return result

    def _warn(self) -> None:
        if self._reminder.is_due(NOT_TAKEN, time.monotonic()):
            logger.warning(NOT_TAKEN, extra={"fields": {"lost_spans": self.num_lost}})

    def shutdown(self) -> None:
        self._exporter.shutdown()


def _resource() -> Resource:
    """Return the resource attributes of this process; the environment may override them and add others."""
    ours = Resource({"service.name": "splitserve", "service.version": VERSION})
    return Resource.create().merge(ours).merge(OTELResourceDetector().detect())
