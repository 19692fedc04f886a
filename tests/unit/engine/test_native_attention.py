import itertools
import random
from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.native import NativeAttention
from engine.attention.paged import PortableAttention
from engine.cache.kv_pool import PagedKVPool
from engine.native.library import native_library
from serving_core.layout import KVLayout
from serving_core.requests import Share
from tests.effort import effort
from tests.unit.engine.in_one_test import for_each
from tests.unit.engine.native_kit import (
    CPU,
    LAYER,
    Scene,
    few_variants,
    needs_library,
    runnable_variants,
    thread_counts,
)

pytestmark = needs_library

# Prompts, chunks that start within a block or a tile of 256 keys, single tokens near and far: at the borders of tiles.
SIZES = [(0, 1), (0, 150), (37, 70), (255, 1), (256, 1), (700, 1), (3, 13), (0, 64), (200, 1), (300, 270), (257, 2)]
SHAPES = [  # heads, key heads, head size, block size, window
    (9, 3, 64, 16, None),
    (9, 3, 64, 16, 100),
    (9, 3, 64, 16, 5),
    (4, 1, 18, 1, None),
    (4, 1, 80, 8, 300),
    (8, 8, 80, 32, None),
    (8, 2, 128, 16, None),
    (7, 1, 256, 16, 1),
    (2, 2, 33, 3, 257),
]
# Float32 sums differ by their order alone; 16-bit outputs of order 1 are rounded, and so are the weights before them.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def attend(scene, window=None, variant=None, softcap=None):
    attention = NativeAttention(scene.pool, scene.num_heads, variant, softcap=softcap)
    return attention.attend(scene.query, LAYER, attention.plan(scene.batch, window))


def attend_alone(scene, index, variant=None):
    """One request, in a batch of its own."""
    attention = NativeAttention(scene.pool, scene.num_heads, variant)
    plan = attention.plan(scene.batch_of([scene.shares[index]]), None)
    return attention.attend(scene.query[scene.rows(index)], LAYER, plan)


def check(scene, window, variant, softcap=None, expected=None):
    output = attend(scene, window, variant, softcap)
    assert output.dtype == scene.query.dtype
    expected = scene.expected(window, softcap) if expected is None else expected
    assert output.shape == expected.shape
    assert (output.double() - expected).abs().max() <= TOLERANCES[output.dtype]


@cache
def known(heads, block_size, dtype, window, softcap=None, compute_dtype=None):
    """Return a scene of SIZES and what attention gives there, computed once for all variants."""
    scene = Scene(SIZES, *heads, block_size, dtype, compute_dtype)
    if compute_dtype is not None:
        scene.pool.compute_dtype = torch.float32  # or gather would round what the kernels read unrounded
    expected = scene.expected(window, softcap)
    scene.pool.compute_dtype = compute_dtype or scene.pool.compute_dtype
    return scene, expected


def check_known(heads, block_size, dtype, window, variant, softcap=None, compute_dtype=None):
    scene, expected = known(heads, block_size, dtype, window, softcap, compute_dtype)
    check(scene, window, variant, softcap, expected)


CAPPED = list(itertools.product((None, 100), (0.5, 2.0, 50.0)))
CAPPED = effort([(None, 0.5), (100, 2.0), (None, 50.0)], CAPPED, CAPPED)


@pytest.mark.parametrize("variant", runnable_variants())
@for_each(shape=SHAPES)
def test_float32(variant, shape):
    check_known(shape[:3], shape[3], "float32", shape[4], variant)


@pytest.mark.parametrize("variant", runnable_variants("bfloat16", "bfloat16"))
@for_each(shape=effort(SHAPES[1::2], SHAPES, SHAPES))
def test_bfloat16(variant, shape):
    check_known(shape[:3], shape[3], "bfloat16", shape[4], variant)


@pytest.mark.parametrize("variant", runnable_variants("float16", "float16"))
@for_each(shape=effort(SHAPES[1:4:2], SHAPES[:4], SHAPES[:4]))
def test_float16(variant, shape):
    check_known(shape[:3], shape[3], "float16", shape[4], variant)


@pytest.mark.parametrize("variant", runnable_variants("bfloat16", "bfloat16"))
@for_each(dtype=["float32", "bfloat16"], seen=CAPPED)
def test_capped_scores(variant, dtype, seen):
    window, softcap = seen
    check_known((9, 3, 64), 16, dtype, window, variant, softcap)


@pytest.mark.parametrize("variant", runnable_variants("int8", "float32"))
@for_each(
    dtype=["int8", "fp8_e4m3"],
    compute_dtype=[torch.float32, torch.bfloat16],
    seen=[(None, None), (100, None), (100, 1.5)],
)
def test_quantized_pools(variant, dtype, compute_dtype, seen):
    window, softcap = seen
    check_known((6, 2, 20), 16, dtype, window, variant, softcap, compute_dtype)


@given(
    sizes=st.lists(st.tuples(st.integers(0, 600), st.integers(1, 300) | st.just(1)), min_size=1, max_size=6),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2), (8, 2), (5, 5)]),
    head_dim=st.sampled_from([16, 18, 64]),
    block_size=st.sampled_from([1, 3, 16]),
    window=st.none() | st.integers(1, 400),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_any_batch(sizes, heads, head_dim, block_size, window, dtype):
    check(Scene(sizes, *heads, head_dim, block_size, dtype), window, None)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(("num_rows", "heads"), [(97, (4, 2)), (193, (1, 1)), (65, (9, 3))])
def test_a_tile_of_one_row_sees_keys_of_several_tiles(num_rows, heads, window):
    """One row more than fills tiles of 192 rows and heads."""
    for start in (159, 160, 415, 1000):
        check(Scene([(start, num_rows)], *heads, 16, 16, "float32"), window, None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_agrees_with_the_portable_backend(dtype):
    scene = Scene(SIZES, 9, 3, 64, 16, dtype)
    if dtype != "int8":  # the portable backend reads, and masks, what is unused
        scene.pool.keys(LAYER).nan_to_num_()
        scene.pool.values(LAYER).nan_to_num_()
    scene.batch.block_tables[scene.batch.block_tables >= scene.pool.num_blocks] = 0
    portable = PortableAttention(scene.pool, scene.num_heads)
    for window in (None, 33):
        expected = portable.attend(scene.query, LAYER, portable.plan(scene.batch, window))
        output = attend(scene, window)
        torch.testing.assert_close(output, expected, rtol=0, atol=TOLERANCES[output.dtype])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", runnable_variants())
def test_the_bits_of_a_request_do_not_depend_on_its_batch(variant, dtype):
    scene = Scene(SIZES, 9, 3, 64, 16, dtype)
    together = attend(scene, variant=variant)
    for index in range(len(scene.sizes)):
        assert torch.equal(together[scene.rows(index)], attend_alone(scene, index, variant))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_the_bits_do_not_depend_on_the_number_of_threads(dtype):
    scene = Scene([*SIZES, (5000, 1)], 9, 3, 64, 16, dtype)
    outputs = [attend(scene) for _ in thread_counts() for _ in range(3)]
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize(
    ("shape", "softcap"),
    [
        *(pytest.param(shape, None, marks=[] if shape == SHAPES[1] else pytest.mark.nightly) for shape in SHAPES),
        ((8, 1, 64, 16, 300), None),
        ((3, 3, 40, 16, 300), None),
        ((8, 4, 64, 16, 300), 2.0),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "compute_dtype"),
    [
        ("float32", None),
        ("bfloat16", None),
        ("float16", None),
        ("int8", torch.bfloat16),
        ("fp8_e4m3", torch.float32),
        ("int8", torch.float16),
    ],
)
@pytest.mark.parametrize("variant", few_variants())
def test_the_bits_of_a_prompt_do_not_depend_on_how_it_is_cut(variant, dtype, compute_dtype, shape, softcap):
    """Into chunks and single rows; the single rows of one batch are those of a decode step."""
    num_heads, num_kv_heads, head_dim, block_size, window = shape
    if native_library().kernel(variant, dtype, str(compute_dtype or dtype).removeprefix("torch.")) is None:
        pytest.skip(f"{variant} does not compute {dtype}")
    if compute_dtype is not None:
        block_size = 16  # quantized caches are multiples of 4 bytes
    scene = Scene([(0, 600)], num_heads, num_kv_heads, head_dim, block_size, dtype, compute_dtype)
    whole = attend(scene, window, variant, softcap)
    attention = NativeAttention(scene.pool, num_heads, variant, softcap=softcap)
    (share,) = scene.shares
    draw = random.Random(0)
    bounds = [0, *sorted(draw.sample(range(1, 600), 12)), 600]
    singles = [(at, at + 1) for at in (0, 1, 31, 254, 255, 256, 257, *draw.sample(range(600), 12), 511, 512, 599)]
    for batch in ([each] for each in pairwise(bounds)), [singles]:
        for cuts in batch:
            chunks = [
                Share([0] * (end - start), start, share.block_ids[: -(-end // block_size)], samples=False)
                for start, end in cuts
            ]
            rows = torch.cat([torch.arange(start, end) for start, end in cuts])
            plan = attention.plan(scene.batch_of(chunks), window)
            assert torch.equal(attention.attend(scene.query[rows], LAYER, plan), whole[rows]), cuts


def test_a_plan_serves_many_calls():
    scene = Scene([(2000, 1), (0, 40)], 4, 2, 64)
    attention = NativeAttention(scene.pool, scene.num_heads)
    plan = attention.plan(scene.batch, None)
    outputs = [attention.attend(scene.query, LAYER, plan) for _ in range(4)]
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.parametrize("variant", runnable_variants())
@pytest.mark.parametrize("sizes", [[(600, 1)], [(580, 40)]])
def test_keys_before_the_window_are_not_read(sizes, variant):
    scene = Scene(sizes, 4, 2, 64, 16)
    before = attend(scene, 50, variant)
    first_seen = sizes[0][0] + 1 - 50
    hidden = torch.tensor(scene.shares[0].block_ids[: first_seen // 16])
    scene.pool.keys(LAYER)[hidden] = torch.nan
    scene.pool.values(LAYER)[hidden] = torch.nan
    assert torch.equal(attend(scene, 50, variant), before)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("variant", runnable_variants("bfloat16", "bfloat16"))
def test_what_is_not_a_number_stays_in_its_row(variant, softcap):
    scene = Scene([(0, 40), (90, 1), (300, 1)], 4, 2, 64, 16, "bfloat16")
    before = attend(scene, None, variant, softcap)
    scene.query[7, 1] = torch.nan
    scene.query[40, 3] = torch.nan if softcap else torch.inf  # a cap takes in what is infinite
    after = attend(scene, None, variant, softcap)
    assert after[7, 1].isnan().all()
    assert after[40, 3].isnan().all()
    for row, head in ((7, 1), (40, 3)):
        after[row, head] = before[row, head]
    assert torch.equal(after, before)


@pytest.mark.parametrize("variant", runnable_variants())
def test_large_scores(variant):
    """Exponents far beyond those of a float32; scores of order 10000 are themselves only good to about 0.001."""
    scene = Scene([(0, 300), (400, 1)], 4, 2, 64)
    scene.query *= 3000
    torch.testing.assert_close(attend(scene, None, variant).double(), scene.expected(None), rtol=0, atol=1e-2)


def test_a_pool_without_a_kernel_is_refused():
    pool = PagedKVPool(KVLayout.uniform(1, 1, 16, 16, "float16"), 1, CPU)
    with pytest.raises(ValueError, match="no native kernel for a pool of float16"):
        NativeAttention(pool, 1, "plain")
