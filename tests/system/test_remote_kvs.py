"""Requests that are longer than any pool of the cluster: their oldest blocks lie on other nodes."""

import asyncio
import random
import signal

import pytest

from engine.build import build_engine
from serving_core.settings import EngineSettings
from tests.system.answers import ask, reason, refusal, request, stream
from tests.system.oracle import Reference
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.nightly

BLOCK_SIZE = 8
POOL_TOKENS = 1024
DTYPE = "float32"
GREEDY = {"temperature": 0, "ignore_eos": True}
NODE = {"num_kv_blocks": POOL_TOKENS // BLOCK_SIZE, "distributed_kv": True, "dtype": DTYPE}
FOUR = {"num_prefill": 0, "num_decode": 0, "num_mixed": 4, "node": NODE}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, num_key_value_heads=2, max_position_embeddings=4096)
    node = EngineSettings(model=str(folder), num_kv_blocks=1, block_size=BLOCK_SIZE, dtype=DTYPE)
    if not build_engine(node).holds_remote_kv:
        pytest.skip(f"the kernels of this CPU promise nothing for {DTYPE}, without which nodes refuse --distributed-kv")
    return folder


APART = {"num_prefill": 2, "num_decode": 2, "node": NODE}


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
    assert sum(load.num_remote_kvs for load in cluster.loads().values()) >= 3
    assert len(answer.token_ids) == num_tokens
    check_greedy(model, prompt, answer.token_ids)


async def test_a_prompt_longer_than_any_pool_beside_others(cluster, model):
    """It is read in chunks, while answers that fit are written on all nodes."""
    long, short = _prompt(2, 2500), [_prompt(seed, 50) for seed in range(10, 18)]
    reference = Reference(model)
    async with cluster.connect() as stub:
        asked = [ask(stub, long, max_tokens=20, **GREEDY)]
        asked += [ask(stub, prompt, max_tokens=40, **GREEDY) for prompt in short]
        answers = await asyncio.gather(*asked)
    check_greedy(model, long, answers[0].token_ids)
    for prompt, answer in zip(short, answers[1:], strict=True):
        assert answer.token_ids == reference.greedy(prompt, 40, eos_token_id=-1)


async def test_where_phases_are_apart(start_cluster, model):
    """A decode node reads what is longer than a pool, and the prefill nodes hold some of it; what fits travels."""
    cluster = start_cluster(model, **APART)
    long, short = _prompt(30, 2500), [_prompt(seed, 50) for seed in range(31, 35)]
    reference = Reference(model)
    async with cluster.connect() as stub:
        asked = [ask(stub, long, max_tokens=20, **GREEDY), ask(stub, _prompt(36, 40), max_tokens=2000, **GREEDY)]
        asked += [ask(stub, prompt, max_tokens=40, **GREEDY) for prompt in short]
        read, written, *answers = await asyncio.gather(*asked)
    check_greedy(model, long, read.token_ids)
    check_greedy(model, _prompt(36, 40), written.token_ids)
    assert read.complete.kv_bytes == written.complete.kv_bytes == 0
    assert [each.token_ids for each in answers] == [reference.greedy(each, 40, eos_token_id=-1) for each in short]
    assert all(each.complete.kv_bytes > 0 for each in answers)
    cluster.wait_all_free()


async def test_two_long_answers_at_once_and_one_that_is_cancelled(cluster, model):
    prompts = [_prompt(seed, 1000) for seed in (3, 4, 5)]
    async with cluster.connect() as stub:
        cancelled = stream(stub, request(prompts[2], max_tokens=2000, **GREEDY))
        await cancelled.tokens(300)
        both = [asyncio.create_task(ask(stub, each, max_tokens=600, **GREEDY)) for each in prompts[:2]]
        cancelled.cancel()
        answers = await asyncio.gather(*both)
    for prompt, answer in zip(prompts, answers, strict=False):
        check_greedy(model, prompt, answer.token_ids)


async def test_older_answers_grow_where_tiles_of_a_younger_one_lie(cluster, model):
    """One is written on each node, which the tiles of the long one leave 256 tokens. That begins again instead, where
    it is: nobody goes elsewhere, where a prompt would be counted anew."""
    older, long = [_prompt(seed, 50) for seed in range(20, 24)], _prompt(8, 900)
    num_before, num_preemptions = (_sum(cluster, field) for field in ("num_prompt_tokens", "num_preemptions"))
    async with cluster.connect() as stub:
        asked = [stream(stub, request(prompt, max_tokens=500, **GREEDY)) for prompt in older]
        for each in asked:
            await each.tokens(1)
        answer = await ask(stub, long, max_tokens=200, **GREEDY)
        answers = [await each.complete() for each in asked]
    cluster.wait_all_free()
    assert _sum(cluster, "num_preemptions") > num_preemptions
    assert _sum(cluster, "num_prompt_tokens") - num_before == sum(map(len, [*older, long]))
    for prompt, each in zip([*older, long], [*answers, answer], strict=True):
        assert each.complete.timeline.num_restarts == 0
        check_greedy(model, prompt, each.token_ids)


def _sum(cluster, field):
    return sum(getattr(load, field) for load in cluster.loads().values())


async def test_what_not_all_pools_together_can_hold_is_refused(cluster):
    async with cluster.connect() as stub:
        error = await refusal(stub, request(_prompt(6, 100), max_tokens=3300, **GREEDY))
    assert reason(error) == "PROMPT_TOO_LONG"
    assert "(3328)" in error.details()  # a pool, and three quarters of three others


@pytest.mark.parametrize("strike", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_host_that_dies_or_stands_still(start_cluster, model, strike):
    """The answer begins again elsewhere, and goes on with the same tokens."""
    cluster = start_cluster(model, **FOUR, coordinator={"node_timeout_s": 5})
    prompt = _prompt(7, 1000)
    async with cluster.connect() as stub:
        asking = stream(stub, request(prompt, max_tokens=900, **GREEDY))
        await asking.tokens(200)
        holder = max(cluster.loads().values(), key=lambda load: load.num_remote_kv_blocks)
        assert holder.num_remote_kv_blocks > 0
        cluster.expect_end(holder.name).send(strike)
        answer = await asking.complete()
    check_greedy(model, prompt, answer.token_ids)
    assert answer.complete.timeline.num_restarts >= 1
    cluster.children[holder.name].kill()
    cluster.heal()
    cluster.wait_all_free()
    cluster.stop()
