"""The figures of a load as a person reads them, and its pictures."""

import math
import struct
import zlib
from dataclasses import replace
from datetime import datetime

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from splitserve_bench.serve.arrivals import Ramp
from splitserve_bench.serve.metrics import Limits, summarize
from splitserve_bench.serve.plots import AttainmentPoint, plot_attainment, plot_latencies, plot_timeline
from splitserve_bench.serve.records import TierUse
from splitserve_bench.serve.results import Run
from splitserve_bench.serve.serve_report import serve_view, warnings
from tests.unit.splitserve_bench.bench_serve_kit import answered, failed, timeline

RUN = Run(datetime(2026, 2, 3), "openai", "org/Model-1B", request_rate_per_s=4.0, num_clipped=3)
LIMITS = Limits(ttft_s=0.5, tpot_s=0.5)
OUTCOMES = [
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
    text = shown(serve_view(summarize(OUTCOMES, LIMITS), RUN, percentiles=(90.0,)))
    for part in (
        "org/Model-1B by openai: 4 requests/s, burstiness 1",
        "requests offered 4 complete 3 failed 0 refused 1",
        "duration 2.50 s",
        "output throughput 2.4 tokens/s",
        "request goodput 0.80 requests/s",
        "clipped to what the model takes 3",
        "milliseconds mean median std p90 max",
        "TTFT, sent to first token 666.7 500.0 235.7 900.0 1000.0",
        "an answer of one token has no TPOT and meets every limit on it",
        "attainment 50.0% (95 % interval 15.0% to 85.0%): 2 of 4 offered requests with TTFT ≤ 500 ms, TPOT ≤ 500 ms; "
        "TTFT alone 50.0%; TPOT alone 75.0%",
        "missed, a request perhaps by several: TTFT 1, refused 1",
        "TTFT misses by the phase furthest beyond the median of the good requests: prefill queue 1",
        "mean of each phase: prefill queue 500.0 ms, prefill 250.0 ms",
    ):
        assert part in text
    assert "warning" not in text


def test_a_ramp_is_told_from_which_rate_to_which_it_goes():
    run = replace(RUN, request_rate_per_s=math.inf, ramp=Ramp("linear", 0.5, 20))
    assert "by openai: 0.5 to 20 requests/s, linear, burstiness 1" in shown(
        serve_view(summarize(OUTCOMES, LIMITS), run)
    )


def test_what_was_not_computed_is_told_where_it_is_known():
    tier = TierUse(block_tokens=5, num_hits=3, num_misses=9, read_s=0.5, saved_s=2.0)
    text = shown(serve_view(summarize([answered(num_prompt_tokens=60, num_cached_tokens=24)], LIMITS), RUN))
    assert "prompt tokens not computed 40.0%" in text
    assert "second tier" not in text
    text = shown(
        serve_view(summarize([answered(num_prompt_tokens=60, num_cached_tokens=24)], LIMITS), replace(RUN, tier=tier))
    )
    assert "prompt tokens not computed 40.0% read back from the second tier 25.0%" in text
    assert (
        "second tier: 3 blocks read back, 25.0% of those that the pools did not hold, in 0.5 s that prompts waited; "
        "computing them would have taken 2.0 s more" in text
    )
    assert "not computed" not in shown(serve_view(summarize(OUTCOMES, LIMITS), RUN))


def test_a_report_of_nothing():
    text = shown(serve_view(summarize([failed()], Limits()), Run(RUN.started_at, "grpc", "m")))
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
    lines = warnings(summarize(outcomes, Limits(ttft_s=ttft_s)), RUN)
    assert [told in line and "did not keep up" in line for line in lines] == ([True] if told else [])


def test_waiting_for_a_place_is_told_as_such():
    outcomes = [answered(0, 2.0, (3.0,), scheduled_s=1.0)]
    run = Run(RUN.started_at, "openai", "m", max_concurrency=4)
    assert "one of 4 places" in shown(serve_view(summarize(outcomes, LIMITS), run))


def test_pictures(tmp_path):
    points = [
        AttainmentPoint(name, rate, share, (share - 0.1, min(1.0, share + 0.05)))
        for name in ("colocated", "split")
        for rate, share in ((2.0, 0.8), (1.0, 1.0), (4.0, 0.2))
    ]
    plot_attainment(points, 0.95, tmp_path / "attainment.png")
    plot_latencies(OUTCOMES, LIMITS, tmp_path / "latencies.png")
    plot_timeline([*OUTCOMES, answered(4, 3.0, (4.0, 5.0), scheduled_s=2.0)], tmp_path / "timeline.png")
    for name in ("attainment", "latencies", "timeline"):
        width, height, num_colours = read_png((tmp_path / f"{name}.png").read_bytes())
        assert 600 <= width <= 1600
        assert 300 <= height <= 1400
        assert num_colours > 20


@pytest.mark.parametrize("outcomes", [[], [failed()], [answered(arrivals_s=(0.0,))], [answered(arrivals_s=())]])
def test_pictures_of_next_to_nothing(tmp_path, outcomes):
    plot_latencies(outcomes, Limits(), tmp_path / "latencies.png")
    plot_timeline(outcomes, tmp_path / "timeline.png")
    plot_attainment([], 0.9, tmp_path / "attainment.png")
    assert all(read_png(path.read_bytes()) for path in tmp_path.iterdir())


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


def test_pictures_of_many_requests_stay_small(tmp_path):
    outcomes = [answered(i, 0.0, (0.5, 1.0 + i)) for i in range(900)]
    plot_timeline(outcomes, tmp_path / "timeline.png")
    plot_latencies([answered(i, 0.0, (1.5**i,)) for i in range(60)], LIMITS, tmp_path / "skewed.png")
    width, height, _ = read_png((tmp_path / "timeline.png").read_bytes())
    assert (width, height) == (1440, 1200)


def read_png(data):
    """Width, height and the number of different colours, by the rules of the format."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, pixels = 8, b""
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + length]
        assert zlib.crc32(kind + body) == struct.unpack(">I", data[at + 8 + length : at + 12 + length])[0]
        if kind == b"IHDR":
            width, height, depth, colour = struct.unpack(">IIBB", body[:10])
        pixels += body if kind == b"IDAT" else b""
        at += 12 + length
    assert (kind, depth, colour) == (b"IEND", 8, 6)
    raw = zlib.decompress(pixels)
    assert len(raw) == height * (1 + 4 * width)
    return width, height, len({raw[each : each + 4] for each in range(1, len(raw), 401)})
