"""Products of bytes with bytes against whole numbers of numpy: equal to the bit, by every kernel."""

import functools

import numpy as np
import pytest
import torch

from engine.model.experts import grouped_product
from engine.quantization.quantized_linear import MOST_INPUTS, quantized_matrix
from engine.quantization.weight_quantization import quantize
from tests.unit.engine.in_one_test import for_each
from tests.unit.engine.native_kit import thread_counts
from tests.unit.engine.test_quantized_linear import SHAPES, random, variants

F32 = np.float32
CHANNELS, SCALING, RATIO, MOST_TIMES, MOST_WHOLE = 16, 4, F32(1.5), F32(4096), 16  # as native/linear_bytes.h has them
ROWS = (1, 2, 3, 5, 6, 7, 13, 16, 29, 40, 259)  # of vectors, and of one tile, two and several


def of_bytes(weight, variant):
    matrix = quantized_matrix(weight, 8, variant)
    matrix.round_inputs(8)
    return matrix


def whole_numbers(row):
    """What the inputs of a row become, and what 1 then stands for."""
    channels = np.abs(np.pad(row, (0, -len(row) % CHANNELS))).reshape(-1, CHANNELS).max(0)
    most, chosen = np.sort(channels)[::-1][[0, SCALING]]
    chosen = max(chosen, most / MOST_TIMES) if most > RATIO * chosen else most
    for largest in (chosen, most):
        numbers = np.rint(row * (F32(127) / largest)).astype(np.int64)
        if (np.abs(numbers) > 127).sum() <= MOST_WHOLE:
            return numbers, largest / F32(127)
    raise AssertionError


def expected(weight, x, bias=None):
    quantized = quantize(weight, 8)
    numbers = quantized.numbers[:, : weight.shape[1]].numpy().astype(np.int64) - 128
    inputs, scales = zip(*(whole_numbers(row) for row in x.float().numpy()), strict=True)
    sums = (np.array(inputs) @ numbers.T).astype(F32)
    outputs = sums * quantized.scales.numpy().T * np.array(scales, F32)[:, None]
    return torch.from_numpy(outputs if bias is None else outputs + bias.numpy()).to(x.dtype)


def inputs_of(num_rows, num_inputs, dtype=torch.float32):
    """Rows with and without some that stand out, and with more of these than are kept."""
    x = random(num_rows, num_inputs, seed=num_rows)
    x[::2, num_inputs // 2] *= 50
    x[::3, num_inputs // 3] *= 9000
    x[::4, ::7] *= 11
    x[1::5] *= 1e-6
    return x.to(dtype)


@functools.cache
def known_products(shape):
    """Return inputs and the outputs expected of them, computed once for all variants."""
    inputs = [inputs_of(num_rows, shape[1], dtype) for dtype in (torch.float32, torch.bfloat16) for num_rows in ROWS]
    return [(x, expected(random(*shape), x)) for x in inputs]


@variants
@for_each(shape=SHAPES)
def test_they_are_those_of_whole_numbers(variant, shape):
    if variant == "portable":
        pytest.skip("torch computes with the inputs as they are")
    weight, bias = random(*shape), random(shape[0], seed=5)
    matrix = of_bytes(weight, variant)
    for x, outputs in known_products(shape):
        assert torch.equal(matrix(x), outputs)
    matrix.set_bias(bias)
    assert torch.equal(matrix(inputs_of(7, shape[1])), expected(weight, inputs_of(7, shape[1]), bias))


@variants
def test_the_largest_sums_fit(variant):
    """Weights and inputs of one sign, as large as bytes can be, and as many inputs in few channels as large as any
    are."""
    weight, x = torch.full((17, MOST_INPUTS), 2.0), torch.full((2, MOST_INPUTS), 3.0)
    x[1, : MOST_WHOLE * CHANNELS // SCALING].view(-1, CHANNELS)[:, :SCALING] = 3.0 * 4096
    outputs = of_bytes(weight, variant)(x)
    torch.testing.assert_close(outputs, x @ weight.T, rtol=1e-4, atol=0)


@variants
def test_more_inputs_than_sums_have_room_for_stay_at_16_bits(variant):
    assert of_bytes(torch.ones(1, MOST_INPUTS), variant).input_bits == 8
    assert of_bytes(torch.ones(1, MOST_INPUTS + 1), variant).input_bits == 16


@variants
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_number_of_threads(variant):
    if variant == "portable":
        pytest.skip("torch promises no such thing")
    matrix, x = of_bytes(random(200, 100), variant), inputs_of(300, 100, torch.bfloat16)
    alone = torch.cat([matrix(row) for row in x.split(1)])
    for _ in thread_counts():
        assert all(torch.equal(torch.cat([matrix(part) for part in x.split(n)]), alone) for n in (2, 3, 7, 260, 300))


@variants
@for_each(wrong=[float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_none_and_spoils_no_other_row(variant, wrong):
    matrix, x = of_bytes(random(17, 48), variant), random(3, 48, seed=1)
    before = matrix(x)
    x[1, 20] = wrong
    outputs = matrix(x)
    assert not outputs[1].isfinite().any()
    assert torch.equal(outputs[[0, 2]], before[[0, 2]])


@variants
def test_zeros_and_a_row_of_one_number(variant):
    weight = random(17, 48)
    matrix, x = of_bytes(weight, variant), torch.zeros(3, 48)
    x[1, 5], x[2, 5] = 4.0, 1e-40
    outputs = matrix(x)
    assert not outputs[0].any()
    torch.testing.assert_close(outputs[1], 4 * quantize(weight, 8).dense()[:, 5], rtol=1e-3, atol=0)
    assert (outputs[2].abs() < 1e-38).all()


@variants
def test_groups_of_rows_have_the_bits_of_their_own_matrix(variant):
    if variant == "portable":
        pytest.skip("torch computes them one by one")
    matrices = [of_bytes(random(70, 33, seed=seed), variant) for seed in range(3)]
    grouped, x = grouped_product(matrices), inputs_of(9, 33)
    alone = torch.cat([matrix(rows) for matrix, rows in zip(matrices, x.split([4, 0, 5]), strict=True)])
    assert torch.equal(grouped(x, torch.tensor([0, 4, 4, 9], dtype=torch.int32)), alone)
    others = [*matrices[:2], quantized_matrix(random(70, 33), 8, variant)]
    assert grouped_product(others) is None
