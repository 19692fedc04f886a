import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.native.linear_library import VARIANTS, linear_library
from engine.quantization import quantized_linear
from engine.quantization.quantized_linear import QuantizedMatrix, quantized_matrix
from engine.quantization.weight_quantization import QuantizedWeight, quantize
from tests.unit.engine.in_one_test import for_each
from tests.unit.engine.native_kit import thread_counts

CPU = torch.device("cpu")
# Of the sizes of a sum's terms: what rounding the inputs, the weights of the portable product and the output may cost.
TOLERANCES = {torch.float32: 3e-5, torch.bfloat16: 6e-3, torch.float16: 1e-3}
SHAPES = [(1, 16), (7, 5), (54, 54), (131, 77), (48, 576), (96, 1000)]


def available(variant):
    return variant == "portable" or (linear_library() is not None and linear_library().kernel(variant) is not None)


variants = pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=pytest.mark.skipif(not available(name), reason=f"no {name} kernel here"))
        for name in (*VARIANTS, "portable")
    ],
)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def product(x, weight):
    """In float64, by numpy; and the sizes of the terms."""
    x, weight = x.double().numpy(), weight.double().numpy()
    sizes = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(weight, axis=1)
    return x @ weight.T, sizes


@variants
@pytest.mark.parametrize("bits", [4, 8])
@for_each(dtype=TOLERANCES, shape=SHAPES)
def test_products_are_those_of_the_rounded_weights(variant, dtype, bits, shape):
    matrix = quantized_matrix(random(*shape), bits, variant)
    weight = matrix.rows(torch.arange(shape[0]))
    for num_rows in (1, 2, 3, 4, 5, 9, 33):
        x = random(num_rows, shape[1], seed=num_rows).to(dtype)
        expected, sizes = product(x, weight)
        outputs = matrix(x)
        assert (outputs.dtype, outputs.shape) == (dtype, expected.shape)
        assert (np.abs(outputs.double().numpy() - expected) <= TOLERANCES[dtype] * sizes).all()


@variants
@for_each(bits=[4, 8])
def test_a_bias_is_added(variant, bits):
    matrix, bias = quantized_matrix(random(19, 40), bits, variant), random(19, seed=5)
    x = random(3, 40, seed=6)
    plain = matrix(x)
    matrix.set_bias(bias)
    torch.testing.assert_close(matrix(x), plain + bias)


@variants
def test_rows_that_are_not_contiguous(variant):
    matrix, wide = quantized_matrix(random(20, 32), 8, variant), random(6, 80, seed=1)
    for x in (wide[:, 8:40], wide[::2, :32], wide.t()[:32].t(), random(32, 6, seed=2).t()):
        torch.testing.assert_close(matrix(x), matrix(x.clone(memory_format=torch.contiguous_format)))


@variants
@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_number_of_threads(variant, bits):
    if variant == "portable":
        pytest.skip("torch promises no such thing")
    matrix, x = quantized_matrix(random(200, 100), bits, variant), random(300, 100, seed=3).bfloat16()
    alone = torch.cat([matrix(row) for row in x.split(1)])
    for _ in thread_counts():
        assert torch.equal(matrix(x), alone)
        assert all(torch.equal(torch.cat([matrix(part) for part in x.split(n)]), alone) for n in (2, 3, 7, 260))


@variants
def test_no_rows(variant):
    assert quantized_matrix(random(17, 48), 4, variant)(torch.empty(0, 48)).shape == (0, 17)


@variants
def test_zeros_large_and_small_numbers(variant):
    matrix = quantized_matrix(random(17, 48), 8, variant)
    assert not matrix(torch.zeros(2, 48)).any()
    for scale in (1e-30, 1e-4, 1e30):
        expected, sizes = product(scale * random(2, 48, seed=1), matrix.rows(torch.arange(17)))
        assert (np.abs(matrix(scale * random(2, 48, seed=1)).double().numpy() - expected) <= 1e-4 * sizes).all()


@variants
@for_each(wrong=[float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_none_and_spoils_no_other_row(variant, wrong):
    matrix, x = quantized_matrix(random(17, 48), 8, variant), random(3, 48, seed=1)
    expected = matrix(x)
    x[1, 20] = wrong
    outputs = matrix(x)
    assert not outputs[1].isfinite().any()
    torch.testing.assert_close(outputs[[0, 2]], expected[[0, 2]])


@variants
@for_each(bits=[4, 8], group_size=[16, 48, 128])
def test_any_numbers_scales_and_zeros(variant, bits, group_size):
    rng = np.random.default_rng(1)
    num_outputs, num_inputs, num_groups = 37, 2 * group_size - 5, 2
    numbers = rng.integers(0, 2**bits, (num_outputs, num_groups * group_size), dtype=np.uint8)
    zeros = rng.integers(0, 2**bits, (num_outputs, num_groups), dtype=np.uint8)
    scales = rng.standard_normal((num_outputs, num_groups)).astype(np.float32)
    numbers[0], zeros[0] = 2**bits - 1, 0
    weight = (numbers - np.repeat(zeros, group_size, 1).astype(float)) * np.repeat(scales, group_size, 1)
    matrix = QuantizedMatrix(num_outputs, num_inputs, bits, group_size, CPU, variant)
    parts = (torch.from_numpy(array) for array in (numbers, scales, zeros))
    matrix.put(0, QuantizedWeight(*parts, num_inputs, bits))
    assert np.allclose(matrix.rows(torch.arange(num_outputs)).numpy(), weight[:, :num_inputs], rtol=1e-6)
    x = random(6, num_inputs) - 0.5
    expected, sizes = product(x, torch.from_numpy(weight[:, :num_inputs]))
    assert (np.abs(matrix(x).double().numpy() - expected) <= 3e-5 * sizes).all()


@variants
def test_inputs_in_another_order(variant):
    weight, order = random(20, 32), torch.randperm(32, generator=torch.Generator().manual_seed(1))
    matrix = quantized_matrix(weight[:, order], 8, variant)
    matrix.columns = order
    plain = quantized_matrix(weight, 8, variant)
    x = random(3, 32, seed=2)
    assert torch.equal(matrix.rows(torch.tensor([3, 19])), plain.rows(torch.tensor([3, 19])))
    torch.testing.assert_close(matrix(x), plain(x), rtol=1e-5, atol=1e-5)


def test_filling_in_tiles_is_filling_at_once(monkeypatch):
    weight = random(100, 50)
    whole = quantized_matrix(weight, 4)
    monkeypatch.setattr("engine.quantization.weight_quantization._TILE_ELEMENTS", 50 * 40)
    assert torch.equal(quantized_matrix(weight, 4).rows(torch.arange(100)), whole.rows(torch.arange(100)))
    monkeypatch.setattr(quantized_linear, "_TILE_ELEMENTS", 50 * 7)
    x = random(2, 50, seed=1)
    portable = quantized_matrix(weight, 4, "portable")
    torch.testing.assert_close(portable(x), x @ portable.rows(torch.arange(100)).t())


def test_bytes_are_a_half_and_a_quarter():
    weight = random(512, 512)
    assert quantized_matrix(weight, 8).num_bytes <= 512 * 512 * 1.02
    assert quantized_matrix(weight, 4).num_bytes <= 512 * 512 * 0.67


weights = st.integers(0, 10**6).map(lambda seed: random(5, 70, seed=seed) * 10.0 ** (seed % 7 - 3))


@given(weights)
def test_eight_bits_are_within_half_a_step_of_an_output(weight):
    quantized = quantize(weight, 8)
    steps = weight.abs().amax(1, keepdim=True) / 127
    assert ((quantized.dense() - weight).abs() <= steps * 0.501).all()
    assert int(quantized.numbers.min()) >= 1
    assert (quantized.zeros == 128).all()


@given(weights)
def test_four_bits_are_within_a_step_of_a_group(weight):
    quantized = quantize(weight, 4)
    assert int(quantized.numbers.max()) <= 15
    size = quantized.group_size
    for group, rounded in zip(weight.split(size, 1), quantized.dense().split(size, 1), strict=True):
        least, most = group.amin(1).clamp_max(0), group.amax(1).clamp_min(0)
        steps = ((most - least) / 15).unsqueeze(1)
        errors = (rounded - group).abs() / steps
        assert errors.max() < 1.001  # half for the number, half for the zero, only at the ends
        assert errors.median() < 0.5


@pytest.mark.parametrize("value", [0.0, 0.3, -7.0])
def test_a_constant_group_is_exact(value):
    for bits in (4, 8):
        torch.testing.assert_close(quantize(torch.full((3, 64), value), bits).dense(), torch.full((3, 64), value))
