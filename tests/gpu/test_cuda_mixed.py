"""Attention of batches that have answers, draft tokens and chunks of prompts at once: against float64 on the host."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton, which comes with torch for CUDA, is not installed")

from engine.attention import varlen
from engine.attention.backends import StepsApart, choose_attention
from engine.attention.triton_paged import TritonAttention
from engine.attention.varlen import GatheredAttention
from engine.cache.kv_pool import PagedKVPool
from engine.forward_batch import build_batch
from serving_core.layout import KVLayout
from tests.gpu.attention_kit import CUDA, eager, random_pool, random_query, shares_of

ANSWERS = ((700, 1), (0, 1), (1100, 1), (255, 1))  # of tokens before, and tokens
DRAFTS = ((300, 5), (511, 5), (64, 2))  # 20 rows of a group of 4
PROMPTS = ((0, 70), (133, 20), (340, 3))  # the last one is the end of a prompt
ORDERS = {
    "answers first": ANSWERS + PROMPTS,
    "draft tokens too": ANSWERS + DRAFTS + PROMPTS,
    "prompts first": PROMPTS + ANSWERS,
    "by turns": tuple(span for pair in zip(ANSWERS, PROMPTS, strict=False) for span in pair),
    "answers alone": ANSWERS,
    "draft tokens alone": DRAFTS + ANSWERS,
}
in_any_order = pytest.mark.parametrize("order", ORDERS)
by_either = pytest.mark.parametrize("by_varlen", [False, True])


def apart(pool, num_heads, softcap=None, by_varlen=False):
    triton = TritonAttention(pool, num_heads, None, softcap)
    return StepsApart(triton, GatheredAttention(pool) if by_varlen else triton, triton.few_tokens)


def check(order, attention, num_heads, window=None, tolerance=0.03):
    pool = attention.pool
    shares = shares_of(ORDERS[order], pool.layout.block_size)
    query, batch = random_query(shares, num_heads, pool), build_batch(shares, pool.layout.block_size, CUDA)
    attended = attention.attend(query, 0, attention.plan(batch, window))
    expected = eager(query, shares, pool, window, attention.softcap)
    torch.testing.assert_close(attended.cpu().double(), expected, atol=tolerance, rtol=tolerance)


@in_any_order
@pytest.mark.parametrize("window", [None, 300])
def test_answers_by_triton_beside_prompts_by_varlen_attn(order, window):
    check(order, apart(random_pool(16, 2, 64, "bfloat16"), 8, by_varlen=True), 8, window)


@pytest.mark.parametrize("most_tokens", [1, 400])
def test_keys_are_gathered_in_parts(most_tokens, monkeypatch):
    monkeypatch.setattr(varlen, "GATHERED_TOKENS", most_tokens)
    check("by turns", GatheredAttention(random_pool(5, 2, 64, "bfloat16")), 8, 300)


@pytest.mark.parametrize("order", ["draft tokens too", "by turns"])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "num_heads", "block_size", "window", "softcap"),
    [
        ("float16", 80, 8, 48, None, 2.0),
        ("bfloat16", 192, 8, 16, 300, None),
        ("float32", 48, 6, 5, 100, 30.0),
        ("int8", 64, 8, 256, None, None),
        ("fp8_e4m3", 64, 8, 16, 300, 2.0),
    ],
)
def test_both_by_triton(order, dtype, head_dim, num_heads, block_size, window, softcap):
    compute_dtype = torch.bfloat16 if dtype in ("int8", "fp8_e4m3") else None
    pool = random_pool(block_size, 2, head_dim, dtype, compute_dtype)
    check(order, apart(pool, num_heads, softcap), num_heads, window, 1e-4 if dtype == "float32" else 0.03)


@pytest.mark.parametrize(
    ("spans", "rows", "programs"),
    [(ANSWERS, 16, 5), (DRAFTS, 32, 3), (((700, 4),), 16, 3), (((700, 8),), 32, 3), (((700, 9),), 64, 1)],
)
def test_programs_that_share_keys_have_as_many_rows_as_it_takes(spans, rows, programs):
    """Of a group of 4. The longest contexts are of 1101, 516 and some 700 tokens, in shares of 256 at least."""
    pool = random_pool(16, 2, 64, "bfloat16")
    plan = TritonAttention(pool, 8).plan(build_batch(shares_of(spans, 16), 16, CUDA), None)
    assert (plan.rows, plan.programs) == (rows, programs)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "is_uniform", "few_tokens"),
    [
        ("bfloat16", 128, False, 8),
        ("int8", 64, False, 8),
        ("bfloat16", 136, False, 4),  # more have no registers
        ("float32", 64, False, 4),
        ("bfloat16", 128, True, 0),
    ],
)
def test_of_up_to_how_many_tokens_programs_share_keys(dtype, head_dim, is_uniform, few_tokens):
    pool = random_pool(256, 2, head_dim, dtype, torch.bfloat16)
    assert TritonAttention(pool, 8, is_uniform=is_uniform).few_tokens == few_tokens


@by_either
def test_bits_of_an_answer_do_not_depend_on_prompts_beside_it(by_varlen):
    attention = apart(random_pool(256, 2, 64, "bfloat16"), 8, by_varlen=by_varlen)
    shares = shares_of(ANSWERS + PROMPTS, 256)
    query = random_query(shares, 8, attention.pool)
    together, alone = (
        attention.attend(query[:num_rows], 0, attention.plan(build_batch(some, 256, CUDA), None))
        for some, num_rows in ((shares, len(query)), (shares[: len(ANSWERS)], len(ANSWERS)))
    )
    assert torch.equal(together[: len(ANSWERS)], alone)


@by_either
def test_the_host_does_not_wait(by_varlen):
    attention = apart(random_pool(256, 2, 64, "bfloat16"), 8, by_varlen=by_varlen)
    shares = shares_of(ORDERS["draft tokens too"], 256)
    query, batch = random_query(shares, 8, attention.pool), build_batch(shares, 256, CUDA)
    attention.attend(query, 0, attention.plan(batch, None))  # first calls may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention.attend(query, 0, attention.plan(batch, None))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("num_heads", [2, 14])
def test_programs_of_all_sizes_are_tried_before_they_are_taken(num_heads, monkeypatch):
    tried, plan = set(), TritonAttention.plan

    def noted(self, batch, window):
        planned = plan(self, batch, window)
        tried.add(planned.rows)
        return planned

    monkeypatch.setattr(TritonAttention, "plan", noted)
    pool = PagedKVPool(KVLayout.uniform(1, 2, 64, 16, "bfloat16"), 40, CUDA)
    assert choose_attention(pool, num_heads).name == f"{GatheredAttention.name}, of steps triton"
    assert tried == {16, 32, 64}
