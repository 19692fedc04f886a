import ctypes
import gc
import mmap

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.layers import Linear, OneDNNMatrix
from engine.native.dense_linear import DenseMatrix, best_variant, dense_library
from engine.native.huge_memory import ALIGNMENT, CHUNK_BYTES, HugeMemory
from engine.native.library import ENVIRONMENT, OFF
from serving_core.sharding import whole

HAS_KERNEL = dense_library() is not None and dense_library().kernel("avx512_bf16") is not None
needs_kernel = pytest.mark.skipif(not HAS_KERNEL, reason="no avx512_bf16 kernel here")

ROUNDING = 2.0**-8  # of an output, to the nearest bfloat16
SUMMING = 2.0**-22  # of the sizes of the terms, for each pair of inputs: what sums of float32 lose
SHAPES = [(1, 1), (7, 5), (16, 2), (54, 54), (65, 33), (131, 77), (113, 576), (96, 1001), (33, 2049), (70, 4100)]
NUM_ROWS = [1, 2, 3, 4, 5, 6, 7, 12, 13, 18, 19, 47, 200]  # of one block of rows, several, and several units


@pytest.fixture(autouse=True)
def _no_variant_is_named(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT, raising=False)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_product(outputs, x, weight, bias=None):
    """Against float64, by numpy."""
    x, weight = x.double().numpy(), weight.double().numpy()
    expected, sizes = x @ weight.T, np.abs(x) @ np.abs(weight.T)
    if bias is not None:
        expected, sizes = expected + bias.double().numpy(), sizes + np.abs(bias.double().numpy())
    assert (outputs.dtype, outputs.shape) == (torch.bfloat16, expected.shape)
    most = ROUNDING * np.abs(expected) + SUMMING * (2 + x.shape[1]) * sizes + 1e-37
    assert (np.abs(outputs.double().numpy() - expected) <= most).all()


@needs_kernel
@pytest.mark.parametrize("shape", SHAPES)
def test_products(shape):
    weight, bias = random(*shape), random(shape[0], seed=1)
    plain, with_bias = DenseMatrix(weight), DenseMatrix(weight, bias)
    for num_rows in NUM_ROWS:
        x = random(num_rows, shape[1], seed=num_rows)
        assert_product(plain(x), x, weight)
        assert_product(with_bias(x), x, weight, bias)
    assert plain(random(0, shape[1])).shape == (0, shape[0])


@needs_kernel
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 200), st.integers(1, 300), st.integers(1, 40), st.integers(0, 9))
def test_products_of_any_shape(num_outputs, num_inputs, num_rows, seed):
    weight, x = random(num_outputs, num_inputs, seed=seed), random(num_rows, num_inputs, seed=seed + 1)
    assert_product(DenseMatrix(weight)(x), x, weight)


@needs_kernel
def test_a_large_head():
    weight, x = random(49152, 64), random(7, 64, seed=1)
    assert_product(DenseMatrix(weight)(x), x, weight)


@needs_kernel
def test_weights_that_are_not_contiguous():
    wide, x = random(300, 90), random(5, 71, seed=1)
    expected = DenseMatrix(wide[::2, 3:74].contiguous())(x)
    assert torch.equal(DenseMatrix(wide[::2, 3:74])(x), expected)
    assert torch.equal(DenseMatrix(wide[::2, 3:74].t().contiguous().t())(x), expected)


@needs_kernel
def test_sums_are_rounded_once_to_the_nearest_and_to_even_between_two():
    weight = torch.tensor([[1, 2**-8], [1, 3 * 2**-8], [1, 2**-7 + 2**-8], [1, -(2**-9)]]).bfloat16()
    bias = torch.tensor([0, 0, 2**-7, -(2**-9) - 2**-10], dtype=torch.bfloat16)
    outputs = DenseMatrix(weight, bias)(torch.ones(1, 2, dtype=torch.bfloat16))
    assert outputs.tolist() == [[1.0, 1 + 2**-6, 1 + 2**-6, 1 - 2**-8]]


@needs_kernel
def test_what_is_no_number_stays_in_its_row():
    weight, x = random(40, 9), random(9, 9, seed=1)
    expected = DenseMatrix(weight)(x)
    x[3, 8], x[5, 0] = float("nan"), float("inf")
    outputs = DenseMatrix(weight)(x)
    assert outputs[3].isnan().all()
    assert outputs[5].isinf().all()
    others = [0, 1, 2, 4, 6, 7, 8]
    assert torch.equal(outputs[others], expected[others])


@needs_kernel
def test_rows_that_are_not_contiguous():
    matrix, wide = DenseMatrix(random(20, 33)), random(8, 80, seed=1)
    for x in (
        wide[:, 8:41],
        wide[::2, 1:34],
        wide.t()[:33].t(),
        random(33, 6, seed=2).t(),
        wide[:1, :33].expand(9, 33),
    ):
        assert torch.equal(matrix(x), matrix(x.clone(memory_format=torch.contiguous_format)))


@needs_kernel
@pytest.mark.parametrize("shape", [(208, 101), (33, 4100)])  # the inputs of the second are more than one block
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_number_of_threads(shape):
    matrix, x = DenseMatrix(random(*shape), random(shape[0], seed=5)), random(400, shape[1], seed=3)
    alone = torch.cat([matrix(row) for row in x.split(1)])
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            for num_rows in (*NUM_ROWS, 400):
                assert torch.equal(matrix(x[:num_rows]), alone[:num_rows])
    finally:
        torch.set_num_threads(before)


@needs_kernel
def test_nothing_is_read_behind_the_last_input():
    page, libc = mmap.PAGESIZE, ctypes.CDLL(None, use_errno=True)
    memory = mmap.mmap(-1, 2 * page)
    whole_memory = torch.frombuffer(memory, dtype=torch.bfloat16)
    assert libc.mprotect(ctypes.c_void_p(whole_memory.data_ptr() + page), ctypes.c_size_t(page), 0) == 0
    for num_rows, num_inputs in ((1, 1), (1, 77), (7, 31), (20, 33)):
        x = whole_memory[page // 2 - num_rows * num_inputs : page // 2].view(num_rows, num_inputs)
        x.copy_(random(num_rows, num_inputs))
        weight = random(17, num_inputs, seed=1)
        assert_product(DenseMatrix(weight)(x), x, weight)


@needs_kernel
@pytest.mark.parametrize("num_outputs", [1, 17, 33, 63, 100])
def test_nothing_is_written_around_the_outputs(num_outputs):
    matrix, x = DenseMatrix(random(num_outputs, 12)), random(8, 12, seed=1)
    written = torch.full((10 * num_outputs,), 7.0, dtype=torch.bfloat16)
    start = written.data_ptr() + 2 * num_outputs
    dense_library().multiply(matrix._address, None, 1, x.data_ptr(), 24, 8, start)
    assert torch.equal(written[num_outputs:-num_outputs].view(8, num_outputs), matrix(x))
    assert (written[:num_outputs] == 7).all()
    assert (written[-num_outputs:] == 7).all()


@needs_kernel
def test_bytes_are_those_of_the_weights():
    assert DenseMatrix(random(64, 32)).num_bytes == 2 * 64 * 32
    assert DenseMatrix(random(33, 31), random(33)).num_bytes == 2 * 48 * 32 + 4 * 33


@needs_kernel
@pytest.mark.parametrize(("named", "matrix"), [("", DenseMatrix), ("avx2", OneDNNMatrix), (OFF, OneDNNMatrix)])
def test_the_environment_can_leave_products_to_onednn(monkeypatch, named, matrix):
    monkeypatch.setenv(ENVIRONMENT, named)
    assert best_variant() == ("avx512_bf16" if matrix is DenseMatrix else None)
    layer = Linear(whole(40), {"a": whole(33)}, bias=True)
    weight, bias = random(33, 40), random(33, seed=1)
    layer.weight, layer.bias = (torch.nn.Parameter(each, requires_grad=False) for each in (weight, bias))
    layer.pack(None)
    assert isinstance(layer.matrix, matrix)
    x = random(5, 40, seed=2)
    assert_product(layer(x), x, weight, bias)


def test_without_a_kernel_there_is_no_matrix(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, OFF)
    with pytest.raises(ValueError, match="no kernel"):
        DenseMatrix(random(4, 4))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from([1, 63, 64, 5000, CHUNK_BYTES // 3, CHUNK_BYTES + 1]), max_size=8))
def test_memory_is_given_out_once(sizes):
    memory = HugeMemory()
    given_out = [memory.empty(size) for size in sizes]
    for number, tensor in enumerate(given_out):
        assert tensor.data_ptr() % ALIGNMENT == 0
        tensor[[0, -1]] = number
    assert [tensor.nbytes for tensor in given_out] == sizes
    assert all((tensor[[0, -1]] == number).all() for number, tensor in enumerate(given_out))


def test_memory_outlives_its_chunk_and_neighbours():
    memory = HugeMemory()
    first, second = memory.empty(1000).fill_(1), memory.empty(1000).fill_(2)
    del memory, first
    gc.collect()
    assert (second == 2).all()
