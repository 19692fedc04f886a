"""Results with vLLM's keys, and a line for each request."""

import json
import math
import types
from dataclasses import replace
from datetime import datetime

import pytest

from splitserve_bench.errors import BenchError
from splitserve_bench.serve.metrics import Limits, summarize
from splitserve_bench.serve.records import Outcome, TierUse
from splitserve_bench.serve.results import (
    Run,
    file_name,
    parse_metrics,
    parse_percentiles,
    request_lines,
    result_json,
)
from tests.unit.splitserve_bench.bench_serve_kit import answered, failed, timeline

VLLM_KEYS = {
    "date",
    "backend",
    "label",
    "model_id",
    "tokenizer_id",
    "num_prompts",
    "request_rate",
    "burstiness",
    "max_concurrency",
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "max_output_tokens_per_s",
    "max_concurrent_requests",
}
VLLM_DETAILS = {"input_lens", "output_lens", "ttfts", "itls", "start_times", "errors"}
OUR_KEYS = {
    "cached_share",
    "tier",
    "slo_limits_ms",
    "slo_attainment",
    "slo_attainment_interval",
    "slo_attainment_ttft",
    "slo_attainment_tpot",
    "num_gpus",
    "goodput_per_gpu",
    "rejected",
    "clipped",
    "misses",
    "frequent_errors",
    "phases",
    "send_lag_p50_ms",
    "send_lag_p99_ms",
    "send_lag_max_ms",
}
RUN = Run(datetime(2026, 2, 3, 4, 5, 6), "openai", "org/Model-1B", request_rate_per_s=4.0)
OUTCOMES = [
    answered(0, 0.0, (0.5, 0.75, 1.25), timeline=timeline(0.25, 0.25, 0.0, 0.0, 0.0, 0.75)),
    answered(1, 1.0, (2.0, 2.25), scheduled_s=0.75, ended_s=2.5),
    failed(2, 1.0, 1.0, "queue full", is_refused=True),
    failed(3, 3.0, 4.0),
]
LIMITS = Limits(ttft_s=0.5, tpot_s=0.5)


@pytest.fixture
def summary():
    return summarize(OUTCOMES, LIMITS)


def statistics(metrics, percentiles):
    return {f"{what}_{name}_ms" for name in metrics for what in ("mean", "median", "std", *percentiles)}


def test_the_keys_are_vllms_and_ours(summary):
    latencies = statistics(("ttft", "tpot", "itl", "ttst"), ("p99",))
    assert set(result_json(summary, RUN)) == VLLM_KEYS | OUR_KEYS | latencies
    detailed = result_json(summary, RUN, detailed=True, metrics=("e2el",), percentiles=(50.0, 99.9))
    latencies = statistics(("e2el", "ttst"), ("p50", "p99.9"))
    assert set(detailed) == VLLM_KEYS | OUR_KEYS | latencies | VLLM_DETAILS | {"latencies", "queue_times"}


def test_values_by_hand(summary):
    result = result_json(summary, RUN, percentiles=(50.0,))
    assert result["date"] == "20260203-040506"
    assert (result["num_prompts"], result["request_rate"], result["max_concurrency"]) == (4, 4.0, None)
    assert (result["duration"], result["completed"], result["failed"], result["rejected"]) == (4.0, 2, 2, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (20, 5)
    assert (result["request_throughput"], result["request_goodput"]) == (0.5, 0.25)
    assert (result["output_throughput"], result["total_token_throughput"]) == (1.25, 6.25)
    assert (result["mean_ttft_ms"], result["p50_ttft_ms"], result["std_ttft_ms"]) == (750.0, 750.0, 250.0)
    assert (result["mean_tpot_ms"], result["mean_ttst_ms"]) == (312.5, 250.0)
    assert result["median_itl_ms"] == 250.0  # of 250, 500 and 250
    assert result["slo_limits_ms"] == {"ttft": 500.0, "tpot": 500.0}
    assert (result["slo_attainment"], result["slo_attainment_ttft"], result["slo_attainment_tpot"]) == (0.25, 0.25, 0.5)
    assert result["slo_attainment_interval"] == list(summary.attainment_interval)
    assert result["phases"]["decode_ms"] == 750.0
    assert (result["send_lag_p50_ms"], result["send_lag_max_ms"]) == (0.0, 250.0)
    assert result["misses"]["refused"] == 1
    assert list(result["frequent_errors"].values()) == [1, 1]


def test_details_are_in_the_order_of_the_load(summary):
    result = result_json(summary, RUN, detailed=True)
    assert result["ttfts"] == [0.5, 1.0, 0.0, 0.0]
    assert result["itls"] == [[0.25, 0.5], [0.25], [], []]
    assert result["start_times"] == [0.0, 1.0, 1.0, 3.0]
    assert result["errors"] == ["", "", "queue full", "lost"]
    assert result["input_lens"] == [10, 10, 10, 10]
    assert result["output_lens"] == [3, 2, 0, 0]


def test_without_limits_and_answers():
    result = result_json(summarize([failed()], Limits()), Run(RUN.started_at, "grpc", "m", burstiness=math.inf))
    assert (result["request_rate"], result["burstiness"]) == ("inf", "inf")
    nothing = ("request_goodput", "slo_attainment", "slo_attainment_interval", "mean_ttft_ms", "p99_itl_ms")
    assert [result[key] for key in nothing] == [None] * 5
    assert result["phases"] == {}
    json.dumps(result, allow_nan=False)


def test_gpus_and_metadata(summary):
    run = Run(RUN.started_at, "openai", "m", num_gpus=2, num_clipped=3, metadata={"tp": "1", "completed": "x"})
    result = result_json(summary, run)
    assert (result["num_gpus"], result["goodput_per_gpu"], result["clipped"], result["tp"]) == (2, 0.125, 3, "1")
    assert result["completed"] == 2


def test_what_was_not_computed():
    """Of complete answers whose server tells it; what came of a second tier is 3 blocks of 16 tokens, of 80."""
    told = [answered(0, num_prompt_tokens=60, num_cached_tokens=24), answered(1, num_cached_tokens=11)]
    outcomes = [*told, answered(2), failed(3, num_cached_tokens=10)]
    tier = TierUse(block_tokens=16, num_hits=3, num_misses=9, read_s=0.5, saved_s=2.0)
    result = result_json(summarize(outcomes, LIMITS), replace(RUN, tier=tier))
    assert result["cached_share"] == 0.5
    counts = {"num_hits": 3, "num_misses": 9, "read_s": 0.5, "saved_s": 2.0}
    assert result["tier"] == {"read_share": 0.6, "hit_rate": 0.25, **counts}
    nothing = result_json(summarize(OUTCOMES, LIMITS), RUN)
    assert (nothing["cached_share"], nothing["tier"]) == (None, None)


def test_files_are_named_as_vllm_names_them():
    assert file_name(RUN) == "openai-4.0qps-Model-1B-20260203-040506.json"
    run = Run(RUN.started_at, "openai", "/models/tiny/", label="a/b", max_concurrency=8)
    assert file_name(run) == "a-b-infqps-concurrency8-tiny-20260203-040506.json"


def test_lines_hold_the_whole_outcome():
    told = answered(4, timeline=types.MappingProxyType(timeline(1.0)))
    lines = [json.loads(json.dumps(line, allow_nan=False)) for line in request_lines([*OUTCOMES, told])]
    assert (lines[0]["ttft_s"], lines[0]["tpot_s"], lines[0]["ttst_s"], lines[0]["e2el_s"]) == (0.5, 0.375, 0.25, 1.25)
    assert (lines[1]["send_lag_s"], lines[1]["timeline"]) == (0.25, None)
    assert (lines[3]["ttft_s"], lines[3]["tpot_s"], lines[3]["ttst_s"], lines[3]["error"]) == (None, None, None, "lost")
    for line, outcome in zip(lines, [*OUTCOMES, told], strict=True):
        kept = {key: tuple(value) if isinstance(value, list) else value for key, value in line.items()}
        for derived in ("ttft_s", "tpot_s", "ttst_s", "e2el_s", "send_lag_s"):
            del kept[derived]
        assert Outcome(**kept) == outcome


def test_lists_of_names_and_numbers():
    assert parse_metrics("ttft, tpot,ttft") == ("ttft", "tpot")
    assert parse_percentiles("50,99.9,50") == (50.0, 99.9)
    with pytest.raises(BenchError, match=r"one of ttft, tpot, .*, not 'speed'"):
        parse_metrics("ttft,speed")
    for bad in ("", "x", "50,", "101", "-1", "nan"):
        with pytest.raises(BenchError, match="percentile"):
            parse_percentiles(bad)
