"""What counting and scraping cost, in CPU time of one core: `python -m tests.metric_costs`. Best of several rounds."""

import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

from prometheus_client.exposition import generate_latest

from coordinator.api.exposition import Exposition
from coordinator.api.http.middleware import HttpCounts
from coordinator.control.metrics import Metrics
from protos import inference_pb2
from serving_core.figures import BATCH, Histogram, families
from serving_core.node.costs import StepLoad
from serving_core.node.requests import NodeRequests
from serving_node.metrics import NodeExposition
from serving_node.outputs import StepCounts
from tests import fleet_events as events
from tests.unit.coordinator.scheduler_kit import World

ROUNDS = 9
STEPS = [1] * (len(BATCH) + 1)


def cpu_us(work: Callable[[], object], number: int) -> float:
    """Microseconds of one call."""
    best = float("inf")
    for _ in range(ROUNDS):
        began_ns = time.thread_time_ns()
        for _ in range(number):
            work()
        best = min(best, (time.thread_time_ns() - began_ns) / number / 1e3)
    return best


class _Text:
    """A collector of what has been taken already."""

    def __init__(self, metrics):
        self._metrics = metrics

    def collect(self):
        return self._metrics


def of_node() -> dict[str, float]:
    counts, load = StepCounts(), StepLoad(num_sequences=32, num_cached=3200)
    told = inference_pb2.NodeLoad(ranks=[inference_pb2.RankLoad(rank=0)], step_tokens=STEPS)
    node = SimpleNamespace(
        name="n",
        engine={},
        steps=counts,
        step_age_s=0.0,
        num_divided_passes=0,
        node_requests=NodeRequests(),
        load=lambda: told,
    )
    end = SimpleNamespace(num_bytes=0, num_failed=0, seconds=Histogram())
    exposition = NodeExposition(node, end, end)
    taken = _Text(list(families(exposition.figures())))
    return {
        "node: counting, a step": cpu_us(lambda: counts.add(load, 0.01), 20_000),
        "node: a scrape, on its event loop": cpu_us(lambda: list(families(exposition.figures())), 100),
        "node: a scrape, in its thread": cpu_us(lambda: generate_latest(taken), 100),
    }


def of_coordinator(num_nodes: int) -> float:
    world, http = World(nodes=[f"{'pd'[i % 2]}{i}" for i in range(num_nodes)]), HttpCounts()
    http.ended("/v1/completions", "POST", 200, 0.1)
    for node in world.registry.nodes:
        world.registry.heartbeat(node, events.heartbeat(num_blocks_free=50, step_tokens=STEPS).heartbeat, 0.0)
    exposition = Exposition(world.metrics, world.scheduler, world.registry, "m", http)
    return cpu_us(exposition.render, 5)


def main() -> None:
    metrics = Metrics()
    timeline = inference_pb2.Timeline(ttft_s=0.1, e2e_s=2.0)
    complete = inference_pb2.Complete(completion_tokens=64, prompt_tokens=512, timeline=timeline)
    figures = of_node() | {
        "coordinator: counting, a token": cpu_us(lambda: metrics.tokens_came(1, 0.02, is_first=False), 20_000),
        "coordinator: counting, an answer": cpu_us(lambda: metrics.ended("stop", complete), 2_000),
        "coordinator: a scrape, 4 nodes": of_coordinator(4),
        "coordinator: a scrape, 64 nodes": of_coordinator(64),
    }
    for what, us in figures.items():
        sys.stdout.write(f"{what:40} {us:10.1f} µs\n")


if __name__ == "__main__":
    main()
