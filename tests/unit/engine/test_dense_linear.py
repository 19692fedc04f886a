import ctypes
import gc
import mmap

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.model.layers import Linear, OneDNNMatrix
from engine.native.huge_memory import ALIGNMENT, CHUNK_BYTES, HugeMemory
from engine.native.library import ENVIRONMENT, OFF
from engine.native.linear import VARIANTS, DenseMatrix, best_variant, dense_library
from serving_core.sharding import whole
from tests.unit.engine.in_one_test import for_each
from tests.unit.engine.native_kit import thread_counts

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


def has_kernel(variant, dtype):
    return dense_library() is not None and dense_library().kernel(variant, dtype) is not None


KINDS = [
    pytest.param(
        (variant, dtype),
        id=f"{variant}-{str(dtype).removeprefix('torch.')}",
        marks=pytest.mark.skipif(not has_kernel(variant, dtype), reason=f"no {variant} kernel here"),
    )
    for dtype, variants in VARIANTS.items()
    for variant in variants
    if dtype != FLOAT32 or variant == "avx512"  # the same for the ones before it
]
RUNNABLE = [param.values[0] for param in KINDS if has_kernel(*param.values[0])]
BEST = "amx" if has_kernel("amx", BFLOAT16) else "avx512_bf16"
needs_pairs = pytest.mark.skipif(not has_kernel("avx512_bf16", BFLOAT16), reason="no avx512_bf16 kernel here")

ROUNDING = {BFLOAT16: 2.0**-8, torch.float16: 2.0**-11, FLOAT32: 2.0**-23}  # of an output, to the nearest
SUMMING = 2.0**-22  # of the sizes of the terms, for each pair of inputs: what sums of float32 lose
SHAPES = [(1, 1), (7, 5), (16, 2), (54, 54), (65, 33), (131, 77), (113, 576), (96, 1001), (33, 2049), (70, 4100)]
NUM_ROWS = [1, 2, 3, 4, 5, 6, 7, 12, 13, 18, 19, 47, 200]  # of one block of rows, several, and several units


@pytest.fixture(autouse=True)
def _no_variant_is_named(monkeypatch):
    monkeypatch.delenv(ENVIRONMENT, raising=False)


@pytest.fixture(params=KINDS)
def dtype(request, monkeypatch):
    """Of each kernel, which is the one that computes."""
    variant, dtype = request.param
    monkeypatch.setenv(ENVIRONMENT, variant)
    return dtype


def random(*shape, seed=0, dtype=BFLOAT16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_product(outputs, x, weight, bias=None):
    """Against float64, by numpy."""
    rounding, dtype = ROUNDING[x.dtype], x.dtype
    x, weight = x.double().numpy(), weight.double().numpy()
    expected, sizes = x @ weight.T, np.abs(x) @ np.abs(weight.T)
    if bias is not None:
        expected, sizes = expected + bias.double().numpy(), sizes + np.abs(bias.double().numpy())
    assert (outputs.dtype, outputs.shape) == (dtype, expected.shape)
    most = rounding * np.abs(expected) + SUMMING * (2 + x.shape[1]) * sizes + 1e-37
    assert (np.abs(outputs.double().numpy() - expected) <= most).all()


@for_each(shape=SHAPES)
def test_products(dtype, shape):
    weight, bias = random(*shape, dtype=dtype), random(shape[0], seed=1, dtype=dtype)
    plain, with_bias = DenseMatrix(weight), DenseMatrix(weight, bias)
    for num_rows in NUM_ROWS:
        x = random(num_rows, shape[1], seed=num_rows, dtype=dtype)
        assert_product(plain(x), x, weight)
        assert_product(with_bias(x), x, weight, bias)
    assert plain(random(0, shape[1], dtype=dtype)).shape == (0, shape[0])


@pytest.mark.skipif(not RUNNABLE, reason="no kernel here")
@given(
    st.sampled_from(RUNNABLE or [None]), st.integers(1, 200), st.integers(1, 300), st.integers(1, 40), st.integers(0, 9)
)
def test_products_of_any_shape(kind, num_outputs, num_inputs, num_rows, seed):
    variant, dtype = kind
    weight = random(num_outputs, num_inputs, seed=seed, dtype=dtype)
    x = random(num_rows, num_inputs, seed=seed + 1, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENVIRONMENT, variant)
        assert_product(DenseMatrix(weight)(x), x, weight)


@for_each(num_outputs=[49152, 2 * 1024 + 37])
def test_a_large_head(num_outputs, dtype):
    weight, x = random(num_outputs, 64, dtype=dtype), random(7, 64, seed=1, dtype=dtype)
    assert_product(DenseMatrix(weight)(x), x, weight)


@for_each(shape=[(1, 1), (16, 3), (64, 8), (65, 7), (100, 30), (500, 33)])
def test_rows_of_the_weights_can_be_read_again(shape, dtype):
    weight = random(*shape, dtype=dtype)
    rows = torch.cat([torch.arange(shape[0]), torch.tensor([0, shape[0] - 1, shape[0] // 2])])
    assert torch.equal(DenseMatrix(weight).rows(rows), weight[rows])
    assert DenseMatrix(weight).rows(rows[:0]).shape == (0, shape[1])


@for_each(outside=[-1, 100])
def test_rows_that_are_not_there(outside, dtype):
    with pytest.raises(IndexError, match="the matrix has 100 outputs"):
        DenseMatrix(random(100, 8, dtype=dtype)).rows(torch.tensor([0, outside, 99]))


def test_many_rows_by_several_threads(dtype):
    weight, rows = random(300, 100, dtype=dtype), torch.arange(1000) * 7 % 300
    torch.set_num_threads(3)
    assert torch.equal(DenseMatrix(weight).rows(rows), weight[rows])


def test_weights_that_are_not_contiguous(dtype):
    wide, x = random(300, 90, dtype=dtype), random(5, 71, seed=1, dtype=dtype)
    expected = DenseMatrix(wide[::2, 3:74].contiguous())(x)
    assert torch.equal(DenseMatrix(wide[::2, 3:74])(x), expected)
    assert torch.equal(DenseMatrix(wide[::2, 3:74].t().contiguous().t())(x), expected)


@needs_pairs
def test_sums_are_rounded_once_to_the_nearest_and_to_even_between_two():
    weight = torch.tensor([[1, 2**-8], [1, 3 * 2**-8], [1, 2**-7 + 2**-8], [1, -(2**-9)]]).bfloat16()
    bias = torch.tensor([0, 0, 2**-7, -(2**-9) - 2**-10], dtype=torch.bfloat16)
    outputs = DenseMatrix(weight, bias)(torch.ones(1, 2, dtype=torch.bfloat16))
    assert outputs.tolist() == [[1.0, 1 + 2**-6, 1 + 2**-6, 1 - 2**-8]]


def test_what_is_no_number_stays_in_its_row(dtype):
    weight, x = random(40, 9, dtype=dtype), random(9, 9, seed=1, dtype=dtype)
    expected = DenseMatrix(weight)(x)
    x[3, 8], x[5, 0] = float("nan"), float("inf")
    outputs = DenseMatrix(weight)(x)
    assert outputs[3].isnan().all()
    assert outputs[5].isinf().all()
    others = [0, 1, 2, 4, 6, 7, 8]
    assert torch.equal(outputs[others], expected[others])


def test_rows_that_are_not_contiguous(dtype):
    matrix, wide = DenseMatrix(random(20, 33, dtype=dtype)), random(8, 80, seed=1, dtype=dtype)
    for x in (
        wide[:, 8:41],
        wide[::2, 1:34],
        wide.t()[:33].t(),
        random(33, 6, seed=2, dtype=dtype).t(),
        wide[:1, :33].expand(9, 33),
    ):
        assert torch.equal(matrix(x), matrix(x.clone(memory_format=torch.contiguous_format)))


# The inputs of the second are more than one block; the panels of the last are two groups, of four and two.
@for_each(shape=[(208, 101), (33, 4100), (330, 1000)])
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_number_of_threads(dtype, shape):
    matrix, x = (
        DenseMatrix(random(*shape, dtype=dtype), random(shape[0], seed=5, dtype=dtype)),
        random(400, shape[1], seed=3, dtype=dtype),
    )
    alone = torch.cat([matrix(row) for row in x.split(1)])
    for _ in thread_counts():
        for num_rows in (*NUM_ROWS, 400):
            assert torch.equal(matrix(x[:num_rows]), alone[:num_rows])


def test_nothing_is_read_behind_the_last_input(dtype):
    page, libc = mmap.PAGESIZE, ctypes.CDLL(None, use_errno=True)
    memory = mmap.mmap(-1, 2 * page)
    end = page // dtype.itemsize
    whole_memory = torch.frombuffer(memory, dtype=dtype)
    assert libc.mprotect(ctypes.c_void_p(whole_memory.data_ptr() + page), ctypes.c_size_t(page), 0) == 0
    for num_rows, num_inputs in ((1, 1), (1, 77), (7, 31), (20, 33)):
        x = whole_memory[end - num_rows * num_inputs : end].view(num_rows, num_inputs)
        x.copy_(random(num_rows, num_inputs, dtype=dtype))
        weight = random(17, num_inputs, seed=1, dtype=dtype)
        assert_product(DenseMatrix(weight)(x), x, weight)


@for_each(num_outputs=[1, 17, 33, 63, 100])
def test_nothing_is_written_around_the_outputs(dtype, num_outputs):
    matrix, x = DenseMatrix(random(num_outputs, 12, dtype=dtype)), random(8, 12, seed=1, dtype=dtype)
    written = torch.full((10 * num_outputs,), 7.0, dtype=dtype)
    start = written.data_ptr() + dtype.itemsize * num_outputs
    dense_library().multiply(matrix.address, None, 1, x.data_ptr(), 12 * dtype.itemsize, 8, start)
    assert torch.equal(written[num_outputs:-num_outputs].view(8, num_outputs), matrix(x))
    assert (written[:num_outputs] == 7).all()
    assert (written[-num_outputs:] == 7).all()


def test_bytes_are_those_of_the_weights(dtype):
    assert DenseMatrix(random(64, 32, dtype=dtype)).num_bytes == dtype.itemsize * 64 * 32
    assert (
        DenseMatrix(random(33, 31, dtype=dtype), random(33, dtype=dtype)).num_bytes
        == 48 * (-(-31 * dtype.itemsize // 4) * 4) + 4 * 33
    )


@needs_pairs
@pytest.mark.parametrize(
    ("named", "dtype", "variant"),
    [
        ("", BFLOAT16, BEST),
        ("avx512_bf16", BFLOAT16, "avx512_bf16"),
        ("avx2", BFLOAT16, "avx2"),
        (OFF, BFLOAT16, None),
        ("plain", BFLOAT16, None),
        ("", FLOAT32, BEST),
        ("avx2", FLOAT32, None),
        ("", torch.float16, None),
    ],
)
def test_the_environment_can_leave_products_to_torch(monkeypatch, named, dtype, variant):
    monkeypatch.setenv(ENVIRONMENT, named)
    assert best_variant(dtype) == variant
    layer = Linear(whole(40), {"a": whole(33)}, bias=True)
    weight, bias = random(33, 40, dtype=dtype), random(33, seed=1, dtype=dtype)
    layer.weight, layer.bias = (torch.nn.Parameter(each, requires_grad=False) for each in (weight, bias))
    layer.pack(None)
    torch_has = OneDNNMatrix if dtype == BFLOAT16 else type(None)
    assert isinstance(layer.matrix, DenseMatrix if variant else torch_has)
    x = random(5, 40, seed=2, dtype=dtype)
    assert_product(layer(x), x, weight, bias)


def test_without_a_kernel_there_is_no_matrix(monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, OFF)
    with pytest.raises(ValueError, match="no kernel"):
        DenseMatrix(random(4, 4))


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
