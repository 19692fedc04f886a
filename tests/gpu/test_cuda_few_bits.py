"""Products with weights of 4 and 8 bits by Triton: against numpy, from the numbers, scales and zeros themselves."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton, which comes with torch for CUDA, is not installed")

from engine.quantization.quantized_linear import QuantizedMatrix, on_cuda, quantized_matrix
from engine.quantization.triton_linear import MANY_ROWS, MOST_ROWS, linear
from engine.quantization.weight_quantization import QuantizedWeight

CUDA = torch.device("cuda", 0)
# Of the sizes of a sum's terms: what rounding weights and outputs may cost.
TOLERANCES = {torch.float32: 3e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
ROWS = (1, 16, 17, MANY_ROWS + 1, MOST_ROWS + 1)


def random_matrix(num_outputs, num_inputs, bits, group_size):
    """One on the device, and its weights [num_outputs, num_inputs] in float64."""
    rng = np.random.default_rng(1)
    num_groups = -(-num_inputs // group_size)
    numbers = rng.integers(0, 2**bits, (num_outputs, num_groups * group_size), dtype=np.uint8)
    zeros = rng.integers(0, 2**bits, (num_outputs, num_groups), dtype=np.uint8)
    scales = rng.standard_normal((num_outputs, num_groups)).astype(np.float32)
    weight = (numbers - np.repeat(zeros, group_size, 1).astype(float)) * np.repeat(scales, group_size, 1)
    matrix = QuantizedMatrix(num_outputs, num_inputs, bits, group_size, CUDA)
    parts = (torch.from_numpy(array).to(CUDA) for array in (numbers, scales, zeros))
    matrix.put(0, QuantizedWeight(*parts, num_inputs, bits))
    return matrix, weight[:, :num_inputs]


def random_rows(num_rows, num_inputs, dtype):
    return torch.randn(num_rows, num_inputs, generator=torch.Generator().manual_seed(num_rows)).to(CUDA, dtype)


def check(outputs, x, weight, bias=0.0):
    rows = x.cpu().double().numpy()
    sizes = np.linalg.norm(rows, axis=1)[:, None] * np.linalg.norm(weight, axis=1) + 1
    off = np.abs(outputs.cpu().double().numpy() - (rows @ weight.T + bias))
    assert outputs.dtype == x.dtype
    assert (off <= TOLERANCES[x.dtype] * sizes).all()


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "group_size"), [(37, 83, 16), (100, 330, 48), (130, 1100, 128), (16, 2064, 2064)]
)
def test_products_are_those_of_the_weights(dtype, bits, num_outputs, num_inputs, group_size):
    matrix, weight = random_matrix(num_outputs, num_inputs, bits, group_size)
    assert on_cuda(CUDA, dtype, bits) is linear, "the log says why not"
    for num_rows in ROWS:
        x = random_rows(num_rows, num_inputs, dtype)
        check(matrix(x), x, weight)


@pytest.mark.parametrize("num_inputs", [64, 1100])
def test_a_bias_is_added_once(num_inputs):
    matrix, weight = random_matrix(50, num_inputs, 4, 32)
    bias = torch.randn(50, generator=torch.Generator().manual_seed(2))
    matrix.set_bias(bias.to(CUDA))
    for num_rows in ROWS:
        x = random_rows(num_rows, num_inputs, torch.float32)
        check(matrix(x), x, weight, bias.double().numpy())


def test_inputs_in_another_order_and_rows_of_a_wider_tensor():
    matrix, weight = random_matrix(40, 96, 4, 32)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1))
    matrix.columns = order.to(CUDA)
    for x in (random_rows(5, 200, torch.float32)[:, 50:146], random_rows(96, 5, torch.float32).t()):
        check(matrix(x), x[:, order], weight)


def test_what_is_no_number_spoils_no_other_row():
    matrix, x = quantized_matrix(torch.randn(70, 300).to(CUDA), 8), random_rows(30, 300, torch.bfloat16)
    expected = matrix(x)
    x[7, 20] = torch.nan
    outputs = matrix(x)
    assert outputs[7].isnan().all()
    others = [row for row in range(30) if row != 7]
    assert torch.equal(outputs[others], expected[others])


def test_bits_of_a_row_do_not_depend_on_how_many_a_step_has():
    matrix, x = quantized_matrix(torch.randn(70, 1100).to(CUDA), 4), random_rows(16, 1100, torch.bfloat16)
    together = matrix(x)
    for row in range(16):
        assert torch.equal(matrix(x[row : row + 1]), together[row : row + 1])
