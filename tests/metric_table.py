"""The tables of metrics in docs/reference/metrics.md: `python -m tests.metric_table` writes them anew.

Their rows are what a coordinator and a node tell, once there has been something to tell of everything.
"""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Final

from prometheus_client.core import Metric

from coordinator.api.exposition import Exposition
from coordinator.api.http.middleware import HttpCounts
from coordinator.api_server_service import ApiServerLink, api_server_figures
from decode_node.speculation import SpeculationCounts
from engine.engine import StepClock
from protos import inference_pb2
from serving_core.figures import BATCH, Histogram, families
from serving_core.node.requests import NodeRequests
from serving_node.metrics import NodeExposition
from serving_node.outputs import StepCounts
from tests import fleet_events as events
from tests.doc_table import DOCS, page_with
from tests.unit.coordinator.scheduler_kit import World

PAGE: Final = DOCS / "reference" / "metrics.md"
OF_PROCESS: Final = "process_"
VLLM: Final = "vllm:"
OF_SAMPLES: Final = ("le",)  # labels that every histogram has


def coordinator_metrics() -> list[Metric]:
    """What the coordinator of a fleet of four nodes tells, with two API servers."""
    world, http = World(), HttpCounts()
    http.ended("/v1/completions", "POST", 200, 0.1)
    steps = [0] * (len(BATCH) + 1)
    for name in ("p0", "p1", "d0", "d1"):
        beat = events.heartbeat(num_blocks_free=100, step_tokens=steps, tier=inference_pb2.TierLoad()).heartbeat
        world.registry.heartbeat(world.registry.find(name), beat, 0.0)
    api_servers = [ApiServerLink("1"), ApiServerLink("2")]
    told = Exposition(
        world.metrics, world.scheduler, world.registry, "m", http, lambda: api_server_figures(api_servers)
    )
    return list(told.collect())


def node_metrics() -> list[Metric]:
    """What a node tells at its own port, but for its process."""
    load = inference_pb2.NodeLoad(ranks=[inference_pb2.RankLoad(rank=0)], tier=inference_pb2.TierLoad())
    counts = {"steps": StepCounts(), "speculation": SpeculationCounts(), "clock": StepClock()}
    numbers = {"step_age_s": 0.0, "num_divided_passes": 0}
    node = SimpleNamespace(name="n", engine={}, **counts, **numbers, node_requests=NodeRequests(), load=lambda: load)
    transport = SimpleNamespace(num_shared_bytes=0)
    end = SimpleNamespace(num_bytes=0, num_failed=0, seconds=Histogram(), transport=transport)
    return list(families(NodeExposition(node, end, end).figures()))


def labels_of(metric: Metric) -> list[str]:
    """The names of its labels."""
    return [label for label in metric.samples[0].labels if label not in OF_SAMPLES]


def full_name(metric: Metric) -> str:
    """As queries have it, but for the ends of a histogram's names."""
    return f"{metric.name}_total" if metric.type == "counter" else metric.name


def table() -> str:
    """The part of the page between the marks."""
    told = [metric for metric in coordinator_metrics() if not metric.name.startswith(OF_PROCESS)]
    own = [metric for metric in told if not metric.name.startswith(VLLM)]
    aliases = [metric for metric in told if metric.name.startswith(VLLM)]
    parts = [
        ("## The coordinator, at `/metrics` of its HTTP port", _lines(own)),
        ("## Each node with `--metrics-port`", _lines(node_metrics())),
        (
            "## Under vLLM's names at the coordinator",
            [", ".join(f"`{name}`" for name in sorted(map(full_name, aliases)))],
        ),
    ]
    return "\n".join(line for title, lines in parts for line in ("", title, "", *lines)) + "\n\n"


def _lines(metrics: Iterable[Metric]) -> Iterable[str]:
    yield "| name{labels} | kind | |"
    yield "|---|---|---|"
    for metric in sorted(metrics, key=full_name):
        labels = ",".join(label for label in labels_of(metric) if label not in ("model_name", "engine"))
        name = full_name(metric) + (f"{{{labels}}}" if labels else "")
        yield f"| `{name}` | {metric.type} | {metric.documentation} |"


def page() -> str:
    """The whole page, with the tables as they ought to be."""
    return page_with(table(), PAGE, "tests.metric_table")


if __name__ == "__main__":
    PAGE.write_text(page())
