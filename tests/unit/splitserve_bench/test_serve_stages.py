"""`bench serve --stages`: when requests are due, what is counted where, and the command as a user runs it."""

import asyncio
import json
import math
from itertools import pairwise

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from serving_core.errors import SettingsError
from splitserve.cli import main
from splitserve.commands.terminal import stdout
from splitserve_bench.errors import BenchError
from splitserve_bench.serve.arrivals import parse_stages, stages_of
from splitserve_bench.serve.command import CAPACITY_CONCURRENCY, CAPACITY_REQUESTS
from splitserve_bench.serve.metrics import Limits
from splitserve_bench.serve.plots import PARTS, plot_stages
from splitserve_bench.serve.stages import back_after_s, findings_of, highest_of, stages_view, windows_of
from splitserve_bench.serve.workload import capacity_load, capacity_per_s, workload_of
from tests.unit.splitserve_bench.bench_serve_kit import answered, failed, staged_options
from tests.unit.splitserve_bench.load_servers import FAIL, REFUSE, REFUSE_ONCE, SERVERS, Script
from tests.unit.splitserve_bench.simulate_kit import PROFILE, chunk_s

LIMITS = Limits(ttft_s=1.0)


def planned_of(stages, **flags):
    return workload_of(staged_options(stages, **flags), 100, 1000).planned


# ---- stages ----


def test_stages_follow_one_another_and_may_be_alike():
    stages = stages_of("0.5x20,3x60,0.5x20", 2.0)
    assert [(each.rate_per_s, each.start_s, each.end_s) for each in stages] == [(1, 0, 20), (6, 20, 80), (1, 80, 100)]
    assert [stage.num_requests for stage in stages] == [20, 360, 20]
    assert highest_of(stages) == (20, 80)
    assert highest_of(stages_of("1x5 4x5 1x5 4x5 2x5", 1.0)) == (5, 20)


@pytest.mark.parametrize("text", ["", "3", "3x", "x60", "3x0", "-1x5", "3x60s", "0x10", "1x1e3", "1x86401"])
def test_what_are_no_stages_is_refused(text):
    with pytest.raises(SettingsError, match="--stages"):
        parse_stages(text)


@pytest.mark.parametrize(("text", "rate"), [("1x10", 0.01), ("1000x1000", 1.0), ("1x10", 1e9)])
def test_stages_of_no_or_too_many_requests_are_refused(text, rate):
    with pytest.raises(SettingsError, match="1 to 100000 can be sent"):
        stages_of(text, rate)


@given(st.integers(0, 2**31), st.floats(0.2, 10))
def test_each_stage_has_its_requests_within_itself(seed, burstiness):
    stages = stages_of("4x5,0x3,20x2.5,1x5", 1.0)
    planned = planned_of("4x5,0x3,20x2.5,1x5", seed=seed, burstiness=burstiness)
    assert [each.index for each in planned] == list(range(75))
    times_s = [each.send_at_s for each in planned]
    assert times_s == sorted(times_s)
    assert [sum(stage.start_s <= at_s < stage.end_s for at_s in times_s) for stage in stages] == [20, 0, 50, 5]


def test_arrivals_of_a_stage_are_spread_evenly_over_it():
    """Of a Poisson process with so many arrivals each is as likely at any moment."""
    times_s = [each.send_at_s for seed in range(20) for each in planned_of("10x10", seed=seed)]
    counts = [sum(low <= at_s < low + 1 for at_s in times_s) for low in range(10)]
    assert sum(counts) == 2000
    assert all(abs(count - 200) < 5 * math.sqrt(200) for count in counts)


def test_random_prompts_begin_alike_where_that_is_wanted():
    planned = planned_of("2x5", random_prefix_len=30)
    assert len({each.prompt[:30] for each in planned}) == 1
    assert len({each.prompt for each in planned}) == len(planned) == 10


def test_a_trace_that_is_too_short_begins_anew_with_other_tokens(tmp_path):
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens", *(f"2023-11-16 18:17:0{i}.0,{10 + i},{1 + i}" for i in range(4))]
    (tmp_path / "trace.csv").write_text("\n".join(rows))
    trace = {"dataset_name": "azure", "dataset_path": tmp_path / "trace.csv"}
    planned = planned_of("2x5", **trace)
    assert [len(each.prompt) for each in planned] == [10, 11, 12, 13, 10, 11, 12, 13, 10, 11]
    assert len({each.prompt for each in planned}) == 10
    assert workload_of(staged_options("2x5", **trace), 12, 1000).num_clipped == 3 + 3 + 1  # all but the shortest


def test_the_capacity_is_measured_with_prompts_that_the_load_does_not_have():
    options = staged_options("1x50", request_rate=1.0)
    probes = capacity_load(options, 100, 1000).planned
    assert [each.send_at_s for each in probes] == [0.0] * CAPACITY_REQUESTS
    assert not {each.prompt for each in probes} & {each.prompt for each in workload_of(options, 100, 1000).planned}


def test_the_capacity_is_what_ended_in_the_time_that_it_took():
    outcomes = [answered(index, 2.0 + index, (3.0 + index,)) for index in range(10)]
    assert capacity_per_s(outcomes) == pytest.approx(10 / 10)
    with pytest.raises(BenchError, match=r"1 of 11 requests failed \(broken\); give --request-rate"):
        capacity_per_s([*outcomes, failed(10, error="broken")])


# ---- windows ----


def good(at_s):
    return answered(0, at_s, (at_s + 0.5,))


def late(at_s):
    return answered(0, at_s, (at_s + 1.5,))


def refused(at_s, until_s=None):
    return failed(0, at_s, at_s, "full", is_refused=True, retry_after_s=until_s)


OUTCOMES = [
    good(0.0),
    late(4.9),
    good(5.0),
    refused(6.0, 1.0),
    refused(7.0),
    refused(8.0, 2.0),
    failed(0, 9.9),
    good(11.0),
]


def test_every_request_is_counted_once_where_it_was_due():
    first, second, third = windows_of(OUTCOMES, LIMITS, 0.0, 12.0)
    assert (first.num_good, first.num_late, first.num_offered, first.attainment) == (1, 1, 2, 0.5)
    assert (second.num_good, second.num_refused_until, second.num_refused, second.num_failed) == (1, 2, 1, 1)
    assert (third.start_s, third.end_s, third.num_good, third.goodput_per_s) == (10, 12, 1, 0.5)
    assert [window.attainment for window in windows_of([], LIMITS, 0.0, 5.0)] == [None]


def test_a_request_that_was_sent_late_counts_where_it_was_due():
    outcome = answered(0, 7.0, (7.1,), scheduled_s=4.0)
    assert [window.num_good for window in windows_of([outcome], LIMITS, 0.0, 10.0)] == [1, 0]


@pytest.mark.parametrize(
    ("shares", "back_s"),
    [
        ([10, 10, 10], 0.0),
        ([2, 10, 10], 5.0),
        ([2, 9, 10], 5.0),
        ([10, 2, 10, 10], 10.0),  # what was good by chance does not count
        ([2, 10, 8, 10, 10], 5.0),  # nor what was bad by chance
        ([2, None, 10], 10.0),
        ([2, 8, 8], None),
        ([], None),
        ([None], None),
    ],
)
def test_goodput_is_back_when_it_is_and_stays_good(shares, back_s):
    outcomes = []
    for number, share in enumerate(shares):
        times_s = [20.0 + 5 * number + 0.1 * i for i in range(10)] if share is not None else []
        outcomes += [good(at_s) if i < share else late(at_s) for i, at_s in enumerate(times_s)]
    windows = windows_of(outcomes, LIMITS, 20.0, 20.0 + 5 * len(shares))
    assert back_after_s(windows, 0.9) == back_s


def found(text="1x5,2x5,1x2", outcomes=OUTCOMES):
    return findings_of(outcomes, stages_of(text, 1.0), LIMITS, 0.9)


def shown(findings):
    with stdout.capture() as capture:
        stdout.print(stages_view(findings))
    return capture.get()


def test_what_was_found_is_shown_and_drawn(tmp_path, monkeypatch):
    findings = found()
    assert findings.back_s == 0.0
    assert "Goodput was back at once after the highest stage: 90% of the requests good." in shown(findings)
    assert "5 to 10 s" in shown(findings)
    told = findings.to_json()
    assert [each["num_offered"] for each in told["windows"]] == [2, 5, 1]
    assert [(each["times"], each["rate_per_s"], each["num_offered"]) for each in told["by_stage"]] == [
        (1, 1, 2),
        (2, 2, 5),
        (1, 1, 1),
    ]
    plot_stages(findings, tmp_path / "stages.png")
    assert (tmp_path / "stages.png").read_bytes().startswith(b"\x89PNG")

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    plot_stages(findings, tmp_path / "none.png")
    ((axes,),) = (figure.axes for figure in drawn)
    heights = {
        bars.get_label(): [round(bar.get_height() * bar.get_width()) for bar in bars] for bars in axes.containers
    }
    assert heights == {name: [getattr(window, field) for window in findings.windows] for name, field, _ in PARTS}


def test_the_highest_stage_is_judged_by_the_one_before_and_by_its_own_requests():
    first = [good(0.1 * number) for number in range(40)]
    before = [good(10.0), good(11.0), good(12.0), good(17.0)]  # 0.4 a second, 0.6 in the better window
    refusals = [failed(0, 23.0, 23.02, is_refused=True), failed(0, 23.0, 23.06, is_refused=True, retry_after_s=1.0)]
    highest = [good(20.0), good(21.0), late(22.0), failed(0, 23.0), *refusals]
    after = [good(25.0), refused(26.0)]
    findings = found("1x10,1x10,2x5,1x5", [*first, *before, *highest, *after])
    told = findings.to_json()["highest"]
    assert (told["start_s"], told["end_s"], told["num_offered"], told["num_admitted"]) == (20, 25, 6, 4)
    assert (told["goodput_per_s"], told["admitted_good"]) == (0.4, 0.5)
    assert (told["mean_before_per_s"], told["best_before_per_s"]) == (0.4, 0.6)
    assert (told["of_mean_before"], told["of_best_before"]) == (1.0, pytest.approx(2 / 3))
    assert told["refusal_ms"] == {"median": pytest.approx(40), "max": pytest.approx(60)}
    assert told["ttft_ms"] == {"median": 500, "p90": pytest.approx(1300), "max": 1500}
    lines = shown(findings)
    assert "20 to 25 s: 0.40 good requests/s: 100% of the 0.40 of the stage before, 67% of the 0.60 of its" in lines
    assert "admitted: 4 of 6, 50% of them good; TTFT median 500 ms, p90 1300 ms, max 1500 ms" in lines
    assert "refused: 2; from sending to refusal median 40 ms, max 60 ms" in lines


def test_without_a_stage_before_there_is_nothing_to_compare_with():
    told = found("2x5,1x5").to_json()["highest"]
    assert (told["mean_before_per_s"], told["of_mean_before"], told["of_best_before"]) == (None, None, None)
    assert "of the stage before" not in shown(found("2x5,1x5"))
    assert found("0x5,2x5").to_json()["highest"]["mean_before_per_s"] == 0.2  # whatever came


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("1x5,2x7", "Nothing was sent after the highest stage"),
        ("1x5,2x7,0x30", "Nothing was sent after the highest stage"),
        ("2x2,1x7", "Goodput was not back within the 7 s"),
        ("2x1,1x11", "Goodput was back for what came 10 s after the highest stage and later"),
    ],
)
def test_it_is_said_whether_goodput_is_back(text, sentence):
    assert sentence in shown(found(text))


# ---- the command ----

FEW = ("--random-input-len", "20", "--random-output-len", "4", "--goodput", "ttft:60000", "tpot:50000")
STAGES = ("--stages", "1x0.4,4x0.5,1x0.4", "--request-rate", "10")


@pytest.mark.parametrize("kind", ["splitserve", pytest.param("openai", marks=pytest.mark.nightly)])
async def test_a_server_is_loaded_in_stages(kind, serve_here, tmp_path):
    script = Script()
    async with SERVERS[kind](script) as target:
        first = json.loads((await serve_here(target, *FEW, *STAGES, "--json"))[0])
        assert [stage["num_good"] for stage in first["stages"]["by_stage"]] == [4, 20, 4]
        # Of the 20 of the highest stage those in the middle: where one stage ends, others may overtake.
        script.does |= dict.fromkeys(script.order[9:19], REFUSE) | {script.order[-1]: FAIL}
        words = ["--save-detailed", "--result-filename", "found.json", "--plots", "."]
        output, _ = await serve_here(target, *FEW, *STAGES, *words)
    assert "stages of 10 requests/s: 1 times for 0.4 s, 4 times for 0.5 s, 1 times for 0.4 s" in output
    assert "Goodput was not back within the 0.4 s after the highest stage" in output
    saved = json.loads((tmp_path / "found.json").read_text())
    assert (saved["num_prompts"], saved["request_rate"]) == (28, 10)
    before, highest, after = saved["stages"]["by_stage"]
    assert (before["num_good"], before["num_offered"], before["rate_per_s"]) == (4, 4, 10)
    assert (highest["num_good"], highest["num_refused_until"], highest["num_refused"]) == (10, 10, 0)
    assert (after["num_good"], after["num_failed"]) == (3, 1)
    assert saved["stages"]["back_s"] is None
    assert len((tmp_path / "found.requests.jsonl").read_text().splitlines()) == 28
    assert (tmp_path / "stages.png").read_bytes().startswith(b"\x89PNG")


async def test_without_a_rate_stages_are_multiples_of_the_capacity(serve_here):
    """Which is measured without limits, after a warm-up, with no more at a time than is said."""

    async def hold(key):
        await asyncio.sleep(0.02)  # else the server answers so fast that a stage has too many requests

    script = Script(hold=hold)
    async with SERVERS["splitserve"](script) as target:
        output, errors = await serve_here(target, *FEW, "--stages", "0.1x1,0.3x0.5", "--send-limits", "--json")
    result = json.loads(output)
    capacity = result["request_rate"]
    assert f"capacity: {capacity:.4g} requests/s (40 requests, 8 at a time)" in errors
    assert [stage["rate_per_s"] for stage in result["stages"]["by_stage"]] == pytest.approx(
        [0.1 * capacity, 0.3 * capacity]
    )
    num_before = CAPACITY_CONCURRENCY + CAPACITY_REQUESTS
    told = ["ttft_ms" in asked for asked in script.asked]
    assert told == [False] * num_before + [True] * result["num_prompts"]


@pytest.mark.parametrize("kind", ["splitserve", pytest.param("openai", marks=pytest.mark.nightly)])
async def test_who_comes_back_is_judged_by_the_last_sending(kind, serve_here, tmp_path):
    few = ("--num-prompts", "6", *FEW)
    script = Script()
    async with SERVERS[kind](script) as target:
        await serve_here(target, *few)
        script.does = {script.order[0]: REFUSE_ONCE, script.order[1]: REFUSE}
        words = ["--obey-retry-after", "--save-detailed", "--result-filename", "found.json"]
        output, _ = await serve_here(target, *few, *words)
    assert "sent again when they had been told to: 2, of which 1 were admitted, and 1 of these were good" in output
    saved = json.loads((tmp_path / "found.json").read_text())
    assert (saved["num_prompts"], saved["completed"], saved["rejected"]) == (6, 5, 1)
    assert saved["returned"] == {"num": 2, "num_admitted": 1, "num_good": 1}
    lines = [json.loads(line) for line in (tmp_path / "found.requests.jsonl").read_text().splitlines()]
    assert sorted(line["num_refusals_before"] for line in lines) == [0] * 6 + [1] * 2


SIMULATED = ("--prefill", "1", "--decode", "1", "--random-input-len", "100", "--random-output-len", "2")
RECOVERY = (*SIMULATED, "--goodput", "ttft:1000", "--stages", "1x10,4x10,0.5x30", "--request-rate", "5", "--json")


@pytest.fixture
def simulate(tmp_path):
    PROFILE.save(tmp_path / "profile.json")

    def run(*words):
        return CliRunner().invoke(main, ["simulate", "--profile", str(tmp_path / "profile.json"), *words])

    return run


@pytest.mark.nightly
def test_a_simulated_fleet_takes_as_long_to_recover_as_its_queue_is_long(simulate):
    """A prompt of 100 tokens takes 102 ms: of 20 a second for 10 s about 100 are left, which shrink by 7.3 a second. A
    fleet that is told the limits reads the others first, and is back as soon as they come at a rate that it serves."""
    results = [simulate(*RECOVERY, *flags) for flags in (["--no-send-limits"], [])]
    assert [result.exit_code for result in results] == [0, 0], [result.output for result in results]
    untold, told = (json.loads(result.stdout) for result in results)
    for result in (untold, told):
        before, highest, _ = result["stages"]["by_stage"]
        assert before["attainment"] >= 0.9
        assert highest["attainment"] < 0.6
        assert result["backend"] == "simulated-1P+1D"
    assert 10 <= untold["stages"]["back_s"] <= 20
    assert told["stages"]["back_s"] <= 5


@pytest.mark.nightly
def test_a_simulated_fleet_that_refuses_says_when_to_come_back_and_recovers_sooner(simulate):
    result = simulate(*RECOVERY, "--admission", "timely")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["stages"]
    assert found["by_stage"][1]["num_refused_until"] > 50
    assert [stage["num_refused"] for stage in found["by_stage"]] == [0, 0, 0]
    assert found["back_s"] <= 5


def test_a_simulated_client_comes_back_when_it_is_told_to(simulate, tmp_path):
    words = ["--admission", "timely", "--save-detailed", "--result-filename", str(tmp_path / "found.json")]
    result = simulate(*RECOVERY, *words, "--obey-retry-after", "2")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    sendings = {}
    for line in map(json.loads, (tmp_path / "found.requests.jsonl").read_text().splitlines()):
        sendings.setdefault(line["index"], []).append(line)
    assert len(sendings) == told["num_prompts"]
    again = [(first, second) for each in sendings.values() for first, second in pairwise(each)]
    assert len(again) > 50
    for first, second in again:
        assert first["is_refused"]
        assert second["sent_s"] == second["scheduled_s"] == pytest.approx(first["ended_s"] + first["retry_after_s"])
    assert {len(each) for each in sendings.values()} == {1, 2, 3}
    last = [each[-1] for each in sendings.values() if len(each) > 1]
    assert told["returned"] == {
        "num": len(last),
        "num_admitted": sum(not each["is_refused"] for each in last),
        "num_good": sum(not each["error"] and each["ttft_s"] <= 1.0 for each in last),
    }
    # Every sending counts where it was due, and those after the last stage nowhere.
    due = [line for each in sendings.values() for line in each if line["scheduled_s"] < 50]
    assert sum(stage["num_offered"] for stage in told["stages"]["by_stage"]) == len(due)


def test_the_capacity_of_a_simulated_fleet_is_that_of_its_prefill_node(simulate):
    """Steps are full while eight prompts of 600 tokens wait, so that nothing but tokens takes time."""
    words = ("--prefill", "1", "--decode", "1", "--random-input-len", "600", "--random-output-len", "2")
    result = simulate(*words, "--goodput", "ttft:1000", "--stages", "0.5x4,1x4", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    capacity = told["request_rate"]
    assert capacity == pytest.approx(512 / chunk_s(512) / 600, rel=0.03)
    assert f"capacity: {capacity:.4g} requests/s" in result.stderr
    assert [stage["rate_per_s"] for stage in told["stages"]["by_stage"]] == [0.5 * capacity, capacity]


REFUSED = {
    "no limits": (["--stages", "3x1"], "--stages without limits: nothing is late"),
    "no stages": (["--goodput", "ttft:1", "--stages", "3"], "--stages 3: a stage is TIMESxSECONDS"),
    "a number beside stages": (["--stages", "3x1", "--num-prompts", "5"], "--num-prompts does not go with them"),
    "a bound beside stages": (["--stages", "3x1", "--max-concurrency", "5"], "--max-concurrency does not go with them"),
    "no trace": (["--goodput", "ttft:1", "--stages", "3x1", "--dataset-name", "azure"], "needs a trace"),
    "no server": (["--goodput", "ttft:1", "--stages", "3x1"], "no server answers at 127.0.0.1:1"),
}


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_flags_that_cannot_be_used(words, message):
    result = CliRunner().invoke(main, ["bench", "serve", "--server", "127.0.0.1:1", *words])
    assert result.exit_code in (1, 2)
    assert message in result.output
