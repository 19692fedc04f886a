"""Render /metrics in the Prometheus text format.

Every figure has a SplitServe name. A figure that vLLM exports too also has vLLM's name and labels, from the same
counter; `engine` is the reporting node, or COORDINATOR for figures measured by the coordinator.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from coordinator.api.connections import Sheds
from coordinator.api.http.middleware import HttpCounts
from coordinator.api.statuses import CODES
from coordinator.control.instructions import FINISH_REASONS, MigrationOutcome
from coordinator.control.metrics import FETCHED, NOT_FETCHED, Metrics
from coordinator.control.nodes import DRAINED, LossCause, Node, Registry, has_path, num_kinds
from coordinator.control.request import Phase
from coordinator.control.scheduler import RESTART_REASONS, Scheduler
from protos.inference_pb2 import NodeLoad, TierLoad
from serving_core.figures import BATCH, Figure, Histogram, Labels, counter, families, family, gauge, histogram
from serving_core.reasons import QUEUE_FULL
from serving_core.shapes import ROLES

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
COORDINATOR: Final = "coordinator"
VLLM_PHASES: Final = {
    Phase.PREFILL_QUEUE: "request_queue_time_seconds",
    Phase.PREFILL: "request_prefill_time_seconds",
    Phase.DECODE: "request_decode_time_seconds",
}


class Exposition(Collector):
    """Collect the figures of one coordinator at the time of each scrape."""

    def __init__(
        self,
        metrics: Metrics,
        scheduler: Scheduler,
        registry: Registry,
        model_name: str,
        http: HttpCounts | None = None,
        api_servers: Callable[[], Iterable[Figure]] = tuple,
        sheds: Sheds | None = None,
    ) -> None:
        """Create the collector over the counters of a coordinator, which it reads at each scrape.

        `http` counts HTTP calls, `sheds` closed connections. `api_servers` returns the figures of each API server
        process, if there are several. `model_name` is a label of vLLM's figures.
        """
        self._metrics = metrics
        self._scheduler = scheduler
        self._registry = registry
        self._model_name = model_name
        self._http = http or HttpCounts()
        self._api_servers = api_servers
        self._sheds = sheds or Sheds()
        self._process = ProcessCollector(registry=None)

    def render(self) -> bytes:
        """Return the text of all figures, as bytes of the type CONTENT_TYPE."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """Yield all figures as prometheus_client's metric families: SplitServe's names, vLLM's, HTTP, this process."""
        nodes = self._registry.nodes
        is_path = has_path(nodes, embeds=self._registry.embeds)
        own = (_times(self._metrics), _totals(self._metrics), _by_class(self._metrics), _live(self._scheduler))
        of_nodes = node_figures(nodes, self._scheduler, is_path=is_path)
        figures = list(chain(*own, self._sheds.figures(), self._api_servers(), of_nodes))
        yield from families(figures)
        for figure in figures:
            for name in figure.vllm:
                yield family(figure, f"vllm:{name}", self._vllm_labels)
        for figure in vllm_figures(self._metrics, self._scheduler, nodes, is_path=is_path):
            yield family(figure, f"vllm:{figure.name}", self._vllm_labels)
        for figure in self._http.figures():
            yield family(figure, figure.name)
        yield from self._process.collect()

    def _vllm_labels(self, labels: Labels) -> Labels:
        others = {name: value for name, value in labels.items() if name not in ("node", "role")}
        return {"model_name": self._model_name, "engine": labels.get("node", COORDINATOR), **others}


def _times(metrics: Metrics) -> Iterator[Figure]:
    def figure(name: str, help: str, observed: Histogram, *vllm: str) -> Figure:
        return histogram(name, help, [({}, observed)], *vllm)

    for name, help, observed in (
        ("time_to_first_token_seconds", "Time from the arrival of a request to its first token (TTFT).", metrics.ttft),
        ("inter_token_latency_seconds", "Time from one output token of a sequence to the next.", metrics.itl),
        ("request_time_per_output_token_seconds", "Mean time per output token after the first (TPOT).", metrics.tpot),
        ("e2e_request_latency_seconds", "Time from the arrival of a request to its end (E2EL).", metrics.e2e),
    ):
        yield figure(name, help, observed, name)
    help = "Time from the last token before a migration to the first token after it."
    yield figure("migration_pause_seconds", help, metrics.migration_pause)
    yield figure(
        "prefix_fetch_seconds",
        "Time of a remote prefix fetch, from the allocation of its blocks to its end.",
        metrics.prefix_fetch,
    )
    for phase, observed in metrics.phases.items():
        help = f"Time of a request in the phase {phase.value}."
        yield figure(f"request_{phase.value}_seconds", help, observed, *filter(None, [VLLM_PHASES.get(phase)]))
    help = "Time of a request after its prefill queue."
    yield figure("request_inference_seconds", help, metrics.inference, "request_inference_time_seconds")
    yield figure(
        "request_prompt_tokens", "Prompt tokens of a request.", metrics.prompt_lengths, "request_prompt_tokens"
    )
    yield figure("request_params_n", "Sequences that a request asks for (n).", metrics.params_n, "request_params_n")
    help, name = "max_tokens of a request.", "request_params_max_tokens"
    yield figure(name, help, metrics.params_max_tokens, name)
    names = ("request_generation_tokens", "request_max_num_generation_tokens")  # each sequence is a group of its own
    yield figure("request_generation_tokens", "Generation tokens of a request.", metrics.output_lengths, *names)


def _totals(metrics: Metrics) -> Iterator[Figure]:
    def total(name: str, help: str, value: int, *vllm: str) -> Figure:
        return counter(name, help, [({}, value)], *vllm)

    def totals(name: str, help: str, label: str, known: Iterable[str], counts: Mapping[str, int]) -> Figure:
        values = [({label: key}, count) for key, count in {**dict.fromkeys(known, 0), **counts}.items()]
        return counter(name, help, values)

    prompt, cached = metrics.num_prompt_tokens, metrics.num_cached_tokens
    yield total(
        "prompt_tokens", "Prompt tokens of prefilled requests.", prompt, "prompt_tokens", "prefix_cache_queries"
    )
    help = "Prompt tokens whose KV came from the prefix cache."
    yield total("prompt_tokens_cached", help, cached, "prefix_cache_hits", "prompt_tokens_cached")
    yield total("generation_tokens", "Generation tokens.", metrics.num_generated_tokens, "generation_tokens")
    yield total("kv_transferred_bytes", "KV bytes transferred between nodes.", metrics.num_kv_bytes)
    yield total(
        "kv_saved_bytes",
        "KV bytes not transferred, since the decode node had the blocks in its prefix cache.",
        metrics.num_kv_bytes_saved,
    )
    yield total("migrated_kv_bytes", "KV bytes transferred by migrations.", metrics.num_migrated_kv_bytes)
    yield total("proposed_tokens", "Draft tokens verified, of ended requests.", metrics.num_proposed)
    yield total("accepted_tokens", "Draft tokens accepted, of ended requests.", metrics.num_accepted)
    yield total("fetched_blocks", "KV blocks fetched from prefix caches of other nodes.", metrics.num_fetched_blocks)
    yield total("fetched_kv_bytes", "KV bytes fetched from prefix caches of other nodes.", metrics.num_fetched_kv_bytes)
    yield total(
        "local_decodes", "Requests decoded by their prefill node, since no decode node had blocks.", metrics.num_kept
    )
    help = "Nodes lost other than by an orderly stop."
    yield totals("node_losses", help, "cause", LossCause, metrics.node_losses)
    yield total("request_restarts", "Restarts of requests on other nodes after a failure.", metrics.num_restarts)
    finish_reasons, failures = FINISH_REASONS.values(), metrics.transfers_failed
    help = "Requests that ended without an error."
    yield totals("requests_finished", help, "finished_reason", finish_reasons, metrics.finished)
    yield totals(
        "prefix_fetches",
        "Remote prefix fetches.",
        "outcome",
        (FETCHED, NOT_FETCHED),
        metrics.prefix_fetches,
    )
    outcomes = [outcome.value for outcome in MigrationOutcome]
    yield totals(
        "migrations", "Migrations of running requests to other nodes.", "outcome", outcomes, metrics.migrations
    )
    yield totals("requests_failed", "Requests that ended with an error.", "reason", CODES, metrics.failed)
    yield totals("requests_refused", "Requests refused.", "reason", CODES, metrics.refused)
    yield totals("transfers_failed", "KV transfers that failed.", "reason", RESTART_REASONS, failures)


def _by_class(metrics: Metrics) -> Iterator[Figure]:
    def times(name: str, help: str, by_class: Mapping[str, Histogram]) -> Figure:
        return histogram(name, help, [({"slo_class": name}, each) for name, each in by_class.items()])

    attained = metrics.attainment.by_class
    num_requests = [({"slo_class": name}, counts.num_sequences) for name, counts in attained.items()]
    yield counter("slo_requests", "Ended requests with an SLO, by SLO class.", num_requests)
    attained_by_limit = [
        ({"slo_class": name, "limit": limit}, value)
        for name, counts in attained.items()
        for limit, value in (("ttft", counts.num_ttft_met), ("tpot", counts.num_tpot_met), ("both", counts.num_met))
    ]
    yield counter(
        "slo_attained", "Ended requests that attained their SLO on TTFT, on TPOT, or on both.", attained_by_limit
    )
    help = "TTFT of ended requests, by SLO class; none: without one, with limits or not."
    yield times("slo_time_to_first_token_seconds", help, metrics.ttft_by_class)
    help = "TPOT of ended requests, by SLO class; none: without one, with limits or not."
    yield times("slo_time_per_output_token_seconds", help, metrics.tpot_by_class)


def _live(scheduler: Scheduler) -> Iterator[Figure]:
    def one(name: str, help: str, value: int, *vllm: str) -> Figure:
        return gauge(name, help, [({}, value)], *vllm)

    help = "Requests that prefill or decode; a prefill counts from the end of its first step on."
    yield one("requests_running", help, scheduler.num_running, "num_requests_running")
    yield one("requests_waiting", "Requests whose prefill has not begun.", scheduler.num_queued, "num_requests_waiting")
    help = "Requests deferred, since they would make others miss their SLO."
    yield one("requests_deferred", help, scheduler.num_deferred)
    needed = scheduler.nodes_needed
    yield one("nodes_needed", "Mixed nodes that the present load needs, for autoscalers.", needed.mixed)
    help = "Prefill nodes that the present load needs, beside the decode nodes needed."
    yield one("prefill_nodes_needed", help, needed.prefill)
    help = "Decode nodes that the present load needs, beside the prefill nodes needed."
    yield one("decode_nodes_needed", help, needed.decode)


# ---- figures that vLLM has under other names, so that its dashboards fill ----


def vllm_figures(metrics: Metrics, scheduler: Scheduler, nodes: Sequence[Node], *, is_path: bool) -> Iterator[Figure]:
    """Yield the figures that only vLLM's names cover, without the prefix `vllm:`.

    `is_path`: the fleet can serve a request.
    """
    ends = {**dict.fromkeys(FINISH_REASONS.values(), 0), **metrics.finished, "error": metrics.failed.total()}
    help = "Ended requests, failed ones included."
    yield counter("request_success", help, [({"finished_reason": reason}, count) for reason, count in ends.items()])
    refused = [({"reason": "max_num_queued_reqs"}, metrics.refused[QUEUE_FULL])]
    yield counter("admission_rejections", "Requests refused, since max_num_queued_reqs were in flight.", refused)
    cached = metrics.num_cached_tokens
    sources = {
        "local_compute": metrics.num_prompt_tokens - cached,
        "local_cache_hit": cached,
        "external_kv_transfer": 0,
    }
    help = "Prompt tokens of prefilled requests, by the source of their KV."
    yield counter("prompt_tokens_by_source", help, [({"source": name}, count) for name, count in sources.items()])
    deferred = scheduler.num_waiting_for_nodes
    reasons = {"capacity": scheduler.num_queued - deferred, "deferred": deferred}
    help = "Requests whose prefill has not begun; deferred: no node can take them now."
    yield gauge("num_requests_waiting_by_reason", help, [({"reason": name}, count) for name, count in reasons.items()])
    states = {"awake": is_path, "weights_offloaded": False, "discard_all": not is_path}
    help = "State of the engine; awake while nodes can serve a request."
    yield gauge("engine_sleep_state", help, [({"sleep_state": name}, value) for name, value in states.items()])
    yield gauge("cache_config_info", "Configuration of each node's KV cache.", [(_cache(node), 1) for node in nodes])


def _cache(node: Node) -> Labels:
    hello = node.hello
    dtype = hello.node.fingerprint.get("kv_cache_dtype", "")
    return {
        "node": node.name,
        "block_size": str(hello.block_size),
        "num_gpu_blocks": str(hello.num_blocks),
        "cache_dtype": dtype,
    }


# ---- figures of the attached nodes, from their heartbeats ----


def node_figures(nodes: Sequence[Node], scheduler: Scheduler, *, is_path: bool) -> Iterator[Figure]:
    """Yield the figures of the attached nodes. `is_path`: the nodes can serve a request.

    Counters of a node start with its process and appear after its first report: otherwise a node that attaches again
    would seem to start from zero.
    """
    yield gauge("nodes", "Attached nodes.", [({"role": role}, sum(n.role == role for n in nodes)) for role in ROLES])
    yield gauge("ready", "1 while nodes can serve a request.", [({}, is_path)])
    help = "Different numerics among the attached nodes; with more than one, outputs may differ in bits between nodes."
    yield gauge("node_kinds", help, [({}, num_kinds(nodes))])
    drained = [(_labels(node), scheduler.load_of(node).state == DRAINED) for node in nodes]
    yield gauge("node_drained", "1 once a drain of the node has finished.", drained)
    yield from _gauges(nodes)
    yield from _node_totals([node for node in nodes if node.has_reported])


def _gauges(nodes: Sequence[Node]) -> Iterator[Figure]:
    def one(name: str, help: str, value: Callable[[Node], float], *vllm: str) -> Figure:
        return gauge(f"node_{name}", help, [(_labels(node), value(node)) for node in nodes], *vllm)

    yield one("ready", "1 while the node accepts requests, 0 while it drains.", lambda node: node.is_ready)
    yield one("requests_running", "Requests in the running batch of the node.", lambda node: node.load.num_running)
    yield one("requests_waiting", "Requests that wait on the node.", lambda node: node.load.num_waiting)
    yield one(
        "waiting_tokens", "Tokens that wait to be computed on the node.", lambda node: node.load.num_waiting_tokens
    )
    yield one(
        "kv_cache_usage_ratio", "KV cache usage: fraction of the KV blocks in use.", _kv_usage, "kv_cache_usage_perc"
    )
    yield one("kv_blocks", "KV blocks of the node.", lambda node: node.hello.num_blocks)
    yield one("kv_blocks_cached", "Free KV blocks that the prefix cache has.", lambda node: node.load.num_blocks_cached)
    yield one(
        "kv_blocks_leaked",
        "KV blocks in use by no request; always 0 unless there is a defect.",
        lambda node: node.load.num_blocks_leaked,
    )
    yield one(
        "resident_memory_bytes", "Resident memory of the first process of the node.", lambda node: node.load.rss_bytes
    )
    yield one("step_seconds", "Median time of recent steps.", lambda node: node.load.step_s)
    help = "Longest of the last 64 times between two heartbeats."
    yield one("longest_heartbeat_gap_seconds", help, lambda node: node.load.longest_heartbeat_gap_s)
    help = "Losses of the node in the last 10 minutes; 3 or more: it flaps."
    yield one("recent_losses", help, lambda node: node.load.num_losses)
    yield one("step_age_seconds", "Age of the running step; 0 when idle.", lambda node: node.step_age_s)
    help = "Prefill rate in prompt tokens/s, in steps without decode."
    yield one("prefill_tokens_per_second", help, lambda node: node.load.prefill_tokens_per_s)


def _node_totals(nodes: Sequence[Node]) -> Iterator[Figure]:
    def one(name: str, help: str, value: Callable[[NodeLoad], float], *vllm: str) -> Figure:
        return counter(f"node_{name}", help, [(_name(node), value(node.load)) for node in nodes], *vllm)

    yield one("steps", "Steps of the node.", lambda load: load.num_steps)
    yield one("preemptions", "Preemptions.", lambda load: load.num_preemptions, "num_preemptions")
    yield one("prefill_tokens", "Prompt tokens that the node has computed.", lambda load: load.num_prefill_tokens)
    help = "Prompt tokens of requests that the node has taken, also where the KV came from another node."
    yield one("prompt_tokens", help, lambda load: load.num_prompt_tokens)
    yield one(
        "prompt_tokens_cached",
        "Prompt tokens whose KV came from the prefix cache of the node.",
        lambda load: load.num_cached_tokens,
    )
    yield one("transferred_bytes", "KV bytes sent and received.", lambda load: load.num_kv_bytes)
    yield one(
        "transfers_failed",
        "KV transfers that failed, without those of aborted requests.",
        lambda load: load.num_transfers_failed,
    )
    yield from _kv_offloads([node for node in nodes if node.load.HasField("tier")])
    steps = [(_name(node), observed) for node in nodes if (observed := _step_tokens(node.load)) is not None]
    yield histogram("node_step_tokens", "Tokens computed in one step.", steps, "iteration_tokens_total")


def _kv_offloads(nodes: Sequence[Node]) -> Iterator[Figure]:
    def values(value: Callable[[TierLoad], float]) -> list[tuple[Labels, float]]:
        return [(_name(node), value(node.load.tier)) for node in nodes]

    if not nodes:
        return
    help = "KV bytes offloaded to host memory and disk."
    yield gauge("node_kv_tier_bytes", help, values(lambda tier: tier.host_bytes + tier.disk_bytes))
    yield counter("node_kv_tier_hits", "Offloaded blocks loaded.", values(lambda tier: tier.num_hits))
    help = "Full blocks of prompts in neither the prefix cache nor the KV offload."
    yield counter("node_kv_tier_misses", help, values(lambda tier: tier.num_misses))
    help = "Loads and stores of the KV offload that failed or were abandoned as too slow."
    lost = values(lambda tier: tier.num_damaged + tier.num_late + tier.num_unwritten)
    yield counter("node_kv_tier_failures", help, lost)
    help = "Computing time saved by loads, less the time of the loads."
    yield gauge("node_kv_tier_saved_seconds", help, values(lambda tier: tier.saved_s))


def _labels(node: Node) -> Labels:
    return {"node": node.name, "role": node.role}


def _name(node: Node) -> Labels:
    """Return the labels of a counter, without the role, whose change would count increments twice in a rate."""
    return {"node": node.name}


def _kv_usage(node: Node) -> float:
    num_blocks = node.hello.num_blocks
    return 1 - min(node.load.num_blocks_free, num_blocks) / num_blocks


def _step_tokens(load: NodeLoad) -> Histogram | None:
    """Return the node's histogram of tokens a step, or None when the node does not count them."""
    observed = Histogram(BATCH)
    if len(load.step_tokens) != len(observed.counts):
        return None
    observed.counts[:] = load.step_tokens
    observed.sum = load.num_step_tokens
    return observed
