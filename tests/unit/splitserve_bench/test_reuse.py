"""`splitserve bench reuse` and `splitserve bench overlap`: their arithmetic, worked out by hand; and the tables."""

import io

import pytest
from click.testing import CliRunner
from rich.console import Console

from splitserve.cli import main
from splitserve.client.answers import Completion, Timeline
from splitserve.launch.models import LocalModel
from splitserve_bench.accuracy.kv_cache import KVAccuracy
from splitserve_bench.clusters.overlap import OverlapFigures, OverlapTimes, pays_from, times_of
from splitserve_bench.clusters.reuse import Asked, Texts, figures_of
from splitserve_bench.errors import BenchError
from splitserve_bench.report import accuracy_table, overlap_view, reuse_table
from tests.tiny_models import write_fake_model

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
    figures = figures_of("chat", WITH, WITHOUT)
    assert (figures.prompt_tokens, figures.cached_tokens, figures.cached_share) == (300, 144, pytest.approx(0.48))
    assert (figures.kv_bytes, figures.kv_bytes_saved) == (15 * MIB, 15 * MIB)
    assert figures.saved_share == pytest.approx(0.5)
    assert (figures.ttft_with_s, figures.ttft_without_s) == (0.2, 0.5)
    assert figures.num_equal == 2, "the last answers differ in their last token"


def test_without_any_bytes_nothing_is_saved():
    assert figures_of("chat", [asked((1,), 0.1, kv_bytes=0)], WITHOUT[:1]).saved_share == 0


def test_the_table_of_reuse():
    row = shown(reuse_table([figures_of("chat", WITH, WITHOUT)]))[1]
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
