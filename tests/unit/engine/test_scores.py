"""Scores of prompts: against transformers, and against paper."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.build import build_engine
from serving_core.requests import Request, SamplingParams, Work
from serving_core.settings import EngineSettings
from tests.tiny_models import VOCAB_SIZE, write_fake_model, write_tiny_model

PROMPTS = [[5, 80, 11, 250, 7, 7, 42, 200, 9], [3, 100]]


def engine_of(folder):
    return build_engine(EngineSettings(model=str(folder), dtype="float32", block_size=4, num_kv_blocks=64))


def scored(engine, prompts, num_top, chunk_tokens):
    """What each of the prompts has scored, read together in chunks."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=num_top)
    requests = [Request(str(index), 0, list(prompt), len(prompt), sampling) for index, prompt in enumerate(prompts)]
    tokens = []
    for start in range(0, max(map(len, prompts)), chunk_tokens):
        works = [
            Work(request, start, min(chunk_tokens, len(request.token_ids) - start), range(8 * place, 8 * place + 8))
            for place, request in enumerate(requests)
            if start < len(request.token_ids)
        ]
        tokens += engine.step(works)
    assert len(tokens) == len(prompts)
    return [request.scores for request in requests]


@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
def test_scores_are_those_of_transformers(written, chunk_tokens):
    folder = written(write_tiny_model, "llama")
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    all_scores = scored(engine_of(folder), PROMPTS, 3, chunk_tokens)
    for prompt, scores in zip(PROMPTS, all_scores, strict=True):
        with torch.no_grad():
            logprobs = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
        assert [score.token_id for score in scores] == prompt[1:]
        for score, expected in zip(scores, logprobs, strict=False):
            assert score.logprob == pytest.approx(float(expected[score.token_id]), abs=1e-4)
            values, ids = expected.topk(3)
            assert [token_id for token_id, _ in score.top_logprobs] == ids.tolist()
            assert [logprob for _, logprob in score.top_logprobs] == pytest.approx(values.tolist(), abs=1e-4)


def test_scores_on_paper(tmp_path):
    write_fake_model(tmp_path)
    [[first, second]] = scored(engine_of(tmp_path), [[97, 98, 37]], 1, 100)
    whole = math.log(math.fsum(math.exp(-rank) for rank in range(VOCAB_SIZE)))
    assert [first.token_id, second.token_id] == [98, 37]
    assert first.logprob == pytest.approx(-whole)  # 97 * 1 + 1 = 98 comes first
    assert second.logprob == pytest.approx(-2 - whole)  # 97 * 1 + 98 * 2 + 2 = 295, 295 mod 260 = 35
    assert second.top_logprobs == ((35, pytest.approx(-whole)),)


def test_what_is_read_again_is_scored_again_from_there(tmp_path):
    write_fake_model(tmp_path)
    engine = engine_of(tmp_path)
    [scores] = scored(engine, PROMPTS[:1], 0, 100)
    request = Request("again", 0, list(PROMPTS[0]), len(PROMPTS[0]), SamplingParams(max_tokens=1, prompt_logprobs=0))
    request.scores = [*scores[:4], *([None] * 4)]
    engine.step([Work(request, 4, 5, range(8))])
    assert request.scores == scores


def test_nobody_scores_who_was_not_asked_or_has_a_token_out(tmp_path):
    write_fake_model(tmp_path)
    engine = engine_of(tmp_path)
    unasked = Request("unasked", 0, [1, 2, 3], 3, SamplingParams(max_tokens=1))
    begun = Request("begun", 0, [1, 2, 3, 4], 3, SamplingParams(max_tokens=2, prompt_logprobs=0))
    asked = Request("asked", 0, [1, 2, 3], 3, SamplingParams(max_tokens=1, prompt_logprobs=0))
    tokens = engine.step([Work(unasked, 0, 3, [0]), Work(asked, 0, 3, [1]), Work(begun, 0, 4, [2])])
    assert len(tokens) == 3
    assert [len(request.scores) for request in (unasked, asked, begun)] == [0, 2, 0]
