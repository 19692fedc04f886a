"""Batches that are changed from step to step, beside those that are built anew."""

from dataclasses import fields
from random import Random

import pytest
import torch

from engine.decode_rows import SPARE_COLUMNS, DecodeRows
from engine.engine import Engine
from engine.forward_batch import build_batch
from serving_core.requests import Request, SamplingParams, Work
from serving_core.settings import EngineSettings
from tests.tiny_models import write_tiny_model

CPU = torch.device("cpu")
BLOCK_SIZE = 4
GREEDY = SamplingParams(max_tokens=99, temperature=0, logprobs=3, ignore_eos=True)


class Answer:
    """One that is written, from a pool of random blocks."""

    def __init__(self, random, num_tokens):
        self._random = random
        self.request = Request(
            "r", 0, random.choices(range(100), k=num_tokens), num_tokens, SamplingParams(max_tokens=9)
        )
        self.begin_anew()

    def begin_anew(self):
        """As behind a preemption: other blocks, in another list."""
        self.block_ids = []
        self.grow()

    def grow(self):
        num_missing = -(-len(self.request.token_ids) // BLOCK_SIZE) - len(self.block_ids)
        self.block_ids += self._random.choices(range(1000), k=num_missing)

    def work(self, num_tokens=1, candidates=()):
        return Work(self.request, len(self.request.token_ids) - num_tokens, num_tokens, self.block_ids, candidates)

    def append(self):
        self.request.token_ids.append(self._random.randrange(100))
        self.grow()


def batch_of(rows, works):
    """What rows make of a step, and whether it followed on the one before."""
    followed = rows.follow(works)
    built = build_batch([work.share for work in works], BLOCK_SIZE, CPU)
    return (rows.take(works, built), False) if followed is None else (followed, True)


def check(batch, works):
    expected = build_batch([work.share for work in works], BLOCK_SIZE, CPU)
    for name in (field.name for field in fields(expected)):
        ours, theirs = getattr(batch, name), getattr(expected, name)
        if isinstance(theirs, torch.Tensor):
            assert ours.dtype == theirs.dtype
            assert ours.tolist() == theirs.tolist(), name
    assert batch.adapted_rows == {}
    assert batch.longest_query == expected.longest_query
    assert batch.longest_context >= expected.longest_context


@pytest.mark.parametrize("seed", range(40))
def test_every_batch_is_the_one_that_would_be_built(seed):
    random = Random(seed)
    rows, num_followed = DecodeRows(BLOCK_SIZE), 0
    answers = [Answer(random, random.randrange(1, 30)) for _ in range(random.randrange(1, 7))]
    for _ in range(60):
        works = [answer.work() for answer in answers]
        match random.randrange(12):
            case 0:
                answers.append(Answer(random, random.randrange(1, 30)))
            case 1 if len(answers) > 1:
                answers.pop(random.randrange(len(answers)))
            case 2:
                random.choice(answers).begin_anew()
            case 3:
                random.shuffle(answers)
            case 4:
                works[0] = answers[0].work(candidates=[1] * (-len(answers[0].request.token_ids) % BLOCK_SIZE))
            case 5:
                works[-1] = answers[-1].work(num_tokens=len(answers[-1].request.token_ids))
        batch, followed = batch_of(rows, works)
        num_followed += followed
        check(batch, works)
        for answer in answers:
            answer.append()
    assert num_followed > 10


def test_a_step_that_is_computed_again_is_built_again():
    rows, answer = DecodeRows(BLOCK_SIZE), Answer(Random(0), 3)
    works = [answer.work()]
    assert [batch_of(rows, works)[1] for _ in range(2)] == [False, False]


def test_tables_that_are_full_are_built_anew():
    rows, answer = DecodeRows(BLOCK_SIZE), Answer(Random(0), BLOCK_SIZE)
    followed = []
    for _ in range((2 * SPARE_COLUMNS + 1) * BLOCK_SIZE):
        batch, has_followed = batch_of(rows, [answer.work()])
        check(batch, [answer.work()])
        followed.append(has_followed)
        answer.append()
    assert followed.count(False) == 2


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_an_engine_gives_with_them_what_it_gives_without(tmp_path, kv_cache_dtype):
    """Tokens and logprobs to the bit: of three answers, one of which ends early."""
    folder = write_tiny_model(tmp_path / "model")
    settings = EngineSettings(model=str(folder), num_kv_blocks=32, block_size=BLOCK_SIZE, kv_cache_dtype=kv_cache_dtype)
    given = []
    for has_rows in (True, False):
        engine = Engine(settings)
        if not has_rows:
            engine._rows = None
        requests = [Request(str(n), 0, [*range(3 + n, 9 + 2 * n)], 6 + n, GREEDY) for n in range(3)]
        blocks = [[*range(10 * n, 10 * n + 10)] for n in range(3)]
        tokens = []
        for step in range(14):
            live = [0, 1, 2] if step < 8 else [0, 2]
            starts = [len(requests[n].token_ids) - 1 if step else 0 for n in live]
            works = [
                Work(requests[n], start, len(requests[n].token_ids) - start, blocks[n])
                for n, start in zip(live, starts, strict=True)
            ]
            tokens += engine.step(works)
            for n, token in zip(live, tokens[-len(live) :], strict=True):
                requests[n].token_ids.append(token.token_id)
        given.append(tokens)
    assert given[0] == given[1]
