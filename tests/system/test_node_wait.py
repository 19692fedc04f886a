"""Nodes that are gone for a while, and a coordinator that stands still: whoever asks waits, and loses nothing."""

import asyncio
import contextlib
import random
import signal

import grpc
import pytest

from protos import inference_pb2_grpc
from tests.system.answers import outcome, request, stream
from tests.system.cluster import CALL_DEADLINE_S, wait_until
from tests.system.oracle import fake_answer
from tests.tiny_models import write_fake_model

pytestmark = pytest.mark.nightly

GREEDY = {"temperature": 0, "ignore_eos": True}
STOPPED_S = 12.0  # three times what nodes need to give a coordinator up


@pytest.fixture(scope="module")
def _cluster(start_cluster, tmp_path_factory):
    model = write_fake_model(tmp_path_factory.mktemp("model"), step_s=0.02)
    return start_cluster(model, num_prefill=2, num_decode=2, coordinator={"node_wait_s": 90, "max_restarts": 10})


@pytest.fixture
def cluster(_cluster):
    _cluster.heal()
    yield _cluster
    _cluster.heal()
    _cluster.wait_all_free()


def _questions(count, *, max_tokens=200):
    rng = random.Random(count)
    return [{"prompt": [rng.randrange(256) for _ in range(30)], "max_tokens": max_tokens} for _ in range(count)]


def _start(stub, questions):
    return [stream(stub, request(**question, **GREEDY)) for question in questions]


async def _check_answers(questions, streams):
    for question, answering in zip(questions, streams, strict=True):
        await answering.end()
        assert outcome(answering) == "LENGTH"
        assert answering.answer.token_ids == fake_answer(question["prompt"], question["max_tokens"])


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_answers_outlive_the_restart_of_all_nodes_of_a_role(cluster, role):
    names = [f"{role}-0", f"{role}-1"]
    questions = _questions(8)
    async with cluster.connect() as stub:
        streams = _start(stub, questions[:4])
        for answering in streams:
            await answering.tokens(3)
        _kill_at_once(cluster, names)
        wait_until(lambda: not cluster.attached() & set(names), "both are lost", CALL_DEADLINE_S)
        streams += _start(stub, questions[4:])
        assert not cluster.is_serving()
        for name in names:
            cluster.start_node(name)
        await _check_answers(questions, streams)
    restarts = [answering.answer.complete.timeline.num_restarts for answering in streams]
    assert restarts[4:] == [0] * 4, "those that came meanwhile have lost nothing"


async def test_answers_outlive_a_coordinator_that_stands_still(cluster):
    """For clients that bear it: the stub here keeps no connection alive by pings, as HTTP clients do not."""
    questions = _questions(6, max_tokens=400)
    async with grpc.aio.insecure_channel(cluster.target) as channel:
        streams = _start(inference_pb2_grpc.InferenceStub(channel), questions)
        for answering in streams:
            await answering.tokens(3)
        with _stopped(cluster.children["coordinator"]):
            await asyncio.sleep(STOPPED_S)
        await _check_answers(questions, streams)


def _kill_at_once(cluster, names):
    """No answer finds the second one alive after the first has died."""
    for name in names:
        cluster.children[name].send(signal.SIGSTOP)
    for name in names:
        cluster.kill(name)


@contextlib.contextmanager
def _stopped(child):
    child.send(signal.SIGSTOP)
    try:
        yield
    finally:
        child.send(signal.SIGCONT)
