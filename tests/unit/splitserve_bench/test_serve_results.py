"""What a load gives: results with vLLM's keys, a line for each request, a report for people, and pictures."""

import json
import math
import types
from dataclasses import replace
from datetime import datetime

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from rich.console import Console

from splitserve_bench.errors import BenchError
from splitserve_bench.serve.metrics import Limits, summarize
from splitserve_bench.serve.plots import AttainmentPoint, plot_attainment, plot_latencies
from splitserve_bench.serve.records import Outcome, TierUse
from splitserve_bench.serve.report import lag_warnings, serve_view
from splitserve_bench.serve.results import (
    Run,
    file_name,
    parse_metrics,
    parse_percentiles,
    request_lines,
    result_json,
)
from tests.effort import few
from tests.unit.splitserve_bench.bench_serve_kit import answered, failed, serve_options, timeline

# ---- results and lines ----

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
    "returned",
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
OPTIONS = serve_options(backend="openai")
RUN = Run(datetime(2026, 2, 3, 4, 5, 6), OPTIONS, "org/Model-1B", 4.0)
OUTCOMES = [
    answered(0, 0.0, (0.5, 0.75, 1.25), timeline=timeline(0.25, 0.25, 0.0, 0.0, 0.0, 0.75)),
    answered(1, 1.0, (2.0, 2.25), scheduled_s=0.75, ended_s=2.5),
    failed(2, 1.0, 1.0, "queue full", is_refused=True),
    failed(3, 3.0, 4.0),
]
LIMITS = Limits(ttft_s=0.5, tpot_s=0.5)


def run_of(model="m", rate=math.inf, run=RUN, **flags):
    return replace(run, model_id=model, request_rate_per_s=rate, options=replace(run.options, **flags))


@pytest.fixture
def summary():
    return summarize(OUTCOMES, LIMITS)


def statistics(metrics, percentiles):
    return {f"{what}_{name}_ms" for name in metrics for what in ("mean", "median", "std", *percentiles)}


def test_the_keys_are_vllms_and_ours(summary):
    latencies = statistics(("ttft", "tpot", "itl", "ttst"), ("p99",))
    assert set(result_json(summary, RUN)) == VLLM_KEYS | OUR_KEYS | latencies
    flags = {"save_detailed": True, "percentile_metrics": "e2el", "metric_percentiles": "50,99.9"}
    detailed = result_json(summary, run_of(**flags))
    latencies = statistics(("e2el", "ttst"), ("p50", "p99.9"))
    assert set(detailed) == VLLM_KEYS | OUR_KEYS | latencies | VLLM_DETAILS | {"latencies", "queue_times"}


def test_values_by_hand(summary):
    result = result_json(summary, run_of(rate=4.0, metric_percentiles="50"))
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
    result = result_json(summary, run_of(save_detailed=True))
    assert result["ttfts"] == [0.5, 1.0, 0.0, 0.0]
    assert result["itls"] == [[0.25, 0.5], [0.25], [], []]
    assert result["start_times"] == [0.0, 1.0, 1.0, 3.0]
    assert result["errors"] == ["", "", "queue full", "lost"]
    assert result["input_lens"] == [10, 10, 10, 10]
    assert result["output_lens"] == [3, 2, 0, 0]


def test_without_limits_and_answers():
    result = result_json(summarize([failed()], Limits()), run_of(burstiness=math.inf))
    assert (result["request_rate"], result["burstiness"]) == ("inf", "inf")
    nothing = ("request_goodput", "slo_attainment", "slo_attainment_interval", "mean_ttft_ms", "p99_itl_ms")
    assert [result[key] for key in nothing] == [None] * 5
    assert result["phases"] == {}
    json.dumps(result, allow_nan=False)


def test_gpus_and_metadata(summary):
    run = replace(run_of(num_gpus=2, metadata=("tp=1", "completed=x")), num_clipped=3)
    result = result_json(summary, run)
    assert (result["num_gpus"], result["goodput_per_gpu"], result["clipped"], result["tp"]) == (2, 0.125, 3, "1")
    assert result["completed"] == 2


def test_what_was_not_computed():
    """Of complete answers whose server tells it; what came of KV offload is 3 blocks of 16 tokens, of 80."""
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
    run = run_of("/models/tiny/", label="a/b", max_concurrency=8)
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


# ---- the report and its pictures ----

SHOWN_RUN = replace(RUN, num_clipped=3)
SHOWN_LIMITS = Limits(ttft_s=0.5, tpot_s=0.5)
SHOWN_OUTCOMES = [
    answered(0, 0.0, (0.5, 0.75, 1.25), timeline=timeline(0.25, 0.25, 0.0, 0.25, 0.0, 0.5)),
    answered(1, 1.0, (2.0, 2.25), timeline=timeline(0.75, 0.25, 0.0, 0.0, 0.0, 0.25)),
    failed(2, 1.0, 1.0, is_refused=True),
    answered(3, 2.0, (2.5,)),
]


def shown(view):
    console = Console(width=200, highlight=False)
    with console.capture() as capture:
        console.print(view)
    return " ".join(capture.get().split())


def test_the_report_names_figures_with_units():
    run = run_of("org/Model-1B", 4.0, SHOWN_RUN, metric_percentiles="90")
    text = shown(serve_view(summarize(SHOWN_OUTCOMES, SHOWN_LIMITS), run))
    for part in (
        "org/Model-1B by openai: 4 requests/s, burstiness 1",
        "requests offered 4 complete 3 failed 0 refused 1",
        "duration 2.50 s",
        "output throughput 2.4 tokens/s",
        "request goodput 0.80 requests/s",
        "clipped to what the model takes 3",
        "milliseconds mean median std p90 max",
        "TTFT, sent to first token 666.7 500.0 235.7 900.0 1000.0",
        "an output of one token has no TPOT and meets every limit on it",
        "attainment 50.0% (95 % interval 15.0% to 85.0%): 2 of 4 offered requests with TTFT ≤ 500 ms, TPOT ≤ 500 ms; "
        "TTFT alone 50.0%; TPOT alone 75.0%",
        "missed, a request perhaps by several: TTFT 1, refusals 1",
        "TTFT misses by the phase furthest beyond the median of the good requests: prefill queue 1",
        "mean of each phase: prefill queue 500.0 ms, prefill 250.0 ms",
    ):
        assert part in text
    assert "warning" not in text


def test_what_was_not_computed_is_told_where_it_is_known():
    tier = TierUse(block_tokens=5, num_hits=3, num_misses=9, read_s=0.5, saved_s=2.0)
    cached = summarize([answered(num_prompt_tokens=60, num_cached_tokens=24)], SHOWN_LIMITS)
    text = shown(serve_view(cached, SHOWN_RUN))
    assert "prompt tokens not computed 40.0%" in text
    assert "KV offload" not in text
    text = shown(
        serve_view(
            summarize([answered(num_prompt_tokens=60, num_cached_tokens=24)], SHOWN_LIMITS),
            replace(SHOWN_RUN, tier=tier),
        )
    )
    assert "prompt tokens not computed 40.0% loaded from the KV offload 25.0%" in text
    assert (
        "KV offload: 3 blocks loaded, 25.0% of those that the pools did not hold, in 0.5 s that prompts waited; "
        "computing them would have taken 2.0 s more" in text
    )
    assert "not computed" not in shown(serve_view(summarize(SHOWN_OUTCOMES, SHOWN_LIMITS), SHOWN_RUN))


def test_a_report_of_nothing():
    text = shown(serve_view(summarize([failed()], Limits()), run_of()))
    assert "no fixed rate" in text
    assert "TTFT, sent to first token - - - - -" in text
    assert "attainment" not in text
    assert "mean of each phase" not in text


@pytest.mark.parametrize(
    ("lag_s", "ttft_s", "told"),
    [
        (0.009, None, None),
        (0.011, None, "11.0 ms, more than 10 ms"),
        (0.009, 0.1, "9.0 ms, more than 5 ms"),
        (0.004, 0.1, None),
        (0.011, 5.0, "11.0 ms, more than 10 ms"),
    ],
)
def test_a_late_generator_is_told(lag_s, ttft_s, told):
    outcomes = [answered(i, 1.0 + lag_s, (2.0,), scheduled_s=1.0) for i in range(3)]
    lines = lag_warnings(summarize(outcomes, Limits(ttft_s=ttft_s)))
    assert [told in line and "did not keep up" in line for line in lines] == ([True] if told else [])


def test_waiting_for_a_place_is_told_as_such():
    outcomes = [answered(0, 2.0, (3.0,), scheduled_s=1.0)]
    run = run_of(max_concurrency=4)
    assert "one of 4 places" in shown(serve_view(summarize(outcomes, SHOWN_LIMITS), run))


def test_pictures(tmp_path):
    points = [
        AttainmentPoint(name, rate, share, (share - 0.1, min(1.0, share + 0.05)))
        for name in ("colocated", "split")
        for rate, share in ((2.0, 0.8), (1.0, 1.0), (4.0, 0.2))
    ]
    plot_attainment(points, 0.95, tmp_path / "attainment.png")
    plot_latencies(SHOWN_OUTCOMES, SHOWN_LIMITS, tmp_path / "latencies.png")
    for name in ("attainment", "latencies"):
        width, height, num_colours = read_png(tmp_path / f"{name}.png")
        assert 600 <= width <= 1600
        assert 300 <= height <= 1400
        assert num_colours > 20


@pytest.mark.parametrize("outcomes", few([[], [failed()], [answered(arrivals_s=(0.0,))], [answered(arrivals_s=())]]))
def test_pictures_of_next_to_nothing(tmp_path, outcomes):
    plot_latencies(outcomes, Limits(), tmp_path / "latencies.png")
    plot_attainment([], 0.9, tmp_path / "attainment.png")
    assert all(read_png(path) for path in tmp_path.iterdir())


def test_no_two_lines_of_a_picture_look_alike(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    names = [f"contender {number}" for number in range(21)]
    plot_attainment([AttainmentPoint(name, 1.0, 0.5, (0.4, 0.6)) for name in names], 0.9, tmp_path / "attainment.png")
    ((axes,),) = (figure.axes for figure in drawn)
    handles, labels = axes.get_legend_handles_labels()
    assert labels == names
    lines = [handle[0] for handle in handles]  # the others are of the intervals
    assert len({(line.get_color(), line.get_marker(), line.get_linestyle()) for line in lines}) == len(names)


def test_a_picture_of_times_that_are_far_apart(tmp_path):
    plot_latencies([answered(i, 0.0, (1.5**i,)) for i in range(60)], SHOWN_LIMITS, tmp_path / "skewed.png")
    assert read_png(tmp_path / "skewed.png")


def read_png(path):
    """Width, height and the number of different colours."""
    pixels = imread(path)
    height, width, _ = pixels.shape
    return width, height, len(np.unique(pixels[::7, ::7].reshape(-1, pixels.shape[2]), axis=0))
