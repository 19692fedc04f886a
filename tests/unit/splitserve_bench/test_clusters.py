"""`splitserve bench cluster`, `reuse`, `overlap`, `ranks` and `kv-tiers`: their arithmetic, worked out by hand, and the
tables."""

import io

import pytest
from click.testing import CliRunner
from rich.console import Console

from splitserve.cli import main
from splitserve.client.answers import Completion, TierLoad, Timeline
from splitserve.launch.models import LocalModel
from splitserve_bench.accuracy.kv_cache import KVAccuracy
from splitserve_bench.clusters import reuse, tiers
from splitserve_bench.clusters.cluster import copy_s, handoff_of, tpot_while_all_stream
from splitserve_bench.clusters.overlap import OverlapFigures, OverlapTimes, pays_from, times_of
from splitserve_bench.clusters.ranks import ONE, Division, RanksFigures
from splitserve_bench.clusters.reuse import Asked, Texts
from splitserve_bench.errors import BenchError
from splitserve_bench.prompts import Prompts
from splitserve_bench.report import accuracy_table, overlap_view, ranks_table, reuse_table, tiers_table
from tests.tiny_models import write_fake_model

# ---- cluster ----


def test_tpot_counts_only_while_all_answers_stream():
    slow = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]  # alone at first: faster then would not count
    late = [2.4, 3.0, 3.5, 4.0, 4.5, 5.0, 9.0]
    # From 3.0 (the second token of the later one) to 5.0 (the end of the earlier one): 2 s, 2 and 4 steps.
    assert tpot_while_all_stream([slow, late]) == pytest.approx((1.0 + 0.5) / 2)


def test_answers_that_never_overlap_are_refused():
    with pytest.raises(BenchError, match="never all under way"):
        tpot_while_all_stream([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])


def test_the_handoff_is_what_lies_between_prefill_and_decode():
    timeline = Timeline(1.0, 2.0, 0.004, 0.02, 0.1, 30.0, 33.124, 3.0, "p", "d", 0, 0, 0.0)
    assert handoff_of(timeline) == pytest.approx(0.124)


def test_prompts_are_the_same_in_every_run_and_none_twice():
    first, second = Prompts(100, 8), Prompts(100, 8)
    drawn = [first.draw(), first.draw()]
    assert drawn == [second.draw(), second.draw()]
    assert drawn[0] != drawn[1]
    assert all(len(prompt) == 8 and min(prompt) >= 0 and max(prompt) < 100 for prompt in drawn)


def test_a_copy_takes_time():
    assert copy_s(1 << 20) > 0


# ---- reuse and overlap ----

MIB = 2**20


def timeline(ttft_s=0.0, prefill_queue_s=0.0, prefill_s=0.0, credit_wait_s=0.0, transfer_s=0.0, decode_queue_s=0.0):
    return Timeline(
        prefill_queue_s, prefill_s, credit_wait_s, transfer_s, decode_queue_s, 9.0, 99.0, ttft_s, "p", "d", 0, 0, 0.0
    )


def asked(token_ids, ttft_s, prompt_tokens=100, cached_tokens=0, kv_bytes=10 * MIB, kv_bytes_saved=0):
    times = timeline(ttft_s=ttft_s)
    completion = Completion("length", None, prompt_tokens, 3, cached_tokens, times, kv_bytes, kv_bytes_saved, 0)
    return Asked(token_ids, completion)


def shown(view):
    console = Console(file=io.StringIO(), width=200, record=True)
    console.print(view)
    return [line.split() for line in console.export_text().splitlines()]


WITHOUT = [asked((1, 2, 3), 0.4), asked((4, 5, 6), 0.6), asked((7, 8, 9), 0.5)]
WITH = [
    asked((1, 2, 3), 0.4),
    asked((4, 5, 6), 0.1, cached_tokens=80, kv_bytes=2 * MIB, kv_bytes_saved=8 * MIB),
    asked((7, 8, 0), 0.2, cached_tokens=64, kv_bytes=3 * MIB, kv_bytes_saved=7 * MIB),
]

# ---- reuse ----


def test_what_reuse_saves():
    figures = reuse.figures_of("chat", WITH, WITHOUT)
    assert (figures.prompt_tokens, figures.cached_tokens, figures.cached_share) == (300, 144, pytest.approx(0.48))
    assert (figures.kv_bytes, figures.kv_bytes_saved) == (15 * MIB, 15 * MIB)
    assert figures.saved_share == pytest.approx(0.5)
    assert (figures.ttft_with_s, figures.ttft_without_s) == (0.2, 0.5)
    assert figures.num_equal == 2, "the last answers differ in their last token"


def test_without_any_bytes_nothing_is_saved():
    assert reuse.figures_of("chat", [asked((1,), 0.1, kv_bytes=0)], WITHOUT[:1]).saved_share == 0


def test_the_table_of_reuse():
    row = shown(reuse_table([reuse.figures_of("chat", WITH, WITHOUT)]))[1]
    assert row == ["chat", "3", "300", "48%", "15.0", "MiB", "50%", "500.0", "200.0", "2/3"]


def test_texts_have_exact_lengths_and_are_the_same_in_every_run(tmp_path):
    model = LocalModel(write_fake_model(tmp_path), "fake")
    texts = Texts(model)
    assert [len(texts.draw(1, length)) for length in (1, 60, 1000)] == [1, 60, 1000]
    assert texts.draw(1, 60) == Texts(model).draw(1, 60) == texts.draw(1, 1000)[:60]
    assert texts.draw(1, 60) != texts.draw(2, 60)
    assert bytes(texts.draw(3, 8)) == b" Number "


def test_a_model_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(BenchError, match=r"fake has no tokenizer\.json"):
        Texts(LocalModel(tmp_path, "fake"))


# ---- overlap ----


def at(prompt_tokens, always_s, never_s):
    return OverlapFigures(prompt_tokens, OverlapTimes(0.0, 0.0, always_s), OverlapTimes(0.0, 0.0, never_s))


def test_the_times_until_the_first_decode_step():
    slow = timeline(0.9, prefill_queue_s=0.1, prefill_s=0.7, credit_wait_s=0.01, transfer_s=0.02, decode_queue_s=0.03)
    fast = timeline(0.5, prefill_queue_s=0.1, prefill_s=0.3, transfer_s=0.02)
    other = timeline(0.6, prefill_queue_s=0.1, prefill_s=0.4, transfer_s=0.05)
    times = times_of([slow, fast, other])
    assert times.ttft_s == 0.6
    assert times.handoff_s == pytest.approx(0.05)
    assert times.decode_start_s == pytest.approx(0.42), "the fastest"


def test_overlap_pays_from_where_it_pays_at_all_longer_prompts():
    figures = [at(16, 2.0, 1.0), at(32, 1.0, 2.0), at(64, 2.0, 1.0), at(256, 1.0, 2.0), at(128, 1.0, 2.0)]
    assert pays_from(figures) == 128
    assert pays_from(figures[:1]) is None
    assert pays_from(figures[:3]) is None
    assert pays_from([at(16, 1.0, 1.0)]) is None, "no gain is no reason"


def test_the_table_of_overlap():
    figures = OverlapFigures(64, always=OverlapTimes(0.1, 0.002, 0.102), never=OverlapTimes(0.09, 0.02, 0.11))
    lines = shown(overlap_view([figures]))
    assert lines[-2] == ["64", "90.0", "100.0", "20.0", "2.0", "110.0", "102.0"]
    assert " ".join(lines[-1]) == "overlap pays from 64 tokens on"
    assert " ".join(shown(overlap_view([at(16, 2.0, 1.0)]))[-1]) == "overlap does not pay at these lengths"


# ---- accuracy of the KV cache ----


def test_the_table_of_accuracy():
    row = KVAccuracy("int8", 512, 256, 0.9961, 0.75, 0.01234, 0.5, 12_000)
    line = shown(accuracy_table([row]))[1]
    assert line == ["int8", "512", "256", "99.6%", "75.0%", "0.0123", "0.500", "11.7", "KiB"]


# ---- commands ----


@pytest.mark.parametrize("command", ["engine", "transfer", "reuse", "overlap", "kv-cache"])
def test_every_bench_tells_what_it_takes_and_refuses_what_is_no_model(command, tmp_path):
    runner = CliRunner()
    assert "--json" in runner.invoke(main, ["bench", command, "--help"]).stdout
    refused = runner.invoke(main, ["bench", command, str(tmp_path / "nowhere")])
    assert (refused.exit_code, refused.stderr.startswith("Error: ")) == (2, True)


# ---- ranks ----


def test_the_table_has_a_row_for_each_way():
    times = {"start_s": 1.25, "lone_prompt_s": 0.7, "lone_tpot_s": 0.0196, "prompt_tokens_per_s": 644.4, "tpot_s": 0.03}
    whole = RanksFigures(ONE, **times, weight_bytes=(300 * MIB,), rss_bytes=(500 * MIB,), num_answers=5, num_equal=5)
    weights, resident = (160 * MIB, 150 * MIB), (400 * MIB, 390 * MIB)
    divided = RanksFigures(
        Division(2, 1), **times, weight_bytes=weights, rss_bytes=resident, num_answers=5, num_equal=4
    )
    _, first, second = shown(ranks_table([whole, divided]))
    assert " ".join(first) == "one process 1.2 700 19.6 644 30.0 300.0 MiB 500.0 MiB 5/5"
    assert " ".join(second) == "2 stages 1.2 700 19.6 644 30.0 160.0 MiB, 150.0 MiB 400.0 MiB, 390.0 MiB 4/5"


@pytest.mark.parametrize(
    ("division", "words"), [(Division(1, 2), "2 ranks"), (Division(2, 2), "2 stages of 2 ranks"), (ONE, "one process")]
)
def test_a_way_in_words(division, words):
    assert str(division) == words


@pytest.mark.parametrize("given", ["2", "0x1", "1x100", "2x1x1", ""])
def test_what_is_no_way_is_refused(given):
    result = CliRunner().invoke(main, ["bench", "ranks", "--divisions", given])
    assert result.exit_code == 2
    assert "STAGESxRANKS" in result.output or "one at least" in result.output


# ---- kv-tiers ----

TIER = TierLoad(0, 8 * MIB, 30, 90, 0, 0, 0, 3 * MIB, 0.5, 12 * MIB, 0.25, 1.5)
FIRST = [asked((1,), 0.5), asked((2,), 0.7)]
LATER = [asked((3,), 0.25, cached_tokens=50), asked((4,), 0.75, cached_tokens=70)]


def test_the_figures_of_one_cluster():
    expected = [FIRST, [asked((3,), 1.0), asked((5,), 1.0)]]
    figures = tiers.figures_of("a file", [FIRST, LATER], expected, TIER)
    assert (figures.num_requests, figures.prompt_tokens, figures.cached_share) == (4, 400, 0.3)
    assert (figures.later_ttft_s, figures.num_equal, figures.hit_rate) == (0.5, 3, 0.25)
    without = tiers.figures_of("the pool alone", [FIRST, LATER], [FIRST, LATER], None)
    assert (without.hit_rate, without.num_equal) == (0, 4)
    rows = shown(tiers_table([without, figures]))
    assert rows[1] == ["the", "pool", "alone", "30%", "500", "2.20", "-", "-", "-", "-", "-", "-", "4/4"]
    assert " ".join(rows[2][2:]) == "30% 500 2.20 25% 3.0 MiB 0.50 12.0 MiB 0.25 1.50 3/4"
