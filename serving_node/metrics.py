"""Expose a node's metrics to Prometheus on its own port.

The coordinator's metrics of nodes, taken from heartbeats, have names that begin with node_; no name here does, so that
sums count nothing twice.
"""

import asyncio
import contextlib
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from http import HTTPStatus
from http.server import HTTPServer
from socketserver import TCPServer
from typing import Any, Final, Protocol

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import MetricsHandler
from prometheus_client.registry import Collector

from decode_node.speculation import SpeculationCounts
from engine.engine import StepClock
from kv_transfer.receiver import KVReceiver
from kv_transfer.sender import KVSender
from protos import inference_pb2
from serving_core.errors import SettingsError
from serving_core.figures import Figure, Values, counter, families, gauge, histogram
from serving_core.net.ports import listened_on
from serving_core.node.requests import NodeRequests, RequestState
from serving_node.outputs import StepCounts


class Observed(Protocol):
    """A node as its metrics see it. No call changes the node."""

    @property
    def name(self) -> str: ...
    @property
    def steps(self) -> StepCounts: ...
    @property
    def speculation(self) -> SpeculationCounts: ...
    @property
    def step_age_s(self) -> float: ...
    @property
    def clock(self) -> StepClock: ...
    @property
    def num_divided_passes(self) -> int: ...
    @property
    def engine(self) -> Mapping[str, str]: ...
    @property
    def node_requests(self) -> NodeRequests: ...
    def load(self) -> inference_pb2.NodeLoad: ...


class NodeExposition:
    """Makes the current metrics of one node. Belongs to the node's event loop."""

    def __init__(self, node: Observed, sender: KVSender, receiver: KVReceiver) -> None:
        self._node = node
        self._sender = sender
        self._receiver = receiver

    def figures(self) -> Iterator[Figure]:
        load = self._node.load()
        yield from self._requests(load)
        yield from self._steps(load)
        yield from self._blocks(load)
        yield from self._transfers()

    def _one(self, value: float) -> Values:
        return [({"node": self._node.name}, value)]

    def _by(self, label: str, values: dict[str, float]) -> Values:
        return [({"node": self._node.name, label: key}, value) for key, value in values.items()]

    def _requests(self, load: inference_pb2.NodeLoad) -> Iterator[Figure]:
        node_requests = self._node.node_requests
        stages: dict[str, float] = {stage.name.lower(): node_requests.count(stage) for stage in RequestState}
        yield gauge("stage_requests", "Requests on the node, by state.", self._by("stage", stages))
        yield gauge("waiting_tokens", "Tokens that wait to be computed.", self._one(load.num_waiting_tokens))
        yield gauge(
            "draining", "1 while the node drains and accepts no new requests.", self._one(load.state == "draining")
        )
        yield counter("preemptions", "Preemptions for lack of blocks.", self._one(load.num_preemptions))
        looked_up, found = load.num_prompt_tokens, load.num_cached_tokens
        yield counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", self._one(looked_up))
        yield counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", self._one(found))

    def _steps(self, load: inference_pb2.NodeLoad) -> Iterator[Figure]:
        steps, name = self._node.steps, self._node.name
        facts = {key: self._node.engine.get(key, "") for key in ("device", "attention", "program")}
        help = "Always 1: the engine's device, attention backend and decode program (modules: no CUDA graphs)."
        yield gauge("engine_info", help, [({"node": name, **facts}, 1)])
        seconds = [({"node": name, "phase": phase}, each) for phase, each in steps.seconds.items()]
        yield histogram("step_seconds", "Time of a step, by phase.", seconds)
        yield histogram("step_tokens", "Tokens computed in one step.", [({"node": name}, steps.tokens)])
        yield histogram("step_sequences", "Sequences decoded in one step.", [({"node": name}, steps.sequences)])
        computed: dict[str, float] = {"prefill": steps.num_prompt_tokens, "decode": steps.num_output_tokens}
        yield counter("computed_tokens", "Tokens computed, by phase.", self._by("phase", computed))
        help = "Time of steps by part: plan, build, compute, sample, draft, after, send, threads, and idle."
        yield counter("step_part_seconds", help, self._by("part", self._node.clock.seconds))
        help = "Forward passes that the ranks divided by tokens (sequence parallelism)."
        yield counter("sequence_parallel_passes", help, self._one(self._node.num_divided_passes))
        yield from self._draft_tokens()
        yield gauge("step_age_seconds", "Age of the running step; 0 when idle.", self._one(self._node.step_age_s))
        memory: dict[str, float] = {str(rank.rank): rank.rss_bytes for rank in load.ranks}
        yield gauge("rank_resident_memory_bytes", "Resident memory of each rank.", self._by("rank", memory))

    def _draft_tokens(self) -> Iterator[Figure]:
        """Yield the metrics of speculative decoding under vLLM's names with the project's prefix."""
        counts = self._node.speculation
        drafts, proposed, accepted = map(self._one, (counts.num_drafts, counts.num_proposed, counts.num_accepted))
        yield counter(
            "spec_decode_num_drafts", "Verifications of draft tokens, one for each sequence and step.", drafts
        )
        yield counter("spec_decode_num_draft_tokens", "Draft tokens verified.", proposed)
        yield counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.", accepted)

    def _blocks(self, load: inference_pb2.NodeLoad) -> Iterator[Figure]:
        num_free, num_cached = load.num_blocks_free - load.num_blocks_cached, load.num_blocks_cached
        states: dict[str, float] = {"used": load.num_blocks - load.num_blocks_free, "cached": num_cached}
        yield gauge("kv_blocks", "KV blocks, by state.", self._by("state", {**states, "free": num_free}))
        yield gauge(
            "kv_blocks_leaked",
            "KV blocks in use by no request; always 0 unless there is a defect.",
            self._one(load.num_blocks_leaked),
        )
        yield gauge(
            "remote_kv_blocks",
            "KV blocks in use as distributed KV of other nodes' requests.",
            self._one(load.num_remote_kv_blocks),
        )
        yield counter("remote_kvs", "Parts of this node's requests held by KV holders.", self._one(load.num_remote_kvs))
        help = "Parts of other nodes' requests revoked for older requests."
        yield counter("remote_kvs_revoked", help, self._one(load.num_remote_kvs_revoked))
        if load.HasField("tier"):
            yield from self._kv_offload(load.tier)

    def _kv_offload(self, tier: inference_pb2.TierLoad) -> Iterator[Figure]:
        used: dict[str, float] = {"host": tier.host_bytes, "disk": tier.disk_bytes}
        yield gauge("kv_tier_bytes", "KV bytes offloaded, by place.", self._by("place", used))
        found: dict[str, float] = {"hit": tier.num_hits, "miss": tier.num_misses}
        help = "Full blocks of prompts that missed the prefix cache: loaded from the KV offload, or computed."
        yield counter("kv_tier_blocks", help, self._by("result", found))
        lost: dict[str, float] = {"damaged": tier.num_damaged, "late": tier.num_late, "unwritten": tier.num_unwritten}
        help = "Loads that ended at a corrupted block or were abandoned as too slow, and blocks not stored in time."
        yield counter("kv_tier_failures", help, self._by("kind", lost))
        num_bytes: dict[str, float] = {"read": tier.read_bytes, "write": tier.written_bytes}
        yield counter("kv_tier_transfer_bytes", "KV bytes loaded and stored.", self._by("direction", num_bytes))
        seconds: dict[str, float] = {"read": tier.read_s, "write": tier.write_s}
        help = "Time that requests waited for loads, and that the first rank stored."
        yield counter("kv_tier_transfer_seconds", help, self._by("direction", seconds))
        help = "Computing time saved by loads, less the time of the loads."
        yield gauge("kv_tier_saved_seconds", help, self._one(tier.saved_s))

    def _transfers(self) -> Iterator[Figure]:
        ends: dict[str, KVSender | KVReceiver] = {"out": self._sender, "in": self._receiver}
        num_bytes: dict[str, float] = {direction: end.num_bytes for direction, end in ends.items()}
        num_failed: dict[str, float] = {direction: end.num_failed for direction, end in ends.items()}
        seconds = [({"node": self._node.name, "direction": key}, end.seconds) for key, end in ends.items()]
        help = "KV bytes sent, repeats included, and received, of the first rank."
        yield counter("transfer_bytes", help, self._by("direction", num_bytes))
        num_shared: dict[str, float] = {key: end.transport.num_shared_bytes for key, end in ends.items()}
        help = "KV bytes transferred through shared memory of the machine."
        yield counter("transfer_shared_bytes", help, self._by("direction", num_shared))
        help = "Time of a KV transfer, from the descriptor (out) or the first message (in) to the commit."
        yield histogram("transfer_seconds", help, seconds)
        yield counter(
            "transfer_failures", "KV transfers that failed or were abandoned.", self._by("direction", num_failed)
        )


logger = logging.getLogger(__name__)

READ_S: Final = 2.0  # for a client that sends or reads nothing
CALL_S: Final = 5.0  # for a whole call
FIGURES_S: Final = 2.0  # for the event loop to return the values
WAITING_CALLS: Final = 8
SHORTAGE_S: Final = 0.5  # between two attempts to accept while the process has no file descriptor left
PATH: Final = "/metrics"


class MetricsServer:
    """Serves metrics over HTTP until `stop`. Create it on the event loop on which `figures` is to be called."""

    def __init__(self, host: str, port: int, figures: Callable[[], Iterable[Figure]]) -> None:
        """Listen on `host` and `port`, 0 for a free one. Raises SettingsError if that is not possible.

        `figures` returns the metrics, at each call of a client.
        """
        registry = CollectorRegistry(support_collectors_without_names=True)
        ProcessCollector(registry=registry)
        registry.register(_OnLoop(asyncio.get_running_loop(), figures))
        handler = type("Handler", (_Handler,), {"registry": registry})
        host = listened_on(host)
        try:
            self._server = (_ServerOfSix if ":" in host else _Server)((host, port), handler)
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or "no such address"
            raise SettingsError(f"--metrics-port {port} cannot be listened on at {host:.80}: {why}") from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.1], name="metrics", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Stop the server, and wait until no call is in progress."""
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()


class _OnLoop(Collector):
    """Collect values of an event loop from another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, figures: Callable[[], Iterable[Figure]]) -> None:
        self._loop = loop
        self._figures = figures

    def describe(self) -> list[Metric]:
        """Return nothing, since the metrics are known only when collected."""
        return []

    def collect(self) -> list[Metric]:
        """Return the metrics. Raises TimeoutError if the event loop does not respond within FIGURES_S."""
        future = asyncio.run_coroutine_threadsafe(self._taken(), self._loop)
        try:
            return future.result(FIGURES_S)
        finally:
            future.cancel()

    async def _taken(self) -> list[Metric]:
        return list(families(self._figures()))


class _Handler(MetricsHandler):
    """Handle one call."""

    timeout = READ_S
    server_version = "splitserve"
    sys_version = ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != PATH:
            self.send_error(HTTPStatus.NOT_FOUND, f"figures are at {PATH}")
            return
        try:
            super().do_GET()
        except TimeoutError:
            self.close_connection = True
            with contextlib.suppress(OSError):  # the client may have stopped reading
                self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "the node is too busy to tell")


class _Server(HTTPServer):
    request_queue_size = WAITING_CALLS

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # without a name lookup of the address
        self.server_name, self.server_port = "", self.server_address[1]

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(SHORTAGE_S)  # otherwise the loop would retry at once
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        deadline = threading.Timer(CALL_S, _cut, [request])
        deadline.daemon = True
        deadline.start()
        try:
            super().process_request(request, client_address)
        finally:
            deadline.cancel()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a call for metrics failed: %s", sys.exception())


class _ServerOfSix(_Server):
    address_family = socket.AF_INET6


def _cut(request: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the client has closed already
        request.shutdown(socket.SHUT_RDWR)
