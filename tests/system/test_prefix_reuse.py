"""Requests that begin alike: what is held already is neither computed nor sent again, and answers stay the same."""

import random

import pytest

from protos.inference_pb2 import GenerateRequest
from tests.system.answers import ask, request, stream
from tests.system.cluster import CALL_DEADLINE_S, wait_until
from tests.system.oracle import Reference, fake_answer
from tests.tiny_models import write_fake_model, write_tiny_model

BLOCK_SIZE = 8
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), num_key_value_heads=2)


@pytest.fixture(scope="module")
def cluster(start_cluster, model):
    """Nothing is lent: what each node holds itself is counted (test_lending.py has the rest)."""
    alone, sizes = {"remote_prefix_fetch": "never"}, {"max_num_batched_tokens": 64}
    return start_cluster(model, node={"num_kv_blocks": 400}, prefill=sizes, coordinator=alone)


def _prompt(seed, length):
    return [random.Random(seed).randrange(256) for _ in range(length)]


def _salted(prompt, salt, max_tokens=8):
    message: GenerateRequest = request(prompt, max_tokens=max_tokens, **GREEDY)
    message.cache_salt = salt
    return message


async def test_the_second_turn_of_a_chat_ships_only_its_new_blocks(cluster, model):
    reference = Reference(model)
    first = _prompt(1, 100)
    async with cluster.connect() as stub:
        answer = await ask(stub, first, max_tokens=30, **GREEDY)
        assert answer.token_ids == reference.greedy(first, 30, eos_token_id=-1)
        assert (answer.complete.cached_tokens, answer.complete.kv_bytes_saved) == (0, 0)
        block_bytes = answer.complete.kv_bytes // 13  # 100 tokens
        second = [*first, *answer.token_ids, *_prompt(2, 50)]
        again = await ask(stub, second, max_tokens=20, **GREEDY)
    assert again.token_ids == reference.greedy(second, 20, eos_token_id=-1)
    # The prefill node holds the first prompt's 12 full blocks. The decode node holds 129 tokens: all but the last token
    # of the answer, whose KV no step has computed.
    assert again.complete.cached_tokens == 12 * BLOCK_SIZE
    assert again.complete.kv_bytes_saved == 16 * block_bytes
    assert again.complete.kv_bytes == (23 - 16) * block_bytes  # 180 tokens are 23 blocks
    cluster.wait_all_free()


async def test_the_same_prompt_again(cluster, model):
    """All of its blocks are held where it decodes; its last token is computed all the same."""
    prompt = _prompt(3, 64)
    expected = Reference(model).greedy(prompt, 16, eos_token_id=-1)
    async with cluster.connect() as stub:
        answers = [await ask(stub, prompt, max_tokens=16, **GREEDY) for _ in range(3)]
    assert [answer.token_ids for answer in answers] == [expected] * 3
    assert [answer.complete.cached_tokens for answer in answers] == [0, 56, 56]
    assert [answer.complete.kv_bytes for answer in answers][1:] == [0, 0]
    cluster.wait_all_free()


async def test_salted_requests_share_only_with_their_salt(cluster):
    prompt = _prompt(4, 80)
    cached = []
    async with cluster.connect() as stub:
        for salt in ("", "", "mine", "yours", "mine"):
            answer = await stream(stub, _salted(prompt, salt)).complete()
            cached.append((answer.complete.cached_tokens, answer.complete.kv_bytes_saved > 0))
    assert cached == [(0, False), (72, True), (0, False), (0, False), (72, True)]


async def test_prompts_with_a_common_beginning_at_the_same_time(cluster, model):
    reference = Reference(model)
    beginning = _prompt(5, 90)
    prompts = [[*beginning, *_prompt(100 + i, 5 + i)] for i in range(12)]
    async with cluster.connect() as stub:
        await ask(stub, beginning, max_tokens=1, **GREEDY)
        streams = [stream(stub, request(prompt, max_tokens=12, **GREEDY)) for prompt in prompts]
        answers = [await answering.complete() for answering in streams]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == reference.greedy(prompt, 12, eos_token_id=-1)
        assert answer.complete.cached_tokens >= 88
    cluster.wait_all_free()


async def test_nodes_that_have_computed_nothing_compute_a_common_beginning_once(start_cluster, model):
    """Prompts that come together, at a fleet that has just started."""
    alone, sizes = {"remote_prefix_fetch": "never"}, {"max_num_batched_tokens": 64}
    cluster = start_cluster(model, num_prefill=3, node={"num_kv_blocks": 400}, prefill=sizes, coordinator=alone)
    reference, beginning = Reference(model), _prompt(7, 40 * BLOCK_SIZE)
    wait_until(lambda: all(load.rss_bytes for load in cluster.loads().values()), "heartbeats", CALL_DEADLINE_S)
    prompts = [[*beginning, *_prompt(300 + i, 5)] for i in range(6)]
    async with cluster.connect() as stub:
        streams = [stream(stub, request(prompt, max_tokens=4, **GREEDY)) for prompt in prompts]
        answers = [await answering.complete() for answering in streams]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == reference.greedy(prompt, 4, eos_token_id=-1)
    cached = sorted(answer.complete.cached_tokens for answer in answers)
    assert cached == [0, *[40 * BLOCK_SIZE] * 5]
    assert len({answer.complete.timeline.prefill_node for answer in answers}) == 1
    cluster.stop()


async def test_what_new_prompts_begin_with_travels_once(cluster, model):
    """All but the first one wait for it, unless their first tokens come before any of its KV: then another try."""
    reference = Reference(model)
    async with cluster.connect() as stub:
        await ask(stub, _prompt(6, 20), max_tokens=2, **GREEDY)  # the nodes know each other now
        for attempt in range(5):
            beginning = _prompt(600 + attempt, 40 * BLOCK_SIZE)
            prompts = [[*beginning, *_prompt(200 + i, 5)] for i in range(4)]
            streams = [stream(stub, request(prompt, max_tokens=4, **GREEDY)) for prompt in prompts]
            answers = [await answering.complete() for answering in streams]
            for prompt, answer in zip(prompts, answers, strict=True):
                assert answer.token_ids == reference.greedy(prompt, 4, eos_token_id=-1)
            sent = sorted(answer.complete.kv_bytes for answer in answers)
            if sent[:3] == [sent[3] // 41] * 3:
                break
    assert sent[:3] == [sent[3] // 41] * 3, "the last block of each, and all 41 of one"
    cluster.wait_all_free()


@pytest.mark.nightly
async def test_a_pool_too_small_to_keep_much(start_cluster, tmp_path):
    """Blocks are evicted all the time, requests are preempted, prefixes come and go: never a wrong token."""
    model = write_fake_model(tmp_path / "model")
    cluster = start_cluster(
        model,
        node={"num_kv_blocks": 40},
        prefill={"max_num_batched_tokens": 64},
        decode={"max_num_seqs": 6},
    )
    rng = random.Random(6)
    beginnings = [_prompt(seed, 60) for seed in range(5)]
    prompts = [
        [*rng.choice(beginnings)[: rng.randint(1, 60)], *_prompt(1000 + i, rng.randint(0, 30))] for i in range(80)
    ]
    async with cluster.connect() as stub:
        streams = [stream(stub, request(prompt, max_tokens=40, **GREEDY)) for prompt in prompts]
        for prompt, answering in zip(prompts, streams, strict=True):
            assert (await answering.complete()).token_ids == fake_answer(prompt, 40)
    cluster.wait_all_free()
    loads = cluster.loads()
    assert loads["prefill-0"].num_cached_tokens > 0
    assert loads["decode-0"].num_cached_tokens > 0
    cluster.stop()


@pytest.mark.nightly
async def test_the_router_sends_a_prompt_to_where_its_beginning_is(start_cluster, tmp_path):
    model = write_fake_model(tmp_path / "model")
    cluster = start_cluster(model, num_prefill=3, num_decode=3, node={"num_kv_blocks": 400})
    async with cluster.connect() as stub:
        places = {}
        for seed in range(6):
            answer = await ask(stub, _prompt(seed, 200), max_tokens=4, **GREEDY)
            places[seed] = (answer.complete.timeline.prefill_node, answer.complete.timeline.decode_node)
        wait_until(lambda: _num_cached(cluster) >= 6 * 2 * 25, "all have told", CALL_DEADLINE_S)
        for seed in reversed(range(6)):
            answer = await ask(stub, [*_prompt(seed, 200), 1, 2, 3], max_tokens=4, **GREEDY)
            assert (answer.complete.timeline.prefill_node, answer.complete.timeline.decode_node) == places[seed]
            assert answer.complete.cached_tokens == 200
    cluster.stop()


def _num_cached(cluster):
    return sum(node.num_blocks_cached for node in cluster.loads().values())


@pytest.mark.nightly
async def test_without_caching_nothing_is_reused(start_cluster, tmp_path):
    model = write_fake_model(tmp_path / "model")
    cluster = start_cluster(model, node={"num_kv_blocks": 100}, env={"SPLITSERVE_ENABLE_PREFIX_CACHING": "false"})
    prompt = _prompt(7, 100)
    async with cluster.connect() as stub:
        answers = [await ask(stub, prompt, max_tokens=10, **GREEDY) for _ in range(2)]
    for answer in answers:
        assert answer.token_ids == fake_answer(prompt, 10)
        assert (answer.complete.cached_tokens, answer.complete.kv_bytes_saved) == (0, 0)
    cluster.stop()
