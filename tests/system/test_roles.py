"""Nodes that change their roles under load: nothing fails, nothing begins again, and no token is another one."""

import asyncio
import random
from collections import Counter

import grpc
import grpc.aio
import pytest

from protos import inference_pb2, inference_pb2_grpc
from tests.system.answers import ask, request, stream
from tests.system.cluster import CALL_DEADLINE_S
from tests.system.oracle import Reference, fake_answer
from tests.tiny_models import write_fake_model, write_tiny_model

DEADLINE_S = 600.0
NUM_ASKERS = 10

# Every node becomes what it was not, so that in the middle the readers write and the writers read, and then it is again
# what it was.
FLIPS = [
    ("prefill-0", "mixed"),
    ("decode-0", "mixed"),
    ("prefill-1", "decode"),
    ("decode-1", "prefill"),
    ("prefill-0", "decode"),
    ("decode-0", "prefill"),
    ("prefill-0", "mixed"),
    ("decode-0", "mixed"),
    ("prefill-1", "prefill"),
    ("decode-1", "decode"),
    ("prefill-0", "prefill"),
    ("decode-0", "decode"),
]


async def set_role(cluster, node, role):
    async with grpc.aio.insecure_channel(cluster.target) as channel:
        admin = inference_pb2_grpc.AdminStub(channel)
        reply = await admin.SetRole(inference_pb2.SetRoleRequest(node=node, role=role), timeout=CALL_DEADLINE_S)
    assert (reply.node.name, reply.node.role) == (node, role)


class Load:
    """Questions that are asked again and again, NUM_ASKERS at a time."""

    def __init__(self, stub, questions):
        self.stub = stub
        self.questions = questions
        self.answers = []  # (prompt, answer)
        self.num_live = 0
        self.is_over = False
        self._ended = asyncio.Condition()

    async def ask(self, number):
        rng = random.Random(number)
        while not self.is_over:
            prompt, max_tokens = rng.choice(self.questions)
            self.num_live += 1
            asking = stream(self.stub, request(prompt, max_tokens=max_tokens, temperature=0))
            answer = await asking.complete(DEADLINE_S)
            self.num_live -= 1
            async with self._ended:
                self.answers.append((prompt, answer))
                self._ended.notify_all()

    async def ended(self, number):
        """Returns when so many answers more have ended."""
        goal = len(self.answers) + number
        async with self._ended:
            await self._ended.wait_for(lambda: len(self.answers) >= goal)


@pytest.mark.nightly
async def test_every_role_is_flipped_and_flipped_back_under_load(start_cluster, tmp_path):
    """Pools hold a few answers, so that some give way; in the middle of all, prompts are handed over in the other
    direction."""
    model = write_tiny_model(tmp_path / "model")
    node = {"num_kv_blocks": 60, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    cluster = start_cluster(model, num_prefill=2, num_decode=2, node=node)
    rng = random.Random(11)
    questions = [
        ([rng.randrange(256) for _ in range(length)], rng.randint(20, 60))
        for length in (1, 7, 8, 9, 30, 63, 64, 65, 100, 150, 200, 300)
    ]
    num_live = []
    async with cluster.connect() as stub, asyncio.timeout(DEADLINE_S):
        load = Load(stub, questions)
        async with asyncio.TaskGroup() as askers:
            for number in range(NUM_ASKERS):
                askers.create_task(load.ask(number))
            await load.ended(2)
            for name, role in FLIPS:
                num_live.append(load.num_live)
                await set_role(cluster, name, role)
                await load.ended(NUM_ASKERS + 1 if (name, role) == ("decode-0", "prefill") else 3)
            load.is_over = True

    reference = Reference(model)
    expected = {tuple(prompt): reference.greedy(prompt, max_tokens) for prompt, max_tokens in questions}
    for prompt, answer in load.answers:
        assert answer.token_ids == expected[tuple(prompt)], f"prompt of {len(prompt)} tokens"
        assert answer.complete.timeline.num_restarts == 0
    timelines = [answer.complete.timeline for _, answer in load.answers]
    pairs = Counter((each.prefill_node.partition("-")[0], each.decode_node.partition("-")[0]) for each in timelines)
    assert min(num_live) > 0
    assert pairs["prefill", "decode"] > 0
    assert pairs["decode", "prefill"] > 0
    cluster.wait_all_free()
    cluster.stop()


@pytest.mark.nightly
async def test_a_node_that_is_made_to_do_both_serves_alone(start_cluster, tmp_path):
    cluster = start_cluster(write_fake_model(tmp_path / "model"))
    await set_role(cluster, "decode-0", "mixed")
    await set_role(cluster, "prefill-0", "decode")
    cluster.kill("prefill-0")
    async with cluster.connect() as stub:
        answer = await ask(stub, [1, 2, 3], max_tokens=5, temperature=0, ignore_eos=True)
    assert answer.token_ids == fake_answer([1, 2, 3], 5)
    assert cluster.is_serving()
    cluster.start_node("prefill-0")
    cluster.wait_complete()
    assert {name: load.role for name, load in cluster.loads().items()} == {"decode-0": "mixed", "prefill-0": "prefill"}
    cluster.stop()
