"""Attention by Triton: against the portable backend, and in engines whose blocks varlen_attn does not take."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton, which comes with torch for CUDA, is not installed")

from engine.attention.backends import batch_invariant_attentions, choose_attention
from engine.attention.paged import PortableAttention
from engine.attention.triton_paged import (
    DEEP_STAGES,
    FEW_ROWS,
    MANY_ROWS,
    ONE_STAGE,
    SHARING_ROWS,
    STAGES,
    TritonAttention,
    most_rows,
    stages_by_rows,
)
from engine.attention.varlen import GatheredAttention
from engine.build import build_engine
from engine.cache.kv_pool import PagedKVPool
from engine.cuda_graphs import StaticDecode
from engine.forward_batch import build_batch
from serving_core.layout import KVLayout
from serving_core.requests import Share
from serving_core.settings import EngineSettings
from tests.gpu.attention_kit import CUDA, random_pool, shares_of
from tests.tiny_models import write_tiny_model
from tests.toy_scheduler import greedy, run_all

GATHERED = GatheredAttention.name
SPANS = ((0, 1), (0, 90), (33, 50), (255, 1), (311, 1), (64, 64), (63, 2))  # of tokens before, and tokens
STEPS = ((0, 1), (255, 1), (256, 1), (700, 2), (1023, 1), (5000, 1), (511, 2))


@pytest.mark.parametrize("is_uniform", [False, True])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "num_heads", "num_kv_heads", "block_size", "window", "softcap"),
    [
        ("bfloat16", 128, 7, 1, 16, None, None),
        ("bfloat16", 64, 8, 2, 256, 40, None),
        ("float16", 80, 8, 2, 48, None, 50.0),
        ("float32", 48, 6, 3, 5, 17, None),
        ("float32", 64, 4, 4, 16, 100, 30.0),
    ],
)
def test_it_agrees_with_the_portable_one(
    dtype, head_dim, num_heads, num_kv_heads, block_size, window, softcap, is_uniform
):
    pool = random_pool(block_size, num_kv_heads, head_dim, dtype)
    ours = TritonAttention(pool, num_heads, None, softcap, is_uniform=is_uniform)
    portable = PortableAttention(pool, num_heads, None, softcap)
    for spans in (SPANS, STEPS, STEPS[:2]):
        batch = build_batch(shares_of(spans, block_size), block_size, CUDA)
        query = torch.randn(len(batch.token_ids), num_heads, head_dim, device=CUDA).to(pool.compute_dtype)
        outputs = [backend.attend(query, 0, backend.plan(batch, window)) for backend in (ours, portable)]
        tolerance = 1e-4 if dtype == "float32" else 0.03
        torch.testing.assert_close(*outputs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("compute_dtype", [torch.bfloat16, torch.float32])
def test_keys_and_values_of_8_bits(dtype, compute_dtype):
    pool = random_pool(16, 2, 64, dtype, compute_dtype)
    ours, portable = TritonAttention(pool, 8), PortableAttention(pool, 8)
    for spans in (SPANS, STEPS):
        batch = build_batch(shares_of(spans, 16), 16, CUDA)
        query = torch.randn(len(batch.token_ids), 8, 64, device=CUDA).to(compute_dtype)
        outputs = [backend.attend(query, 0, backend.plan(batch, None)) for backend in (ours, portable)]
        tolerance = 1e-4 if compute_dtype == torch.float32 else 0.03
        torch.testing.assert_close(*outputs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
def test_many_small_weights_of_small_values_add_up(dtype):
    """In 16 bits they would be none once they were multiplied by a value's scale. One key takes nearly all."""
    layout = KVLayout.uniform(1, 1, 64, 16, dtype)
    pool, num_tokens = PagedKVPool(layout, 64, CUDA, torch.float16), 1024
    query = torch.ones(1, 1, 64, device=CUDA, dtype=torch.float16)
    keys = torch.zeros(num_tokens, 1, 64, device=CUDA)
    keys[0] = 9 / 8  # a score of 9, and 0 of all others
    values = torch.full_like(keys, 0.02)
    values[0] = 0
    pool.store(0, torch.arange(num_tokens, device=CUDA), keys.half(), values.half())
    batch = build_batch([Share([0], num_tokens - 1, range(64), samples=True)], 16, CUDA)
    ours = TritonAttention(pool, 1)
    attended = ours.attend(query, 0, ours.plan(batch, None)).cpu().double()
    stored = pool.gather(0, torch.arange(64, device=CUDA))
    keys, values = (cache.cpu().flatten(0, 1)[:, 0].double() for cache in stored)
    expected = (keys.sum(1) / 8).softmax(0) @ values  # the query is of ones
    torch.testing.assert_close(attended[0, 0], expected, rtol=0.01, atol=0)


@pytest.mark.parametrize("window", [None, 300])
def test_bits_of_a_step_do_not_depend_on_what_else_is_in_the_batch(window):
    """Though several programs share its keys, and though fewer are started where all contexts are short."""
    pool = random_pool(16, 2, 64, "bfloat16")
    ours, shares = TritonAttention(pool, 8), shares_of(STEPS, 16)
    batch = build_batch(shares, 16, CUDA)
    query = torch.randn(len(batch.token_ids), 8, 64, device=CUDA).bfloat16()
    together = ours.attend(query, 0, ours.plan(batch, window))
    for number, share in enumerate(shares):
        rows = slice(*batch.query_starts[number : number + 2].tolist())
        alone = build_batch([share], 16, CUDA)
        assert torch.equal(ours.attend(query[rows], 0, ours.plan(alone, window)), together[rows])


def test_what_is_not_a_number_stays_with_its_request():
    """Blocks of other requests, and what lies behind a request's last token, are not read."""
    pool, block_size = random_pool(16, 2, 64, "bfloat16"), 16
    first, second = shares_of([(20, 1), (9, 5)], block_size)
    batch = build_batch([first, second], block_size, CUDA)
    query = torch.randn(len(batch.token_ids), 4, 64, device=CUDA).bfloat16()
    ours = TritonAttention(pool, 4)
    expected = ours.attend(query, 0, ours.plan(batch, None))
    for caches in (pool.keys(0), pool.values(0)):
        caches[first.block_ids[-1], 21 - 16 :] = torch.nan
        caches[second.block_ids[-1], 14:] = torch.nan
        caches[second.block_ids[-1] + 1 :] = torch.nan
    assert torch.equal(ours.attend(query, 0, ours.plan(batch, None)), expected)


@pytest.mark.parametrize(
    ("head_dim", "itemsize", "memory_kib", "expected"),
    [
        (128, 2, 99, (MANY_ROWS, STAGES)),
        (128, 2, 163, (MANY_ROWS, DEEP_STAGES)),
        (256, 2, 99, (SHARING_ROWS, STAGES)),
        (256, 2, 163, (MANY_ROWS, STAGES)),
        (256, 1, 99, (MANY_ROWS, STAGES)),
        (256, 4, 99, (FEW_ROWS, ONE_STAGE)),
    ],
)
def test_wide_heads_have_smaller_programs_where_a_device_has_little_memory(head_dim, itemsize, memory_kib, expected):
    stages = stages_by_rows(head_dim, max(2, itemsize), itemsize, memory_kib * 1024)
    rows = most_rows(MANY_ROWS, stages)
    assert (rows, stages[rows]) == expected


@pytest.mark.parametrize(
    ("dtype", "block_size", "softcap"), [("float32", 16, None), ("bfloat16", 256, 20.0), ("int8", 256, None)]
)
def test_it_is_taken_where_varlen_attn_is_not(dtype, block_size, softcap):
    pool = random_pool(block_size, 2, 64, dtype, torch.bfloat16)
    assert choose_attention(pool, 4, softcap=softcap).name == "triton"
    assert not any(map(torch.any, pool.read_tensors(0, range(3)))), "what was tried is gone"


@pytest.mark.parametrize(
    ("block_size", "invariant"), [(256, ["varlen_attn", "triton", "tiled"]), (16, ["triton", "tiled"])]
)
def test_prompts_are_varlen_attns_and_steps_those_of_triton(block_size, invariant):
    pool = random_pool(block_size, 2, 64, "bfloat16")
    pool.clear(0, pool.num_blocks)
    ours, portable = choose_attention(pool, 4), PortableAttention(pool, 4)
    assert ours.name == f"{GATHERED}, of steps triton"
    assert [each.name for each in batch_invariant_attentions(ours, 4)] == invariant
    pool.try_values(0, pool.num_blocks)
    chosen = {("triton", GATHERED): SPANS, ("triton",): STEPS, (GATHERED,): SPANS[1:]}
    for names, spans in chosen.items():
        batch = build_batch(shares_of(spans, block_size), block_size, CUDA)
        plan = ours.plan(batch, None)
        assert tuple(part.backend.name for part in plan) == names
        query = torch.randn(len(batch.token_ids), 4, 64, device=CUDA).bfloat16()
        expected = portable.attend(query, 0, portable.plan(batch, None))
        torch.testing.assert_close(ours.attend(query, 0, plan), expected, atol=0.03, rtol=0.03)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_steps_are_graphs_and_answers_those_of_the_cpu(tmp_path, kv_cache_dtype):
    folder = write_tiny_model(tmp_path, "llama", seed=3, num_hidden_layers=1)
    sizes = {"dtype": "float32", "kv_cache_dtype": kv_cache_dtype, "num_kv_blocks": 8, "max_model_len": 64}
    on_cpu, on_cuda = (
        build_engine(EngineSettings(model=str(folder), device=device, **sizes)) for device in ("cpu", "cuda")
    )
    assert on_cuda.attention.name == "triton"
    assert isinstance(on_cuda.program, StaticDecode), "the log says why nothing was captured"
    prompts = [list(range(start, start + 9)) for start in (3, 40)]
    answers = [run_all(engine, prompts, greedy(6, ignore_eos=True)) for engine in (on_cpu, on_cuda)]
    assert [[token.token_id for token in answer] for answer in answers[1]] == [
        [token.token_id for token in answer] for answer in answers[0]
    ]
