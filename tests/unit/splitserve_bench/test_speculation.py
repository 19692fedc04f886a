"""The bench that writes the same answers with candidates and without."""

import json

import pytest
from click.testing import CliRunner

from splitserve_bench.commands import bench
from splitserve_bench.speculation import texts
from splitserve_bench.speculation.measure import measure_speculation
from splitserve_bench.speculation.texts import CHAT, KINDS, RANDOM, prompts_of
from tests.tiny_models import write_fake_model, write_tiny_model

MAX_TOKENS = 20


def test_every_kind_has_prompts_enough(tmp_path):
    folder = write_fake_model(tmp_path)
    for kind in KINDS:
        prompts = prompts_of(kind, folder, 16)
        assert len({tuple(prompt) for prompt in prompts}) == 16
        assert prompts == prompts_of(kind, folder, 16)


def test_it_counts_what_steps_gave(tmp_path):
    """A model of random weights soon says the same again and again."""
    folder = write_tiny_model(tmp_path, dtype="bfloat16", max_position_embeddings=2048)
    rows = measure_speculation(folder, [CHAT, RANDOM], [1, 3], 4, MAX_TOKENS, 1, 1, lambda text: None)
    assert [(row.kind, row.batch) for row in rows] == [(CHAT, 1), (CHAT, 3), (RANDOM, 1), (RANDOM, 3)]
    for row in rows:
        # Each token but the first, of a step that reads the prompt, is given by a share or came as a candidate.
        assert row.tokens_per_step == pytest.approx(1 / (1 - row.proposed * row.accepted))
        assert row.speedup == pytest.approx(row.tokens_per_s / row.plain_tokens_per_s)


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "KINDS", (RANDOM,))
    folder = write_tiny_model(tmp_path, dtype="bfloat16", max_position_embeddings=512)
    options = ["--batches", "1", "--max-tokens", "5", "--repeats", "1", "--threads", "1"]
    result = CliRunner().invoke(bench, ["speculation", str(folder), *options, "--json"])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)
    assert row["kind"] == RANDOM
    result = CliRunner().invoke(bench, ["speculation", str(folder), *options])
    assert "tokens/s off" in result.stdout
