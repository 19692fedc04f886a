"""Decode as one native program against the same decoder, module after module: equal to the bit."""

import ctypes
import itertools
import os
import random
import subprocess
import sys

import pytest
import torch

from engine.build import build_engine
from engine.forward_batch import build_batch
from engine.native.library import ENVIRONMENT, OFF, native_library
from engine.native.linear import best_variant
from engine.native.ops_library import best_variant as best_ops
from engine.native.program import NativeProgram
from engine.native_decode import MOST_ROWS, NativeDecode, RotationTable
from engine.ops.base import Norm
from engine.ops.native import NativeOps
from engine.ops.rope import RotaryEmbedding
from serving_core.model_files.rope import DefaultRope
from serving_core.requests import Request, Share, Work
from serving_core.settings import EngineSettings
from tests.effort import effort
from tests.tiny_models import VOCAB_SIZE
from tests.toy_scheduler import greedy, run_all
from tests.transformers_models import DESCRIBED, MIXTURES, write_any_model
from tests.unit.engine.histories_kit import run_program

MODELS = {
    "llama": ("llama", {}),
    "tied-mqa": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "odd-heads": ("llama", {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 10}),
    "9-heads-of-64": (
        "llama",
        {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 200},
    ),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "window": ("mistral", {"sliding_window": 11}),
    "some-windows-tied": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "head-norms": ("qwen3", {"head_dim": 16}),
    "head-norms-bias-tied": ("qwen3", {"head_dim": 24, "attention_bias": True, "tie_word_embeddings": True}),
    **{family: (family, {}) for family in DESCRIBED if family not in MIXTURES},
    "granite-biases-tied": ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
}
ALIKE = ("tied-mqa", "head-norms", "gemma", "gemma2", "cohere2")  # to others of them
BLOCK_SIZE, NUM_BLOCKS = 16, 350

pytestmark = pytest.mark.skipif(best_variant(torch.bfloat16) is None, reason="bfloat16 products are not native here")


@pytest.fixture
def folder_of(written):
    """Return a function that gives the folder of a model by its name."""
    return lambda name: written(write_any_model, MODELS[name][0], **MODELS[name][1])


def engine_of(folder, quantization="none", **fields):
    chosen = {"dtype": "bfloat16", "block_size": BLOCK_SIZE, "num_kv_blocks": NUM_BLOCKS, **fields}
    return build_engine(EngineSettings(model=str(folder), quantization=quantization, **chosen))


def random_decode(engine, batch_size, seed, most_tokens=300, most_draft_tokens=0):
    """A batch of requests with one token each and up to so many draft tokens, whose contexts are random numbers in the
    pool."""
    draw = random.Random(seed)
    nums = [1 + draw.randint(0, most_draft_tokens) for _ in range(batch_size)]
    lengths = [num + draw.randint(0, most_tokens // (1 + index % 3)) for index, num in enumerate(nums)]
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    order = draw.sample(range(engine.num_blocks), sum(counts))
    blocks = [[order.pop() for _ in range(count)] for count in counts]
    fill_once(engine.pool)
    shares = [
        Share(draw.choices(range(VOCAB_SIZE), k=num), length - num, ids, samples=True, num_scored=num - 1)
        for num, length, ids in zip(nums, lengths, blocks, strict=True)
    ]
    return build_batch(shares, BLOCK_SIZE, torch.device("cpu"))


def fill_once(pool):
    """Fill an empty pool with random numbers."""
    generator = torch.Generator().manual_seed(0)
    if not pool.keys(0).any():
        for layer in range(pool.layout.num_layers):
            for caches in (pool.keys(layer), pool.values(layer)):
                caches.copy_(torch.randn(caches.shape, generator=generator))


def pool_of(engine):
    layers = range(engine.layout.num_layers)
    return [caches.clone() for layer in layers for caches in (engine.pool.keys(layer), engine.pool.values(layer))]


@torch.inference_mode()
def check_equal(engine, batch, counts=(1, 3)):
    before = pool_of(engine)
    torch.set_num_threads(1)
    expected = engine.model(batch, engine.attention)
    expected_pool = pool_of(engine)
    for num_threads in counts:
        restore(engine, before)
        torch.set_num_threads(num_threads)
        logits, (highest, tokens) = engine.program.run(batch, engine.program.plan(batch), lambda: None)
        torch.testing.assert_close(logits, expected, rtol=0, atol=0)
        assert all(map(torch.equal, pool_of(engine), expected_pool))
        assert torch.equal(highest, expected.amax(-1).float())
        assert torch.equal(tokens, expected.argmax(-1))


def restore(engine, caches):
    saved = iter(caches)
    for layer in range(engine.layout.num_layers):
        engine.pool.keys(layer).copy_(next(saved))
        engine.pool.values(layer).copy_(next(saved))


def kinds():
    """Yield all models in every way, of which the gate runs most models in bfloat16 and the first one in every way."""
    for number, name in enumerate(MODELS):
        for dtype, quantization in itertools.product(("bfloat16", "float32"), ("none", "int8", "int4", "w8a8")):
            is_long = (number and (dtype, quantization) != ("bfloat16", "none")) or name in ALIKE
            yield pytest.param(name, dtype, quantization, marks=pytest.mark.nightly if is_long else ())


@pytest.mark.parametrize(("name", "dtype", "quantization"), list(kinds()))
def test_it_gives_the_bits_of_the_modules(name, dtype, quantization, folder_of):
    if quantization == "none" and best_variant(getattr(torch, dtype)) is None:
        pytest.skip(f"{dtype} products are not native here")
    engine = engine_of(folder_of(name), quantization, dtype=dtype)
    assert isinstance(engine.program, NativeDecode)
    batch_sizes, counts = (1, 2, 3, 5, 7, 13, 16, 33), (1, 2, 3)
    for seed, batch_size in enumerate(effort((1, 5, 33), batch_sizes, batch_sizes)):
        check_equal(engine, random_decode(engine, batch_size, seed), effort((1, 3), counts, counts))


def test_batches_up_to_the_largest(folder_of):
    engine = engine_of(folder_of("llama"))
    for batch_size in range(1, MOST_ROWS + 1, 3):
        check_equal(engine, random_decode(engine, batch_size, batch_size, most_tokens=90), counts=(3,))


def test_batches_with_draft_tokens(folder_of):
    engine = engine_of(folder_of("some-windows-tied"))
    for seed, batch_size in enumerate((1, 1, 2, 3, 7)):
        check_equal(engine, random_decode(engine, batch_size, seed, most_tokens=500, most_draft_tokens=8))


def test_a_request_has_the_same_bits_alone_and_in_a_batch(folder_of):
    engine = engine_of(folder_of("9-heads-of-64"))
    batch = random_decode(engine, 20, seed=7)
    torch.set_num_threads(3)
    with torch.inference_mode():
        together = run_program(engine.program, batch).clone()
        for row in range(20):
            length = int(batch.kv_lengths[row])
            share = Share([int(batch.token_ids[row])], length - 1, batch.block_tables[row].tolist(), samples=True)
            alone = run_program(engine.program, build_batch([share], BLOCK_SIZE, torch.device("cpu")))
            assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("name", ["llama", "some-windows-tied"])
@pytest.mark.parametrize("has_begun", [True, False])
def test_a_step_behind_another_is_the_one_that_is_built_of_its_tokens(folder_of, name, has_begun):
    """Whether the step before it has begun, or not yet moved its batch, when it is prepared."""
    engine = engine_of(folder_of(name))
    torch.set_num_threads(3)  # little work is not divided, and becomes more
    fill_once(engine.pool)
    starts, tables = [0, 230, 500], [list(range(40 * row, 40 * row + 40)) for row in range(3)]
    requests = [Request(str(row), 0, [0], 1, greedy(1)) for row in range(3)]
    draw, num_moved = random.Random(1), 0

    def works_of(step):
        rows = zip(requests, starts, tables, strict=True)
        return [Work(request, start + step, 1, table) for request, start, table in rows]

    steps = [engine.prepare(works_of(0))]

    def prepare_next():
        steps.append(engine.prepare(works_of(len(steps)), steps[-1]))

    for step in range(60):  # over ends of blocks, and of the tiles of 256 keys
        prepared, token_ids = steps[-1], draw.choices(range(VOCAB_SIZE), k=3)
        if not has_begun:
            prepare_next()
        on_taken = prepare_next if has_begun else lambda: None
        with torch.inference_mode():
            prepared.batch.know(token_ids)
            logits = engine.program.run(prepared.batch, prepared.plan, on_taken).rows
            fresh = engine.prepare(works_of(step))
            fresh.batch.know(token_ids)
            assert torch.equal(logits, engine.model(fresh.batch, engine.attention)), step
        assert units_of(prepared.plan) == units_of(fresh.plan)
        num_moved += steps[-1].batch is prepared.batch
    assert 50 < num_moved < 60  # the others found their block tables full


def units_of(plan):
    """How a step's attention is divided."""
    unit_bytes, plans = native_library().unit_bytes, [each.owners[0] for each in plan.attention]
    return [ctypes.string_at(each.units, each.num_units * unit_bytes) for each in plans]


def test_answers_are_those_of_the_modules(folder_of):
    engine = engine_of(folder_of("window"))
    prompts = [list(range(start, start + length)) for start, length in ((0, 5), (40, 70), (100, 33))]
    joins_at = [0, 3, 6]  # steps with chunks among them go from module to module
    answers = run_all(engine, prompts, greedy(20, ignore_eos=True), chunk_tokens=16, joins_at=joins_at)
    engine.program = None
    assert run_all(engine, prompts, greedy(20, ignore_eos=True), chunk_tokens=16, joins_at=joins_at) == answers


def test_other_batches_are_left_to_the_modules(folder_of):
    engine = engine_of(folder_of("llama"))
    device = torch.device("cpu")
    one = Share([5], 3, [0], samples=True)
    chunk, silent = Share([5, 6], 3, [1], samples=True), Share([5], 3, [1], samples=False)
    assert engine.program.plan(build_batch([one], BLOCK_SIZE, device)) is not None
    assert engine.program.plan(build_batch([one] * MOST_ROWS, BLOCK_SIZE, device)) is not None
    for shares in ([one] * (MOST_ROWS + 1), [chunk], [one, chunk], [one, silent]):
        assert engine.program.plan(build_batch(shares, BLOCK_SIZE, device)) is None


@pytest.mark.parametrize("fields", [{"dtype": "float16"}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8_e4m3"}])
def test_other_dtypes_have_no_program(fields, folder_of):
    assert engine_of(folder_of("llama"), **fields).program is None


@pytest.mark.parametrize("variant", [OFF, "plain", "avx2", "avx512"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_variants_without_such_products_have_no_program(dtype, variant, folder_of, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT, variant)
    has_program = engine_of(folder_of("llama"), dtype=dtype).program is not None
    assert has_program == (best_variant(getattr(torch, dtype)) is not None)


def test_a_slot_outside_the_pool_is_refused_and_nothing_written(folder_of):
    engine = engine_of(folder_of("llama"))
    batch = random_decode(engine, 4, seed=1)
    batch.slots[2] = engine.num_blocks * BLOCK_SIZE
    before = pool_of(engine)
    with torch.inference_mode(), pytest.raises(IndexError, match="outside the 350 blocks"):
        run_program(engine.program, batch)
    assert all(map(torch.equal, pool_of(engine), before))


def test_a_token_outside_the_vocabulary_is_refused_and_nothing_written(folder_of):
    for model in ("llama", "tied-mqa", "gemma"):  # a table, a packed head, scaled vectors
        engine = engine_of(folder_of(model))
        batch = random_decode(engine, 4, seed=1)
        batch.token_ids[3] = VOCAB_SIZE
        before = pool_of(engine)
        with torch.inference_mode(), pytest.raises(IndexError):
            run_program(engine.program, batch)
        assert all(map(torch.equal, pool_of(engine), before))


@pytest.mark.parametrize("head_dim", [10, 64, 80])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rotations_of_a_table_are_those_of_each_position_alone(head_dim, dtype):
    rotary = RotaryEmbedding(DefaultRope(10000.0), head_dim, torch.device("cpu"))
    table = RotationTable(rotary, head_dim, dtype)
    small = table.up_to(3)
    found = table.up_to(3 * len(small[0]) + 1)
    assert len(found[0]) > 3 * len(small[0]) > 3
    for position in (*range(70), len(small[0]) - 1, len(found[0]) - 1):
        for rows, row in zip(found, rotary.tables(torch.tensor([position]), dtype), strict=True):
            assert torch.equal(rows[position], row[0])
    assert all(torch.equal(new[: len(old)], old) for new, old in zip(found, small, strict=True))


def test_a_full_program_is_refused():
    program, rows = NativeProgram(0, 4), torch.ones(4, 8)
    with pytest.raises(ValueError, match="the program is full"):
        NativeOps(best_ops()).record_norm(program, rows, Norm(torch.ones(8), 1e-5), torch.empty(4, 8))


CROWD = """
import sys, torch
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.transformers_models import write_any_model
from tests.unit.engine.test_native_decode import MODELS, check_equal, engine_of, random_decode
family, config = MODELS["9-heads-of-64"]
engine = engine_of(write_any_model(Path(sys.argv[1]), family, **config))
for seed in range(20):
    check_equal(engine, random_decode(engine, 1 + seed % 5, seed, most_tokens=600), (24, 7, 40))
"""


@pytest.mark.nightly
def test_more_threads_than_cores_do_not_hang(tmp_path):
    """Also more than there are queues. In a process of its own: the threads of a pool stay for good."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    subprocess.run([sys.executable, "-c", CROWD, tmp_path, root], env=environment, check=True, timeout=800)
