"""Define the calls of an API server to control, the part of the coordinator that places and tracks requests.

LocalControl serves a coordinator of one process. With several API servers, each is a process that calls over a socket
(coordinator/api/remote.py).
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

from coordinator.api.generation import Generation
from coordinator.api.validation import RequestPlan
from coordinator.control.nodes import Capacity, Registry, has_path, why_no_path
from coordinator.control.request import SoFar
from coordinator.control.request_log import CallRecord, RequestLog
from coordinator.control.slo import SloClasses
from coordinator.dispatcher import Dispatcher
from coordinator.text.answers import AnswerText
from coordinator.traces.carrier import CARRIER
from protos import inference_pb2
from serving_core.errors import RequestError

if TYPE_CHECKING:  # its imports need an extra
    from coordinator.traces.export import Traces


class Control(Protocol):
    """Interface to control for one API server."""

    @property
    def num_live(self) -> int:
        """Return the number of requests in flight or queued, over all API servers."""

    @property
    def is_serving(self) -> bool:
        """Return whether the health service reports SERVING."""

    def capacity(self) -> Capacity:
        """Return what the attached nodes can serve now: the longest sequence, and which request options."""

    def why_not_ready(self) -> str:
        """Return why no request can be served at this moment; empty when requests can be served."""

    def is_ready(self, node_name: str) -> bool:
        """Return whether a node of this name is attached and ready; False for an unknown name."""

    def recorded(self, record: CallRecord) -> AbstractContextManager[None]:
        """Return a context manager around a whole call.

        On exit it ends the call's trace with the outcome in `record`.
        """

    def refused(self, record: CallRecord, error: RequestError) -> None:
        """Add a call that was refused before it began, and its error, to the request history."""

    async def begin(
        self,
        plan: RequestPlan,
        beginnings: Sequence[tuple[SoFar, AnswerText]],
        asked: inference_pb2.GenerateRequest,
        *,
        deadline_s: float,
        record: CallRecord,
    ) -> Generation:
        """Submit the sequences of a call to the scheduler, and return the queue of their output. `close` must follow.

        `beginnings` has, for each sequence, the output that it already has and the state of its text. `asked` is the
        request as it came, from which the SLO is found. `deadline_s` is a time of the monotonic clock, after which the
        call fails. Raises RequestError, in which case nothing has begun.
        """

    def close(self, generation: Generation) -> None:
        """Release a call that has ended for any reason; sequences that still run are aborted."""


class LocalControl:
    """Control in the same process as the API server."""

    def __init__(
        self,
        registry: Registry,
        dispatcher: Dispatcher,
        request_log: RequestLog,
        slo_classes: SloClasses,
        traces: "Traces | None" = None,
    ) -> None:
        self._registry = registry
        self._dispatcher = dispatcher
        self._request_log = request_log
        self._slo_classes = slo_classes
        self._traces = traces

    @property
    def num_live(self) -> int:
        return self._dispatcher.num_live

    @property
    def is_serving(self) -> bool:
        is_path = has_path(self._registry.nodes, embeds=self._registry.embeds)
        return is_path and not self._dispatcher.is_draining

    def capacity(self) -> Capacity:
        return self._dispatcher.capacity()

    def why_not_ready(self) -> str:
        if self._dispatcher.is_draining:
            return "the server is draining"
        return why_no_path(self._registry.nodes, embeds=self._registry.embeds)

    def is_ready(self, node_name: str) -> bool:
        node = self._registry.find(node_name)
        return node is not None and node.is_ready

    @contextmanager
    def recorded(self, record: CallRecord) -> Iterator[None]:
        trace = self._traces.begin(record, CARRIER.get()) if self._traces is not None else None
        try:
            yield
        finally:
            if self._traces is not None and trace is not None:
                self._traces.end(trace, time.monotonic())

    def refused(self, record: CallRecord, error: RequestError) -> None:
        self._request_log.refused(record, error)

    async def begin(
        self,
        plan: RequestPlan,
        beginnings: Sequence[tuple[SoFar, AnswerText]],
        asked: inference_pb2.GenerateRequest,
        *,
        deadline_s: float,
        record: CallRecord,
    ) -> Generation:
        slo = self._slo_classes.slo_of(asked, plan.num_prompt_tokens, self._registry.nodes)
        return self._dispatcher.submit(
            plan, beginnings, slo, arrived_s=record.arrived_s, deadline_s=deadline_s, record=record
        )

    def close(self, generation: Generation) -> None:
        self._dispatcher.close(generation)
