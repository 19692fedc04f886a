import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.kv_pool import PagedKVPool
from engine.native.library import ENVIRONMENT
from engine.native.ops_library import VARIANTS, OpsLibrary, ops_library
from engine.ops.backends import choose_ops
from engine.ops.base import HeadNorms, KVSlots, Norm, Ops
from engine.ops.native import NativeOps
from engine.ops.rope import RotaryEmbedding
from serving_core.layout import KVLayout
from serving_core.model_files.differences import GELU_TANH, SILU
from serving_core.model_files.rope import DefaultRope
from tests.unit.engine.in_one_test import for_each
from tests.unit.engine.native_kit import thread_counts

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-5
SHAPES = [(1, 576), (16, 48), (3, 1), (7, 130), (2, 15), (5, 64), (300, 33)]
HEADS = [(9, 3, 64), (4, 1, 10), (3, 3, 18), (2, 1, 130), (1, 1, 2)]  # heads, key heads, head size
# One unit in the last place; but float32 sums of a row differ by their order too.
TOLERANCES = {torch.float32: {"rtol": 2e-6, "atol": 1e-6}, torch.bfloat16: {"rtol": 2**-7, "atol": 1e-30}}

needs_library = pytest.mark.skipif(ops_library() is None, reason="the native ops were not built")


def has(variant):
    library = ops_library()
    return library is not None and library.kernel(variant) is not None


variants = pytest.mark.parametrize(
    "variant",
    [pytest.param(name, marks=pytest.mark.skipif(not has(name), reason=f"no {name} here")) for name in VARIANTS],
)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
activations = pytest.mark.parametrize("activation", [SILU, GELU_TANH])


def random(*shape, dtype=torch.float32, seed=0, scale=3.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def strided(rows):
    """The same rows as a part of wider ones."""
    wide = torch.full((rows.shape[0], rows.shape[1] + 7), torch.nan, dtype=rows.dtype)
    wide[:, 3:-4] = rows
    return wide[:, 3:-4]


def norm_in_float64(x, weight, centers=False):
    x = x.double()
    x = x - x.mean(-1, keepdim=True) if centers else x
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@variants
@dtypes
@for_each(shape=SHAPES)
def test_norm(variant, dtype, shape):
    x, weight = random(*shape, dtype=dtype), random(shape[1], dtype=dtype, seed=1)
    before = x.clone()
    normed = NativeOps(variant).norm(strided(x), Norm(weight, EPS))
    torch.testing.assert_close(normed.double(), norm_in_float64(x, weight), **TOLERANCES[dtype])
    torch.testing.assert_close(normed, Ops().norm(x, Norm(weight, EPS)), **TOLERANCES[dtype])
    assert torch.equal(x, before)
    assert normed.is_contiguous()


@variants
@dtypes
@for_each(shape=SHAPES)
def test_norm_of_a_sum(variant, dtype, shape):
    x, delta = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=2)
    weight = random(shape[1], dtype=dtype, seed=1)
    ours, theirs = strided(x), x.clone()
    normed = NativeOps(variant).norm(ours, Norm(weight, EPS), strided(delta))
    expected = Ops().norm(theirs, Norm(weight, EPS), delta)
    assert torch.equal(ours, theirs)
    assert torch.equal(ours, x + delta)
    torch.testing.assert_close(normed, expected, **TOLERANCES[dtype])
    torch.testing.assert_close(normed.double(), norm_in_float64(x + delta, weight), **TOLERANCES[dtype])


@variants
@dtypes
@for_each(shape=SHAPES)
def test_norm_of_a_sum_with_a_part_of_the_delta(variant, dtype, shape):
    x, delta = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=2)
    weight = random(shape[1], dtype=dtype, seed=1)
    ours, theirs = strided(x), x.clone()
    normed = NativeOps(variant).norm(ours, Norm(weight, EPS, 0.3), strided(delta))
    Ops().norm(theirs, Norm(weight, EPS, 0.3), delta)
    expected, rtol = x.double() + 0.3 * delta.double(), 2**-8 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(ours.double(), expected, rtol=rtol, atol=1e-6)
    torch.testing.assert_close(theirs.double(), expected, rtol=rtol, atol=5 * rtol)  # of which the product is rounded
    torch.testing.assert_close(normed.double(), norm_in_float64(ours, weight), **TOLERANCES[dtype])


@variants
@dtypes
@for_each(shape=[shape for shape in SHAPES if shape[1] > 2])  # else what is left of two cancels out
def test_norm_that_centers(variant, dtype, shape):
    x, delta = random(*shape, dtype=dtype) + 2, random(*shape, dtype=dtype, seed=2)
    weight = random(shape[1], dtype=dtype, seed=1)
    ours, theirs = strided(x), x.clone()
    normed = NativeOps(variant).norm(ours, Norm(weight, EPS, centers=True), strided(delta))
    expected = Ops().norm(theirs, Norm(weight, EPS, centers=True), delta)
    assert torch.equal(ours, theirs)
    tolerance = {torch.float32: {"rtol": 2e-6, "atol": 2e-5}, torch.bfloat16: {"rtol": 2**-7, "atol": 1e-4}}[dtype]
    torch.testing.assert_close(normed, expected, **tolerance)
    torch.testing.assert_close(normed.double(), norm_in_float64(ours, weight, centers=True), **tolerance)
    alone = NativeOps(variant).norm(x, Norm(weight, EPS, centers=True))
    torch.testing.assert_close(alone.double(), norm_in_float64(x, weight, centers=True), **tolerance)


@variants
@dtypes
@for_each(shape=SHAPES)
def test_a_norm_is_added(variant, dtype, shape):
    x, delta = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=2)
    weight, ops = random(shape[1], dtype=dtype, seed=1), NativeOps(variant)
    ours, before = strided(x), delta.clone()
    ops.add_norm(ours, strided(delta), Norm(weight, EPS))
    assert torch.equal(ours, x + ops.norm(delta, Norm(weight, EPS)))
    theirs = x.clone()
    Ops().add_norm(theirs, delta, Norm(weight, EPS))
    # Where a sum is next to nothing, what its parts were rounded by shows.
    tolerance = {torch.float32: (2e-6, 1e-4), torch.bfloat16: (2**-7, 0.3)}[dtype]
    torch.testing.assert_close(ours, theirs, rtol=tolerance[0], atol=tolerance[1])
    assert torch.equal(delta, before)


@variants
def test_norm_of_numbers_at_the_limits(variant):
    x = torch.tensor([[0.0, 0.0, 0.0], [torch.nan, 1.0, 2.0], [3e38, 3e38, 1.0], [1e-30, -1e-30, 0.0]])
    weight = torch.ones(3)
    expected = Ops().norm(x, Norm(weight, EPS))
    torch.testing.assert_close(NativeOps(variant).norm(x, Norm(weight, EPS)), expected, equal_nan=True)


@variants
@for_each(shape=SHAPES)
def test_norms_with_weights_of_float32(variant, shape):
    """Between bfloat16, as torch computes it: rounded once."""
    x, delta = random(*shape, dtype=torch.bfloat16), random(*shape, dtype=torch.bfloat16, seed=2)
    weight, ops = random(shape[1], seed=1) + 1, NativeOps(variant)
    for centers in (False, True) if shape[1] > 2 else (False,):
        normed = ops.norm(strided(x), Norm(weight, EPS, centers=centers))
        expected = norm_in_float64(x, weight, centers)
        torch.testing.assert_close(normed.double(), expected, rtol=2**-8, atol=1e-4)
        theirs = Ops().norm(x, Norm(weight, EPS, centers=centers))
        assert (normed != theirs).float().mean() < 0.01 or normed.numel() < 500
        torch.testing.assert_close(normed, theirs, rtol=2**-7, atol=1e-4)
    ours = strided(x)
    ops.add_norm(ours, strided(delta), Norm(weight, EPS))
    assert torch.equal(ours, x + ops.norm(delta, Norm(weight, EPS)))


def gate_in_float64(gates_and_ups, activation):
    gates, ups = gates_and_ups.double().chunk(2, -1)
    if activation == GELU_TANH:
        return gates / (1 + (-2 * (2 / torch.pi) ** 0.5 * (gates + 0.044715 * gates**3)).exp()) * ups
    return gates / (1 + (-gates).exp()) * ups


@variants
@dtypes
@activations
@for_each(shape=SHAPES)
def test_gate(variant, dtype, activation, shape):
    gates_and_ups = random(shape[0], 2 * shape[1], dtype=dtype, scale=8.0)
    gated = NativeOps(variant).gate(strided(gates_and_ups), activation)
    # e^-x of float32 is off by more than its last bits where the activation is next to nothing.
    tolerance = {"rtol": 4e-6 if dtype == torch.float32 else 2**-7, "atol": 1e-30}
    if activation == GELU_TANH:
        tolerance = {"rtol": 1e-4 if dtype == torch.float32 else 2**-7, "atol": 1e-12}
    torch.testing.assert_close(gated.double(), gate_in_float64(gates_and_ups, activation), **tolerance)
    expected = Ops().gate(gates_and_ups, activation)
    tolerance["atol"] = 1e-5 if activation == GELU_TANH else 1e-30  # of what torch takes from 1 by tanh
    torch.testing.assert_close(gated, expected, **tolerance)
    if dtype == torch.bfloat16:
        is_large = expected.abs() > (0 if activation == SILU else 1e-3)
        assert ((gated != expected) & is_large).float().mean() < 0.001


@variants
@dtypes
@activations
def test_gate_of_numbers_at_the_limits(variant, dtype, activation):
    gates = torch.tensor([0.0, -0.0, 90.0, -90.0, 3e38, -3e38, torch.inf, torch.nan, 1e-30, -1e-30, 88.8, -88.8])
    rows = torch.cat((gates, torch.ones(len(gates)))).to(dtype).unsqueeze(0)
    gated = NativeOps(variant).gate(rows, activation)
    expected = Ops().gate(rows, activation)
    torch.testing.assert_close(gated, expected, rtol=2e-6, atol=1e-36, equal_nan=True)


@variants
@dtypes
@for_each(shape=SHAPES, cap=[0.7, 30.0])
def test_cap(variant, dtype, shape, cap):
    logits = random(*shape, dtype=dtype, scale=20.0)
    ours, theirs = strided(logits), logits.clone()
    around = ours.as_strided((shape[0], shape[1] + 7), (shape[1] + 7, 1), 0)
    NativeOps(variant).cap(ours, cap)
    Ops().cap(theirs, cap)
    tolerance = {"rtol": 5e-7 if dtype == torch.float32 else 2**-8, "atol": 1e-30}
    torch.testing.assert_close(ours.double(), cap * (logits.double() / cap).tanh(), **tolerance)
    torch.testing.assert_close(ours, theirs, **{**tolerance, "rtol": 2 * tolerance["rtol"]})
    assert around[:, [0, 1, 2, -4, -3, -2, -1]].isnan().all()


@variants
@dtypes
def test_cap_of_numbers_at_the_limits(variant, dtype):
    logits = torch.tensor([[0.0, -0.0, 1e-30, -1e-30, 400.0, -3e38, torch.inf, -torch.inf, torch.nan]]).to(dtype)
    capped = logits.clone()
    NativeOps(variant).cap(capped, 50.0)
    expected = 50 * (logits.double() / 50).tanh()
    torch.testing.assert_close(capped.double(), expected, rtol=2**-8, atol=0, equal_nan=True)
    assert capped[0, :-1].abs().max() <= 50


class Heads:
    """Random queries, keys and values of tokens at random positions, and scattered slots of a pool."""

    def __init__(self, num_tokens, heads, dtype, kv_dtype=None, has_norms=False, block_size=4, norm_dtype=None):
        num_heads, self.num_kv_heads, head_dim = heads
        generator = torch.Generator().manual_seed(5)
        self.heads = random(num_tokens, num_heads + 2 * self.num_kv_heads, head_dim, dtype=dtype)
        positions = torch.randint(0, 5000, (num_tokens,), generator=generator)
        self.rotation = RotaryEmbedding(DefaultRope(1e4), head_dim, CPU).tables(positions, dtype)
        kv_dtype = kv_dtype or str(dtype).removeprefix("torch.")
        self._layout = KVLayout.uniform(2, self.num_kv_heads, head_dim, block_size, kv_dtype)
        self._num_blocks = num_tokens // block_size + 3
        self.slots = torch.randperm(self._num_blocks * block_size, generator=generator)[:num_tokens]
        weights = (random(head_dim, dtype=norm_dtype or dtype, seed=seed) for seed in (3, 4))
        self.norms = HeadNorms(*weights, EPS) if has_norms or norm_dtype else None
        self._dtype = dtype

    def run(self, ops, rows=slice(None)):
        """The queries, and all keys and values of a pool that was empty."""
        pool = PagedKVPool(self._layout, self._num_blocks, CPU, self._dtype)
        rotation = (self.rotation[0][rows], self.rotation[1][rows])
        queries = ops.rotate_and_store(
            self.heads[rows].clone(), rotation, KVSlots(pool, 1, self.slots[rows]), self.norms
        )
        assert not any(cache.any() for cache in pool.read_tensors(0, range(self._num_blocks)))
        return (queries, *pool.gather(1, torch.arange(self._num_blocks)))


@variants
@dtypes
@for_each(heads=HEADS, has_norms=[False, True])
def test_rotate_and_store(variant, dtype, heads, has_norms):
    batch = Heads(11, heads, dtype, has_norms=has_norms)
    for given_, expected in zip(batch.run(NativeOps(variant)), batch.run(Ops()), strict=True):
        if has_norms:
            tolerance = 1e-5 if dtype == torch.float32 else 0.1
            torch.testing.assert_close(given_, expected, rtol=0, atol=tolerance)
            assert (given_ != expected).float().mean() < 0.01 or dtype == torch.float32
        elif dtype == torch.float32:
            torch.testing.assert_close(given_, expected, rtol=0, atol=2e-6)
        else:
            assert torch.equal(given_, expected)


@variants
@for_each(heads=HEADS)
def test_rotate_and_store_with_norms_of_float32(variant, heads):
    batch = Heads(11, heads, torch.bfloat16, norm_dtype=torch.float32)
    for given_, expected in zip(batch.run(NativeOps(variant)), batch.run(Ops()), strict=True):
        torch.testing.assert_close(given_, expected, rtol=0, atol=0.1)
        assert (given_ != expected).float().mean() < 0.01


@variants
@dtypes
def test_rotate_and_store_in_complex_numbers(variant, dtype):
    batch = Heads(6, (2, 1, 12), dtype)
    queries, keys, values = batch.run(NativeOps(variant))
    cosines, signed_sines = (table.double() for table in batch.rotation)
    turns = torch.complex(cosines[..., :6], signed_sines[..., 6:])
    heads = batch.heads.double()
    turned = torch.complex(heads[..., :6], heads[..., 6:]) * turns
    expected = torch.cat((turned.real, turned.imag), -1)
    atol = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(queries.double(), expected[:, :2], rtol=0, atol=atol)
    torch.testing.assert_close(keys.flatten(0, 1)[batch.slots].double(), expected[:, 2:3], rtol=0, atol=atol)
    assert torch.equal(values.flatten(0, 1)[batch.slots], batch.heads[:, 3:])


@variants
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3"])
def test_rotate_and_store_in_a_quantized_pool(variant, kv_dtype):
    batch = Heads(9, (4, 2, 16), torch.bfloat16, kv_dtype)
    for given_, expected in zip(batch.run(NativeOps(variant)), batch.run(Ops()), strict=True):
        assert torch.equal(given_, expected)


@needs_library
@pytest.mark.parametrize("slot", [-1, 5 * 4, 2**40])
def test_a_slot_outside_the_pool_is_refused_before_anything_is_written(slot):
    batch = Heads(8, (2, 1, 8), torch.float32)
    batch.slots[7] = slot
    pool = PagedKVPool(KVLayout.uniform(1, 1, 8, 4, "float32"), 5, CPU)
    with pytest.raises(IndexError, match="5 blocks"):
        NativeOps("plain").rotate_and_store(batch.heads, batch.rotation, KVSlots(pool, 0, batch.slots))
    assert not pool.keys(0).any()


@variants
@dtypes
@given(
    rows=st.integers(1, 3),
    columns=st.integers(1, 1100),
    seed=st.integers(0, 2**16),
    specials=st.lists(st.sampled_from([0.0, -0.0, 9.0, torch.inf, -torch.inf, torch.nan, -torch.nan]), max_size=5),
    scale=st.sampled_from([0.0, 1e-3, 1.0]),
)
def test_likeliest_is_what_torch_finds(variant, dtype, rows, columns, seed, specials, scale):
    logits = random(rows, columns, dtype=dtype, seed=seed, scale=scale)
    places = torch.randint(0, rows * columns, (len(specials),), generator=torch.Generator().manual_seed(seed))
    logits.view(-1)[places] = torch.tensor(specials, dtype=dtype)
    highest, tokens = NativeOps(variant).likeliest(strided(logits))
    expected, expected_tokens = logits.max(dim=-1)
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(highest, expected.float(), rtol=0, atol=0, equal_nan=True)


@variants
def test_likeliest_among_nothing_but_negative_infinity(variant):
    highest, tokens = NativeOps(variant).likeliest(torch.full((1, 600), -torch.inf))
    assert (highest.tolist(), tokens.tolist()) == ([-torch.inf], [0])


def all_results(ops, num_tokens, dtype, rows=slice(None)):
    """Of enough work for several threads, or of some rows of it."""
    x, delta, weight = (random(*shape, dtype=dtype) for shape in [(num_tokens, 576), (num_tokens, 576), (576,)])
    x = x[rows].clone()
    normed = ops.norm(x, Norm(weight, EPS, 0.7), delta[rows])
    centered = ops.norm(x.abs(), Norm(weight, EPS, centers=True))
    summed = delta[rows].abs()  # and what is added: so that nothing cancels out
    ops.add_norm(summed, x.abs(), Norm(weight.abs(), EPS))
    gated = ops.gate(random(num_tokens, 600, dtype=dtype)[rows])
    approximated = ops.gate(random(num_tokens, 600, dtype=dtype)[rows], GELU_TANH)
    capped = random(num_tokens, 999, dtype=dtype)[rows].clone()
    ops.cap(capped, 2.0)
    offset = ops.norm(x, Norm(weight.float(), EPS))
    highest, tokens = ops.likeliest(random(num_tokens, 999, dtype=dtype)[rows])
    batch = Heads(num_tokens, (5, 2, 20), dtype, has_norms=True)
    queries, keys, values = batch.run(ops, rows)
    slots = batch.slots[rows]
    return [
        x,
        normed,
        centered,
        summed,
        gated,
        approximated,
        capped,
        offset,
        highest,
        tokens,
        queries,
        keys.flatten(0, 1)[slots],
        values.flatten(0, 1)[slots],
    ]


@variants
@dtypes
def test_threads_do_not_change_a_bit(variant, dtype):
    results = [all_results(NativeOps(variant), 301, dtype) for _ in thread_counts()]
    for one, *others in zip(*results, strict=True):
        assert all(torch.equal(one, other) for other in others)


@variants
@dtypes
def test_rows_do_not_depend_on_other_rows(variant, dtype):
    ops = NativeOps(variant)
    together = all_results(ops, 37, dtype)
    for row in (0, 5, 36):
        alone = all_results(ops, 37, dtype, slice(row, row + 1))
        assert all(torch.equal(whole[row : row + 1], part) for whole, part in zip(together, alone, strict=True))


@needs_library
@dtypes
def test_variants_agree(dtype):
    plain, *others = (all_results(NativeOps(name), 37, dtype) for name in reversed(VARIANTS) if has(name))
    for other in others:
        for one, same in zip(plain, other, strict=True):
            torch.testing.assert_close(one, same, rtol=TOLERANCES[dtype]["rtol"], atol=1e-5)
            if dtype == torch.bfloat16:
                assert (one != same).float().mean() < 0.01


@needs_library
def test_other_dtypes_are_left_to_torch():
    ops, portable = NativeOps("plain"), Ops()
    x, weight = random(3, 20).half(), random(20).half()
    assert torch.equal(ops.norm(x.clone(), Norm(weight, EPS), x), portable.norm(x.clone(), Norm(weight, EPS), x))
    ours, theirs = x.clone(), x.clone()
    ops.add_norm(ours, x, Norm(weight, EPS))
    portable.add_norm(theirs, x, Norm(weight, EPS))
    assert torch.equal(ours, theirs)
    assert torch.equal(ops.gate(x), portable.gate(x))
    assert torch.equal(ops.likeliest(x)[1], x.argmax(-1))
    batch = Heads(5, (2, 1, 8), torch.float16)
    assert all(map(torch.equal, batch.run(ops), batch.run(portable)))


def test_torch_computes_where_nothing_native_does(monkeypatch):
    assert isinstance(choose_ops(torch.device("cuda")), Ops)
    monkeypatch.setenv(ENVIRONMENT, "off")
    assert isinstance(choose_ops(CPU), Ops)


@variants
def test_a_variant_is_named(variant, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, variant)
    ops = choose_ops(CPU)
    assert isinstance(ops, NativeOps)
    assert ops.variant == variant


def test_a_file_of_something_else_is_refused(tmp_path):
    file = tmp_path / "op_kernels.so"
    file.write_bytes(b"no library")
    with pytest.raises(OSError, match="op_kernels"):
        OpsLibrary(file)


def test_an_unknown_variant_is_refused():
    with pytest.raises(ValueError, match="no sse9 ops"):
        NativeOps("sse9")
