"""Requests that are longer than any pool of the cluster: their oldest blocks lie on other nodes."""

import asyncio
import random

import pytest

from tests.system.answers import ask, outcome, request, stream
from tests.system.cluster import wait_until
from tests.system.oracle import Reference
from tests.tiny_models import write_tiny_model

BLOCK_SIZE = 8
POOL_TOKENS = 1024
GREEDY = {"temperature": 0, "ignore_eos": True}
NODE = {"num_kv_blocks": POOL_TOKENS // BLOCK_SIZE, "kv_annexes": True, "dtype": "float32"}
FOUR = {"num_prefill": 0, "num_decode": 0, "num_both": 4, "node": NODE}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return write_tiny_model(folder, num_key_value_heads=2, max_position_embeddings=4096)


@pytest.fixture(scope="module")
def _cluster(start_cluster, model):
    return start_cluster(model, **FOUR)


@pytest.fixture
def cluster(_cluster):
    _cluster.heal()
    yield _cluster
    _cluster.heal()
    _cluster.wait_all_free()


def _prompt(seed, length):
    return [random.Random(seed).randrange(256) for _ in range(length)]


def check_greedy(model, prompt, token_ids):
    """Each token is what transformers finds likeliest behind all that came before it: the answer that its `generate`
    gives, token by token."""
    logits = Reference(model).logits([*prompt, *token_ids])
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == token_ids


async def test_an_answer_three_times_as_long_as_any_pool(cluster, model):
    prompt = _prompt(1, 40)
    num_tokens = 3 * POOL_TOKENS - len(prompt)
    async with cluster.connect() as stub:
        answer = await ask(stub, prompt, max_tokens=num_tokens, **GREEDY)
    assert len(answer.token_ids) == num_tokens
    check_greedy(model, prompt, answer.token_ids)
