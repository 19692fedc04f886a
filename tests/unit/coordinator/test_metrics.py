"""/metrics: the figures of a scripted run beside those worked out by hand, and every name."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from coordinator.control.metrics import BOUNDS_S, Histogram, Metrics
from coordinator.doors.exposition import Exposition
from tests import fleet_events as events
from tests.unit.coordinator.tracker_kit import World

HISTOGRAMS = {
    "splitserve_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "splitserve_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "splitserve_request_time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "splitserve_e2e_request_latency_seconds": "vllm:e2e_request_latency_seconds",
    "splitserve_move_pause_seconds": None,
    "splitserve_request_prefill_queue_seconds": "vllm:request_queue_time_seconds",
    "splitserve_request_prefill_seconds": "vllm:request_prefill_time_seconds",
    "splitserve_request_credit_wait_seconds": None,
    "splitserve_request_transfer_seconds": None,
    "splitserve_request_decode_queue_seconds": None,
    "splitserve_request_decode_seconds": "vllm:request_decode_time_seconds",
}
COUNTERS = {
    "splitserve_prompt_tokens_total": "vllm:prompt_tokens_total",
    "splitserve_prompt_tokens_cached_total": "vllm:prefix_cache_hits_total",
    "splitserve_generation_tokens_total": "vllm:generation_tokens_total",
    "splitserve_kv_transferred_bytes_total": None,
    "splitserve_kv_saved_bytes_total": None,
    "splitserve_request_restarts_total": None,
    "splitserve_moved_kv_bytes_total": None,
    "splitserve_moves_total": None,
    "splitserve_answers_kept_total": None,
    "splitserve_requests_finished_total": "vllm:request_success_total",
    "splitserve_slo_answers_total": None,
    "splitserve_slo_attained_total": None,
    "splitserve_requests_failed_total": None,
    "splitserve_requests_refused_total": None,
    "splitserve_transfers_failed_total": None,
    "splitserve_node_steps_total": None,
    "splitserve_node_preemptions_total": "vllm:num_preemptions_total",
}
GAUGES = {
    "splitserve_requests_running": "vllm:num_requests_running",
    "splitserve_requests_waiting": "vllm:num_requests_waiting",
    "splitserve_nodes": None,
    "splitserve_nodes_needed": None,
    "splitserve_node_kinds": None,
    "splitserve_node_ready": None,
    "splitserve_node_requests_running": None,
    "splitserve_node_requests_waiting": None,
    "splitserve_node_waiting_tokens": None,
    "splitserve_node_kv_cache_usage_ratio": "vllm:kv_cache_usage_perc",
    "splitserve_node_kv_blocks": None,
    "splitserve_node_resident_memory_bytes": None,
}
SECOND_ALIAS = "vllm:prefix_cache_queries_total"  # of splitserve_prompt_tokens_total


@pytest.fixture
def world():
    return World(max_restarts=1)


def families(world):
    text = Exposition(world.metrics, world.tracker, world.registry, "m").render().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(world):
    """Every sample by its name and labels, as it would be written."""
    return {
        f"{sample.name}{{{','.join(f'{key}={value}' for key, value in sorted(sample.labels.items()))}}}": sample.value
        for family in families(world).values()
        for sample in family.samples
    }


def test_the_names_are_these_and_every_one_is_there_from_the_start(world):
    found = {(family.type, sample.name) for family in families(world).values() for sample in family.samples}
    expected = {("counter", SECOND_ALIAS)}
    for kind, names in (("counter", COUNTERS), ("gauge", GAUGES)):
        expected |= {(kind, name) for pair in names.items() for name in pair if name}
    parts = ("bucket", "count", "sum")
    expected |= {
        ("histogram", f"{name}_{part}") for pair in HISTOGRAMS.items() for name in pair if name for part in parts
    }
    assert found == expected


def test_buckets_hold_what_is_at_most_their_bound(world):
    histogram = world.metrics.e2e = Histogram()
    for seconds in (0.0, 0.001, 0.0011, 640.0, 641.0):
        histogram.observe(seconds)
    found = values(world)
    name = "splitserve_e2e_request_latency_seconds"
    bounds = {bound: found[f"{name}_bucket{{le={bound}}}"] for bound in ("0.001", "0.002", "320.0", "640.0", "+Inf")}
    assert bounds == {"0.001": 2, "0.002": 3, "320.0": 3, "640.0": 4, "+Inf": 5}
    assert (found[f"{name}_count{{}}"], found[f"{name}_sum{{}}"]) == (5, pytest.approx(1281.0021))
    assert list(BOUNDS_S) == sorted(set(BOUNDS_S))
    assert sum(bound < 1 for bound in BOUNDS_S) > len(BOUNDS_S) / 2


def run_of_two(world):
    """One answer of four tokens that moves nodes once, for a transfer that failed; one whose client leaves."""
    world.submit("a/0", now=10.0)
    attempt = world.attempt
    world.first(attempt, now=12.0, prefill_s=0.5, num_cached_tokens=2)
    world.tell("d0", events.reserved(attempt), 13.0)
    world.tell("d0", events.failed(attempt, "TRANSFER_FAILED"), 14.0)
    attempt = world.attempt
    token = events.sampled(attempt, 1, 101)
    world.tell("p1", events.first_token(token, prefill_s=1.0, num_cached_tokens=3), 16.0)
    world.tell("d1", events.reserved(attempt), 16.0)
    world.tell("d1", events.committed(attempt, num_bytes=800, num_bytes_saved=200), 17.0)
    world.tell("d1", events.committed(attempt, num_bytes=800, num_bytes_saved=200), 17.0)  # repeated: not counted again
    tokens = [events.sampled(attempt, 2, 102), events.sampled(attempt, 3, 103, events.STOP)]
    world.tell("d1", events.step_tokens(*tokens, step_s=0.5), 19.0)
    world.metrics.answered("stop", world.outcome)
    world.submit("b/0", now=20.0)
    world.short(world.tracker.finish("b/0", events.ABORT, 21.0))
    world.metrics.answered("abort", world.outcome)


def test_the_figures_of_a_run(world):
    run_of_two(world)
    found = values(world)
    seconds = {name.removeprefix("splitserve_").removesuffix("_seconds"): (
        found[f"{name}_count{{}}"], found[f"{name}_sum{{}}"]) for name in HISTOGRAMS}  # fmt: skip
    assert seconds == {
        "time_to_first_token": (1, 2.0),
        "inter_token_latency": (3, 7.0),  # 12 to 16 over the move, 16 to 19, and one with that
        "request_time_per_output_token": (1, pytest.approx(7.0 / 3)),
        "e2e_request_latency": (1, 9.0),
        "move_pause": (0, 0.0),
        "request_prefill_queue": (1, 2.5),  # 10 to 11.5, then 14 to 15
        "request_prefill": (1, 1.5),
        "request_credit_wait": (1, 1.0),
        "request_transfer": (1, 2.0),  # 13 to 14, then 16 to 17
        "request_decode_queue": (1, 1.5),
        "request_decode": (1, 0.5),
    }
    totals = {name: found[f"{name}{{}}"] for name in list(COUNTERS)[:6]}
    assert list(totals.values()) == [3, 2, 4, 800, 200, 1]
    reasons = {key: value for key, value in found.items() if "reason=" in key and value and key.startswith("split")}
    assert reasons == {
        "splitserve_requests_finished_total{finished_reason=stop}": 1,
        "splitserve_requests_finished_total{finished_reason=abort}": 1,
        "splitserve_transfers_failed_total{reason=TRANSFER_FAILED}": 1,
    }


def test_vllms_names_tell_the_same(world):
    run_of_two(world)
    world.registry.heartbeat(
        world.registry.find("d0"), events.heartbeat(num_blocks_free=75, num_preemptions=4).heartbeat, 0.0
    )
    found = families(world)

    def told(name, labels):
        family = found[name.removesuffix("_total")]
        return [
            (
                sample.name.removeprefix(name),
                {key: sample.labels[key] for key in labels if key in sample.labels},
                sample.value,
            )
            for sample in family.samples
        ]

    own_labels = ("le", "finished_reason")
    second = ("splitserve_prompt_tokens_total", SECOND_ALIAS)
    for own, vllm in (*HISTOGRAMS.items(), *COUNTERS.items(), *GAUGES.items(), second):
        if vllm is not None:
            assert told(own, own_labels) == told(vllm, own_labels)
            for sample in found[vllm.removesuffix("_total")].samples:
                assert sample.labels.keys() - own_labels == {"model_name", "engine"}
    assert values(world)["vllm:kv_cache_usage_perc{engine=d0,model_name=m}"] == 0.25
    assert values(world)["vllm:num_preemptions_total{engine=d0,model_name=m}"] == 4
    assert values(world)["vllm:num_requests_running{engine=coordinator,model_name=m}"] == 0


def test_live_answers_run_once_they_have_a_token(world):
    for name in ("a/0", "b/0", "c/0"):
        world.submit(name)
    world.first(world.attempt)
    found = values(world)
    assert (found["splitserve_requests_running{}"], found["splitserve_requests_waiting{}"]) == (1, 2)


def test_figures_of_nodes_are_those_of_attached_ones(world):
    load = {"num_running": 3, "num_waiting": 2, "num_waiting_tokens": 70, "num_blocks_free": 250, "rss_bytes": 1000}
    beat = events.heartbeat("draining", num_steps=9, **load).heartbeat
    world.registry.heartbeat(world.registry.find("p1"), beat, 0.0)
    world.lose("d1")
    found = values(world)
    assert (found["splitserve_nodes{role=prefill}"], found["splitserve_nodes{role=decode}"]) == (2, 1)
    assert not any("d1" in key for key in found)
    of_p1 = {key.partition("{")[0]: value for key, value in found.items() if "node=p1,role=prefill" in key}
    assert {name.removeprefix("splitserve_node_"): value for name, value in of_p1.items()} == {
        "ready": 0,
        "requests_running": 3,
        "requests_waiting": 2,
        "waiting_tokens": 70,
        "kv_cache_usage_ratio": 0,  # a node with more free blocks than it has
        "kv_blocks": 100,
        "resident_memory_bytes": 1000,
        "steps_total": 9,
        "preemptions_total": 0,
    }


def test_names_of_models_are_escaped():
    world = World()
    text = Exposition(Metrics(), world.tracker, world.registry, 'a"b\\c\nd').render().decode()
    models = {sample.labels["model_name"] for family in text_string_to_metric_families(text)
              for sample in family.samples if family.name.startswith("vllm:")}  # fmt: skip
    assert models == {'a"b\\c\nd'}
