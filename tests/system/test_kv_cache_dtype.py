"""KV in 8 bits, in the pools and on the way."""

import random

import pytest

from tests.system.answers import request, stream
from tests.system.cluster import START_DEADLINE_S, wait_until
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.nightly

GREEDY = {"temperature": 0, "ignore_eos": True}
SHAPE = {"num_key_value_heads": 3, "num_attention_heads": 6, "head_dim": 8}
PROMPTS = [[random.Random(seed).randrange(256) for _ in range(length)] for seed, length in enumerate((1, 9, 64, 200))]


async def _answers(cluster):
    async with cluster.connect() as stub:
        streams = [stream(stub, request(prompt, max_tokens=16, **GREEDY)) for prompt in PROMPTS]
        answers = [await answering.complete() for answering in streams]
    cluster.wait_all_free()
    return [answer.token_ids for answer in answers], sum(answer.complete.kv_bytes for answer in answers)


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3"])
async def test_half_the_bytes_and_the_same_answers_for_any_ranks(dtype, start_cluster, tmp_path):
    """Scales belong to a head, so how heads are spread over ranks changes no value."""
    model = write_tiny_model(tmp_path / "model", dtype="bfloat16", **SHAPE)
    node = {"num_kv_blocks": 200, "kv_cache_dtype": dtype, "dtype": "float32"}
    alone = start_cluster(model, node=node)
    expected, num_bytes = await _answers(alone)
    alone.stop()
    ranked = start_cluster(model, node=node, prefill={"tensor_parallel_size": 2}, decode={"tensor_parallel_size": 4})
    found, num_ranked_bytes = await _answers(ranked)
    ranked.stop()
    assert found == expected
    # 1 + 2 + 8 + 25 blocks of 8 tokens, 3 layers, K and V: one byte for each number, and a float32 for each head.
    head_bytes = 36 * 3 * 2 * (8 * 8 + 4)
    assert num_bytes == 3 * head_bytes
    assert num_ranked_bytes == 4 * head_bytes  # one of the heads goes to two ranks


def test_nodes_that_keep_kv_differently_are_refused(start_cluster, tmp_path):
    model = write_tiny_model(tmp_path / "model", **SHAPE)
    cluster = start_cluster(model, node={"num_kv_blocks": 50})
    other = cluster.start_node("decode-1", kv_cache_dtype="int8")
    cluster.expect_end("decode-1")
    wait_until(lambda: not other.is_running, "the other node is refused", START_DEADLINE_S)
    assert "kv_cache_dtype is int8 and float32" in other.output()
