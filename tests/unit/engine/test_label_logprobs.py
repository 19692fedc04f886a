"""Logprobs of given tokens instead of a token, of requests that only prefill: against transformers, and in company."""

import math
import struct

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.build import build_engine
from serving_core.requests import LOGPROBS, Pooling, Request, SamplingParams, Work
from serving_core.settings import EngineSettings
from tests.tiny_models import VOCAB_SIZE, write_fake_model, write_tiny_model

PROMPT = [5, 80, 11, 250, 7, 7, 42, 200, 9]
LABELS = (7, 250, 0, VOCAB_SIZE - 1)


def engine_of(folder, **settings):
    return build_engine(EngineSettings(model=str(folder), block_size=4, num_kv_blocks=256, **settings))


def asked(name, labels=LABELS, prompt=PROMPT):
    sampling = SamplingParams(max_tokens=0, temperature=0.0, logprobs=0, logprob_token_ids=labels)
    return Request(name, 0, list(prompt), len(prompt), sampling, pooling=Pooling(LOGPROBS))


def numbers(token):
    assert (token.error, bool(token.embedding)) == (None, True)
    return struct.unpack(f"<{len(token.embedding) // 4}f", token.embedding)


def test_they_are_those_of_transformers_in_the_order_of_the_request(written):
    folder = written(write_tiny_model, "llama")
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)[list(LABELS)]
    engine = engine_of(folder, dtype="float32")
    request = asked("a")
    assert engine.step([Work(request, 0, 5, range(3))]) == []
    [token] = engine.step([Work(request, 5, 4, range(3))])
    assert numbers(token) == pytest.approx(expected.tolist(), abs=1e-5)


def test_on_paper(tmp_path):
    """The fake model's logits are 0 for the next token, -1 for the one behind it, and so on."""
    write_fake_model(tmp_path)
    [token] = engine_of(tmp_path, dtype="float32").step([Work(asked("a", (36, 35, 34), [97, 98]), 0, 2, [0])])
    whole = math.log(math.fsum(math.exp(-rank) for rank in range(VOCAB_SIZE)))
    # 97 * 1 + 98 * 2 + 2 = 295, 295 mod 260 = 35
    assert numbers(token) == pytest.approx([-1 - whole, -whole, -(VOCAB_SIZE - 1) - whole])


def test_company_changes_no_bit_of_them_nor_they_a_token_of_their_company(written):
    engine = engine_of(written(write_tiny_model, "llama"), dtype="float32", batch_invariant=True)
    [alone] = engine.step([Work(asked("alone"), 0, 9, range(3))])
    answered = Request("answered", 0, [1, 2, 3], 3, SamplingParams(max_tokens=1, temperature=0.0, logprobs=1))
    [token] = engine.step([Work(answered, 0, 3, [3])])
    others = [asked(f"{index}", LABELS[: index % 4 + 1], [*PROMPT, index]) for index in range(20)]
    works = [Work(request, 0, 10, range(4 + 3 * index, 7 + 3 * index)) for index, request in enumerate(others)]
    tokens = engine.step([Work(answered, 0, 3, [3]), *works, Work(asked("among"), 0, 9, range(3))])
    assert (tokens[0], tokens[-1].embedding) == (token, alone.embedding)
    assert [len(numbers(each)) for each in tokens[1:-1]] == [index % 4 + 1 for index in range(20)]
