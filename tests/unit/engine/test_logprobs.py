import math

import pytest
import torch

from engine.sampler import Beside, with_logprobs
from tests.unit.engine.in_one_test import for_each
from tests.unit.engine.native_kit import thread_counts

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def random(num_rows, num_columns, dtype=torch.float32):
    generator = torch.Generator().manual_seed(num_rows * num_columns)
    return (torch.randn(num_rows, num_columns, generator=generator) * 3).to(dtype)


def scored(ops, logits, num_top, rows=None):
    rows = [*range(len(logits))] if rows is None else rows
    tokens = [(row * 7919 + 5) % logits.shape[1] for row in rows]
    beside = [Beside(num_top[row]) for row in rows]
    return with_logprobs(logits, ops.likeliest(logits)[0], rows, tokens, beside, ops)


@dtypes
@for_each(num_columns=[1, 3, 63, 64, 200, 1000, 5003])
def test_logprobs_are_those_of_a_softmax(ops, dtype, num_columns):
    logits, num_top = random(4, num_columns, dtype), [0, 1, 5, 20]
    expected = logits.double().log_softmax(-1)
    for row, token in enumerate(scored(ops, logits, num_top)):
        assert token.logprob == pytest.approx(float(expected[row, token.token_id]), abs=2e-6)
        # Of equally likely tokens the first comes first.
        order = expected[row].sort(descending=True, stable=True).indices[: num_top[row]].tolist()
        assert [each for each, _ in token.top_logprobs] == order
        assert [number for _, number in token.top_logprobs] == pytest.approx(expected[row, order].tolist(), abs=2e-6)


def test_equals_are_told_in_their_order(ops):
    logits = torch.zeros(1, 5003)
    logits[0, [1000, 64, 4999, 63, 5002]] = 1.0
    (token,) = scored(ops, logits, [7])
    assert [each for each, _ in token.top_logprobs] == [63, 64, 1000, 4999, 5002, 0, 1]
    assert token.top_logprobs[0][1] == pytest.approx(1 - math.log(5 * math.e + 4998), abs=2e-6)


def test_tokens_that_may_not_come_are_not_among_the_likeliest(ops):
    logits = torch.full((1, 700), -torch.inf)
    logits[0, [3, 600]] = torch.tensor([1.0, 2.0])
    (token,) = with_logprobs(logits, ops.likeliest(logits)[0], [0], [3], [Beside(5)], ops)
    assert [each for each, _ in token.top_logprobs] == [600, 3]
    assert token.logprob == pytest.approx(-1 - math.log1p(math.exp(-1)), abs=1e-6)


@dtypes
def test_logprobs_depend_on_their_own_row_alone(ops, dtype):
    logits, num_top = random(23, 4099, dtype), [row % 6 for row in range(23)]
    together = scored(ops, logits, num_top)
    assert scored(ops, logits, num_top, rows=[*range(22, 0, -3)]) == together[:0:-3]
    wide = torch.full((23, 4106), torch.nan, dtype=dtype)
    wide[:, 3:-4] = logits
    assert scored(ops, wide[:, 3:-4], num_top) == together
    for row in (0, 11, 22):
        alone = logits[row : row + 1].clone()
        highest, tokens = ops.likeliest(alone)[0], [together[row].token_id]
        assert with_logprobs(alone, highest, [0], tokens, [Beside(num_top[row])], ops) == [together[row]]
    for _ in thread_counts():
        assert scored(ops, logits, num_top) == together


@dtypes
def test_named_tokens_are_told_in_place_of_the_likeliest_beside_rows_that_name_none(ops, dtype):
    logits = random(4, 5003, dtype)
    named = [(17, 4999, 3), (), (5002,), (0, 1, 2, 4000)]
    beside = [Beside(num_top, names) for num_top, names in zip([0, 2, 20, 5], named, strict=True)]
    expected = logits.double().log_softmax(-1)
    highest = ops.likeliest(logits)[0]
    for row, token in enumerate(with_logprobs(logits, highest, range(4), [9, 8, 7, 6], beside, ops)):
        ids = [*named[row]] or expected[row].topk(2).indices.tolist()
        order = sorted(ids, key=lambda each, row=row: -float(expected[row, each]))
        assert [each for each, _ in token.top_logprobs] == order, "the likeliest first"
        told = [token.logprob, *(number for _, number in token.top_logprobs)]
        assert told == pytest.approx(expected[row, [9 - row, *order]].tolist(), abs=2e-6)
    (forbidden,) = with_logprobs(
        logits.index_fill(1, torch.tensor([3]), -torch.inf), highest, [0], [9], beside[:1], ops
    )
    assert {each for each, _ in forbidden.top_logprobs} == {17, 4999}
