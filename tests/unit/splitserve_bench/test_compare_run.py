"""Whole comparisons of queues that are worked out instead of run: one server each, that answers in turn."""

import asyncio
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys

import pytest
from matplotlib.figure import Figure

from serving_core.errors import SettingsError
from splitserve.commands.terminal import stdout
from splitserve_bench.compare.comparison import Forecaster
from splitserve_bench.compare.contenders import ClusterContender, PeerContender, colocated, contenders
from splitserve_bench.compare.report import comparison_json, comparison_view, save_comparison, warnings
from splitserve_bench.compare.run import Cell, Cells, Compare, CompareBench, Measured, Workload, first_rate_of
from splitserve_bench.compare.slo import Scales, Unloaded
from splitserve_bench.errors import BenchError
from splitserve_bench.serve.command import Dataset
from splitserve_bench.serve.metrics import Limits
from splitserve_bench.serve.records import Outcome, PlannedRequest, Progress, ServedModel
from tests.effort import few
from tests.unit.splitserve_bench.bench_serve_kit import answered, failed, timeline

PROMPT_TOKENS, OUTPUT_TOKENS, TPOT_S = 10, 5, 0.01
BENCH = CompareBench(
    criteria=(Limits(ttft_s=0.5),),
    send_limits=False,
    own_unloaded=False,
    attainment=0.9,
    tolerance=0.1,
    max_probes=16,
    first_rate=1.0,
    at_rates=(),
    num_prompts=100,
    seconds=20.0,
    request_timeout_s=30.0,
    seed=0,
)
SHORT_BENCH = dataclasses.replace(BENCH, num_prompts=40, seconds=5.0)
COLOCATED, _, SPLIT, AUTO = CONTENDERS = contenders(2, [], [])
NOBODY = Forecaster({}, 2, {})
FAST = PeerContender("peer fast", "http://127.0.0.1:1")


class QueueArena:
    """An Arena whose contenders compute one prompt after the other, each for so many seconds; then tokens flow."""

    def __init__(self, prefill_s, failures=()):
        self.prefill_s = prefill_s
        self.failures = dict(failures)
        self.loads = []
        self.stop_at = None

    async def run(self, contender, warm_up, planned, *, max_concurrency, request_timeout_s, on_progress):
        if len(self.loads) == self.stop_at:
            raise asyncio.CancelledError
        self.loads.append((contender.name, [*planned], [*warm_up]))
        self.failures[contender.name] = self.failures.get(contender.name, 10**9) - 1
        if self.failures[contender.name] < 0:
            raise BenchError("lost during the load: decode-0")
        on_progress(Progress(len(planned), 1, 0, 0, 0, 0.1))
        outcomes, free_s = [], 0.0
        for each in planned:
            sent_s = free_s if max_concurrency == 1 else each.send_at_s
            start_s = max(sent_s, free_s)
            free_s = start_s + self.prefill_s[contender.name]
            outcomes.append(served(each, sent_s, start_s, free_s))
            free_s += TPOT_S * (OUTPUT_TOKENS - 1) if max_concurrency == 1 else 0.0
        return outcomes


def served(planned, sent_s, start_s, first_s):
    arrivals_s = tuple(first_s + TPOT_S * i for i in range(OUTPUT_TOKENS))
    timeline = {"prefill_queue_s": start_s - sent_s, "prefill_s": first_s - start_s, "decode_s": 4 * TPOT_S}
    return Outcome(
        planned.index,
        planned.send_at_s,
        sent_s,
        len(planned.prompt),
        OUTPUT_TOKENS,
        arrivals_s,
        (1,) * OUTPUT_TOKENS,
        arrivals_s[-1],
        timeline=timeline,
    )


@pytest.fixture
def comparing(tmp_path):
    """Makes comparisons that are all saved in one folder."""

    def compare(arena, bench=SHORT_BENCH, lines=None):
        dataset = Dataset(random_input_len=PROMPT_TOKENS, random_output_len=OUTPUT_TOKENS)
        workload = Workload(dataset, ServedModel("queue", 100, 1000))
        report = [].append if lines is None else lines.append
        cells = Cells(tmp_path / "saved", {})
        return Compare(bench, workload, arena, cells, NOBODY, report=report, show=lambda text: None)

    return compare


def knee_of(prefill_s, limit_s):
    """The rate at which 90 % of Poisson arrivals wait no longer than the limit less the prefill itself: Erlang's
    distribution of the wait for one server with a fixed time, M/D/1."""

    def share_in_time(rate):
        wait_s = limit_s - prefill_s
        lags_s = [wait_s - k * prefill_s for k in range(int(wait_s / prefill_s + 1e-9) + 1)]
        terms = [(-rate * lag_s) ** k / math.factorial(k) * math.exp(rate * lag_s) for k, lag_s in enumerate(lags_s)]
        return (1 - rate * prefill_s) * sum(terms)

    low, high = 0.0, 1 / prefill_s
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if share_in_time(middle) >= 0.9 else (low, middle)
    return low


async def test_the_faster_queue_wins_and_the_slower_one_loses_to_its_prefill_queue(comparing):
    arena = QueueArena({COLOCATED.name: 0.2, SPLIT.name: 0.1})
    (comparison,) = await comparing(arena, BENCH).run([COLOCATED, SPLIT], COLOCATED)
    colocated, split = (entry.search.result() for entry in comparison.entries)
    for result, prefill_s in ((colocated, 0.2), (split, 0.1)):
        assert result.best_rate == pytest.approx(knee_of(prefill_s, 0.5), rel=0.1)
        assert result.knee_low < knee_of(prefill_s, 0.5) < result.knee_high
    assert comparison.verdict[0].startswith("split 1P+1D wins: ")
    assert comparison.verdict[1] == "Disaggregation wins."
    assert any(
        sentence.startswith("colocated 1x2 loses its requests at ")
        and "to TTFT" in sentence
        and "prefill queue" in sentence
        for sentence in comparison.verdict
    )
    assert comparison.unloaded is None  # fixed limits and a first rate: nothing to be measured before


async def test_contenders_take_turns_with_the_same_requests_and_nobody_always_begins(comparing):
    arena = QueueArena({COLOCATED.name: 0.2, SPLIT.name: 0.1})
    await comparing(arena).run([COLOCATED, SPLIT], COLOCATED)
    by_contender = {
        each.name: [load for name, load, _ in arena.loads if name == each.name] for each in (COLOCATED, SPLIT)
    }
    shorter = min(map(len, by_contender.values()))
    names = [name for name, _, _ in arena.loads]
    rounds = [names[start : start + 2] for start in range(0, 2 * shorter, 2)]
    assert all(sorted(each) == [COLOCATED.name, SPLIT.name] for each in rounds)
    assert len({each[0] for each in rounds}) == 2
    first_of_each = [loads[0] for loads in by_contender.values()]
    assert first_of_each[0] == first_of_each[1]


async def test_no_two_probes_of_a_contender_share_a_prompt(comparing):
    arena = QueueArena({FAST.name: 0.1})
    await comparing(arena).run([FAST], COLOCATED)
    prompts = [each.prompt for _, load, warm_up in arena.loads for each in [*load, *warm_up]]
    assert len(arena.loads) > 3
    assert len(set(prompts)) == len(prompts)


async def test_relative_limits_are_multiples_of_what_the_reference_takes_alone(comparing):
    arena = QueueArena({COLOCATED.name: 0.2, SPLIT.name: 0.1})
    bench = dataclasses.replace(BENCH, criteria=(Scales(ttft=6.0, tpot=1.5),), first_rate=None)
    (comparison,) = await comparing(arena, bench).run([SPLIT], COLOCATED)
    assert arena.loads[0][0] == COLOCATED.name
    assert comparison.unloaded.ttft_s(PROMPT_TOKENS) == pytest.approx(0.2)
    assert comparison.unloaded.tpot_s == pytest.approx(TPOT_S)
    assert comparison.goal.first_rate == 4.2  # 1 / (0.2 s + 4 * 0.01 s), to two digits
    limits = comparison.entries[0].slo.limits_of(arena.loads[0][1][0])
    assert limits.ttft_s == pytest.approx(1.2)
    assert limits.tpot_s == pytest.approx(0.015)


async def test_who_cannot_go_on_is_left_out_and_named(comparing):
    lines = []
    arena = QueueArena({COLOCATED.name: 0.2, SPLIT.name: 0.1}, failures={SPLIT.name: 2})
    (comparison,) = await comparing(arena, lines=lines).run([COLOCATED, SPLIT], COLOCATED)
    assert sum(name == SPLIT.name for name, _, _ in arena.loads) == 3
    assert "split 1P+1D is out: lost during the load: decode-0" in lines
    assert comparison.entries[0].search.result().is_settled
    assert not any("wins" in sentence for sentence in comparison.verdict)
    assert "split 1P+1D is out: lost during the load: decode-0" in warnings(comparison)


async def test_when_nobody_can_be_probed_that_is_an_error(comparing):
    arena = QueueArena({SPLIT.name: 0.1}, failures={SPLIT.name: 0})
    with pytest.raises(BenchError, match=r"split 1P\+1D: lost during the load"):
        await comparing(arena).run([SPLIT], COLOCATED)


async def test_what_is_known_stays_known_when_it_is_stopped(comparing):
    arena = QueueArena({COLOCATED.name: 0.2, SPLIT.name: 0.1})
    arena.stop_at = 3
    stopped = comparing(arena)
    assert stopped.found == ()
    with pytest.raises(asyncio.CancelledError):
        await stopped.run([COLOCATED, SPLIT], COLOCATED)
    (found,) = stopped.found
    assert [len(entry.runs) for entry in found.entries] == [1, 2]  # the second round begins with the other one
    assert "split 1P+1D" in shown(found)


async def test_given_rates_are_run_once_for_everybody(comparing):
    arena = QueueArena({COLOCATED.name: 0.2, SPLIT.name: 0.1})
    bench = dataclasses.replace(BENCH, at_rates=(2.0, 8.0), first_rate=None)
    (comparison,) = await comparing(arena, bench).run([COLOCATED, SPLIT], COLOCATED)
    assert len(arena.loads) == 4
    assert [len(load) for _, load, _ in arena.loads] == [100, 100, 160, 160]  # 100 requests and 20 s at least
    colocated, split = (entry.search.result() for entry in comparison.entries)
    assert (colocated.best_rate, colocated.failing_rate) == (2.0, 8.0)
    assert (split.best_rate, split.failing_rate) in [(8.0, None), (2.0, 8.0)]
    text = shown(comparison)
    assert text.count("colocated 1x2  ") == 2
    assert "prefill queue" in text


TWO_SCALES = dataclasses.replace(
    BENCH, criteria=(Scales(ttft=2.0), Scales(ttft=1e6)), at_rates=(2.0, 8.0), first_rate=None
)


async def test_the_same_cells_are_judged_by_several_objectives(comparing, tmp_path):
    arena = QueueArena({COLOCATED.name: 0.2, SPLIT.name: 0.1})
    strict, loose = await comparing(arena, TWO_SCALES).run([COLOCATED, SPLIT], COLOCATED)
    assert len(arena.loads) == 1 + 4  # the unloaded reference, two contenders at two rates
    assert [[run.pairs for run in entry.runs] for entry in loose.entries] == [
        [run.pairs for run in entry.runs] for entry in strict.entries
    ]
    good = [[counted.num_good for counted in entry.search.curve()] for entry in strict.entries]
    assert [[counted.num_good for counted in entry.search.curve()] for entry in loose.entries] == [[100, 160]] * 2
    assert good[0][1] < 160
    assert "TTFT ≤ 1e+06 x unloaded" in shown(loose)
    save_comparison((strict, loose), {"model": "queue"}, tmp_path)
    pictures = [(tmp_path / name).read_bytes() for name in ("attainment.png", "attainment-2.png")]
    assert pictures[0] != pictures[1]
    (also,) = json.loads((tmp_path / "comparison.json").read_text())["also"]
    assert also["slo"].startswith("TTFT ≤ 1e+06 x unloaded")
    assert [[probe["num_good"] for probe in each["probes"]] for each in also["contenders"]] == [[100, 160]] * 2


async def test_who_is_told_the_limits_has_a_cell_for_each_objective(comparing):
    arena = QueueArena({COLOCATED.name: 0.2, SPLIT.name: 0.1, FAST.name: 0.05})
    bench = dataclasses.replace(TWO_SCALES, criteria=(Scales(ttft=2.0, tpot=3.0), Scales(ttft=5.0)), send_limits=True)
    await comparing(arena, bench).run([SPLIT, FAST], COLOCATED)
    (reference, unloaded, warm_up), *loads = arena.loads
    assert reference == COLOCATED.name
    assert {(each.ttft_ms, each.tpot_ms) for each in [*unloaded, *warm_up]} == {(None, None)}
    told = {(name, each.ttft_ms, each.tpot_ms) for name, load, _ in loads for each in load}
    strict, loose = (pytest.approx((ttft_ms, tpot_ms)) for ttft_ms, tpot_ms in ((400.0, 30.0), (1000.0, 0.0)))
    assert sorted((ttft_ms, tpot_ms or 0.0) for name, ttft_ms, tpot_ms in told if name == SPLIT.name) == [strict, loose]
    assert {each[1:] for each in told if each[0] == FAST.name} == {(None, None)}  # a peer is told nothing
    assert [name for name, _, _ in loads].count(SPLIT.name) == 2 * [name for name, _, _ in loads].count(FAST.name) == 4
    asked = {(load[0].send_at_s, load[-1].send_at_s, *(each.prompt for each in load)) for _, load, _ in loads}
    assert len(asked) == 2  # the same requests for everybody: one load a rate


async def test_each_can_be_judged_by_what_it_takes_alone_itself(comparing):
    arena = QueueArena({COLOCATED.name: 0.2, SPLIT.name: 0.1})
    bench = dataclasses.replace(TWO_SCALES, criteria=(Scales(ttft=1.9),), own_unloaded=True)
    by_ours, by_own = await comparing(arena, bench).run([COLOCATED, SPLIT], COLOCATED)
    assert len(arena.loads) == 2 + 4
    assert by_own.objective == "TTFT ≤ 1.9 x what the request takes alone on the same contender"
    limits_s = [
        [entry.slo.limits_of(arena.loads[0][1][0]).ttft_s for entry in each.entries] for each in (by_ours, by_own)
    ]
    assert limits_s == [pytest.approx([0.38, 0.38]), pytest.approx([0.38, 0.19])]
    ours, own = ([entry.search.curve() for entry in each.entries] for each in (by_ours, by_own))
    assert ours[0] == own[0]
    assert own[1][1].num_good < ours[1][1].num_good  # the faster one has to be faster


async def test_a_comparison_that_was_stopped_goes_on_where_it_was(comparing):
    times = {COLOCATED.name: 0.2, SPLIT.name: 0.1}
    bench = dataclasses.replace(
        BENCH, criteria=(Scales(ttft=3.0),), send_limits=True, own_unloaded=True, at_rates=(2.0, 8.0)
    )
    stopped, lines = QueueArena(times), []
    stopped.stop_at = 4
    with pytest.raises(asyncio.CancelledError):
        await comparing(stopped, bench).run([COLOCATED, SPLIT], COLOCATED)
    rest = QueueArena(times)
    found = await comparing(rest, bench, lines).run([COLOCATED, SPLIT], COLOCATED)
    assert len(rest.loads) == 2 + 4 - 4
    assert sum(line.endswith(", as saved") for line in lines) == 2
    nothing = QueueArena(times)
    again = await comparing(nothing, bench).run([COLOCATED, SPLIT], COLOCATED)
    assert nothing.loads == []
    assert comparison_json(again, {}) == comparison_json(found, {})
    assert [[run.pairs for run in entry.runs] for entry in again[0].entries] == [
        [run.pairs for run in entry.runs] for entry in found[0].entries
    ]


async def test_a_search_goes_on_too(comparing):
    arena = QueueArena({COLOCATED.name: 0.2})
    arena.stop_at = 4
    with pytest.raises(asyncio.CancelledError):
        await comparing(arena).run([COLOCATED], COLOCATED)
    arena.stop_at = None
    (comparison,) = await comparing(arena).run([COLOCATED], COLOCATED)
    assert comparison.entries[0].search.result().is_settled
    first_prompts = [load[0].prompt for _, load, _ in arena.loads]
    assert len(set(first_prompts)) == len(first_prompts) == len(comparison.entries[0].runs)


async def test_what_a_contender_that_failed_lacks_is_measured_the_next_time(comparing):
    arena = QueueArena({COLOCATED.name: 0.2, SPLIT.name: 0.1}, failures={SPLIT.name: 1})
    bench = dataclasses.replace(BENCH, at_rates=(2.0, 8.0))
    await comparing(arena, bench).run([COLOCATED, SPLIT], COLOCATED)
    well = QueueArena({SPLIT.name: 0.1})
    (comparison,) = await comparing(well, bench).run([COLOCATED, SPLIT], COLOCATED)
    assert [name for name, _, _ in well.loads] == [SPLIT.name]
    assert not any(entry.failure for entry in comparison.entries)


async def test_what_a_peer_was_asked_twice_is_said(comparing):
    arena, bench = QueueArena({FAST.name: 0.1, SPLIT.name: 0.1}), dataclasses.replace(BENCH, at_rates=(2.0,))
    for stop_at in (0, 1):  # within the peer's load, then within the cluster's, which is a new one each time
        arena.stop_at = stop_at
        with pytest.raises(asyncio.CancelledError):
            await comparing(arena, bench).run([FAST, SPLIT], COLOCATED)
    arena.stop_at = None
    (comparison,) = await comparing(arena, bench).run([FAST, SPLIT], COLOCATED)
    (line,) = (line for line in warnings(comparison) if "had been sent" in line)
    assert line.startswith("peer fast, 2 req/s: ")


async def test_the_same_requests_are_compared_one_by_one(comparing):
    arena = QueueArena({COLOCATED.name: 0.2, SPLIT.name: 0.1})
    bench = dataclasses.replace(BENCH, at_rates=(4.0,), num_prompts=300)
    (comparison,) = await comparing(arena, bench).run([COLOCATED, SPLIT], COLOCATED)
    (pair,) = comparison.paired
    goods = [entry.runs[0].summary.are_good for entry in comparison.entries]
    assert pair.num_total == 300
    assert pair.num_one_alone == sum(one and not other for one, other in zip(*goods, strict=True)) == 0
    assert pair.num_other_alone == sum(other and not one for one, other in zip(*goods, strict=True)) > 50
    assert -1 <= pair.interval[0] < pair.difference < pair.interval[1] < 0
    (sentence,) = (each for each in comparison.verdict if "of the same" in each)
    assert sentence.startswith("At 4 req/s, of the same 300 requests, split 1P+1D keeps more than colocated 1x2 by ")
    (saved,) = comparison_json((comparison,), {})["paired"]
    assert (saved["one"], saved["other"], saved["difference"]) == (COLOCATED.name, SPLIT.name, pair.difference)


async def test_what_auto_lost_and_a_fixed_mode_kept_is_told_by_decision(comparing):
    """A queue is all that it loses by: no server here says what it expected."""
    arena = QueueArena({COLOCATED.name: 0.3, SPLIT.name: 0.1, AUTO.name: 0.2})
    bench = dataclasses.replace(BENCH, at_rates=(4.0,), num_prompts=300)
    (comparison,) = await comparing(arena, bench).run([COLOCATED, SPLIT, AUTO], COLOCATED)
    _, split, auto = (entry.runs[0].summary.are_good for entry in comparison.entries)
    num_lost = sum(other and not own for own, other in zip(auto, split, strict=True))
    assert num_lost > 50
    by_colocated, by_split = comparison_json((comparison,), {})["causes"]
    assert (by_colocated["keeper"], by_colocated["num_lost"], by_colocated["causes"]) == (COLOCATED.name, 0, ())
    assert (by_split["loser"], by_split["keeper"], by_split["rate"]) == (AUTO.name, SPLIT.name, 4.0)
    (cause,) = by_split["causes"]
    assert (cause["decision"], cause["limit"]) == ("prefill queue longer than expected", "TTFT")
    assert cause["num_lost"] == by_split["num_lost"] == num_lost
    assert (cause["predicted_ms"], cause["margin_ms"], cause["limit_ms"]) == (None, None, 500.0)
    assert cause["actual_ms"] > 500.0
    text = shown(comparison)
    assert f"At 4 req/s {AUTO.name} lost {num_lost} of 300 requests that {SPLIT.name} kept:" in text
    assert "prefill queue longer than expected" in text
    assert f"that {COLOCATED.name} kept" not in text


async def test_it_is_shown_saved_and_drawn(comparing, tmp_path):
    arena = QueueArena({COLOCATED.name: 0.2, FAST.name: 0.05})
    (comparison,) = await comparing(arena, BENCH).run([COLOCATED, FAST], COLOCATED)
    text = shown(comparison)
    assert "90% of the offered requests good: TTFT ≤ 500 ms" in text
    assert "peer fast wins: " in text
    save_comparison((comparison,), {"model": "queue"}, tmp_path)
    assert (tmp_path / "attainment.png").read_bytes().startswith(b"\x89PNG")
    saved = json.loads((tmp_path / "comparison.json").read_text())
    assert saved == json.loads(json.dumps(comparison_json((comparison,), {"model": "queue"})))
    first = saved["contenders"][0]
    assert first["result"]["best_rate"] == comparison.entries[0].search.result().best_rate
    assert first["loses_by"] == "TTFT: prefill queue"
    assert first["probes"][0]["p50_tpot_ms"] == pytest.approx(1e3 * TPOT_S)
    files = sorted((tmp_path / "saved" / "probes").iterdir())
    assert len(files) == len(arena.loads) == sum(len(each["probes"]) for each in saved["contenders"])
    assert len(json.loads(files[0].read_text())["requests"]) == 100


async def test_the_picture_shows_the_share_that_was_wanted(comparing, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    arena = QueueArena({COLOCATED.name: 0.2})
    (comparison,) = await comparing(arena, dataclasses.replace(BENCH, attainment=0.95)).run([COLOCATED], COLOCATED)
    save_comparison((comparison,), {}, tmp_path)
    ((axes,),) = (figure.axes for figure in drawn)
    assert [text.get_text() for text in axes.texts] == ["95%"]
    assert [95.0, 95.0] in [list(line.get_ydata()) for line in axes.lines]


async def test_what_is_not_known_of_a_peer_is_said(comparing):
    (comparison,) = await comparing(QueueArena({FAST.name: 0.1, SPLIT.name: 0.1})).run([FAST, SPLIT], COLOCATED)
    assert [line.partition(":")[0] for line in warnings(comparison) if "not known here" in line] == ["peer fast"]


async def test_a_probe_that_a_trace_makes_short_is_said(tmp_path):
    path, lines = tmp_path / "trace.csv", []
    rows = [f"2023-11-16 18:17:{i:02}.0000000,10,5" for i in range(50)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    workload = Workload(Dataset("azure", str(path)), ServedModel("queue", 100, 1000))
    arena, bench = QueueArena({COLOCATED.name: 0.2}), dataclasses.replace(BENCH, at_rates=(1.0,))
    cells = Cells(tmp_path / "saved", {})
    compare = Compare(bench, workload, arena, cells, NOBODY, report=lines.append, show=lambda text: None)
    await compare.run([COLOCATED], COLOCATED)
    assert any("the data set has 50 requests, not the 100 of 20 s" in line for line in lines)


async def test_a_search_that_ran_out_of_probes_is_marked(comparing):
    arena = QueueArena({COLOCATED.name: 0.2})
    (comparison,) = await comparing(arena, dataclasses.replace(BENCH, max_probes=2)).run([COLOCATED], COLOCATED)
    assert any("the search ended before" in line for line in warnings(comparison))


def test_the_search_begins_where_one_answer_after_the_other_would_end():
    planned = Workload(Dataset(random_input_len=100, random_output_len=11), ServedModel("", 1000, 1000)).load(1, 50, 0)
    assert first_rate_of(Unloaded(0.1, 0.001, 0.01), planned) == 3.3  # 1 / (0.1 + 0.1 + 0.1)


def test_a_data_set_needs_a_vocabulary():
    with pytest.raises(BenchError, match="vocabulary"):
        Workload(Dataset(), ServedModel("", None, None))


def shown(comparison):
    with stdout.capture() as capture:
        stdout.print(comparison_view(comparison))
    return capture.get()


async def test_a_probe_of_as_many_requests_as_there_may_be_is_said_to_be_short(tmp_path, monkeypatch):
    monkeypatch.setattr("splitserve_bench.compare.run.MOST_REQUESTS", 500)
    lines, bench = [], dataclasses.replace(BENCH, at_rates=(25.0, 30.0), seconds=20.0)
    workload = Workload(Dataset(random_input_len=2, random_output_len=1), ServedModel("queue", 100, 1000))
    cells = Cells(tmp_path / "saved", {})
    arena = QueueArena({COLOCATED.name: 0.2})
    compare = Compare(bench, workload, arena, cells, NOBODY, report=lines.append, show=lambda text: None)
    await compare.run([COLOCATED], COLOCATED)
    said = "30 req/s: a probe has 500 requests, not the 600 of 20 s"
    assert [said in line for line in lines if "a probe has" in line] == [True]


# ---- what is saved ----


ARGUMENTS = {"model": "m", "bench": {"seed": 0, "at_rates": (1.0, 2.0)}, "contenders": [{"name": "a"}]}
PLANNED = [PlannedRequest(i, i / 3, (i, 7), 3, ttft_ms=500.0) for i in range(2)]
CELL = Cell(colocated(1, 2), "2qps-0", PLANNED)
MEASURED = Measured(
    (
        answered(0, 0.1, (1 / 3, 0.7), timeline=timeline(0.1, 0.2)),
        failed(1, 0.4, error="full", is_refused=True, retry_after_s=1.5),
    )
)


def test_what_was_saved_is_found_as_it_was(tmp_path):
    cells = Cells(tmp_path / "new", ARGUMENTS)
    assert (len(cells), CELL in cells, cells.find(CELL)) == (0, False, None)
    cells.begin(CELL)
    cells.save(CELL, MEASURED)
    again = Cells(tmp_path / "new", ARGUMENTS)
    assert (len(again), CELL in again, again.find(CELL)) == (1, True, MEASURED)
    (path,) = (tmp_path / "new" / "probes").iterdir()
    assert path.name.startswith("colocated-1x2-2qps-0-")
    assert json.loads(path.read_text())["requests"][1]["told_ttft_ms"] == 500


OTHERS = {
    "flags": Cell(ClusterContender("colocated 1x2", "colocated", 0, 0, 1, (("block_size", 8),)), "2qps-0", PLANNED),
    "address": Cell(PeerContender("colocated 1x2", "http://x"), "2qps-0", PLANNED),
    "prompt": Cell(CELL.contender, CELL.label, [PLANNED[0], dataclasses.replace(PLANNED[1], prompt=(1, 8))]),
    "moment": Cell(CELL.contender, CELL.label, [PLANNED[0], dataclasses.replace(PLANNED[1], send_at_s=0.5)]),
    "limit": Cell(CELL.contender, CELL.label, [PLANNED[0], dataclasses.replace(PLANNED[1], ttft_ms=None)]),
    "fewer": Cell(CELL.contender, CELL.label, PLANNED[:1]),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_what_was_asked_otherwise_is_another_cell(tmp_path, other):
    cells = Cells(tmp_path, ARGUMENTS)
    cells.save(CELL, MEASURED)
    assert other not in cells


@pytest.mark.parametrize(
    ("arguments", "difference"),
    [
        ({**ARGUMENTS, "bench": {"seed": 1, "at_rates": (1.0, 2.0)}}, "its bench.seed is 0, not 1"),
        ({**ARGUMENTS, "bench": {"seed": 0, "at_rates": (1.0,)}}, r"its bench.at_rates is \[1.0, 2.0\], not \[1.0\]"),
        ({**ARGUMENTS, "cores": 4}, "its cores is None, not 4"),
        ({"model": "m", "bench": ARGUMENTS["bench"]}, r"its contenders is \[{'name': 'a'}\], not None"),
    ],
)
def test_a_comparison_of_other_arguments_is_refused(tmp_path, arguments, difference):
    Cells(tmp_path, ARGUMENTS).save(CELL, MEASURED)
    with pytest.raises(
        SettingsError, match=f"holds a comparison of other arguments or code: {difference}; give another folder"
    ):
        Cells(tmp_path, arguments)
    assert CELL in Cells(tmp_path, ARGUMENTS)  # it is as it was


def test_a_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="cannot be used"):
        Cells(tmp_path / "file", ARGUMENTS)


def test_a_file_that_is_no_cell_is_named(tmp_path):
    cells = Cells(tmp_path, ARGUMENTS)
    (tmp_path / "probes" / f"{CELL.name}.json").write_text("{")
    with pytest.raises(BenchError, match=f"{CELL.name}.json cannot be read: remove it"):
        cells.find(CELL)


def test_what_was_begun_and_not_ended_is_known(tmp_path):
    assert not Cells(tmp_path, ARGUMENTS).begin(CELL)
    again = Cells(tmp_path, ARGUMENTS)
    assert again.begin(CELL)
    assert len(again) == 0
    again.save(CELL, Measured(MEASURED.outcomes, is_repeated=True))
    assert again.find(CELL).is_repeated
    assert not again.begin(CELL)


SAVER = """
import sys
from pathlib import Path
from tests.unit.splitserve_bench.test_compare_run import ARGUMENTS, CELL, LARGE
from splitserve_bench.compare.run import Cells
cells = Cells(Path(sys.argv[1]), ARGUMENTS)
print("begins", flush=True)
while True:
    cells.save(CELL, LARGE)
"""
LARGE = Measured(tuple(answered(i, 0.0, tuple(i + k / 7 for k in range(500))) for i in range(2)))


@pytest.mark.parametrize("number", few(range(4), 3))
def test_a_file_is_whole_whenever_its_writer_is_killed(tmp_path, number):
    writer = subprocess.Popen(
        [sys.executable, "-c", SAVER, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=os.getcwd()
    )
    with writer:
        assert writer.stdout.readline() == "begins\n"
        cells = Cells(tmp_path, ARGUMENTS)
        while CELL not in cells:
            pass
        for _ in range(number * 3):  # some more rewritings
            assert cells.find(CELL) == LARGE
        writer.send_signal(signal.SIGKILL)
    assert Cells(tmp_path, ARGUMENTS).find(CELL) == LARGE
    assert len(cells) == 1
