"""/metrics: the figures of a scripted run beside those worked out by hand, and every name."""

from types import SimpleNamespace

import pytest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from coordinator.api.exposition import Exposition
from coordinator.control.metrics import Metrics
from coordinator.control.slo import UNNAMED, parse_slo_classes
from protos import inference_pb2
from serving_core.figures import BATCH, SECONDS, TOKENS, Histogram
from tests import fleet_events as events
from tests.metric_table import PAGE, page
from tests.unit.coordinator.scheduler_kit import World

HISTOGRAMS = {
    "splitserve_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "splitserve_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "splitserve_request_time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "splitserve_e2e_request_latency_seconds": "vllm:e2e_request_latency_seconds",
    "splitserve_migration_pause_seconds": None,
    "splitserve_prefix_fetch_seconds": None,
    "splitserve_request_prefill_queue_seconds": "vllm:request_queue_time_seconds",
    "splitserve_request_prefill_seconds": "vllm:request_prefill_time_seconds",
    "splitserve_request_kv_alloc_seconds": None,
    "splitserve_request_kv_transfer_seconds": None,
    "splitserve_request_decode_queue_seconds": None,
    "splitserve_request_decode_seconds": "vllm:request_decode_time_seconds",
    "splitserve_request_inference_seconds": "vllm:request_inference_time_seconds",
}
LENGTHS = {
    "splitserve_request_prompt_tokens": "vllm:request_prompt_tokens",
    "splitserve_request_generation_tokens": "vllm:request_generation_tokens",
    "splitserve_request_params_n": "vllm:request_params_n",
    "splitserve_request_params_max_tokens": "vllm:request_params_max_tokens",
    "splitserve_node_step_tokens": "vllm:iteration_tokens_total",
    "splitserve_slo_time_to_first_token_seconds": None,
    "splitserve_slo_time_per_output_token_seconds": None,
}
COUNTERS = {
    "splitserve_prompt_tokens_total": "vllm:prompt_tokens_total",
    "splitserve_prompt_tokens_cached_total": "vllm:prefix_cache_hits_total",
    "splitserve_generation_tokens_total": "vllm:generation_tokens_total",
    "splitserve_kv_transferred_bytes_total": None,
    "splitserve_kv_saved_bytes_total": None,
    "splitserve_request_restarts_total": None,
    "splitserve_migrated_kv_bytes_total": None,
    "splitserve_migrations_total": None,
    "splitserve_proposed_tokens_total": None,
    "splitserve_accepted_tokens_total": None,
    "splitserve_node_losses_total": None,
    "splitserve_connections_shed_total": None,
    "splitserve_prefix_fetches_total": None,
    "splitserve_fetched_blocks_total": None,
    "splitserve_fetched_kv_bytes_total": None,
    "splitserve_local_decodes_total": None,
    "splitserve_requests_finished_total": None,
    "splitserve_slo_requests_total": None,
    "splitserve_slo_attained_total": None,
    "splitserve_requests_failed_total": None,
    "splitserve_requests_refused_total": None,
    "splitserve_transfers_failed_total": None,
    "splitserve_node_steps_total": None,
    "splitserve_node_preemptions_total": "vllm:num_preemptions_total",
    "splitserve_node_prefill_tokens_total": None,
    "splitserve_node_prompt_tokens_total": None,
    "splitserve_node_prompt_tokens_cached_total": None,
    "splitserve_node_transferred_bytes_total": None,
    "splitserve_node_transfers_failed_total": None,
}
GAUGES = {
    "splitserve_requests_running": "vllm:num_requests_running",
    "splitserve_requests_waiting": "vllm:num_requests_waiting",
    "splitserve_requests_deferred": None,
    "splitserve_nodes": None,
    "splitserve_ready": None,
    "splitserve_nodes_needed": None,
    "splitserve_prefill_nodes_needed": None,
    "splitserve_decode_nodes_needed": None,
    "splitserve_node_kinds": None,
    "splitserve_node_ready": None,
    "splitserve_node_drained": None,
    "splitserve_node_requests_running": None,
    "splitserve_node_requests_waiting": None,
    "splitserve_node_waiting_tokens": None,
    "splitserve_node_kv_cache_usage_ratio": "vllm:kv_cache_usage_perc",
    "splitserve_node_kv_blocks": None,
    "splitserve_node_kv_blocks_cached": None,
    "splitserve_node_kv_blocks_leaked": None,
    "splitserve_node_step_seconds": None,
    "splitserve_node_longest_heartbeat_gap_seconds": None,
    "splitserve_node_recent_losses": None,
    "splitserve_node_step_age_seconds": None,
    "splitserve_node_prefill_tokens_per_second": None,
    "splitserve_node_resident_memory_bytes": None,
}
SECOND_ALIASES = {
    "splitserve_prompt_tokens_total": "vllm:prefix_cache_queries_total",
    "splitserve_prompt_tokens_cached_total": "vllm:prompt_tokens_cached_total",
    "splitserve_request_generation_tokens": "vllm:request_max_num_generation_tokens",
}
OF_VLLM_ALONE = {
    ("counter", "vllm:request_success_total"),
    ("counter", "vllm:admission_rejections_total"),
    ("counter", "vllm:prompt_tokens_by_source_total"),
    ("gauge", "vllm:num_requests_waiting_by_reason"),
    ("gauge", "vllm:engine_sleep_state"),
    ("gauge", "vllm:cache_config_info"),
}
NO_STEPS = [0] * (len(BATCH) + 1)


@pytest.fixture
def world():
    """Whose nodes have told how they do."""
    world = World(max_restarts=1)
    for name in ("p0", "p1", "d0", "d1"):
        beat(world, name, num_blocks_free=100)
    return world


def beat(world, name, state="ready", step_tokens=NO_STEPS, **load):
    heartbeat = events.heartbeat(state, step_tokens=step_tokens, **load).heartbeat
    world.registry.heartbeat(world.registry.find(name), heartbeat, 0.0)


def families(world):
    text = Exposition(world.metrics, world.scheduler, world.registry, "m").render().decode()
    told = {family.name: family for family in text_string_to_metric_families(text)}
    return {name: family for name, family in told.items() if not name.startswith("process_")}


def values(world):
    """Every sample by its name and labels, as it would be written."""
    return {
        f"{sample.name}{{{','.join(f'{key}={value}' for key, value in sorted(sample.labels.items()))}}}": sample.value
        for family in families(world).values()
        for sample in family.samples
    }


def test_the_names_are_these_and_every_one_is_there_from_the_start(world):
    found = {(family.type, sample.name) for family in families(world).values() for sample in family.samples}
    expected = set(OF_VLLM_ALONE)
    for kind, names in (("counter", COUNTERS), ("gauge", GAUGES)):
        expected |= {(kind, name) for pair in names.items() for name in pair if name}
    histograms = [name for pair in (HISTOGRAMS | LENGTHS).items() for name in pair if name]
    for alias in SECOND_ALIASES.values():
        if alias.endswith("_total"):
            expected.add(("counter", alias))
        else:
            histograms.append(alias)
    expected |= {("histogram", f"{name}_{part}") for name in histograms for part in ("bucket", "count", "sum")}
    assert found == expected


def test_the_page_of_the_docs_has_every_metric():
    assert PAGE.read_text() == page(), "python -m tests.metric_table writes it"


def test_buckets_hold_what_is_at_most_their_bound(world):
    histogram = world.metrics.e2e = Histogram()
    for seconds in (0.0, 0.001, 0.0011, 640.0, 641.0):
        histogram.observe(seconds)
    found = values(world)
    name = "splitserve_e2e_request_latency_seconds"
    bounds = {bound: found[f"{name}_bucket{{le={bound}}}"] for bound in ("0.001", "0.002", "320.0", "640.0", "+Inf")}
    assert bounds == {"0.001": 2, "0.002": 3, "320.0": 3, "640.0": 4, "+Inf": 5}
    assert (found[f"{name}_count{{}}"], found[f"{name}_sum{{}}"]) == (5, pytest.approx(1281.0021))
    for several in (SECONDS, TOKENS, BATCH):
        assert list(several) == sorted(set(several))
    assert sum(bound < 1 for bound in SECONDS) > len(SECONDS) / 2


def test_one_observation_may_stand_for_several():
    one_by_one, at_once = Histogram(TOKENS), Histogram(TOKENS)
    for value in (3, 3, 3, 0, 10**6):
        one_by_one.observe(value)
    at_once.observe(3, 3)
    at_once.observe(0)
    at_once.observe(10**6)
    assert (at_once.counts, at_once.sum) == (one_by_one.counts, one_by_one.sum)
    assert at_once.counts[0] == at_once.counts[-1] == 1


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
    world.metrics.ended("stop", world.outcome)
    world.submit("b/0", now=20.0)
    world.short(world.scheduler.finish("b/0", events.ABORT, 21.0))
    world.metrics.ended("abort", world.outcome)


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
        "migration_pause": (0, 0.0),
        "prefix_fetch": (0, 0.0),
        "request_prefill_queue": (1, 2.5),  # 10 to 11.5, then 14 to 15
        "request_prefill": (1, 1.5),
        "request_kv_alloc": (1, 1.0),
        "request_kv_transfer": (1, 2.0),  # 13 to 14, then 16 to 17
        "request_decode_queue": (1, 1.5),
        "request_decode": (1, 0.5),
        "request_inference": (1, 6.5),
    }
    lengths = [found[f"splitserve_request_{name}_tokens_sum{{}}"] for name in ("prompt", "generation")]
    assert lengths == [3, 4]
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
    beat(world, "d0", num_blocks_free=75, num_preemptions=4, step_tokens=[2, 3, *NO_STEPS[2:]], num_step_tokens=8)
    found = families(world)

    def told(name, labels):
        family = found[name if name in found else name.removesuffix("_total")]
        return [
            (
                sample.name.removeprefix(name),
                {key: sample.labels[key] for key in labels if key in sample.labels},
                sample.value,
            )
            for sample in family.samples
        ]

    own_labels = ("le", "finished_reason")
    pairs = [*(HISTOGRAMS | LENGTHS | COUNTERS | GAUGES).items(), *SECOND_ALIASES.items()]
    for own, vllm in pairs:
        if vllm is not None:
            assert told(own, own_labels) == told(vllm, own_labels)
            for sample in found[vllm if vllm in found else vllm.removesuffix("_total")].samples:
                assert sample.labels.keys() - own_labels == {"model_name", "engine"}
    known = values(world)
    assert known["vllm:kv_cache_usage_perc{engine=d0,model_name=m}"] == 0.25
    assert known["vllm:num_preemptions_total{engine=d0,model_name=m}"] == 4
    assert known["vllm:iteration_tokens_total_bucket{engine=d0,le=2.0,model_name=m}"] == 5
    assert known["vllm:iteration_tokens_total_sum{engine=d0,model_name=m}"] == 8
    assert known["vllm:num_requests_running{engine=coordinator,model_name=m}"] == 0


def test_what_vllm_tells_otherwise(world):
    run_of_two(world)
    world.metrics.failed["WORKER_LOST"] += 2

    def of(name, label):
        start = f"vllm:{name}{{engine=coordinator,"
        told = {key: value for key, value in values(world).items() if key.startswith(start)}
        return {key.partition(f"{label}=")[2].rstrip("}").partition(",")[0]: value for key, value in told.items()}

    assert of("request_success_total", "finished_reason") == {"stop": 1, "length": 0, "abort": 1, "error": 2}
    sources = {"local_compute": 1, "local_cache_hit": 2, "external_kv_transfer": 0}
    assert of("prompt_tokens_by_source_total", "source") == sources
    assert of("engine_sleep_state", "sleep_state") == {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
    config = [key for key in values(world) if key.startswith("vllm:cache_config_info") and "engine=d0" in key]
    assert config == ["vllm:cache_config_info{block_size=16,cache_dtype=,engine=d0,model_name=m,num_gpu_blocks=100}"]


def test_answers_that_no_node_has_are_deferred():
    world = World(nodes=("p0",), node_wait_s=5.0)
    world.submit("a/0")
    found = values(world)
    waiting = "vllm:num_requests_waiting_by_reason{{engine=coordinator,model_name=m,reason={}}}"
    assert (found[waiting.format("deferred")], found[waiting.format("capacity")]) == (1, 0)
    assert found["splitserve_requests_waiting{}"] == 1
    assert found["splitserve_ready{}"] == 0
    world.attach("d0")
    world.tick(1.0)
    found = values(world)
    assert (found[waiting.format("deferred")], found[waiting.format("capacity")]) == (0, 1)
    assert found["splitserve_ready{}"] == 1


def test_times_by_class_are_those_of_answers_that_have_ended():
    metrics = Metrics(parse_slo_classes(["chat=ttft:500"]))

    def ended(num_tokens, slo_class="", resumed=0, reason=events.STOP):
        timeline = inference_pb2.Timeline(ttft_s=1.0, e2e_s=4.0)
        told = inference_pb2.Attainment(slo_class=slo_class) if slo_class else None
        complete = inference_pb2.Complete(
            finish_reason=reason,
            completion_tokens=num_tokens,
            timeline=timeline,
            attainment=told,
            resumed_tokens=resumed,
        )
        metrics.ended("stop", complete)

    ended(4, "chat")
    ended(1, "chat")
    ended(2)
    ended(3, resumed=2)  # whose first token an earlier call has given
    ended(3, "chat", reason=events.ABORT)
    ended(0)

    def of(by_class):
        return {name: (sum(each.counts), each.sum) for name, each in by_class.items()}

    assert of(metrics.ttft_by_class) == {"chat": (2, 2.0), UNNAMED: (1, 1.0)}
    assert of(metrics.tpot_by_class) == {"chat": (1, 1.0), UNNAMED: (1, 3.0)}


def test_a_node_that_has_attached_again_has_no_counters_until_it_tells_them(world):
    """Else they would seem to begin anew, and to grow by all that they were when it does tell."""
    beat(world, "d0", num_steps=9)
    name = "splitserve_node_steps_total{node=d0}"
    assert values(world)[name] == 9
    world.lose("d0")
    assert name not in values(world)
    world.attach("d0")
    found = values(world)
    assert name not in found
    assert "vllm:num_preemptions_total{engine=d0,model_name=m}" not in found
    assert found["splitserve_node_kv_blocks{node=d0,role=decode}"] == 100
    beat(world, "d0", num_steps=10)
    assert values(world)[name] == 10


def test_a_node_that_does_not_count_its_steps_tells_no_histogram(world):
    beat(world, "d0", step_tokens=[], num_steps=9)
    found = values(world)
    assert found["splitserve_node_steps_total{node=d0}"] == 9
    assert "splitserve_node_step_tokens_count{node=d0}" not in found
    assert "splitserve_node_step_tokens_count{node=d1}" in found


def test_what_is_told_is_open_metrics_too(world):
    run_of_two(world)
    told = Exposition(world.metrics, world.scheduler, world.registry, "m").collect()
    ours = [metric for metric in told if not metric.name.startswith("vllm:")]  # a histogram of vLLM's ends in _total
    text = openmetrics_latest(SimpleNamespace(collect=lambda: ours)).decode()
    found = {sample.name: sample.value for family in openmetrics_families(text) for sample in family.samples}
    assert found["splitserve_generation_tokens_total"] == 4


def test_live_answers_run_once_they_have_a_token(world):
    for name in ("a/0", "b/0", "c/0"):
        world.submit(name)
    world.first(world.attempt)
    found = values(world)
    assert (found["splitserve_requests_running{}"], found["splitserve_requests_waiting{}"]) == (1, 2)


def test_figures_of_nodes_are_those_of_attached_ones(world):
    load = {"num_running": 3, "num_waiting": 2, "num_waiting_tokens": 70, "num_blocks_free": 250, "rss_bytes": 1000}
    beat(world, "p1", "draining", num_steps=9, num_blocks_cached=40, num_kv_bytes=70, step_s=0.5, **load)
    world.lose("d1")
    found = values(world)
    assert (found["splitserve_nodes{role=prefill}"], found["splitserve_nodes{role=decode}"]) == (2, 1)
    assert not any("d1" in key for key in found)
    of_p1 = {key.partition("{")[0]: value for key, value in found.items() if "{node=p1" in key}
    assert {name.removeprefix("splitserve_node_"): value for name, value in of_p1.items()} == {
        "ready": 0,
        "drained": 1,
        "requests_running": 3,
        "requests_waiting": 2,
        "waiting_tokens": 70,
        "kv_cache_usage_ratio": 0,  # a node with more free blocks than it has
        "kv_blocks": 100,
        "resident_memory_bytes": 1000,
        "kv_blocks_cached": 40,
        "kv_blocks_leaked": 0,
        "step_seconds": 0.5,
        "longest_heartbeat_gap_seconds": 0,
        "recent_losses": 0,
        "step_age_seconds": 0,
        "prefill_tokens_per_second": 0,
        "steps_total": 9,
        "preemptions_total": 0,
        "prefill_tokens_total": 0,
        "prompt_tokens_total": 0,
        "prompt_tokens_cached_total": 0,
        "transferred_bytes_total": 70,
        "transfers_failed_total": 0,
        "step_tokens_count": 0,
        "step_tokens_sum": 0,
    }


def test_names_of_models_are_escaped():
    world = World()
    text = Exposition(Metrics(), world.scheduler, world.registry, 'a"b\\c\nd').render().decode()
    models = {sample.labels["model_name"] for family in text_string_to_metric_families(text)
              for sample in family.samples if family.name.startswith("vllm:")}  # fmt: skip
    assert models == {'a"b\\c\nd'}
