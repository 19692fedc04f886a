"""Answers of a real model on KV that earlier requests left are those on KV of its own."""

import pytest

from engine.build import build_engine
from serving_core.node.blocks import BlockAllocator
from serving_core.settings import EngineSettings
from tests.tiny_models import write_fake_model, write_tiny_model
from tests.toy_scheduler import CountingEngine, greedy, run_all, token_ids

BASE = [(7 * i + 3) % 250 for i in range(50)]
PROMPTS = [BASE, [*BASE[:41], 1, 2, 3], BASE[:20], BASE + [9] * 30, [8, *BASE]]
SAMPLING = greedy(12, ignore_eos=True)


@pytest.mark.parametrize("write_model", [write_fake_model, write_tiny_model])
@pytest.mark.parametrize("chunk_tokens", [7, 1000])
def test_answers_are_the_same_with_and_without_reuse(write_model, chunk_tokens, written):
    settings = EngineSettings(model=str(written(write_model)), block_size=4, num_kv_blocks=128)
    expected = token_ids(run_all(build_engine(settings), PROMPTS, SAMPLING))
    engine, allocator = CountingEngine(build_engine(settings)), BlockAllocator(128)
    for _ in range(2):  # the second time on what the first has left, answers too
        options = {"chunk_tokens": chunk_tokens, "joins_at": [0, 9, 9, 11, 3], "allocator": allocator}
        assert token_ids(run_all(engine, PROMPTS, SAMPLING, **options)) == expected
        allocator.check_integrity()
    num_prompt_tokens = sum(map(len, PROMPTS))
    num_answer_tokens = len(PROMPTS) * 11  # the last of an answer is never computed
    # First time: 40, 16 and 48 tokens of the three that follow BASE are cached. Second time: all but the last tokens.
    first = num_prompt_tokens - 40 - 16 - 48
    second = sum((len(prompt) - 1) % 4 + 1 for prompt in PROMPTS)
    assert engine.num_tokens == first + second + 2 * num_answer_tokens
