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
        """Create the collector. `api_servers` returns the figures of each API server process, if there are several."""
        self._metrics = metrics
        self._scheduler = scheduler
        self._registry = registry
        self._model_name = model_name
        self._http = http or HttpCounts()
        self._api_servers = api_servers
        self._sheds = sheds or Sheds()
        self._process = ProcessCollector(registry=None)

    def render(self) -> bytes:
        """Return the text of all figures, of type CONTENT_TYPE."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
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
        ("time_to_first_token_seconds", "From the arrival of a request to its first token.", metrics.ttft),
        ("inter_token_latency_seconds", "From one token of an answer to the next.", metrics.itl),
        ("request_time_per_output_token_seconds", "Mean of an answer's tokens after the first.", metrics.tpot),
        ("e2e_request_latency_seconds", "From the arrival of a request to the end of its answer.", metrics.e2e),
    ):
        yield figure(name, help, observed, name)
    help = "From the last token before a running answer moved to the first one after it."
    yield figure("migration_pause_seconds", help, metrics.migration_pause)
    yield figure(
        "prefix_fetch_seconds", "From a node's room for blocks to the end of the prefix fetch.", metrics.prefix_fetch
    )
    for phase, observed in metrics.phases.items():
        help = f"Part of an answer's time: {phase.value.replace('_', ' ')}."
        yield figure(f"request_{phase.value}_seconds", help, observed, *filter(None, [VLLM_PHASES.get(phase)]))
    help = "An answer's time but for the wait to be read."
    yield figure("request_inference_seconds", help, metrics.inference, "request_inference_time_seconds")
    yield figure("request_prompt_tokens", "Tokens of a prompt.", metrics.prompt_lengths, "request_prompt_tokens")
    yield figure("request_params_n", "Answers that a request asks for.", metrics.params_n, "request_params_n")
    help, name = "Most tokens of each answer that a request asks for.", "request_params_max_tokens"
    yield figure(name, help, metrics.params_max_tokens, name)
    names = ("request_generation_tokens", "request_max_num_generation_tokens")  # each sequence is a group of its own
    yield figure("request_generation_tokens", "Tokens of an answer.", metrics.answer_lengths, *names)


def _totals(metrics: Metrics) -> Iterator[Figure]:
    def total(name: str, help: str, value: int, *vllm: str) -> Figure:
        return counter(name, help, [({}, value)], *vllm)

    def totals(name: str, help: str, label: str, known: Iterable[str], counts: Mapping[str, int]) -> Figure:
        values = [({label: key}, count) for key, count in {**dict.fromkeys(known, 0), **counts}.items()]
        return counter(name, help, values)

    prompt, cached = metrics.num_prompt_tokens, metrics.num_cached_tokens
    yield total("prompt_tokens", "Of prompts that were read.", prompt, "prompt_tokens", "prefix_cache_queries")
    help = "Of those, the ones whose KV was there."
    yield total("prompt_tokens_cached", help, cached, "prefix_cache_hits", "prompt_tokens_cached")
    yield total("generation_tokens", "Of answers.", metrics.num_generated_tokens, "generation_tokens")
    yield total("kv_transferred_bytes", "KV that travelled between nodes.", metrics.num_kv_bytes)
    yield total("kv_saved_bytes", "KV that decode nodes held already.", metrics.num_kv_bytes_saved)
    yield total(
        "moved_kv_bytes", "Of the KV that travelled, that of answers that moved.", metrics.num_migrated_kv_bytes
    )
    yield total("proposed_tokens", "Candidates that were computed for answers that have ended.", metrics.num_proposed)
    yield total("accepted_tokens", "Of those, the ones that became tokens.", metrics.num_accepted)
    yield total("blocks_lent", "Of prompts, that came from other nodes which held them.", metrics.num_fetched_blocks)
    yield total("lent_kv_bytes", "KV of those blocks.", metrics.num_fetched_kv_bytes)
    yield total("answers_kept", "Answers written where their prompts were read, for want of room.", metrics.num_kept)
    help = "Nodes lost that did not stop in good order."
    yield totals("node_losses", help, "cause", LossCause, metrics.node_losses)
    yield total("request_restarts", "Answers that began again on other nodes, after a failure.", metrics.num_restarts)
    finish_reasons, failures = FINISH_REASONS.values(), metrics.transfers_failed
    help = "Answers that ended well."
    yield totals("requests_finished", help, "finished_reason", finish_reasons, metrics.finished)
    yield totals(
        "prefix_fetches",
        "Prefix fetches of blocks to nodes that read.",
        "outcome",
        (FETCHED, NOT_FETCHED),
        metrics.prefix_fetches,
    )
    outcomes = [outcome.value for outcome in MigrationOutcome]
    yield totals("migrations", "Moves of running answers to other nodes.", "outcome", outcomes, metrics.migrations)
    yield totals("requests_failed", "Answers that ended with an error.", "reason", CODES, metrics.failed)
    yield totals("requests_refused", "Requests that did not begin.", "reason", CODES, metrics.refused)
    yield totals("transfers_failed", "Transfers of KV that failed.", "reason", RESTART_REASONS, failures)


def _by_class(metrics: Metrics) -> Iterator[Figure]:
    def times(name: str, help: str, by_class: Mapping[str, Histogram]) -> Figure:
        return histogram(name, help, [({"slo_class": name}, each) for name, each in by_class.items()])

    attained = metrics.attainment.by_class
    answers = [({"slo_class": name}, counts.num_answers) for name, counts in attained.items()]
    yield counter("slo_answers", "Answers with limits that have ended, by class.", answers)
    kept = [
        ({"slo_class": name, "limit": limit}, value)
        for name, counts in attained.items()
        for limit, value in (("ttft", counts.num_ttft_met), ("tpot", counts.num_tpot_met), ("both", counts.num_met))
    ]
    yield counter("slo_attained", "Of those, the ones that kept a limit, or both.", kept)
    help = "To the first token, of answers that have ended, by class."
    yield times("slo_time_to_first_token_seconds", help, metrics.ttft_by_class)
    help = "Mean of an answer's tokens after the first, by class."
    yield times("slo_time_per_output_token_seconds", help, metrics.tpot_by_class)


def _live(scheduler: Scheduler) -> Iterator[Figure]:
    def one(name: str, help: str, value: int, *vllm: str) -> Figure:
        return gauge(name, help, [({}, value)], *vllm)

    yield one("requests_running", "Live answers that are written.", scheduler.num_running, "num_requests_running")
    yield one("requests_waiting", "Live answers that are not yet.", scheduler.num_waiting, "num_requests_waiting")
    held = "Of those, the ones that are held, since they would make answers late."
    yield one("requests_held", held, scheduler.num_deferred)
    yield one("nodes_needed", "Nodes that the load of now needs, for autoscalers.", scheduler.num_nodes_needed)


# ---- figures that vLLM has under other names, so that its dashboards fill ----


def vllm_figures(metrics: Metrics, scheduler: Scheduler, nodes: Sequence[Node], *, is_path: bool) -> Iterator[Figure]:
    """Yield the figures that have no SplitServe name. Names omit vLLM's prefix."""
    ends = {**dict.fromkeys(FINISH_REASONS.values(), 0), **metrics.finished, "error": metrics.failed.total()}
    help = "Answers that have ended, those that failed too."
    yield counter("request_success", help, [({"finished_reason": reason}, count) for reason, count in ends.items()])
    refused = [({"reason": "max_num_queued_reqs"}, metrics.refused[QUEUE_FULL])]
    yield counter("admission_rejections", "Requests that were refused as too many were in flight.", refused)
    cached = metrics.num_cached_tokens
    sources = {
        "local_compute": metrics.num_prompt_tokens - cached,
        "local_cache_hit": cached,
        "external_kv_transfer": 0,
    }
    help = "Of prompts that were read: every token is computed, or found, once."
    yield counter("prompt_tokens_by_source", help, [({"source": name}, count) for name, count in sources.items()])
    deferred = scheduler.num_waiting_for_nodes
    reasons = {"capacity": scheduler.num_waiting - deferred, "deferred": deferred}
    help = "Live answers that are not written yet; deferred: no node can take them now."
    yield gauge("num_requests_waiting_by_reason", help, [({"reason": name}, count) for name, count in reasons.items()])
    states = {"awake": is_path, "weights_offloaded": False, "discard_all": not is_path}
    help = "Awake while there are nodes for a request."
    yield gauge("engine_sleep_state", help, [({"sleep_state": name}, value) for name, value in states.items()])
    yield gauge("cache_config_info", "What each node's KV cache is like.", [(_cache(node), 1) for node in nodes])


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
    """Yield the figures of the attached nodes.

    Counters of a node start with its process and appear after its first report: otherwise a node that attaches again
    would seem to start from zero.
    """
    yield gauge("nodes", "Attached nodes.", [({"role": role}, sum(n.role == role for n in nodes)) for role in ROLES])
    yield gauge("ready", "1 while there are nodes for a request.", [({}, is_path)])
    help = "Kinds of attached nodes: with more than one, answers may differ in bits between nodes."
    yield gauge("node_kinds", help, [({}, num_kinds(nodes))])
    drained = [(_labels(node), scheduler.load_of(node).state == DRAINED) for node in nodes]
    yield gauge("node_drained", "1 once a drain of the node has finished.", drained)
    yield from _gauges(nodes)
    yield from _node_totals([node for node in nodes if node.has_reported])


def _gauges(nodes: Sequence[Node]) -> Iterator[Figure]:
    def one(name: str, help: str, value: Callable[[Node], float], *vllm: str) -> Figure:
        return gauge(f"node_{name}", help, [(_labels(node), value(node)) for node in nodes], *vllm)

    yield one("ready", "1 while the node takes requests, 0 while it drains.", lambda node: node.is_ready)
    yield one("requests_running", "Requests in the node's steps.", lambda node: node.load.num_running)
    yield one("requests_waiting", "Requests that wait on the node.", lambda node: node.load.num_waiting)
    yield one("waiting_tokens", "Tokens that wait to be computed.", lambda node: node.load.num_waiting_tokens)
    yield one("kv_cache_usage_ratio", "Part of the KV blocks in use.", _kv_usage, "kv_cache_usage_perc")
    yield one("kv_blocks", "KV blocks.", lambda node: node.hello.num_blocks)
    yield one(
        "kv_blocks_cached", "Of those, free ones with the KV of prompts.", lambda node: node.load.num_blocks_cached
    )
    yield one("kv_blocks_leaked", "In use, but by no request: always 0.", lambda node: node.load.num_blocks_leaked)
    yield one("resident_memory_bytes", "Memory of the first process.", lambda node: node.load.rss_bytes)
    yield one("step_seconds", "Median of the recent steps.", lambda node: node.load.step_s)
    help = "Longest of the last 64 gaps between two heartbeats: a node that is slow to tell is waited for longer."
    yield one("longest_heartbeat_gap_seconds", help, lambda node: node.load.longest_heartbeat_gap_s)
    help = "Times that it was lost in the last 10 minutes; 3 and more: it flaps."
    yield one("recent_losses", help, lambda node: node.load.num_losses)
    yield one("step_age_seconds", "Of the step that runs; 0 when idle.", lambda node: node.step_age_s)
    help = "Prompt tokens a second in steps that do nothing else."
    yield one("prefill_tokens_per_second", help, lambda node: node.load.prefill_tokens_per_s)


def _node_totals(nodes: Sequence[Node]) -> Iterator[Figure]:
    def one(name: str, help: str, value: Callable[[NodeLoad], float], *vllm: str) -> Figure:
        return counter(f"node_{name}", help, [(_name(node), value(node.load)) for node in nodes], *vllm)

    yield one("steps", "Steps.", lambda load: load.num_steps)
    yield one("preemptions", "Answers put back.", lambda load: load.num_preemptions, "num_preemptions")
    yield one("prompt_tokens", "Tokens of prompts that began on the node.", lambda load: load.num_prompt_tokens)
    yield one("prompt_tokens_cached", "Of those, the ones whose KV was there.", lambda load: load.num_cached_tokens)
    yield one("transferred_bytes", "KV that the node has sent and received.", lambda load: load.num_kv_bytes)
    yield one(
        "transfers_failed",
        "Its transfers that failed, but for those of answers that were cancelled.",
        lambda load: load.num_transfers_failed,
    )
    yield from _second_tiers([node for node in nodes if node.load.HasField("tier")])
    steps = [(_name(node), observed) for node in nodes if (observed := _step_tokens(node.load)) is not None]
    yield histogram("node_step_tokens", "Tokens that one step computed.", steps, "iteration_tokens_total")


def _second_tiers(nodes: Sequence[Node]) -> Iterator[Figure]:
    def values(value: Callable[[TierLoad], float]) -> list[tuple[Labels, float]]:
        return [(_name(node), value(node.load.tier)) for node in nodes]

    if not nodes:
        return
    help = "KV that the second tier holds, in host memory and in its file."
    yield gauge("node_kv_tier_bytes", help, values(lambda tier: tier.host_bytes + tier.disk_bytes))
    yield counter("node_kv_tier_hits", "Blocks read back.", values(lambda tier: tier.num_hits))
    help = "Full blocks of prompts that were computed instead."
    yield counter("node_kv_tier_misses", help, values(lambda tier: tier.num_misses))
    help = "Reads and writes of it that failed or came too late."
    lost = values(lambda tier: tier.num_damaged + tier.num_late + tier.num_unwritten)
    yield counter("node_kv_tier_failures", help, lost)
    help = "Seconds that computing would have taken, less what reading took."
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
