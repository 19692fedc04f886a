"""The native decoder against transformers, an implementation that shares no line with it."""

import itertools

import pytest
import torch

from engine.build import build_engine
from serving_core.requests import Request, Work
from serving_core.settings import EngineSettings
from tests.effort import few
from tests.tiny_models import FAMILIES, VOCAB_SIZE, write_tiny_model
from tests.toy_scheduler import greedy, random_prompts, run_all, token_ids
from tests.transformers_models import greedy_answers, transformers_model
from tests.unit.engine.native_kit import choose_native

YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 16.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "llama-gqa": ("llama", {}),
    "llama-mqa-tied": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-mha-odd-heads": ("llama", {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 10}),
    "llama-gqa-3-of-9": ("llama", {"hidden_size": 54, "num_attention_heads": 9, "num_key_value_heads": 3}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-yarn-mscale": ("llama", {"rope_parameters": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.7}}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 11}),
    "qwen2": ("qwen2", {}),
    "qwen2-some-windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-bias-tied": ("qwen3", {"head_dim": 24, "attention_bias": True, "tie_word_embeddings": True}),
}
PROMPT_LENGTHS = (1, 3, 16, 17, 33, 64, 150, 320)
NUM_NEW_TOKENS = 12


ALIKE = ("llama-gqa-3-of-9", "llama-yarn", "llama-theta", "mistral-full", "qwen2", "qwen3")  # to others


@pytest.mark.parametrize("name", few(MODELS, *(name for name in MODELS if name not in ALIKE)))
def test_greedy_tokens_equal_transformers(name, tmp_path, monkeypatch):
    family, overrides = MODELS[name]
    folder = write_tiny_model(tmp_path, family, **overrides)
    prompts = random_prompts(PROMPT_LENGTHS)
    found = {}
    for is_native in (True, False):
        choose_native(monkeypatch, is_native)
        engine = build_engine(EngineSettings(model=str(folder), block_size=16, num_kv_blocks=64))
        joins_at = [0, 4, 0, 9, 2, 0, 1, 3]
        sampled = run_all(engine, prompts, greedy(NUM_NEW_TOKENS), chunk_tokens=23, joins_at=joins_at)
        found[is_native] = token_ids(sampled)
    expected = greedy_answers(transformers_model(folder), prompts, NUM_NEW_TOKENS, found[True])
    assert found == {True: expected, False: expected}
    assert len({token for answer in expected for token in answer}) > 10  # the models are not constant


@pytest.mark.parametrize(
    ("block_size", "chunk_tokens"),
    [
        pytest.param(*pair, marks=[] if pair in ((1, 64), (7, 1), (64, 1000)) else pytest.mark.nightly)
        for pair in itertools.product((1, 7, 64), (1, 64, 1000))
    ],
)
def test_chunks_and_blocks_do_not_change_the_answer(block_size, chunk_tokens, written):
    folder = written(write_tiny_model, "mistral", sliding_window=21)
    prompts = random_prompts([5, 70, 129])
    settings = EngineSettings(model=str(folder), block_size=block_size, kv_cache_memory_bytes=2**20)
    found = token_ids(run_all(build_engine(settings), prompts, greedy(NUM_NEW_TOKENS), chunk_tokens=chunk_tokens))
    assert found == greedy_answers(transformers_model(folder), prompts, NUM_NEW_TOKENS, found)


@pytest.mark.parametrize(
    ("family", "tied"),
    [
        pytest.param(family, tied, marks=[] if tied == (family in ("mistral", "qwen3")) else pytest.mark.nightly)
        for family in FAMILIES
        for tied in (False, True)
    ],
)
def test_bfloat16_logprobs_are_as_close_to_the_truth_as_those_of_transformers(family, tied, written, monkeypatch):
    folder = written(write_tiny_model, family, dtype="bfloat16", tie_word_embeddings=tied)
    (prompt,) = random_prompts([90])
    with torch.inference_mode():
        truth, rounded = (
            transformers_model(folder, dtype)(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)
            for dtype in (torch.float32, torch.bfloat16)
        )
    for is_native in (True, False):
        choose_native(monkeypatch, is_native)
        engine = build_engine(EngineSettings(model=str(folder), num_kv_blocks=16))
        ((token,),) = run_all(engine, [prompt], greedy(1, logprobs=VOCAB_SIZE), chunk_tokens=40)
        ours = torch.tensor([logprob for _, logprob in sorted(token.top_logprobs)])
        our_error, their_error = ((logprobs - truth).square().mean().sqrt() for logprobs in (ours, rounded))
        assert their_error > 0.01  # the comparison is not between two float32 models
        assert our_error < 1.5 * their_error
        assert (ours - truth).abs().max() < 0.2


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.15)])
def test_native_logits_are_those_of_torch(family, dtype, tolerance, written, monkeypatch):
    folder = written(write_tiny_model, family, dtype=dtype)
    prompts = random_prompts([1, 40, 90])
    answers = []
    for is_native in (True, False):
        choose_native(monkeypatch, is_native)
        engine = build_engine(EngineSettings(model=str(folder), device="cpu", num_kv_blocks=64))
        sampled = run_all(engine, prompts, greedy(1, logprobs=VOCAB_SIZE), chunk_tokens=17)
        answers.append([dict(token.top_logprobs) for (token,) in sampled])
    for native, portable in zip(*answers, strict=True):
        assert native == pytest.approx(portable, rel=0, abs=tolerance)


def test_a_step_tells_how_many_layers_are_in_the_pool(tmp_path):
    folder = write_tiny_model(tmp_path, "llama", num_hidden_layers=18)
    engine = build_engine(EngineSettings(model=str(folder), device="cpu", num_kv_blocks=4))
    request = Request("r", 0, [1, 2, 3], 3, greedy(1))
    reports = []

    def on_layer(num_layers):
        done = [bool(engine.pool.keys(layer)[0, 2].any()) for layer in range(18)]
        reports.append((num_layers, done.index(False) if False in done else 18))

    engine.step([Work(request, 0, 3, [0])], on_layer)
    assert reports == [(8, 8), (16, 16), (18, 18)]
