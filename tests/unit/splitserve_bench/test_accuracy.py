"""`splitserve bench engine --measure accuracy`, on a tiny model."""

import json
import math

import pytest
import torch
from click.testing import CliRunner

from serving_core.errors import SettingsError
from serving_core.settings import EngineSettings
from splitserve.cli import main
from splitserve_bench.engine import accuracy
from splitserve_bench.engine.accuracy import measure_accuracy, texts_of
from tests.tiny_models import write_tiny_llama
from tests.transformers_models import transformers_model

NEXT_TOKENS = 16


@pytest.fixture(autouse=True)
def few_texts(monkeypatch):
    monkeypatch.setattr(accuracy, "NUM_TEXTS", 2)
    monkeypatch.setattr(accuracy, "NEXT_TOKENS", NEXT_TOKENS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("model"), seed=1)


def measure(folder, **settings):
    return measure_accuracy(folder, EngineSettings(**settings), [20, 70], 1, lambda text: None)


def test_without_quantization_nothing_differs(folder):
    figures = measure(folder)
    assert [row.context_tokens for row in figures.contexts] == [20, 70]
    for row in figures.contexts:
        assert row.num_tokens == 2 * NEXT_TOKENS
        assert (row.same_likeliest, row.same_output, row.mean_error, row.max_error) == (1, 1, 0, 0)
        texts = torch.tensor(texts_of(folder, row.context_tokens + NEXT_TOKENS))
        with torch.inference_mode():
            logprobs = transformers_model(folder)(texts).logits.log_softmax(-1)
        of_text = logprobs[:, row.context_tokens - 1 : -1].gather(2, texts[:, row.context_tokens :, None])
        assert row.perplexity == row.reference_perplexity == pytest.approx(math.exp(-of_text.mean()), rel=1e-3)
    assert figures.kv_bytes_per_token == 2 * 3 * 2 * 12 * 4  # K and V, layers, heads, head size, float32


@pytest.mark.nightly
def test_fewer_bits_of_weights_are_less_accurate(folder):
    int8, int4 = (measure(folder, quantization=quantization) for quantization in ("int8", "int4"))
    for one, other in zip(int8.contexts, int4.contexts, strict=True):
        assert 0 < one.mean_error < other.mean_error
        assert one.mean_error < one.max_error
        assert one.same_likeliest > 0.8
        assert one.reference_perplexity == other.reference_perplexity
    assert int8.reference_weight_bytes > int8.weight_bytes > int4.weight_bytes


def test_kv_of_8_bits_is_less_accurate(folder):
    int8, fp8 = (measure(folder, kv_cache_dtype=dtype) for dtype in ("int8", "fp8_e4m3"))
    for one, other in zip(int8.contexts, fp8.contexts, strict=True):
        assert 0 < one.mean_error < other.mean_error < 0.5  # 1/254 of the largest value against 1/16 of each
        assert one.mean_error < one.max_error
        assert one.same_likeliest > 0.8
    assert int8.kv_bytes_per_token == fp8.kv_bytes_per_token == 2 * 3 * (2 * 12 + 2 * 4 // 16) + 3
    assert int8.reference_kv_bytes_per_token == 2 * 3 * 2 * 12 * 4


def test_a_context_longer_than_the_text_is_refused(folder):
    with pytest.raises(SettingsError, match=r"a context of 10000000 tokens is more than the \d+ of text"):
        measure_accuracy(folder, EngineSettings(), [10_000_000], 1, print)


def test_the_command(folder):
    words = ["bench", "engine", str(folder), "--measure", "accuracy", "--kv-cache-dtype", "int8", "--contexts", "20"]
    shown = CliRunner().invoke(main, words)
    assert shown.exit_code == 0, shown.output
    assert "same likeliest token" in shown.stdout
    [row] = json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)["contexts"]
    assert row["context_tokens"] == 20
