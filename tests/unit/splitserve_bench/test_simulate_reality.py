"""How a simulated load is compared with a real one."""

import io
from dataclasses import replace

import pytest
from click.testing import CliRunner
from rich.console import Console

from splitserve.cli import main
from splitserve_bench.serve.metrics import Limits
from splitserve_bench.serve.records import Outcome
from splitserve_bench.simulate import reality_command
from splitserve_bench.simulate.reality import Figures, Pair, figures_of
from splitserve_bench.simulate.reality_report import reality_json, reality_view
from tests.unit.splitserve_bench.dominance_kit import write_trace
from tests.unit.splitserve_bench.plan_kit import model_folder
from tests.unit.splitserve_bench.simulate_kit import PROFILE

REAL = Figures(0.90, 1.0, 0.100, {"prefill_queue_s": 0.5, "prefill_s": 0.2, "decode_s": 0.09, "transfer_s": 0.01})


def outcome(index, first_s, tpot_s, num_tokens=5):
    arrivals_s = tuple(first_s + place * tpot_s for place in range(num_tokens))
    timeline = {"prefill_queue_s": first_s / 2, "decode_s": tpot_s * (num_tokens - 1)}
    return Outcome(index, 0.0, 0.0, 10, num_tokens, arrivals_s, (1,) * num_tokens, arrivals_s[-1], timeline=timeline)


def shown(*pairs):
    console = Console(file=io.StringIO(), width=200)
    console.print(reality_view(pairs))
    return console.file.getvalue()


def test_figures_of_a_load():
    outcomes = [outcome(0, 1.0, 0.1), outcome(1, 3.0, 0.3), outcome(2, 2.0, 0.2)]
    figures = figures_of(outcomes, Limits(ttft_s=2.5))
    assert figures.attainment == pytest.approx(2 / 3)
    assert (figures.ttft_s, figures.tpot_s) == (pytest.approx(2.0), pytest.approx(0.2))
    assert figures.phases_s["prefill_queue_s"] == pytest.approx(1.0)
    assert figures.phases_s["decode_s"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("attainment", "ttft_s", "tpot_s", "is_close"),
    [
        (0.90, 1.0, 0.100, True),
        (0.949, 1.149, 0.086, True),
        (0.96, 1.0, 0.100, False),
        (0.90, 1.16, 0.100, False),
        (0.90, 1.0, 0.084, False),
        (0.90, None, None, True),
    ],
)
def test_what_is_close(attainment, ttft_s, tpot_s, is_close):
    pair = Pair("1P+1D", 2.0, REAL, Figures(attainment, ttft_s, tpot_s, {}))
    assert pair.is_close is is_close
    assert reality_json([pair])[0]["is_close"] is is_close


def test_what_is_not_close_says_by_what():
    phases = {"prefill_queue_s": 0.1, "prefill_s": 0.25, "decode_s": 0.12, "transfer_s": 0.01}
    far, close = Pair("1P+1D", 2.0, REAL, Figures(0.9, 0.6, 0.13, phases)), Pair("2B", 2.0, REAL, REAL)
    text = shown(far, close)
    assert "1 of 2 within 5 points of attainment and 15% of both medians" in text
    assert "1P+1D at 2 req/s: the simulation differs most in prefill queue (-400.0 ms a request)" in text
    assert "in decode (+30.00 ms a token)" in text
    assert "2B at" not in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--time-scale", "2", "--request-rate", "3"), "--time-scale 2 and --request-rate 3 both"),
        (("--burstiness", "9"), "--burstiness 9 is of random arrivals"),
    ],
)
def test_flags_that_would_say_nothing_are_refused_before_anything_starts(tmp_path, words, said):
    PROFILE.save(tmp_path / "profile.json")
    trace = write_trace(tmp_path / "trace.csv", 9, prompt_tokens=20, answer_tokens=5)
    load = ("--dataset-name", "azure", "--dataset-path", str(trace))
    result = CliRunner().invoke(
        main, ["bench", "simulate", str(tmp_path), "--profile", str(tmp_path / "profile.json"), *load, *words]
    )
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_clusters_have_the_flags_that_the_profile_was_measured_with(tmp_path, monkeypatch):
    asked = []

    async def compare(what, as_json):
        asked.append(what)

    monkeypatch.setattr(reality_command, "_compare", compare)
    model = model_folder(tmp_path / "paper")
    flags = {"quantization": "w8a8", "dtype": "bfloat16"}
    replace(PROFILE, flags=flags).save(tmp_path / "profile.json")
    words = ["bench", "simulate", str(model), "--profile", str(tmp_path / "profile.json")]
    result = CliRunner().invoke(main, [*words, "--engine-flag", "dtype=float32", "--engine-flag", "block_size=8"])
    assert result.exit_code == 0, result.output
    assert asked[0].flags == {"quantization": "w8a8", "dtype": "float32", "block_size": 8}
