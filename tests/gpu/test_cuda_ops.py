"""What is computed between products by Triton: against formulas in float64."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton, which comes with torch for CUDA, is not installed")

from engine.cache.kv_pool import PagedKVPool
from engine.ops.backends import choose_ops
from engine.ops.base import HeadNorms, KVSlots, Norm, Ops
from engine.ops.rope import RotaryEmbedding
from engine.ops.topk_topp import RowSampling
from engine.ops.triton import TritonOps
from serving_core.layout import KVLayout
from serving_core.model_files.differences import GELU_TANH, SILU
from serving_core.model_files.rope import DefaultRope
from tests.unit.engine.test_row_sampling import BELOW_ONE, SETTINGS
from tests.unit.engine.test_row_sampling import check as check_sampled

CUDA = torch.device("cuda", 0)
EPS = 1e-5
# Of numbers of order 1: a few roundings to the dtype.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
dtypes = pytest.mark.parametrize("dtype", TOLERANCES)
OPS = TritonOps()


def random(*shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(CUDA, dtype)


def exact(tensor):
    return tensor.cpu().double().numpy()


def check(ours, expected):
    tolerance = TOLERANCES[ours.dtype]
    np.testing.assert_allclose(exact(ours), expected, rtol=tolerance, atol=tolerance)


def norm(x, weight, centers=False):
    x = x - x.mean(-1, keepdims=True) if centers else x
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def strided(rows):
    """The same rows as a part of wider ones, beside which nothing is a number."""
    wide = torch.full((rows.shape[0], rows.shape[1] + 7), torch.nan, dtype=rows.dtype, device=rows.device)
    wide[:, 3:-4] = rows
    return wide[:, 3:-4]


def test_they_are_taken():
    assert isinstance(choose_ops(CUDA), TritonOps), "the log says why not"


@dtypes
@pytest.mark.parametrize("shape", [(1, 576), (16, 48), (3, 1), (7, 1300)])
@pytest.mark.parametrize("centers", [False, True])
def test_norm(dtype, shape, centers):
    x, weight = random(*shape, dtype=dtype), random(shape[1], dtype=dtype, seed=1)
    check(OPS.norm(x, Norm(weight, EPS, centers=centers)), norm(exact(x), exact(weight), centers))
    check(OPS.norm(strided(x), Norm(weight.float(), EPS, centers=centers)), norm(exact(x), exact(weight), centers))


@dtypes
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_norm_adds_what_is_still_to_be_added(dtype, scale):
    x, delta, weight = (random(*shape, dtype=dtype, seed=len(shape)) for shape in ((5, 96), (5, 96), (96,)))
    delta = strided(delta.flip(0))
    total = exact(x) + scale * exact(delta)
    given = OPS.norm(x, Norm(weight, EPS, scale), delta)
    check(x, total)
    check(given, norm(exact(x), exact(weight)))


@dtypes
def test_add_norm(dtype):
    x, delta, weight = random(5, 96, dtype=dtype), random(5, 96, dtype=dtype, seed=1), random(96, dtype=dtype, seed=2)
    expected = exact(x) + norm(exact(delta), exact(weight))
    OPS.add_norm(x, delta, Norm(weight, EPS))
    check(x, expected)


@dtypes
@pytest.mark.parametrize("num_columns", [1, 100, 2100])
@pytest.mark.parametrize("activation", [SILU, GELU_TANH])
def test_gate(dtype, num_columns, activation):
    rows = random(3, 2 * num_columns, dtype=dtype)
    gates, ups = np.split(exact(rows), 2, axis=1)
    inner = np.sqrt(2 / np.pi) * (gates + 0.044715 * gates**3)
    activated = gates / (1 + np.exp(-gates)) if activation == SILU else gates / 2 * (1 + np.tanh(inner))
    check(OPS.gate(strided(rows), activation), activated * ups)


@dtypes
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (20, 4, 10), (2, 1, 130)])
@pytest.mark.parametrize("has_norms", [False, True])
def test_rotate_and_store(dtype, num_heads, num_kv_heads, head_dim, has_norms):
    layout = KVLayout.uniform(2, num_kv_heads, head_dim, 4, str(dtype).removeprefix("torch."))
    pool = PagedKVPool(layout, 3, CUDA)
    heads = random(5, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    slots, positions = torch.tensor([11, 0, 7, 3, 4], device=CUDA), torch.tensor([31, 3, 0, 19, 7], device=CUDA)
    rotation = RotaryEmbedding(DefaultRope(1e4), head_dim, CUDA).tables(positions, dtype)
    norms = HeadNorms(random(head_dim, dtype=dtype, seed=1), random(head_dim, dtype=dtype, seed=2), EPS)
    numbers = exact(heads)
    queries, keys, values = np.split(numbers, [num_heads, num_heads + num_kv_heads], axis=1)
    if has_norms:
        queries, keys = norm(queries, exact(norms.query_weight)), norm(keys, exact(norms.key_weight))
    given = OPS.rotate_and_store(heads, rotation, KVSlots(pool, 1, slots), norms if has_norms else None)
    angles = exact(positions)[:, None] / 1e4 ** (np.arange(0, head_dim, 2) / head_dim)
    check(given, turned(queries, angles))
    check(pool.keys(1).flatten(0, 1)[slots], turned(keys, angles))
    assert np.array_equal(exact(pool.values(1).flatten(0, 1)[slots]), values)
    untouched = [slot for slot in range(12) if slot not in (11, 0, 7, 3, 4)]
    assert not pool.keys(1).flatten(0, 1)[untouched].any()
    assert not pool.values(1).flatten(0, 1)[untouched].any()
    assert not pool.keys(0).any()


def turned(heads, angles):
    first, second = np.split(heads, 2, axis=-1)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def test_rows_are_computed_as_if_alone():
    x, weight, rows = random(9, 700, dtype=torch.bfloat16), random(700, dtype=torch.bfloat16, seed=1), [0, 4, 8]
    assert OPS.is_batch_invariant(torch.bfloat16)
    for function in (lambda rows: OPS.norm(rows, Norm(weight, EPS)), OPS.gate):
        together = function(x)
        for row in rows:
            assert torch.equal(function(x[row : row + 1]), together[row : row + 1])


def test_no_rows():
    empty = random(0, 64, dtype=torch.bfloat16)
    assert OPS.norm(empty, Norm(empty.new_ones(64), EPS)).shape == (0, 64)
    assert OPS.gate(empty).shape == (0, 32)


def sampled(ops, logits, samplings):
    return ops.sample(logits, ops.likeliest(logits)[0], samplings).tolist()


@dtypes
@pytest.mark.parametrize("num_columns", [1, 40, 2048, 3001])
def test_tokens_are_sampled_of_what_sorting_leaves(dtype, num_columns):
    logits = random(len(SETTINGS), num_columns, dtype=dtype) * 3
    samplings = [
        RowSampling(row, number, **{"temperature": 1.0, **fields})
        for row, fields in enumerate(SETTINGS)
        for number in (0.0, 0.45, BELOW_ONE)
    ]
    tokens = sampled(OPS, logits, samplings)
    assert tokens == sampled(Ops(), logits, samplings)
    check_sampled(logits.cpu(), samplings, tokens)


NUCLEI = [{"top_p": top_p} for top_p in (1e-6, 0.3, 0.5, 1 - 1e-6)] + [{"top_p": 0.6, "top_k": 5}, {"top_k": 3}, {}]


def test_nuclei_of_flat_rows_and_of_such_with_few_tokens():
    flat, few = torch.full((3000,), 2.5), torch.full((3000,), -torch.inf)
    few[[7, 2900]] = -4.0
    logits = torch.stack([flat, few]).to(CUDA)
    for row, ends in enumerate(([0, 2999], [7, 2900])):
        samplings = [
            RowSampling(row, number, **{"temperature": 1.0, **fields})
            for number in (0.0, BELOW_ONE)
            for fields in NUCLEI
        ]
        assert sampled(OPS, logits, samplings) == [end for end in ends for _ in NUCLEI]


def test_of_a_row_that_is_no_number_others_do_not_hear():
    logits = random(5, 500, dtype=torch.float32)
    samplings = [RowSampling(row, 0.6, 1.0, top_p=0.9) for row in range(5)]
    expected = sampled(OPS, logits, samplings)
    logits[2, 77] = torch.nan
    assert np.delete(sampled(OPS, logits, samplings), 2).tolist() == np.delete(expected, 2).tolist()
