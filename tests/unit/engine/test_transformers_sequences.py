"""Models that transformers computes sequence by sequence, over its own cache: greedy answers against its `generate`."""

import pytest

from engine.build import build_engine
from engine.transformers_backend import loading
from engine.transformers_backend.sequences import SequenceDecoder
from serving_core.requests import Request, SamplingParams, Work
from serving_core.settings import EngineSettings
from tests.toy_scheduler import greedy, run_all, token_ids
from tests.transformers_models import NUM_TOKENS, PROMPTS, SEQUENCES, generated, write_transformers_model


@pytest.fixture(params=SEQUENCES)
def folder(request, written):
    return written(write_transformers_model, request.param)


def load(folder, **fields):
    return build_engine(EngineSettings(**{"model": str(folder), "num_kv_blocks": 200, "block_size": 8, **fields}))


def test_answers_are_those_of_transformers(folder):
    """In chunks that end within blocks, steps of answers beside chunks of prompts."""
    engine = load(folder)
    assert isinstance(engine.model, SequenceDecoder)
    found = token_ids(run_all(engine, PROMPTS, greedy(NUM_TOKENS), chunk_tokens=19, joins_at=[3, 0, 1]))
    assert found == generated(folder, PROMPTS, NUM_TOKENS, found)


def test_what_is_kept_moves_with_the_blocks(folder):
    """A prompt is computed by one engine, and another one goes on behind a copy of its blocks."""
    engines, prompt = [load(folder) for _ in range(2)], PROMPTS[1]
    request = Request("r", 0, list(prompt), len(prompt), SamplingParams(max_tokens=4, temperature=0))
    layout = engines[0].layout
    here, there = ([*range(start, start + layout.num_blocks_for(len(prompt) + 4))] for start in (3, 50))
    [token] = engines[0].step([Work(request, 0, len(prompt), here)])
    for layer in layout.layers:
        engines[1].pool.write(layer, there, *engines[0].pool.read(layer, here))
    answer = [token.token_id]
    while len(answer) < 4:
        request.token_ids.append(answer[-1])
        [token] = engines[1].step([Work(request, len(request.token_ids) - 1, 1, there)])
        answer.append(token.token_id)
    assert answer == generated(folder, [prompt], 4, [answer])[0]


JOINED = ("diffllama", "falcon_h1", "jamba", "lfm2", "mamba", "qwen3_5", "stablelm")


def test_the_sequences_of_a_step_are_computed_together(folder):
    """One call of the model for all that are about as long, where padding in front changes nothing."""
    engine = load(folder)
    family = engine.config.model_type.removesuffix("_text")
    calls = []
    engine.model.module.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    prompts = [[number, *range(1, 8 + number)] for number in range(3)]
    run_all(engine, [*prompts, list(range(1, 150))], greedy(5, ignore_eos=True))
    of_steps = calls[4:]  # behind the prompts
    assert of_steps == ([3, 1] * 4 if family in JOINED else [1] * 16)


def test_keys_and_values_may_be_in_8_bits(folder, monkeypatch, caplog):
    """The check at the start, which models that tests have tried are spared, finds no more than rounding."""
    monkeypatch.setattr(loading, "TRIED", frozenset())
    with caplog.at_level("INFO"):
        engine = load(folder, kv_cache_dtype="int8")
    assert engine.layout.is_quantized
    assert any("agrees here" in record.message for record in caplog.records)
