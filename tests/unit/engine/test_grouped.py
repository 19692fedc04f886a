"""Products of groups of rows against float64, and against each matrix alone: equal to the bit."""

from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch

from engine.model.experts import grouped_product
from engine.native import linear, linear_library
from engine.native.library import ENVIRONMENT
from engine.native.linear import DenseMatrix
from engine.quantization.quantized_linear import quantized_matrix
from tests.effort import effort
from tests.unit.engine.in_one_test import for_each
from tests.unit.engine.native_kit import thread_counts
from tests.unit.engine.test_dense_linear import KINDS, assert_product, random
from tests.unit.engine.test_quantized_linear import TOLERANCES, product, variants

COUNTS = [  # rows of each matrix
    [1],
    [0, 1, 0],
    [3, 0, 1, 1, 7],
    [1] * 16,
    [0] * 30 + [2, 5],
    [250, 0, 13, 200],
]
SHAPES = [(1, 16), (70, 33), (131, 1040), (96, 2100)]
NOWHERE = 8  # an address that cannot be read


def starts_of(counts):
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32)


def check(matrices, counts, x):
    """The outputs, which each matrix gives for its rows alone too, whatever the number of threads."""
    grouped, starts = grouped_product(matrices), starts_of(counts)
    groups = list(zip(matrices, pairwise(starts.tolist()), strict=True))
    alone = torch.cat([matrix(row) for matrix, (first, end) in groups for row in x[first:end].split(1)])
    for _ in thread_counts():
        assert torch.equal(grouped(x, starts), alone)
    return alone


@pytest.mark.parametrize("kind", KINDS)
@for_each(counts=COUNTS)
def test_float_products(kind, counts, monkeypatch):
    variant, dtype = kind
    monkeypatch.setenv(ENVIRONMENT, variant)
    for shape in effort(SHAPES[:3], SHAPES, SHAPES):
        few_weights = [random(*shape, seed=seed, dtype=dtype) for seed in range(5)]
        weights = [few_weights[place % 5] for place in range(len(counts))]
        x = random(sum(counts), shape[1], seed=99, dtype=dtype)
        outputs = check([DenseMatrix(weight) for weight in weights], counts, x)
        for weight, (first, end) in zip(weights, pairwise(starts_of(counts).tolist()), strict=True):
            assert_product(outputs[first:end], x[first:end], weight)


@variants
@pytest.mark.parametrize("bits", [4, 8])
@for_each(counts=COUNTS[1:4])
def test_products_with_quantized_weights(variant, bits, counts):
    if variant == "portable":
        pytest.skip("torch computes them one by one")
    for shape in SHAPES[1:3]:
        few_weights = [random(*shape, seed=seed).float() for seed in range(5)]
        matrices = [quantized_matrix(few_weights[place % 5], bits, variant) for place in range(len(counts))]
        for dtype in (torch.float32, torch.bfloat16):
            x = random(sum(counts), shape[1], seed=99, dtype=dtype)
            outputs = check(matrices, counts, x)
            for matrix, (first, end) in zip(matrices, pairwise(starts_of(counts).tolist()), strict=True):
                expected, sizes = product(x[first:end], matrix.rows(torch.arange(shape[0])))
                assert (np.abs(outputs[first:end].double().numpy() - expected) <= TOLERANCES[dtype] * sizes).all()


@pytest.mark.parametrize("kind", [*KINDS, "int8"])
def test_matrices_without_rows_are_not_read(kind, monkeypatch):
    """Else the process dies."""
    dtype = torch.float32 if kind == "int8" else kind[1]
    if kind != "int8":
        monkeypatch.setenv(ENVIRONMENT, kind[0])
    weights = [random(70, 33, seed=seed, dtype=dtype) for seed in range(4)]
    matrices = [quantized_matrix(weight, 8) if kind == "int8" else DenseMatrix(weight) for weight in weights]
    grouped = grouped_product(matrices)
    if grouped is None:
        pytest.skip("no kernel here")
    x, starts = random(5, 33, seed=9, dtype=dtype), starts_of([0, 2, 0, 3])
    expected = grouped(x, starts)
    for unused in (0, 2):
        matrix = (linear_library if kind == "int8" else linear).Matrix.from_address(matrices[unused].address)
        matrix.weights = matrix.scales = NOWHERE
    assert torch.equal(grouped(x, starts), expected)


def test_no_rows():
    grouped = grouped_product([quantized_matrix(torch.ones(5, 16), 8)] * 3)
    if grouped is None:
        pytest.skip("no kernel here")
    assert grouped(torch.empty(0, 16), starts_of([0, 0, 0])).shape == (0, 5)


def test_matrices_that_differ_are_not_grouped():
    matrix = quantized_matrix(torch.ones(5, 16), 8)
    others = [quantized_matrix(torch.ones(6, 16), 8), quantized_matrix(torch.ones(5, 16), 4), None]
    assert all(grouped_product([matrix, other]) is None for other in others)
    assert grouped_product([quantized_matrix(torch.ones(5, 16), 8, "portable")] * 2) is None
