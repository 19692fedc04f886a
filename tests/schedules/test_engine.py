"""The simulated engine computes what the model says, from what lies in its blocks, and nothing else."""

from random import Random

import pytest

from serving_core.requests import Request, SamplingParams, Work
from tests.schedules.model import answer_of
from tests.schedules.node import Pool, SimulatedEngine, Sizes

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
TABLE = [7, 2, 5, 0, 1]
SIZES = Sizes(8, 16, 4, 4, is_batch_invariant=True)


@pytest.fixture
def pool():
    return Pool(8, 1, lambda block_ids, epoch, by: None)


def step(pool, request, start, num_tokens, table=TABLE):
    """The tokens of one step."""
    engine = SimulatedEngine("n", SIZES, pool, Random(0))
    running = engine.step([Work(request, start, num_tokens, table)])
    while True:
        try:
            next(running)
        except StopIteration as end:
            return [sampled.token_id for sampled in end.value]


def write(pool, request, num_tokens, chunk=3):
    """The answer, in chunks and then token by token."""
    start = 0
    while request.num_output_tokens < num_tokens:
        share = min(chunk, len(request.token_ids) - start)
        request.token_ids += step(pool, request, start, share)
        start += share
    return request.token_ids[request.num_prompt_tokens :]


def request_of(prompt, salt=""):
    return Request("r", 0, list(prompt), len(prompt), SamplingParams(max_tokens=9), salt)


@pytest.mark.parametrize("chunk", [1, 3, 4, 20])
@pytest.mark.parametrize("salt", ["", "a"])
def test_chunks_and_steps_give_the_models_answer(chunk, salt, pool):
    assert write(pool, request_of(PROMPT, salt), 7, chunk) == answer_of(PROMPT, 7, salt)


def test_blocks_that_were_copied_go_on_as_they_would_have(pool):
    request, other = request_of(PROMPT), Pool(8, 2, lambda block_ids, epoch, by: None)
    write(pool, request, 1)
    for layer in (0, 1):
        other.write(layer, [4, 6, 3], *pool.read(layer, TABLE[:3]))
    num_known = len(request.token_ids)
    assert step(other, request, num_known - 1, 1, [4, 6, 3]) == answer_of(PROMPT, 2, "")[1:]


@pytest.mark.parametrize("position", [0, 5, 9])
@pytest.mark.parametrize("layer", [0, 1])
def test_one_changed_bit_gives_another_token(layer, position, pool):
    request = request_of(PROMPT)
    write(pool, request, 1)
    pool.flip_key(Work(request, 0, 1, TABLE).share, position, layer)
    assert step(pool, request, len(PROMPT), 1) != answer_of(PROMPT, 2, "")[1:]
