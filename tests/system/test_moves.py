"""Answers that move and roles that change while everything runs: nobody who asks may notice.

The fake model's answers are known in advance. Those of real weights are compared, with their logprobs, with the answer
that stayed where it was.
"""

import asyncio
import itertools
import random
import sys
import time
from collections import Counter

import pytest

from splitserve import AsyncClient
from tests.system.answers import request, stream
from tests.system.oracle import fake_answer
from tests.tiny_models import write_fake_model, write_tiny_model

pytestmark = pytest.mark.nightly

GREEDY = {"temperature": 0, "ignore_eos": True}
DEADLINE_S = 800.0
NUM_FLIPS = 36
NUM_LIVE = 100


def _question(rng, max_prompt, max_tokens):
    prompt = [rng.randrange(256) for _ in range(rng.randint(1, max_prompt))]
    return {"prompt": prompt, "max_tokens": rng.randint(max_tokens // 4, max_tokens)}


async def _until(condition, deadline_s=DEADLINE_S):
    """What is true of it then."""
    async with asyncio.timeout(deadline_s):
        while not (found := condition()):
            await asyncio.sleep(0.05)
    return found


def _writers(cluster):
    """Names of the nodes that have told of an answer that they write."""
    return [name for name, load in cluster.loads().items() if load.num_running]


class Load:
    """Questions, as many at a time as are wanted; each is asked once."""

    def __init__(self, stub, make_question):
        self.asked = []
        self.num_live = 0
        self._stub, self._make_question = stub, make_question
        self._is_over = False

    async def ask(self):
        while not self._is_over:
            question = self._make_question()
            self.num_live += 1
            answer = await stream(self._stub, request(**question, **GREEDY), timeout=DEADLINE_S).complete(DEADLINE_S)
            self.num_live -= 1
            self.asked.append((question, answer))

    def end(self):
        self._is_over = True

    def check(self):
        for question, answer in self.asked:
            assert answer.token_ids == fake_answer(question["prompt"], question["max_tokens"])
            assert answer.complete.timeline.num_restarts == 0, "a prompt was read again"


async def test_all_roles_change_under_load(start_cluster, tmp_path, capsys):
    """Tiny pools, so that answers give way and credits are taken back, and KV transfers go both ways."""
    model = write_fake_model(tmp_path / "model", step_s=0.004, token_s=0.00002)
    node = {"num_kv_blocks": 150, "max_num_batched_tokens": 128, "max_num_seqs": 24, "credit_timeout_s": DEADLINE_S}
    node["descriptor_timeout_s"] = DEADLINE_S
    cluster = start_cluster(model, num_prefill=1, num_decode=1, num_mixed=1, node=node)
    rng = random.Random(36)
    num_live, flips = [], []
    async with cluster.connect() as stub, AsyncClient(cluster.target) as client, asyncio.timeout(DEADLINE_S):
        load = Load(stub, lambda: _question(rng, 120, 80))
        async with asyncio.TaskGroup() as askers:
            for _ in range(NUM_LIVE):
                askers.create_task(load.ask())
            await _until(lambda: len(load.asked) >= 10)
            roles = dict(zip(cluster.names, ("prefill", "decode", "mixed"), strict=True))
            while len(flips) < NUM_FLIPS:
                name, role = rng.choice(cluster.names), rng.choice(["prefill", "decode", "mixed"])
                others = {each for other, each in roles.items() if other != name} | {role}
                if roles[name] == role or not ("mixed" in others or {"prefill", "decode"} <= others):
                    continue
                num_live.append(load.num_live)
                assert (await client.set_role(name, role)).role == role
                roles[name] = role
                flips.append((name, role))
                num_asked = len(load.asked)
                await _until(lambda goal=num_asked + 5: len(load.asked) >= goal)
            load.end()

    load.check()
    timelines = [answer.complete.timeline for _, answer in load.asked]
    pairs = Counter((each.prefill_node, each.decode_node) for each in timelines)
    counts = {
        "flips": len(flips),
        "answers": len(load.asked),
        "live at a flip, at least": min(num_live),
        "gave way": sum(each.num_preemptions for each in cluster.loads().values()),
        "migrated": sum(each.num_migrations for each in timelines),
        "from one node to another": {" -> ".join(pair): count for pair, count in sorted(pairs.items())},
    }
    with capsys.disabled():
        sys.stdout.write(f"\n{counts}\n")
    assert min(num_live) >= 0.9 * NUM_LIVE
    assert counts["gave way"] > 0
    both_ways = [pair for pair in itertools.permutations(cluster.names, 2) if pairs[pair] and pairs[pair[::-1]]]
    assert both_ways, "KV transfers went one way only"
    cluster.wait_all_free()


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "num_migrations", "max_tokens"),
    [("bfloat16", "auto", 4, 4200), ("bfloat16", "int8", 3, 3400), ("float32", "auto", 3, 3400)],
)
async def test_an_answer_that_moves_keeps_its_bits(
    dtype, kv_cache_dtype, num_migrations, max_tokens, start_cluster, tmp_path
):
    """From one of two nodes to the other and back, whenever its node is told to write no more."""
    model = write_tiny_model(tmp_path / "model", dtype=dtype, max_position_embeddings=16384)
    options = {"node": {"kv_cache_dtype": kv_cache_dtype, "num_kv_blocks": 1600}, "coordinator": {"heartbeat_s": 0.05}}
    cluster = start_cluster(model, num_prefill=0, num_decode=0, num_mixed=2, **options)
    prompt = [random.Random(10).randrange(256) for _ in range(40)]
    question = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "logprobs": 0,
        "temperature": 0.8,
        "seed": 10,
        "ignore_eos": True,
    }

    def salted(salt):
        message = request(**question)
        if kv_cache_dtype == "int8":  # bits of 8-bit keys depend on where a cached prefix ends
            message.cache_salt = salt
        return message

    async with cluster.connect() as stub, AsyncClient(cluster.target) as client, asyncio.timeout(DEADLINE_S):
        stayed = await stream(stub, salted("stays"), timeout=DEADLINE_S).complete(DEADLINE_S)
        migrating = stream(stub, salted("migrations"), timeout=DEADLINE_S)
        await migrating.tokens(20)
        names = cluster.names
        for number in range(num_migrations):
            (at,) = await _until(lambda: _writers(cluster))
            other = names[1 - names.index(at)]
            await client.set_role(other, "mixed")
            await client.set_role(at, "prefill")
            await _until(lambda away=at: away not in _writers(cluster))
            num_tokens = len(migrating.answer.token_ids)
            await migrating.tokens(min(num_tokens + 20, question["max_tokens"]))
            assert not migrating.has_ended, f"the answer ended before move {number + 1}"
        migrated = await migrating.complete(DEADLINE_S)

    assert migrated.complete.timeline.num_migrations >= num_migrations
    assert migrated.complete.timeline.num_restarts == 0
    assert migrated.complete.migrated_kv_bytes > 0
    assert migrated.token_ids == stayed.token_ids
    assert [each.logprob for each in migrated.logprobs] == [each.logprob for each in stayed.logprobs]
    cluster.wait_all_free()


async def test_a_node_with_long_answers_drains_under_load(start_cluster, tmp_path, capsys):
    """Answers of 2000 tokens take 10 s and more; that they are let go of does not."""
    model = write_fake_model(tmp_path / "model", step_s=0.005)
    cluster = start_cluster(model, num_prefill=1, num_decode=2, node={"num_kv_blocks": 4000})
    rng = random.Random(2000)
    async with cluster.connect() as stub, AsyncClient(cluster.target) as client, asyncio.timeout(DEADLINE_S):
        questions = [{"prompt": [rng.randrange(256)] * 30, "max_tokens": 2000} for _ in range(12)]
        streams = [stream(stub, request(**question, **GREEDY), timeout=DEADLINE_S) for question in questions]
        for answering in streams:
            await answering.tokens(100)
        assert cluster.loads()["decode-0"].num_running > 2
        began_at = time.monotonic()
        left = [num_left async for num_left in client.drain("decode-0", deadline_s=DEADLINE_S)]
        drained_s = time.monotonic() - began_at
        num_tokens = max(len(answering.answer.token_ids) for answering in streams)
        assert left[-1] == 0
        assert num_tokens < 2000, "the drain waited for answers to end"
        answers = [await answering.complete(DEADLINE_S) for answering in streams]
    for question, answer in zip(questions, answers, strict=True):
        assert answer.token_ids == fake_answer(question["prompt"], 2000)
        assert answer.complete.timeline.num_restarts == 0
    migrated = [answer.complete for answer in answers if answer.complete.timeline.num_migrations]
    pauses_ms = sorted(round(1000 * each.timeline.migration_pause_s, 1) for each in migrated)
    with capsys.disabled():
        sys.stdout.write(f"\n{len(migrated)} answers moved away in {drained_s:.2f} s, pauses {pauses_ms} ms\n")
    assert migrated
    cluster.wait_all_free()
