"""Nodes that prefill and decode: alone, and beside a prefill node."""

import asyncio
import random

import pytest

from tests.system.answers import ask, outcome, request, stream
from tests.system.cluster import wait_until
from tests.system.oracle import Reference, fake_answer
from tests.tiny_models import write_fake_model, write_tiny_model

GREEDY = {"temperature": 0, "ignore_eos": True}
DEADLINE_S = 240.0
ALONE = {"num_prefill": 0, "num_decode": 0}


def _questions(seed, lengths, max_tokens):
    rng = random.Random(seed)
    return [{"prompt": [rng.randrange(256) for _ in range(n)], "max_tokens": rng.randint(*max_tokens)} for n in lengths]


def _start(stub, questions):
    return [stream(stub, request(**question, **GREEDY)) for question in questions]


def _has_work(cluster, name):
    load = cluster.loads()[name]
    return load.num_running + load.num_waiting > 0


async def _check(questions, streams):
    for question, answering in zip(questions, streams, strict=True):
        answer = await answering.complete()
        assert answer.token_ids == fake_answer(question["prompt"], question["max_tokens"])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_fake_model(tmp_path_factory.mktemp("model"), step_s=0.01, token_s=0.0005)


@pytest.fixture(scope="module")
def _cluster(start_cluster, model):
    options = {"num_kv_blocks": 1000, "max_num_batched_tokens": 64}
    return start_cluster(model, **ALONE, num_mixed=2, mixed=options)


@pytest.fixture
def cluster(_cluster):
    """Two mixed nodes, complete before each test, and with every block free after it."""
    _cluster.heal()
    yield _cluster
    _cluster.heal()
    _cluster.wait_all_free()


@pytest.mark.parametrize(
    ("family", "tp_size"),
    [
        ("llama", 1),
        pytest.param("qwen3", 1, marks=pytest.mark.nightly),
        pytest.param("llama", 2, marks=pytest.mark.nightly),
    ],
)
async def test_greedy_answers_of_one_node_equal_transformers_generate(family, tp_size, start_cluster, tmp_path):
    """Chunks of 64 tokens beside a batch of up to 6; prompts of one token, of many chunks, and on every border."""
    model = write_tiny_model(tmp_path / "model", family)
    options = {"max_num_batched_tokens": 64, "max_num_seqs": 6, "tensor_parallel_size": tp_size}
    cluster = start_cluster(model, **ALONE, num_mixed=1, mixed=options)
    lengths = [1, 2, 7, 8, 9, 16, 17, 31, 63, 64, 65, 100, 127, 128, 129, 200, 257, 420]
    questions = _questions(family, lengths, (1, 30))
    random.Random(family).shuffle(questions)

    async with cluster.connect() as stub:
        streams = []
        for question in questions:
            streams.append(stream(stub, request(**question, temperature=0)))
            await asyncio.sleep(0.01)
        answers = [await answer.complete() for answer in streams]

    reference = Reference(model)
    for question, answer in zip(questions, answers, strict=True):
        assert answer.token_ids == reference.greedy(**question), f"prompt of {len(question['prompt'])} tokens"
        timeline = answer.complete.timeline
        assert (timeline.prefill_node, timeline.decode_node, timeline.num_restarts) == ("mixed-0", "mixed-0", 0)
        assert timeline.kv_alloc_s == timeline.kv_transfer_s == answer.complete.kv_bytes == 0
        assert timeline.prefill_s > 0
    cluster.wait_all_free()
    cluster.stop()


@pytest.mark.nightly
async def test_a_crowd_is_answered_by_both_nodes(cluster):
    rng = random.Random(3)
    questions = _questions(40, [rng.choice([1, 8, 30, 200, 700]) for _ in range(40)], (1, 60))
    async with cluster.connect() as stub:
        streams = _start(stub, questions)
        await _check(questions, streams)
    nodes = [answering.answer.complete.timeline.decode_node for answering in streams]
    assert min(nodes.count("mixed-0"), nodes.count("mixed-1")) > 0


async def test_a_prompt_that_was_read_before_is_not_computed_again(cluster):
    [question] = _questions(5, [200], (5, 5))
    async with cluster.connect() as stub:
        for num_cached_tokens in (0, 192):  # of 25 blocks of 8 the last is computed in any case
            answer = await ask(stub, **question, **GREEDY)
            assert answer.token_ids == fake_answer(question["prompt"], 5)
            assert answer.complete.cached_tokens == num_cached_tokens


async def test_prompts_cancelled_half_way_disturb_nobody(cluster):
    bystanders = _questions(1, [5, 50, 300, 5], (100, 100))
    impatient = _questions(2, [1500] * 6, (1000, 1000))
    async with cluster.connect() as stub:
        streams = _start(stub, bystanders)
        for answering in streams:
            await answering.tokens(2)
        cancelled = _start(stub, impatient)
        await asyncio.sleep(0.3)  # the first of them is read in 0.75 s
        for answering in cancelled:
            answering.cancel()
        assert {outcome(await answering.end()) for answering in cancelled} == {"CANCELLED"}
        await _check(bystanders, streams)
    cluster.wait_all_free()


@pytest.mark.nightly
@pytest.mark.parametrize("moment_s", [0.0, 0.4])
async def test_a_node_killed_half_way_through_prompts(cluster, moment_s):
    questions = _questions(moment_s, [600] * 8 + [10] * 4, (100, 100))
    async with cluster.connect() as stub:
        streams = _start(stub, questions)
        await asyncio.to_thread(wait_until, lambda: _has_work(cluster, "mixed-0"), "it has some of them", DEADLINE_S)
        await asyncio.sleep(moment_s)
        cluster.kill("mixed-0")
        await _check(questions, streams)
    timelines = [answering.answer.complete.timeline for answering in streams]
    assert {timeline.decode_node for timeline in timelines if timeline.num_restarts} == {"mixed-1"}


@pytest.mark.nightly
async def test_it_serves_with_a_prefill_node_and_without_it(start_cluster, model):
    cluster = start_cluster(model, num_decode=0, num_mixed=1)
    questions = _questions(9, [5, 100, 600] * 6, (5, 40))
    async with cluster.connect() as stub:
        await _check(questions, _start(stub, questions))
        streams = _start(stub, questions)
        await asyncio.sleep(0.3)
        cluster.kill("prefill-0")
        await _check(questions, streams)
        assert cluster.is_serving()
        answer = await ask(stub, **questions[2], **GREEDY)
    assert answer.complete.timeline.prefill_node == "mixed-0"
    cluster.wait_all_free()
    cluster.start_node("prefill-0")
    cluster.wait_complete()
    async with cluster.connect() as stub:
        await _check(questions, _start(stub, questions))
    cluster.wait_all_free()
    cluster.stop()
