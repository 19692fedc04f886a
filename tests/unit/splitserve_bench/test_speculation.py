"""The bench that writes the same answers with candidates and without."""

import json
import sys

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from engine.engine import Engine
from serving_core.errors import SettingsError
from serving_core.settings import EngineSettings
from splitserve_bench.commands import bench
from splitserve_bench.speculation import texts
from splitserve_bench.speculation.first_layers import write_first_layers
from splitserve_bench.speculation.measure import measure_speculation
from splitserve_bench.speculation.texts import CHAT, EDIT, KINDS, RANDOM, prompts_of
from tests.effort import few
from tests.tiny_models import write_fake_model, write_tiny_llama
from tests.toy_scheduler import greedy, run_all

MAX_TOKENS = 20


@pytest.mark.parametrize("kind", few(KINDS, EDIT))
def test_every_kind_has_prompts_enough(tmp_path, kind):
    folder = write_fake_model(tmp_path)
    prompts = prompts_of(kind, folder, 16)
    assert len({tuple(prompt) for prompt in prompts}) == 16
    assert prompts == prompts_of(kind, folder, 16)


def test_it_counts_what_steps_gave(tmp_path):
    """A model of random weights soon says the same again and again."""
    folder = write_tiny_llama(tmp_path, dtype="bfloat16", max_position_embeddings=2048)
    rows = measure_speculation(folder, [CHAT, RANDOM], [1, 3], 4, MAX_TOKENS, 1, 1, lambda text: None)
    assert [(row.kind, row.batch) for row in rows] == [(CHAT, 1), (CHAT, 3), (RANDOM, 1), (RANDOM, 3)]
    for row in rows:
        # Each token but the first, of a step that reads the prompt, is given by a share or came as a candidate.
        assert row.tokens_per_step == pytest.approx(1 / (1 - row.proposed * row.accepted))
        assert row.speedup == pytest.approx(row.tokens_per_s / row.plain_tokens_per_s)


def test_answers_that_end_at_once_have_no_row(tmp_path):
    """Whatever comes first ends them, but those of random tokens, which go on."""
    folder = write_tiny_llama(tmp_path, dtype="bfloat16", max_position_embeddings=2048, eos_token_id=list(range(260)))
    told = []
    rows = measure_speculation(folder, [CHAT, RANDOM], [1], 4, MAX_TOKENS, 1, 1, told.append)
    assert [row.kind for row in rows] == [RANDOM]
    assert f"{CHAT}, batch 1: answers end with their first tokens, so that no step was timed" in told


@pytest.mark.parametrize("num_layers", few([1, 2], 2))
def test_first_layers_are_a_model(tmp_path, num_layers):
    """It says what the model says whose other layers add nothing."""
    folder = write_tiny_llama(tmp_path / "all", dtype="bfloat16")
    written = tmp_path / "first"
    written.mkdir()
    write_first_layers(folder, num_layers, written)
    tensors, first = load_file(folder / "model.safetensors"), load_file(written / "model.safetensors")
    assert len(first) < len(tensors)
    for name, tensor in tensors.items():
        layer = int(name.split(".")[2]) if ".layers." in name else 0
        if layer >= num_layers and name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    save_file(tensors, folder / "model.safetensors")
    prompts = prompts_of(RANDOM, folder, 2)
    answers = [run_all(Engine(EngineSettings(model=str(each))), prompts, greedy(8)) for each in (folder, written)]
    assert answers[0] == answers[1]
    with pytest.raises(SettingsError, match="--draft-layers 3: the model has 3"):
        write_first_layers(folder, 3, written)


@pytest.mark.nightly
def test_a_draft_model_that_is_free_is_worth_it(tmp_path):
    """The model itself, of which all comes."""
    folder = write_tiny_llama(tmp_path, dtype="bfloat16", max_position_embeddings=2048)
    draft = EngineSettings(model=str(folder))
    (row,) = measure_speculation(folder, [CHAT], [2], 4, 3 * MAX_TOKENS, 1, 1, lambda text: None, draft, are_free=True)
    assert row.proposed > 0
    assert row.accepted == 1
    assert row.tokens_per_step == pytest.approx(1 / (1 - row.proposed))


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "KINDS", (RANDOM,))
    folder = write_tiny_llama(tmp_path, dtype="bfloat16", max_position_embeddings=512)
    options = ["--batches", "1", "--max-tokens", "5", "--repeats", "1", "--threads", "1"]
    result = CliRunner().invoke(bench, ["speculation", str(folder), *options, "--json"])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)
    assert row["kind"] == RANDOM
    for more in ([], ["--draft-layers", "1"], ["--speculative-model", "MODEL", "--free-drafts"]):
        result = CliRunner().invoke(bench, ["speculation", str(folder), *options, *more])
        assert result.exit_code == 0, result.output
        assert "tokens/s off" in result.stdout
        assert ("draft" in result.stdout) == bool(more)


STAND_IN = """
class Llama:
    def __init__(self, path, *, n_ctx, n_threads, n_threads_batch, draft_model, verbose):
        assert open(path).read() == "weights"
        assert n_threads == n_threads_batch == 1, f"{n_threads} threads"
        self.step_s = 0.01 if draft_model is None else 0.005
        if draft_model is not None:
            assert draft_model.num_pred_tokens == 8

    def reset(self):
        pass

    def generate(self, tokens, *, top_k, top_p, min_p, temp, repeat_penalty):
        assert len(tokens) == 300 and temp == 1.0
        import time

        while True:
            ends_s = time.process_time() + self.step_s
            while time.process_time() < ends_s:
                pass
            yield 0
"""
LOOKUP = """
class LlamaPromptLookupDecoding:
    def __init__(self, num_pred_tokens):
        self.num_pred_tokens = num_pred_tokens
"""


def speculation_beside_llama(folder, weights, *words, threads=("--threads", "1")):
    options = ["--batches", "1,2", "--max-tokens", "5", "--repeats", "1", *threads]
    llama = ["--llama-cpp", sys.executable, "--gguf", str(weights)]
    return CliRunner().invoke(bench, ["speculation", str(folder), *options, *llama, *words])


@pytest.mark.nightly
def test_beside_llama_cpp(tmp_path, monkeypatch):
    """A stand-in for it: what is asked and what is told, as there is no llama.cpp here."""
    monkeypatch.setattr(texts, "KINDS", (RANDOM,))
    folder = write_tiny_llama(tmp_path / "model", dtype="bfloat16", max_position_embeddings=512)
    package = tmp_path / "path" / "llama_cpp"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN)
    (package / "llama_speculative.py").write_text(LOOKUP)
    weights = tmp_path / "model.gguf"
    weights.write_text("weights")
    result = speculation_beside_llama(folder, weights)
    assert str(result.exception).endswith("it said last: ModuleNotFoundError: No module named 'llama_cpp'")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    alone, two = json.loads(speculation_beside_llama(folder, weights, "--json").stdout)
    assert "llama_cpp" not in two
    told = alone["llama_cpp"]
    assert told["plain_tokens_per_s"] <= 100  # of its own time; no step is shorter
    assert told["tokens_per_s"] <= 200
    assert told["speedup"] == pytest.approx(told["tokens_per_s"] / told["plain_tokens_per_s"])
    table = speculation_beside_llama(folder, weights)
    assert "its lookup" in table.stdout
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)  # of ours, where the flag does not say
    other = speculation_beside_llama(folder, weights, threads=())
    assert str(other.exception).endswith("it said last: AssertionError: 3 threads")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "--llama-cpp and --gguf go together"),
        (["--gguf", __file__, "--batches", "4"], "--llama-cpp answers one prompt at a time: --batches has to have 1"),
    ],
)
def test_llama_cpp_goes_with_other_flags(more, message):
    result = CliRunner().invoke(bench, ["speculation", "--llama-cpp", sys.executable, *more])
    assert result.exit_code == 2
    assert message in result.output
