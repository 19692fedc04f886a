"""What /metrics says, in Prometheus' words.

Every figure has a name of ours. Where vLLM has the same figure, it stands under vLLM's name too, out of the same
counter and with vLLM's labels: `engine` is the node that says it, or COORDINATOR for what is measured here.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from coordinator.control.instructions import MoveOutcome
from coordinator.control.kinds import num_kinds
from coordinator.control.metrics import BOUNDS_S, Histogram, Metrics
from coordinator.control.outcomes import FINISH_REASONS
from coordinator.control.registry import Node, Registry
from coordinator.control.timeline import Phase
from coordinator.control.tracker import RESTART_REASONS, Tracker
from coordinator.doors.statuses import CODES
from serving_core.shapes import ROLES

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
COORDINATOR: Final = "coordinator"
VLLM_PHASES: Final = {
    Phase.PREFILL_QUEUE: "request_queue_time_seconds",
    Phase.PREFILL: "request_prefill_time_seconds",
    Phase.DECODE: "request_decode_time_seconds",
}
_LE: Final = [*map(str, BOUNDS_S), "+Inf"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of any kind: its values by their labels, whose names are always the same."""

    kind: Callable[..., Any]  # a class of metric families
    name: str
    help: str
    values: Sequence[tuple[Mapping[str, str], float | Histogram]]
    vllm: Sequence[str] = ()  # names of vLLM's


class Exposition(Collector):
    """The figures of one coordinator, as they are when they are asked for."""

    def __init__(self, metrics: Metrics, tracker: Tracker, registry: Registry, model_name: str) -> None:
        self._metrics = metrics
        self._tracker = tracker
        self._registry = registry
        self._model_name = model_name

    def render(self) -> bytes:
        """The text of all figures, of type CONTENT_TYPE."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        nodes = self._registry.nodes
        for figures in (_times(self._metrics), _totals(self._metrics), _live(self._tracker), _nodes(nodes)):
            for figure in figures:
                yield _family(figure, f"splitserve_{figure.name}", dict)
                for name in figure.vllm:
                    yield _family(figure, f"vllm:{name}", self._vllm_labels)

    def _vllm_labels(self, labels: Mapping[str, str]) -> dict[str, str]:
        others = {name: value for name, value in labels.items() if name not in ("node", "role")}
        return {"model_name": self._model_name, "engine": labels.get("node", COORDINATOR), **others}


def _times(metrics: Metrics) -> Iterator[Figure]:
    def figure(name: str, help: str, histogram: Histogram, vllm: str | None) -> Figure:
        return Figure(HistogramMetricFamily, name, help, [({}, histogram)], [vllm] if vllm else [])

    for name, help, histogram in (
        ("time_to_first_token_seconds", "From the arrival of a request to its first token.", metrics.ttft),
        ("inter_token_latency_seconds", "From one token of an answer to the next.", metrics.itl),
        ("request_time_per_output_token_seconds", "Mean of an answer's tokens after the first.", metrics.tpot),
        ("e2e_request_latency_seconds", "From the arrival of a request to the end of its answer.", metrics.e2e),
    ):
        yield figure(name, help, histogram, name)
    help = "From the last token before a running answer moved to the first one after it."
    yield figure("move_pause_seconds", help, metrics.move_pause, None)
    for phase, histogram in metrics.phases.items():
        help = f"Part of an answer's time: {phase.value.replace('_', ' ')}."
        yield figure(f"request_{phase.value}_seconds", help, histogram, VLLM_PHASES.get(phase))


def _totals(metrics: Metrics) -> Iterator[Figure]:
    def total(name: str, help: str, value: int, *vllm: str) -> Figure:
        return Figure(CounterMetricFamily, name, help, [({}, value)], vllm)

    def totals(name: str, help: str, label: str, known: Iterable[str], counts: Mapping[str, int], *vllm: str) -> Figure:
        values = [({label: key}, count) for key, count in {**dict.fromkeys(known, 0), **counts}.items()]
        return Figure(CounterMetricFamily, name, help, values, vllm)

    prompt, cached = metrics.num_prompt_tokens, metrics.num_cached_tokens
    yield total("prompt_tokens", "Of prompts that were read.", prompt, "prompt_tokens", "prefix_cache_queries")
    yield total("prompt_tokens_cached", "Of those, the ones whose KV was there.", cached, "prefix_cache_hits")
    yield total("generation_tokens", "Of answers.", metrics.num_generated_tokens, "generation_tokens")
    yield total("kv_transferred_bytes", "KV that travelled between nodes.", metrics.num_kv_bytes)
    yield total("kv_saved_bytes", "KV that decode nodes held already.", metrics.num_kv_bytes_saved)
    yield total("moved_kv_bytes", "Of the KV that travelled, that of answers that moved.", metrics.num_moved_kv_bytes)
    yield total("answers_kept", "Answers written where their prompts were read, for want of room.", metrics.num_kept)
    yield total("request_restarts", "Answers that began again on other nodes, after a failure.", metrics.num_restarts)
    finish_reasons, failures = FINISH_REASONS.values(), metrics.transfers_failed
    yield totals(
        "requests_finished",
        "Answers that ended well.",
        "finished_reason",
        finish_reasons,
        metrics.finished,
        "request_success",
    )
    outcomes = [outcome.value for outcome in MoveOutcome]
    yield totals("moves", "Moves of running answers to other nodes.", "outcome", outcomes, metrics.moves)
    yield totals("requests_failed", "Answers that ended with an error.", "reason", CODES, metrics.failed)
    attained = metrics.attainment.by_class
    answers = {name: counts.num_answers for name, counts in attained.items()}
    yield totals("slo_answers", "Answers with limits that have ended, by class.", "slo_class", attained, answers)
    kept = [
        ({"slo_class": name, "limit": limit}, value)
        for name, counts in attained.items()
        for limit, value in (("ttft", counts.num_ttft_met), ("tpot", counts.num_tpot_met), ("both", counts.num_met))
    ]
    yield Figure(CounterMetricFamily, "slo_attained", "Of those, the ones that kept a limit, or both.", kept)
    yield totals("requests_refused", "Requests that did not begin.", "reason", CODES, metrics.refused)
    yield totals("transfers_failed", "Transfers of KV that failed.", "reason", RESTART_REASONS, failures)


def _live(tracker: Tracker) -> Iterator[Figure]:
    def gauge(name: str, help: str, value: int, vllm: str) -> Figure:
        return Figure(GaugeMetricFamily, name, help, [({}, value)], [vllm])

    yield gauge("requests_running", "Live answers that have a token.", tracker.num_running, "num_requests_running")
    yield gauge("requests_waiting", "Live answers that have none yet.", tracker.num_waiting, "num_requests_waiting")
    help = "Nodes that the load of now needs, for autoscalers."
    yield Figure(GaugeMetricFamily, "nodes_needed", help, [({}, tracker.num_nodes_needed)])


def _nodes(nodes: Sequence[Node]) -> Iterator[Figure]:
    def gauge(name: str, help: str, value: Callable[[Node], float], *vllm: str) -> Figure:
        return Figure(GaugeMetricFamily, f"node_{name}", help, [(_labels(node), value(node)) for node in nodes], vllm)

    def total(name: str, help: str, value: Callable[[Node], float], *vllm: str) -> Figure:
        return Figure(CounterMetricFamily, f"node_{name}", help, [(_labels(node), value(node)) for node in nodes], vllm)

    yield Figure(
        GaugeMetricFamily,
        "nodes",
        "Attached nodes.",
        [({"role": role}, sum(node.role == role for node in nodes)) for role in ROLES],
    )
    help = "Kinds of attached nodes: with more than one, answers may differ in bits between nodes."
    yield Figure(GaugeMetricFamily, "node_kinds", help, [({}, num_kinds(nodes))])
    yield gauge("ready", "1 while the node takes requests, 0 while it drains.", lambda node: node.is_ready)
    yield gauge("requests_running", "Requests in the node's steps.", lambda node: node.load.num_running)
    yield gauge("requests_waiting", "Requests that wait on the node.", lambda node: node.load.num_waiting)
    yield gauge("waiting_tokens", "Tokens that wait to be computed.", lambda node: node.load.num_waiting_tokens)
    yield gauge("kv_cache_usage_ratio", "Part of the KV blocks in use.", _kv_usage, "kv_cache_usage_perc")
    yield gauge("kv_blocks", "KV blocks.", lambda node: node.hello.num_blocks)
    yield gauge("resident_memory_bytes", "Memory of the first process.", lambda node: node.load.rss_bytes)
    yield total("steps", "Steps.", lambda node: node.load.num_steps)
    yield total("preemptions", "Answers put back.", lambda node: node.load.num_preemptions, "num_preemptions")


def _labels(node: Node) -> dict[str, str]:
    return {"node": node.name, "role": node.role}


def _kv_usage(node: Node) -> float:
    num_blocks = node.hello.num_blocks
    return 1 - min(node.load.num_blocks_free, num_blocks) / num_blocks


def _family(figure: Figure, name: str, relabel: Callable[[Mapping[str, str]], dict[str, str]]) -> Metric:
    values = [(relabel(labels), value) for labels, value in figure.values]
    family: Any = figure.kind(name, figure.help, labels=list(values[0][0]) if values else [])
    for labels, value in values:
        if isinstance(value, Histogram):
            family.add_metric([*labels.values()], list(zip(_LE, accumulate(value.counts), strict=True)), value.sum_s)
        else:
            family.add_metric([*labels.values()], value)
    return cast("Metric", family)
