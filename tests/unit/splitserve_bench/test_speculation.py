"""`splitserve bench engine --measure speculation`, which generates the same outputs with draft tokens and without."""

import json

import pytest
from click.testing import CliRunner

from serving_core.errors import SettingsError
from serving_core.settings import EngineSettings
from splitserve_bench.commands import bench
from splitserve_bench.engine import speculation
from splitserve_bench.engine.speculation import CHAT, EDIT, KINDS, RANDOM, measure_speculation, prompts_of
from tests.effort import few
from tests.tiny_models import write_fake_model, write_tiny_llama

OUTPUT_TOKENS = 20


@pytest.fixture(autouse=True)
def short_outputs(monkeypatch):
    monkeypatch.setattr(speculation, "OUTPUT_TOKENS", OUTPUT_TOKENS)
    monkeypatch.setattr(speculation, "KINDS", (CHAT, RANDOM))


def measure(folder, batches, told=(), draft=None):
    said = told.append if isinstance(told, list) else lambda text: None
    return measure_speculation(folder, EngineSettings(), draft, 4, batches, 1, 1, said).kinds


@pytest.mark.parametrize("kind", few(KINDS, EDIT))
def test_every_kind_has_prompts_enough(tmp_path, kind):
    folder = write_fake_model(tmp_path)
    prompts = prompts_of(kind, folder, 16)
    assert len({tuple(prompt) for prompt in prompts}) == 16
    assert prompts == prompts_of(kind, folder, 16)


def test_it_counts_what_steps_gave(tmp_path):
    """A model of random weights soon says the same again and again."""
    folder = write_tiny_llama(tmp_path, dtype="bfloat16", max_position_embeddings=2048)
    rows = measure(folder, [1, 3])
    assert [(row.kind, row.batch) for row in rows] == [(CHAT, 1), (CHAT, 3), (RANDOM, 1), (RANDOM, 3)]
    for row in rows:
        # Each token but the first, of a step that computes the prompt, is sampled by a step or was a draft token.
        assert row.tokens_per_step == pytest.approx(1 / (1 - row.drafts_per_token * row.acceptance_rate))
        assert row.speedup == pytest.approx(row.tokens_per_s / row.plain_tokens_per_s)


def test_outputs_that_end_at_once_have_no_row(tmp_path):
    """Whatever comes first ends them, but those of random tokens, which go on."""
    folder = write_tiny_llama(tmp_path, dtype="bfloat16", max_position_embeddings=2048, eos_token_id=list(range(260)))
    told = []
    rows = measure(folder, [1], told)
    assert [row.kind for row in rows] == [RANDOM]
    assert f"{CHAT}, batch 1: outputs end with their first tokens, so that no step was timed" in told


def test_where_bits_depend_on_the_batch_there_is_no_speculation(tmp_path):
    folder = write_tiny_llama(tmp_path, dtype="float16")
    with pytest.raises(SettingsError, match="the bits of this engine's outputs depend on the batch"):
        measure(folder, [1])


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(speculation, "KINDS", (RANDOM,))
    monkeypatch.setattr(speculation, "OUTPUT_TOKENS", 5)
    folder = write_tiny_llama(tmp_path, dtype="bfloat16", max_position_embeddings=512)
    words = ["engine", str(folder), "--measure", "speculation", "--batches", "1", "--repeats", "1", "--threads", "1"]
    result = CliRunner().invoke(bench, [*words, "--json"])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)["kinds"]
    assert row["kind"] == RANDOM
    result = CliRunner().invoke(bench, [*words, "--speculative-model", "MODEL", "--speculative-quantization", "int8"])
    assert result.exit_code == 0, result.output
    assert "quantization int8" in result.stdout
    assert "acceptance rate" in result.stdout
