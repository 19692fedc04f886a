"""Many clients at once, patient and impatient: everyone is served rightly, and nothing stays behind."""

import asyncio
import random

import pytest

from protos.inference_pb2 import AbortRequest
from tests.system.answers import CALL_TIMEOUT_S, ask, outcome, request, stream
from tests.system.oracle import fake_answer
from tests.tiny_models import write_fake_model

BYSTANDER = {"max_tokens": 400, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def cluster(start_cluster, tmp_path_factory):
    model = write_fake_model(tmp_path_factory.mktemp("model"), step_s=0.002, token_s=0.00005)
    return start_cluster(model, num_prefill=2, num_decode=2, node={"num_kv_blocks": 400})


def _question(rng, length, max_tokens):
    return {"prompt": [rng.randrange(256) for _ in range(length)], "max_tokens": max_tokens}


async def test_fifty_clients_with_mixed_lengths(cluster):
    rng = random.Random(50)
    questions = [_question(rng, rng.choice([1, 8, 30, 200, 900]), rng.choice([1, 2, 17, 90, 250])) for _ in range(50)]

    async def client(question):
        async with cluster.connect() as stub:
            return await ask(stub, **question, temperature=0, ignore_eos=True)

    answers = await asyncio.gather(*[client(question) for question in questions])
    for question, answer in zip(questions, answers, strict=True):
        assert answer.token_ids == fake_answer(question["prompt"], question["max_tokens"])
    cluster.wait_all_free()


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_a_crowd_of_the_shortest_answers(cluster, max_tokens):
    """An answer of one token ends on the prefill node, while its transfer is under way."""
    rng = random.Random(max_tokens)
    questions = [_question(rng, rng.choice([1, 30, 300]), max_tokens) for _ in range(100)]
    async with cluster.connect() as stub:
        streams = [stream(stub, request(**question, temperature=0, ignore_eos=True)) for question in questions]
        for question, answering in zip(questions, streams, strict=True):
            answer = await answering.complete()
            assert answer.token_ids == fake_answer(question["prompt"], max_tokens)
            assert answer.complete.timeline.num_restarts == 0
    cluster.wait_all_free()


@pytest.mark.nightly
async def test_two_hundred_cancelled_at_random_moments(cluster):
    rng = random.Random(200)
    room = asyncio.Semaphore(40)

    async def impatient(stub, number):
        question = _question(rng, rng.choice([1, 100, 1000]), 500)
        message = request(**question, temperature=0, ignore_eos=True, request_id=f"impatient-{number}")
        way = rng.choice(["before it is answered", "after some tokens", "by Abort", "by deadline"])
        moment_s, num_tokens = rng.uniform(0, 0.3), rng.randint(1, 40)
        async with room:
            answering = stream(stub, message, **({"timeout": moment_s} if way == "by deadline" else {}))
            if way == "after some tokens":
                await answering.tokens(num_tokens)
                answering.cancel()
            elif way != "by deadline":
                await asyncio.sleep(moment_s)
                if way == "by Abort":
                    await stub.Abort(AbortRequest(request_ids=[message.request_id]))
                else:
                    answering.cancel()
            return way, await answering.end(), question

    async with cluster.connect() as stub:
        patient = [_question(rng, length, BYSTANDER["max_tokens"]) | BYSTANDER for length in (5, 50, 500, 900)]
        bystanders = [stream(stub, request(**question)) for question in patient]
        ended = await asyncio.gather(*[impatient(stub, number) for number in range(200)])
        answers = [await bystander.complete() for bystander in bystanders]
        after = await ask(stub, [1, 2, 3], max_tokens=5, temperature=0, ignore_eos=True)

    cluster.wait_all_free()
    for question, answer in zip(patient, answers, strict=True):
        assert answer.token_ids == fake_answer(question["prompt"], BYSTANDER["max_tokens"])
    assert after.token_ids == fake_answer([1, 2, 3], 5)
    allowed = {
        "before it is answered": {"CANCELLED"},
        "after some tokens": {"CANCELLED"},
        "by Abort": {"ABORT"},
        "by deadline": {"DEADLINE_EXCEEDED"},
    }
    for way, stopped, question in ended:
        how = outcome(stopped)
        assert how == "LENGTH" or how.split()[0] in allowed[way], f"{way}: {how}"
        tokens = stopped.answer.token_ids
        assert tokens == fake_answer(question["prompt"], len(tokens)), "wrong tokens before the cancel"
    assert sum(outcome(stopped) != "LENGTH" for _, stopped, _ in ended) >= 150, "too few were cancelled in flight"


async def test_slow_readers_do_not_disturb_others(cluster):
    rng = random.Random(16)
    async with cluster.connect() as slow, cluster.connect() as stub:
        stalled = [
            slow.Generate(request([number], max_tokens=2000, temperature=0), timeout=CALL_TIMEOUT_S)
            for number in range(8)
        ]
        for call in stalled:
            await call.read()
        questions = [_question(rng, 40, 100) for _ in range(8)]
        answers = await asyncio.gather(
            *[ask(stub, **question, temperature=0, ignore_eos=True) for question in questions]
        )
        for question, answer in zip(questions, answers, strict=True):
            assert answer.token_ids == fake_answer(question["prompt"], 100)
        for call in stalled:
            call.cancel()
    cluster.wait_all_free()


async def test_a_closed_channel_frees_everything(cluster):
    async with cluster.connect() as stub:
        for number in range(10):
            call = stub.Generate(request([number], max_tokens=2000, temperature=0, ignore_eos=True))
            await call.read()
    cluster.wait_all_free()


async def test_deadline_frees_everything(cluster):
    async with cluster.connect() as stub:
        message = request([1], max_tokens=3000, temperature=0, ignore_eos=True)
        ended = [await late.end() for late in [stream(stub, message, timeout=0.5) for _ in range(5)]]
    assert {outcome(late).split()[0] for late in ended} == {"DEADLINE_EXCEEDED"}
    cluster.wait_all_free()
