"""--batch-invariant on CUDA: one request alone and among others, to the bit."""

import pytest

from engine.engine import Engine
from serving_core.requests import Request, SamplingParams, Work
from serving_core.settings import EngineSettings
from tests.tiny_models import VOCAB_SIZE, write_tiny_model

PROMPT = [(7 * i + 3) % 250 for i in range(43)]
EVERY_LOGPROB = SamplingParams(max_tokens=100, temperature=0, logprobs=VOCAB_SIZE, ignore_eos=True)
BLOCKS_OF_ONE = 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_neighbours_change_no_bit(tmp_path, family, dtype):
    folder = write_tiny_model(tmp_path, family, seed=3)
    settings = EngineSettings(
        model=str(folder), device="cuda", dtype=dtype, num_kv_blocks=BLOCKS_OF_ONE * 40, batch_invariant=True
    )
    engine = Engine(settings)

    def answer(num_neighbours):
        request = Request("watched", 0, list(PROMPT), len(PROMPT), EVERY_LOGPROB)
        sampled, start = [], 0
        for num_tokens in (len(PROMPT), 1, 1, 1):
            works = []
            for index in range(1, num_neighbours + 1):
                length = 1 + 13 * index % 60
                blocks = range(index * BLOCKS_OF_ONE, (index + 1) * BLOCKS_OF_ONE)
                other = Request(str(index), 0, [(index * at) % 250 for at in range(length)], length, EVERY_LOGPROB)
                works.append(Work(other, 0, length, blocks))
            at = num_neighbours // 2
            works.insert(at, Work(request, start, num_tokens, range(BLOCKS_OF_ONE)))
            sampled.append(engine.step(works)[at])
            request.token_ids.append(sampled[-1].token_id)
            start += num_tokens
        return sampled

    alone = answer(0)
    for num_neighbours in (1, 3, 8, 30):
        assert answer(num_neighbours) == alone, num_neighbours
