"""Sampling tokens, by torch and by every variant of the compiled kernels."""

import numpy as np
import pytest
import torch

from engine.ops.base import Ops
from engine.ops.topk_topp import LIKELIEST_MASS, RowSampling, least_in_nuclei
from tests.effort import effort
from tests.unit.engine.in_one_test import for_each
from tests.unit.engine.native_kit import thread_counts

BELOW_ONE = 1 - 2**-53
TOLERANCE = 1e-5
SIZES = [1, 2, 15, 64, 511, 513, 3000, 20_011]
SETTINGS = [
    {},
    {"temperature": 0.1},
    {"temperature": 100.0},
    {"min_p": 0.02},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 300},
    {"top_k": 2**40},
    {"top_p": 0.9},
    {"top_p": 0.5, "temperature": 0.3},
    {"top_p": 0.95, "temperature": 100.0},
    {"top_p": 1e-6},
    {"top_p": 1 - 1e-6},
    {"top_p": 0.8, "top_k": 20, "temperature": 0.7},
    {"top_p": 0.7, "top_k": 500, "min_p": 0.001, "temperature": 2.0},
    {"top_p": 0.9, "min_p": 0.3},
    {"min_p": 1.0},
]


dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def random(num_rows, num_columns, dtype=torch.float32, scale=3.0):
    generator = torch.Generator().manual_seed(num_rows * num_columns)
    return (torch.randn(num_rows, num_columns, generator=generator) * scale).to(dtype)


def sampled(ops, logits, samplings):
    return ops.sample(logits, ops.likeliest(logits)[0], samplings).tolist()


def numbers_for(num_rows, count=4):
    return np.random.default_rng(7).random((num_rows, count)).tolist()


def weights_that_stay(logits, sampling):
    """In float64, by sorting."""
    scores = logits.double().numpy()
    weights = np.exp((scores - scores.max()) / sampling.temperature)
    weights[weights < sampling.min_p] = 0
    if 0 < sampling.top_k < len(weights):
        weights[weights < np.sort(weights)[-sampling.top_k]] = 0
    if sampling.top_p < 1:
        descending = np.sort(weights)[::-1]
        masses = descending.cumsum()
        edge = min(np.searchsorted(masses, sampling.top_p * masses[-1]), len(masses) - 1)
        weights[weights < descending[edge]] = 0
    return weights


def check(logits, samplings, tokens):
    """That the numbers fall into what the tokens have of the distributions."""
    known = {}
    for sampling, token in zip(samplings, tokens, strict=True):
        distribution = sampling._replace(number=0.0)
        if distribution not in known:
            known[distribution] = weights_that_stay(logits[sampling.row], sampling)
        weights = known[distribution]
        masses = weights.cumsum() / weights.sum()
        assert weights[token] > 0, sampling
        assert (
            masses[token] - weights[token] / weights.sum() - TOLERANCE <= sampling.number <= masses[token] + TOLERANCE
        )


@dtypes
@for_each(num_columns=SIZES)
def test_numbers_fall_into_the_shares_of_their_tokens(ops, dtype, num_columns):
    logits = random(len(SETTINGS), num_columns, dtype)
    numbers = numbers_for(len(SETTINGS))
    samplings = [
        RowSampling(row, number, **{"temperature": 1.0, **fields})
        for row, fields in enumerate(SETTINGS)
        for number in numbers[row]
    ]
    check(logits, samplings, sampled(ops, logits, samplings))


@dtypes
@for_each(fields=SETTINGS)
def test_all_tokens_that_stay_and_no_others_are_drawn(ops, dtype, fields):
    logits = random(1, 40, dtype)
    num_samplings = effort(1000, 4000, 4000)
    samplings = [
        RowSampling(0, (i + 0.5) / num_samplings, **{"temperature": 1.0, **fields}) for i in range(num_samplings)
    ]
    counts = np.bincount(sampled(ops, logits, samplings), minlength=40)
    weights = weights_that_stay(logits[0], samplings[0])
    assert counts == pytest.approx(num_samplings * weights / weights.sum(), abs=1.01)
    assert not counts[weights == 0].any()


@dtypes
@for_each(fields=SETTINGS)
def test_a_flat_row(ops, dtype, fields):
    """All are as likely as the last one that stays."""
    logits = torch.full((1, 3000), 2.5, dtype=dtype)
    samplings = [
        RowSampling(0, number, **{"temperature": 1.0, **fields}) for number in (0.0, 0.25, 0.5, 0.9, BELOW_ONE)
    ]
    assert sampled(ops, logits, samplings) == [0, 750, 1500, 2700, 2999]


@dtypes
def test_a_row_that_is_nearly_flat(ops, dtype):
    logits = random(1, 20_000, dtype)
    settings = [{"top_p": 0.5}, {"top_p": 0.999}, {"top_k": 15_000}, {"top_k": 600, "top_p": 0.3}, {"min_p": 0.95}]
    samplings = [RowSampling(0, 0.3, 100.0, **fields) for fields in settings]
    check(logits, samplings, sampled(ops, logits, samplings))


@dtypes
@for_each(num_columns=[3, 700, 5000])
def test_forbidden_tokens_do_not_come_whatever_the_number(ops, dtype, num_columns):
    logits = torch.full((2, num_columns), -torch.inf, dtype=dtype)
    logits[:, num_columns // 2] = -4.0
    logits[1, num_columns // 3] = -4.0
    ends = {0: [num_columns // 2] * 2, 1: [num_columns // 3, num_columns // 2]}
    for fields in SETTINGS:
        for row, expected in ends.items():
            samplings = [RowSampling(row, number, **{"temperature": 1.0, **fields}) for number in (0.0, BELOW_ONE)]
            assert sampled(ops, logits, samplings) == expected


@for_each(temperature=[1e-30, 1e-6, 1e6])
def test_extreme_temperatures(ops, temperature):
    logits = torch.tensor([[-3e38, 1.0, 2.0, 3e38, -torch.inf, 3e38]])
    numbers = [0.0, 0.3, 0.7, BELOW_ONE]
    samplings = [RowSampling(0, number, temperature, top_p=top_p) for top_p in (1.0, 0.99) for number in numbers]
    assert sampled(ops, logits, samplings) == [3, 3, 5, 5] * 2


def test_the_largest_number_of_a_long_row(ops):
    logits = random(1, 9001)
    logits[0, 8900:] = -torch.inf
    for fields in ({}, {"top_p": 0.9}, {"top_k": 50}):
        sampling = RowSampling(0, BELOW_ONE, 1.0, **fields)
        assert sampled(ops, logits, [sampling]) == [weights_that_stay(logits[0], sampling).nonzero()[0][-1]]


@for_each(broken=[torch.nan, torch.inf, -torch.inf])
def test_a_row_without_a_finite_highest_gives_any_token_and_changes_no_other(ops, broken):
    logits = random(3, 900)
    samplings = [RowSampling(row, 0.6, 1.0, top_p=0.9, top_k=40) for row in range(3)]
    expected = sampled(ops, logits, samplings)
    if broken > 0 or broken != broken:
        logits[1, 77] = broken
    else:
        logits[1] = broken
    tokens = sampled(ops, logits, samplings)
    assert 0 <= tokens[1] < 900
    assert (tokens[0], tokens[2]) == (expected[0], expected[2])


def mixed(num_rows):
    numbers = numbers_for(num_rows, 1)
    settings = [SETTINGS[row % len(SETTINGS)] for row in range(num_rows)]
    return [RowSampling(row, numbers[row][0], **{"temperature": 1.0, **settings[row]}) for row in range(num_rows)]


@dtypes
@for_each(num_columns=[401, 4099])
def test_samplings_depend_on_their_own_row_alone(ops, dtype, num_columns):
    logits, samplings = random(34, num_columns, dtype), mixed(34)
    together = sampled(ops, logits, samplings)
    alone = [
        sampled(ops, logits[row : row + 1].clone(), [sampling._replace(row=0)])[0]
        for row, sampling in enumerate(samplings)
    ]
    wide = torch.full((34, num_columns + 7), torch.nan, dtype=dtype)
    wide[:, 3:-4] = logits
    assert together == alone
    assert sampled(ops, wide[:, 3:-4], samplings) == together
    assert sampled(ops, logits, samplings[::-3]) == together[::-3]


@dtypes
def test_threads_change_no_sampling(ops, dtype):
    logits, samplings = random(34, 2001, dtype), mixed(34)
    one, *others = (sampled(ops, logits, samplings) for _ in thread_counts())
    assert others == [one] * len(others)


def test_other_dtypes_are_left_to_torch(ops):
    logits, samplings = random(34, 300, torch.float16), mixed(34)
    assert sampled(ops, logits, samplings) == sampled(Ops(), logits, samplings)


def test_the_least_weight_of_a_nucleus_by_hand():
    weights = torch.tensor([0.25, 1.0, 0.0, 0.5, 0.25]).expand(6, 5)
    needed = torch.tensor([1, 2**40, 2**40 + 1, 3 * 2**39, 3 * 2**39 + 1, 2**41])[:, None]
    assert least_in_nuclei(weights, needed).flatten().tolist() == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]


@for_each(num_columns=[1, 3, 700, 5000])
def test_the_least_weight_of_a_nucleus_is_that_of_sorted_weights(num_columns):
    """What devices count by digits, for any needed mass: of random rows and of one with ties."""
    weights = random(40, num_columns).sub(9.0).clamp(max=0.0).exp()
    weights[1] = weights[1].bfloat16().float()
    descending = weights.sort(descending=True).values
    sums = (descending * LIKELIEST_MASS).long().cumsum(1)
    needed = (torch.rand(40, 1, generator=torch.Generator().manual_seed(1)).double() * sums[:, -1:]).ceil().long()
    needed = torch.cat((needed[:-1], sums[-1:, -1:])).clamp(min=1)
    expected = descending.gather(1, torch.searchsorted(sums, needed))
    assert torch.equal(least_in_nuclei(weights, needed), expected)
    weights[0] = torch.nan
    assert torch.equal(least_in_nuclei(weights, needed)[1:], expected[1:]), "a row that broke changed another"
