"""Whole comparisons of queues that are worked out instead of run: one server each, that answers in turn."""

import asyncio
import dataclasses
import json
import math

import pytest
from matplotlib.figure import Figure

from splitserve.commands.terminal import stdout
from splitserve_bench.compare.compare_report import (
    comparison_json,
    comparison_view,
    save_comparison,
    save_probe,
    warnings,
)
from splitserve_bench.compare.contenders import PeerContender, contenders
from splitserve_bench.compare.entry import judged_by
from splitserve_bench.compare.run import Compare, CompareBench, first_rate_of
from splitserve_bench.compare.slo import RelativeSlo, Scales
from splitserve_bench.compare.unloaded import Unloaded
from splitserve_bench.compare.workload import Dataset, Workload
from splitserve_bench.errors import BenchError
from splitserve_bench.serve.metrics import Limits
from splitserve_bench.serve.records import Outcome
from splitserve_bench.serve.target import Progress, ServedModel

PROMPT_TOKENS, OUTPUT_TOKENS, TPOT_S = 10, 5, 0.01
BENCH = CompareBench(
    criterion=Limits(ttft_s=0.5),
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
COLOCATED, _, SPLIT, _ = CONTENDERS = contenders(2, [], [])
FAST = PeerContender("peer fast", "http://127.0.0.1:1")


class QueueArena:
    """An Arena whose contenders compute one prompt after the other, each for so many seconds; then tokens flow."""

    def __init__(self, prefill_s, failures=()):
        self.prefill_s = prefill_s
        self.failures = dict(failures)
        self.loads = []

    async def run(self, contender, warm_up, planned, *, max_concurrency, request_timeout_s, on_progress):
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
            outcomes.append(answered(each, sent_s, start_s, free_s))
            free_s += TPOT_S * (OUTPUT_TOKENS - 1) if max_concurrency == 1 else 0.0
        return outcomes


def answered(planned, sent_s, start_s, first_s):
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


def comparing(arena, bench=BENCH, lines=None, on_probe=lambda run: None):
    dataset = Dataset(random_input_len=PROMPT_TOKENS, random_output_len=OUTPUT_TOKENS)
    workload = Workload(dataset, ServedModel("queue", 100, 1000))
    report = [].append if lines is None else lines.append
    return Compare(bench, workload, arena, report=report, show=lambda text: None, on_probe=on_probe)


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


async def test_the_faster_queue_wins_and_the_slower_one_loses_to_its_prefill_queue():
    arena = QueueArena({COLOCATED.name: 0.2, SPLIT.name: 0.1})
    comparison = await comparing(arena).run([COLOCATED, SPLIT], COLOCATED)
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


async def test_contenders_take_turns_with_the_same_requests_and_nobody_always_begins():
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


async def test_no_two_probes_of_a_contender_share_a_prompt():
    arena = QueueArena({FAST.name: 0.1})
    await comparing(arena).run([FAST], COLOCATED)
    prompts = [each.prompt for _, load, warm_up in arena.loads for each in [*load, *warm_up]]
    assert len(arena.loads) > 3
    assert len(set(prompts)) == len(prompts)


async def test_relative_limits_are_multiples_of_what_the_reference_takes_alone():
    arena = QueueArena({COLOCATED.name: 0.2, SPLIT.name: 0.1})
    bench = dataclasses.replace(BENCH, criterion=Scales(ttft=6.0, tpot=1.5), first_rate=None)
    comparison = await comparing(arena, bench).run([SPLIT], COLOCATED)
    assert arena.loads[0][0] == COLOCATED.name
    assert comparison.unloaded.ttft_s(PROMPT_TOKENS) == pytest.approx(0.2)
    assert comparison.unloaded.tpot_s == pytest.approx(TPOT_S)
    assert comparison.goal.first_rate == 4.2  # 1 / (0.2 s + 4 * 0.01 s), to two digits
    limits = comparison.slo.limits_of(arena.loads[0][1][0])
    assert limits.ttft_s == pytest.approx(1.2)
    assert limits.tpot_s == pytest.approx(0.015)


async def test_who_cannot_go_on_is_left_out_and_named():
    lines = []
    arena = QueueArena({COLOCATED.name: 0.2, SPLIT.name: 0.1}, failures={SPLIT.name: 2})
    comparison = await comparing(arena, lines=lines).run([COLOCATED, SPLIT], COLOCATED)
    assert sum(name == SPLIT.name for name, _, _ in arena.loads) == 3
    assert "split 1P+1D is out: lost during the load: decode-0" in lines
    assert comparison.entries[0].search.result().is_settled
    assert not any("wins" in sentence for sentence in comparison.verdict)
    assert "split 1P+1D is out: lost during the load: decode-0" in warnings(comparison)


async def test_when_nobody_can_be_probed_that_is_an_error():
    arena = QueueArena({SPLIT.name: 0.1}, failures={SPLIT.name: 0})
    with pytest.raises(BenchError, match=r"split 1P\+1D: lost during the load"):
        await comparing(arena).run([SPLIT], COLOCATED)


async def test_what_is_known_stays_known_when_it_is_stopped():
    arena, runs = QueueArena({COLOCATED.name: 0.2, SPLIT.name: 0.1}), []

    def stop_at_third(run):
        runs.append(run)
        if len(runs) == 3:
            raise asyncio.CancelledError

    stopped = comparing(arena, on_probe=stop_at_third)
    assert stopped.found is None
    with pytest.raises(asyncio.CancelledError):
        await stopped.run([COLOCATED, SPLIT], COLOCATED)
    assert [run for entry in stopped.found.entries for run in entry.runs] == runs
    assert "split 1P+1D" in shown(stopped.found)


async def test_given_rates_are_run_once_for_everybody():
    arena = QueueArena({COLOCATED.name: 0.2, SPLIT.name: 0.1})
    bench = dataclasses.replace(BENCH, at_rates=(2.0, 8.0), first_rate=None)
    comparison = await comparing(arena, bench).run([COLOCATED, SPLIT], COLOCATED)
    assert len(arena.loads) == 4
    assert [len(load) for _, load, _ in arena.loads] == [100, 100, 160, 160]  # 100 requests and 20 s at least
    colocated, split = (entry.search.result() for entry in comparison.entries)
    assert (colocated.best_rate, colocated.failing_rate) == (2.0, 8.0)
    assert (split.best_rate, split.failing_rate) in [(8.0, None), (2.0, 8.0)]
    text = shown(comparison)
    assert text.count("colocated 1x2  ") == 2
    assert "prefill queue" in text


async def test_the_same_probes_can_be_judged_by_another_objective(tmp_path):
    arena = QueueArena({COLOCATED.name: 0.2, SPLIT.name: 0.1})
    bench = dataclasses.replace(BENCH, criterion=Scales(ttft=2.0), at_rates=(2.0, 8.0), first_rate=None)
    strict = await comparing(arena, bench).run([COLOCATED, SPLIT], COLOCATED)
    loose = judged_by(RelativeSlo(Scales(ttft=1e6), strict.unloaded), strict)
    assert [[run.pairs for run in entry.runs] for entry in loose.entries] == [
        [run.pairs for run in entry.runs] for entry in strict.entries
    ]
    good = [[counted.num_good for counted in entry.search.curve()] for entry in strict.entries]
    assert [[counted.num_good for counted in entry.search.curve()] for entry in loose.entries] == [[100, 160]] * 2
    assert good[0][1] < 160
    assert "TTFT ≤ 1e+06 x unloaded" in shown(loose)
    save_comparison(strict, [loose], {"model": "queue"}, tmp_path)
    pictures = [(tmp_path / name).read_bytes() for name in ("attainment.png", "attainment-2.png")]
    assert pictures[0] != pictures[1]
    (also,) = json.loads((tmp_path / "comparison.json").read_text())["also"]
    assert also["slo"].startswith("TTFT ≤ 1e+06 x unloaded")
    assert [[probe["num_good"] for probe in each["probes"]] for each in also["contenders"]] == [[100, 160]] * 2
    assert [[counted.num_good for counted in entry.search.curve()] for entry in strict.entries] == good


async def test_it_is_shown_saved_and_drawn(tmp_path):
    arena = QueueArena({COLOCATED.name: 0.2, FAST.name: 0.05})
    runs = []
    comparison = await comparing(arena, on_probe=runs.append).run([COLOCATED, FAST], COLOCATED)
    text = shown(comparison)
    assert "90% of the offered requests good: TTFT ≤ 500 ms" in text
    assert "peer fast wins: " in text
    for run in runs:
        save_probe(run, tmp_path)
    save_comparison(comparison, [], {"model": "queue"}, tmp_path)
    assert (tmp_path / "attainment.png").read_bytes().startswith(b"\x89PNG")
    saved = json.loads((tmp_path / "comparison.json").read_text())
    assert saved == json.loads(json.dumps(comparison_json(comparison, [], {"model": "queue"})))
    first = saved["contenders"][0]
    assert first["result"]["best_rate"] == comparison.entries[0].search.result().best_rate
    assert first["loses_by"] == "TTFT: prefill queue"
    assert first["probes"][0]["p50_tpot_ms"] == pytest.approx(1e3 * TPOT_S)
    files = sorted(tmp_path.glob("0*.json"))
    assert len(files) == len(runs) == sum(len(each["probes"]) for each in saved["contenders"])
    probe = json.loads(files[0].read_text())
    assert len(probe["requests"]) == probe["num_total"] == 100


async def test_the_picture_shows_the_share_that_was_wanted(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    arena = QueueArena({COLOCATED.name: 0.2})
    comparison = await comparing(arena, dataclasses.replace(BENCH, attainment=0.95)).run([COLOCATED], COLOCATED)
    save_comparison(comparison, [], {}, tmp_path)
    ((axes,),) = (figure.axes for figure in drawn)
    assert [text.get_text() for text in axes.texts] == ["95%"]
    assert [95.0, 95.0] in [list(line.get_ydata()) for line in axes.lines]


async def test_what_is_not_known_of_a_peer_is_said():
    comparison = await comparing(QueueArena({FAST.name: 0.1, SPLIT.name: 0.1})).run([FAST, SPLIT], COLOCATED)
    assert [line.partition(":")[0] for line in warnings(comparison) if "not known here" in line] == ["peer fast"]


async def test_a_probe_that_a_trace_makes_short_is_said(tmp_path):
    path, lines = tmp_path / "trace.csv", []
    rows = [f"2023-11-16 18:17:{i:02}.0000000,10,5" for i in range(50)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    workload = Workload(Dataset("azure", str(path)), ServedModel("queue", 100, 1000))
    arena, bench = QueueArena({COLOCATED.name: 0.2}), dataclasses.replace(BENCH, at_rates=(1.0,))
    compare = Compare(bench, workload, arena, report=lines.append, show=lambda text: None, on_probe=lambda run: None)
    await compare.run([COLOCATED], COLOCATED)
    assert any("the trace has 50 requests, not the 100 of 20 s" in line for line in lines)


async def test_a_search_that_ran_out_of_probes_is_marked():
    arena = QueueArena({COLOCATED.name: 0.2})
    comparison = await comparing(arena, dataclasses.replace(BENCH, max_probes=2)).run([COLOCATED], COLOCATED)
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
