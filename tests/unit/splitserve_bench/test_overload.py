"""Loads in stages: when requests are due, what is counted where, and the command as a user runs it."""

import asyncio
import json
import math
import sys
from dataclasses import replace

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from serving_core.errors import SettingsError
from splitserve.cli import main
from splitserve.commands.terminal import stdout
from splitserve_bench.overload.command import STAGED
from splitserve_bench.overload.findings import findings_json, findings_of
from splitserve_bench.overload.overload_report import overload_view
from splitserve_bench.overload.picture import PARTS, plot_overload
from splitserve_bench.overload.stages import overload_of, parse_stages, staged_load
from splitserve_bench.overload.windows import back_after_s, window_of, windows_of
from splitserve_bench.serve.metrics import Limits
from splitserve_bench.serve.serve_options import ServeOptions
from splitserve_bench.simulate.command import NO_SERVER
from tests.unit.splitserve_bench.bench_serve_kit import answered, failed
from tests.unit.splitserve_bench.load_servers import FAIL, MODEL, REFUSE, SERVERS, Script, http_server
from tests.unit.splitserve_bench.simulate_kit import PROFILE

LIMITS = Limits(ttft_s=1.0)
RANDOM_DATA = {"dataset_name": "random", "dataset_path": None, "random_input_len": 8, "random_output_len": 3}
RANDOM_DATA |= {
    "random_prefix_len": 0,
    "text_output_len": None,
    "skip_chat_template": False,
    "random_range_ratio": 0.5,
    "burstiness": 1.0,
    "length_scale": 1.0,
    "request_timeout_s": 9.0,
    "backend": None,
}


def options(**flags):
    return ServeOptions(**{**NO_SERVER, **STAGED, **RANDOM_DATA, "goodput": ("ttft:1",), "seed": 0, **flags})


# ---- stages ----


def test_stages_follow_one_another_and_may_be_alike():
    stages = parse_stages("0.5x20,3x60,0.5x20", 2.0)
    assert [(stage.rate, stage.start_s, stage.end_s) for stage in stages] == [(1, 0, 20), (6, 20, 80), (1, 80, 100)]
    assert [stage.num_requests for stage in stages] == [20, 360, 20]
    assert overload_of(stages) == (20, 80)
    assert overload_of(parse_stages("1x5 4x5 1x5 4x5 2x5", 1.0)) == (5, 20)


@pytest.mark.parametrize("text", ["", "3", "3x", "x60", "3x0", "-1x5", "3x60s", "1e9x1", "0x10", "1000x1000", "1x1e3"])
def test_what_are_no_stages_is_refused(text):
    with pytest.raises(SettingsError, match="--stages"):
        parse_stages(text, 1.0)


@given(st.integers(0, 2**31), st.floats(0.2, 10))
def test_each_stage_has_its_requests_within_itself(seed, burstiness):
    stages = parse_stages("4x5,0x3,20x2.5,1x5", 1.0)
    planned = staged_load(stages, options(seed=seed, burstiness=burstiness), 100, 1000).planned
    assert [each.index for each in planned] == list(range(75))
    times_s = [each.send_at_s for each in planned]
    assert times_s == sorted(times_s)
    assert [sum(stage.start_s <= at_s < stage.end_s for at_s in times_s) for stage in stages] == [20, 0, 50, 5]


def test_arrivals_of_a_stage_are_spread_evenly_over_it():
    """Of a Poisson process with so many arrivals each is as likely at any moment."""
    (stage,) = parse_stages("10x10", 1.0)
    times_s = [
        each.send_at_s for seed in range(20) for each in staged_load([stage], options(seed=seed), 100, 1000).planned
    ]
    counts = [sum(low <= at_s < low + 1 for at_s in times_s) for low in range(10)]
    assert sum(counts) == 2000
    assert all(abs(count - 200) < 5 * math.sqrt(200) for count in counts)


def test_random_prompts_begin_alike_where_that_is_wanted():
    planned = staged_load(parse_stages("2x5", 1.0), options(random_prefix_len=30), 100, 1000).planned
    assert len({each.prompt[:30] for each in planned}) == 1
    assert len({each.prompt for each in planned}) == len(planned) == 10


def test_a_trace_that_is_too_short_begins_anew_with_other_tokens(tmp_path):
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens", *(f"2023-11-16 18:17:0{i}.0,{10 + i},{1 + i}" for i in range(4))]
    (tmp_path / "trace.csv").write_text("\n".join(rows))
    trace = options(dataset_name="azure", dataset_path=tmp_path / "trace.csv")
    planned = staged_load(parse_stages("2x5", 1.0), trace, 100, 1000).planned
    assert [len(each.prompt) for each in planned] == [10, 11, 12, 13, 10, 11, 12, 13, 10, 11]
    assert len({each.prompt for each in planned}) == 10
    assert staged_load(parse_stages("2x5", 1.0), trace, 12, 1000).num_clipped == 3 + 3 + 1  # all but the shortest


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
    whole = window_of(OUTCOMES, LIMITS, 0.0, 12.0)
    assert whole.num_offered == len(OUTCOMES)
    assert whole.num_good == sum(each.num_good for each in (first, second, third))
    assert window_of([], LIMITS, 0.0, 5.0).attainment is None


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


def found(text="1x5,2x5,1x2"):
    return findings_of(OUTCOMES, parse_stages(text, 1.0), LIMITS, 0.9)


def test_what_was_found_is_shown_and_drawn(tmp_path, monkeypatch):
    findings = found()
    assert (findings.overload_s, findings.back_s) == ((5.0, 10.0), 0.0)
    with stdout.capture() as capture:
        stdout.print(overload_view(findings))
    assert "Goodput was back at once after the overload: 90% of the requests good." in capture.get()
    assert "5 to 10 s" in capture.get()
    saved = findings_json(findings, {"model": "m"}, detailed=True)
    assert [each["num_offered"] for each in saved["windows"]] == [2, 5, 1]
    assert [each["rate"] for each in saved["stages"]] == [1, 2, 1]
    assert [each["scheduled_s"] for each in saved["requests"]] == [each.scheduled_s for each in OUTCOMES]
    assert "requests" not in findings_json(findings, {})
    plot_overload(findings, tmp_path / "overload.png")
    assert (tmp_path / "overload.png").read_bytes().startswith(b"\x89PNG")

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    plot_overload(findings, tmp_path / "none.png")
    ((axes,),) = (figure.axes for figure in drawn)
    heights = {
        bars.get_label(): [round(bar.get_height() * bar.get_width()) for bar in bars] for bars in axes.containers
    }
    assert heights == {name: [getattr(window, field) for window in findings.windows] for name, field, _ in PARTS}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("1x5,2x7", "Nothing was sent after the overload"),
        ("1x5,2x7,0x30", "Nothing was sent after the overload"),
        ("2x2,1x7", "Goodput was not back within the 7 s"),
        ("2x1,1x11", "Goodput was back for what came 10 s after the overload and later"),
    ],
)
def test_it_is_said_whether_goodput_is_back(text, sentence):
    with stdout.capture() as capture:
        stdout.print(overload_view(found(text)))
    assert sentence in capture.get()


def test_a_generator_that_did_not_keep_up_is_told():
    late = [replace(each, sent_s=each.scheduled_s + 0.08) for each in OUTCOMES]
    findings = [findings_of(each, parse_stages("1x5,2x5,1x2", 1.0), LIMITS, 0.9) for each in (OUTCOMES, late)]
    assert [findings_json(each, {})["send_lag_p99_s"] for each in findings] == pytest.approx([0.0, 0.08])
    with stdout.capture() as capture:
        stdout.print(overload_view(findings[0]))
    assert "send lag" not in capture.get()
    with stdout.capture() as capture:
        stdout.print(overload_view(findings[1]))
    assert "the send lag's p99 is 80.0 ms" in capture.get()


# ---- the command ----

FEW = ("--random-input-len", "20", "--random-output-len", "4", "--goodput", "ttft:60000", "tpot:50000")
STAGES = ("--stages", "1x0.4,4x0.5,1x0.4", "--request-rate", "10")


async def run(target, *words):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "splitserve", "bench", "overload", "--server", target.address, *words),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return output.decode()


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["splitserve", "openai"])
async def test_a_server_is_loaded_in_stages(kind, tmp_path):
    script = Script()
    async with SERVERS[kind](script) as target:
        first = json.loads(await run(target, *FEW, *STAGES, "--json"))
        assert [stage["num_good"] for stage in first["stages"]] == [4, 20, 4]
        # Of the 20 of the overload those in the middle: where one stage ends, others may overtake.
        script.does |= dict.fromkeys(script.order[9:19], REFUSE) | {script.order[-1]: FAIL}
        words = ["--save", str(tmp_path / "found.json"), "--plot", str(tmp_path / "found.png")]
        await run(target, *FEW, *STAGES, *words)
    saved = json.loads((tmp_path / "found.json").read_text())
    before, overload, after = saved["stages"]
    assert (before["num_good"], before["num_offered"], before["rate"]) == (4, 4, 10)
    assert (overload["num_good"], overload["num_refused_until"], overload["num_refused"]) == (10, 10, 0)
    assert (after["num_good"], after["num_failed"]) == (3, 1)
    assert (saved["model"], saved["overload_start_s"], saved["overload_end_s"]) == (MODEL, 0.4, 0.9)
    assert saved["back_s"] is None
    assert len(saved["requests"]) == 28
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.nightly
@pytest.mark.parametrize(("words", "limits"), [([], (60000, 50000)), (["--no-send-limits"], (None, None))])
async def test_the_server_is_told_the_limits(words, limits):
    script = Script()
    async with SERVERS["splitserve"](script) as target:
        await run(target, *FEW, *STAGES, "--num-warmups", "2", *words)
    told = [script.seen[key].asked for key in script.order]
    assert {(asked.get("ttft_ms"), asked.get("tpot_ms")) for asked in told[2:]} == {limits}
    assert {(asked.get("ttft_ms"), asked.get("tpot_ms")) for asked in told[:2]} == {(None, None)}


@pytest.mark.nightly
async def test_other_servers_are_not_told_the_limits():
    script = Script()
    async with http_server(script) as target:
        await run(target, *FEW, *STAGES)
    assert not any("ttft_ms" in seen.asked for seen in script.seen.values())


@pytest.mark.nightly
def test_a_simulated_fleet_takes_as_long_to_recover_as_its_queue_is_long(tmp_path):
    """A prompt of 100 tokens takes 102 ms: of 20 a second for 10 s about 100 are left, which shrink by 7.3 a second. A
    fleet that is told the limits reads the others first, and is back as soon as they come at a rate that it serves."""
    PROFILE.save(tmp_path / "profile.json")
    words = ["--profile", str(tmp_path / "profile.json"), "--prefill", "1", "--decode", "1", "--goodput", "ttft:1000"]
    words += ["--random-input-len", "100", "--random-output-len", "2", "--stages", "1x10,4x10,0.5x30", "--json"]
    words = ["bench", "overload", *words, "--request-rate", "5"]
    results = [CliRunner().invoke(main, [*words, *flags]) for flags in (["--no-send-limits"], [])]
    assert [result.exit_code for result in results] == [0, 0], [result.output for result in results]
    untold, told = (json.loads(result.stdout) for result in results)
    for found in (untold, told):
        before, overload, _ = found["stages"]
        assert before["attainment"] >= 0.9
        assert overload["attainment"] < 0.6
        assert found["backend"] == "simulated-1P+1D"
    assert 10 <= untold["back_s"] <= 20
    assert told["back_s"] <= 5


@pytest.mark.nightly
def test_a_simulated_fleet_that_refuses_says_when_to_come_back_and_recovers_sooner(tmp_path):
    PROFILE.save(tmp_path / "profile.json")
    words = ["--profile", str(tmp_path / "profile.json"), "--prefill", "1", "--decode", "1", "--goodput", "ttft:1000"]
    words += ["--random-input-len", "100", "--random-output-len", "2", "--stages", "1x10,4x10,0.5x30", "--json"]
    result = CliRunner().invoke(main, ["bench", "overload", *words, "--request-rate", "5", "--admission", "timely"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["stages"][1]["num_refused_until"] > 50
    assert [stage["num_refused"] for stage in told["stages"]] == [0, 0, 0]
    assert told["back_s"] <= 5


def test_what_is_clipped_is_told(tmp_path):
    replace(PROFILE, node=replace(PROFILE.node, max_model_len=64)).save(tmp_path / "profile.json")
    words = ("bench", "overload", "--profile", str(tmp_path / "profile.json"), "--both", "1", "--goodput", "ttft:1000")
    words += ("--stages", "2x4", "--random-output-len", "4", "--random-input-len")
    assert "8 of 8 requests are clipped to what the model takes" in CliRunner().invoke(main, [*words, "100"]).stderr
    assert "clipped" not in CliRunner().invoke(main, [*words, "60"]).stderr


@pytest.mark.parametrize("flag", [("--server", "127.0.0.1:1"), ("--num-warmups", "3"), ("--model", "m")])
def test_a_simulation_takes_no_flag_of_a_server_but_from_the_environment(tmp_path, flag):
    PROFILE.save(tmp_path / "profile.json")
    words = ("bench", "overload", "--profile", str(tmp_path / "profile.json"), "--both", "1", *FEW, "--stages", "1x1")
    refused = CliRunner().invoke(main, [*words, *flag])
    assert (refused.exit_code, f"{flag[0]} is for a server, and --profile asks none" in refused.output) == (2, True)
    assert CliRunner().invoke(main, words, env={"SPLITSERVE_SERVER": "127.0.0.1:1"}).exit_code == 0


REFUSED = {
    "no limits": ([], "without limits nothing is late"),
    "no stages": (["--goodput", "ttft:1", "--stages", "3"], "--stages 3: a stage is TIMESxSECONDS"),
    "nodes of a real server": (["--goodput", "ttft:1", "--both", "2"], "give --profile"),
    "no trace": (["--goodput", "ttft:1", "--dataset-name", "azure"], "needs a trace"),
    "no server": (["--goodput", "ttft:1"], "no server answers at 127.0.0.1:1"),
}


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_flags_that_cannot_be_used(words, message):
    result = CliRunner().invoke(main, ["bench", "overload", "--server", "127.0.0.1:1", *words])
    assert result.exit_code in (1, 2)
    assert message in result.output
