"""A seeded sampled answer is a function of the request alone: not of neighbours, preemptions, nodes or crashes."""

import asyncio
import itertools
import random

import pytest

from tests.system.answers import CALL_TIMEOUT_S, ask, ask_all, request, stream
from tests.system.cluster import wait_until
from tests.tiny_models import write_tiny_model

MAX_TOKENS = 120
POOL_TOKENS = 384
SAMPLING = {"max_tokens": MAX_TOKENS, "temperature": 0.9, "top_p": 0.95, "ignore_eos": True}


@pytest.fixture(scope="module")
def cluster(start_cluster, tmp_path_factory):
    model = write_tiny_model(tmp_path_factory.mktemp("model"), "llama", seed=3)
    # A decode node holds two of the answers below, no more: a crowd must be preempted.
    return start_cluster(
        model, num_prefill=2, num_decode=2, node={"max_model_len": 512}, prefill={"num_kv_blocks": 128},
        decode={"num_kv_blocks": POOL_TOKENS // 8},
    )  # fmt: skip


def _questions(count):
    rng = random.Random(11)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(20, 60))] for _ in range(count)]
    return [{"prompt": prompt, "seed": rng.getrandbits(40)} for prompt in prompts]


async def _alone(cluster, questions):
    async with cluster.connect() as stub:
        return [(await ask(stub, question["prompt"], seed=question["seed"], **SAMPLING)) for question in questions]


def _preemptions(cluster):
    return sum(load.num_preemptions for load in cluster.loads().values())


def _busiest_writer(cluster):
    """As soon as one has told that it writes."""
    found = []

    def writers():
        loads = [load for load in cluster.loads().values() if load.role == "decode" and load.num_running]
        found[:] = sorted(loads, key=lambda load: load.num_running)
        return bool(found)

    wait_until(writers, "a node writes", CALL_TIMEOUT_S)
    return found[-1].name


@pytest.mark.nightly
async def test_same_in_a_crowd_after_preemptions_and_on_other_nodes(cluster):
    questions = _questions(10)
    alone = await _alone(cluster, questions)
    cluster.wait_all_free()
    before = _preemptions(cluster)

    readers, writers = set(), set()
    async with cluster.connect() as stub, asyncio.timeout(CALL_TIMEOUT_S):
        for crowd_number in itertools.count():
            messages = [request(q["prompt"], seed=q["seed"], **SAMPLING) for q in questions for _ in range(2)]
            for index, message in enumerate(messages):
                message.cache_salt = f"{crowd_number}-{index}"  # no node has read it before
            crowd = await ask_all(stub, messages)
            for index, answer in enumerate(crowd):
                assert answer.token_ids == alone[index // 2].token_ids
                assert answer.text == alone[index // 2].text
                assert len(answer.token_ids) == MAX_TOKENS
                readers.add(answer.complete.timeline.prefill_node)
                writers.add(answer.complete.timeline.decode_node)
            # An answer that waits too long for room is written where its prompt was read; and where a node was slow, as
            # on a busy machine, it may be spared a whole crowd.
            if len(readers) == 2 and {"decode-0", "decode-1"} <= writers:
                break
    assert readers == {"prefill-0", "prefill-1"}
    cluster.wait_all_free()
    assert _preemptions(cluster) > before


@pytest.mark.nightly
async def test_the_last_request_can_always_finish(cluster):
    """Each of these needs a decode node's whole pool in the end."""
    prompt = _questions(1)[0]["prompt"][:20]
    fields = SAMPLING | {"max_tokens": POOL_TOKENS - len(prompt), "seed": 1}
    async with cluster.connect() as stub:
        alone = await ask(stub, prompt, **fields)
        crowd = await ask_all(stub, [request(prompt, **fields)] * 5)
    assert {answer.finish_reason for answer in crowd} == {"LENGTH"}
    assert all(answer.token_ids == alone.token_ids for answer in crowd)
    cluster.wait_all_free()


async def test_different_seeds_give_different_answers(cluster):
    prompt = list(b"Tell me")
    async with cluster.connect() as stub:
        answers = await ask_all(stub, [request(prompt, seed=seed, **SAMPLING) for seed in range(6)])
        unseeded = await ask_all(stub, [request(prompt, **SAMPLING) for _ in range(2)])
    assert len({tuple(answer.token_ids) for answer in answers + unseeded}) == 8


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
async def test_every_int64_is_a_seed(cluster, seed):
    async with cluster.connect() as stub:
        first, second = await ask_all(stub, [request(list(b"Hi"), seed=seed, **SAMPLING)] * 2)
    assert first.token_ids == second.token_ids


async def test_same_after_their_decode_node_was_killed(cluster):
    question = _questions(1)[0] | SAMPLING | {"max_tokens": 300}
    async with cluster.connect() as stub:
        undisturbed = await ask(stub, **question)
        streams = [stream(stub, request(**question)) for _ in range(4)]
        for answering in streams:
            await answering.tokens(5)
        lost = await asyncio.to_thread(_busiest_writer, cluster)
        cluster.kill(lost)
        answers = [await answering.complete() for answering in streams]
    assert any(answer.complete.timeline.num_restarts == 1 for answer in answers), "nothing was moved"
    for answer in answers:
        assert answer.complete.timeline.decode_node != lost
        assert answer.token_ids == undisturbed.token_ids
        assert answer.text == undisturbed.text
    cluster.heal()
    cluster.wait_all_free()
