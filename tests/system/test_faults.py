"""Processes die, hang, come back and leave, with requests in every phase.

The bound on waiting is the product's promise: within 5 s of a SIGKILL every client hears something. The answers of
the fake model are known in advance, so no test can mistake wrong tokens for right ones.
"""

import asyncio
import contextlib
import itertools
import random
import signal
import time

import pytest

from protos.inference_pb2 import AbortRequest
from tests.effort import few
from tests.system.answers import ask, details, outcome, reason, refusal, request, stream
from tests.system.cluster import START_DEADLINE_S, STOP_DEADLINE_S, wait_until
from tests.system.oracle import fake_answer
from tests.tiny_models import write_fake_model

# 5 s are promised on an idle machine. Without detection answers end with the deadline of their call, 240 s.
PROMISED_S = 30.0
DETECTION_OF_HANGS_S = 60.0  # a restarted prompt then queues on the other node
NODE_TIMEOUT_S = 8  # a busy machine may keep a node from saying anything for a while
LONG = 800  # tokens of answers that are far from their end when something strikes
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def _cluster(start_cluster, tmp_path_factory):
    # 8 kB of KV for each token: transfers take long enough to be caught in the middle.
    shape = {"num_layers": 8, "num_kv_heads": 4, "head_dim": 32}
    model = write_fake_model(tmp_path_factory.mktemp("model"), **shape, step_s=0.01, token_s=0.0005)
    return start_cluster(
        model,
        num_prefill=2,
        num_decode=2,
        # tests/system/test_node_wait.py has longer waits
        coordinator={"node_wait_s": 1, "node_timeout_s": NODE_TIMEOUT_S},
        node={"num_kv_blocks": 1000},
        prefill={"max_num_batched_tokens": 64},
    )


@pytest.fixture
def cluster(_cluster):
    """The module's cluster, complete before each test, and with every block free after it."""
    _cluster.heal()
    yield _cluster
    _cluster.heal()
    _cluster.wait_all_free()


def _questions(count, *, length=30, max_tokens=100):
    rng = random.Random(count * length)
    return [{"prompt": [rng.randrange(256) for _ in range(length)], "max_tokens": max_tokens} for _ in range(count)]


def _start(stub, questions):
    return [stream(stub, request(**question, **GREEDY)) for question in questions]


async def _wait_tokens(streams, count):
    for answering in streams:
        await answering.tokens(count)


async def _check_answers(questions, streams):
    for question, answering in zip(questions, streams, strict=True):
        answer = await answering.complete()
        assert answer.token_ids == fake_answer(question["prompt"], question["max_tokens"])


def _longest_silence_s(streams, since):
    """The longest time from `since` to a stream's next message or end, and between two messages after it."""
    silences = []
    for answering in streams:
        times = [since, *(at for at in answering.arrivals if at > since)]
        silences += [after - before for before, after in itertools.pairwise(times)]
    return max(silences)


async def _serves(cluster):
    """A fresh client gets a right answer."""
    async with cluster.connect() as stub:
        answer = await ask(stub, [7, 8, 9], max_tokens=12, **GREEDY)
    assert answer.token_ids == fake_answer([7, 8, 9], 12)


# ---- SIGKILL ----


async def test_decode_node_killed_while_it_answers(cluster):
    questions = _questions(12, max_tokens=100)
    async with cluster.connect() as stub:
        streams = _start(stub, questions)
        await _wait_tokens(streams, 5)
        killed_at = time.monotonic()
        cluster.kill("decode-0")
        await _check_answers(questions, streams)
        await _serves(cluster)
    assert _longest_silence_s(streams, killed_at) < PROMISED_S
    assert sum(answering.answer.complete.timeline.num_restarts for answering in streams) > 0, "nothing was moved"


@pytest.mark.parametrize(
    "moment_s", [pytest.param(0.05, marks=pytest.mark.nightly), 0.3, pytest.param(0.8, marks=pytest.mark.nightly)]
)
async def test_prefill_node_killed_while_it_reads_prompts(cluster, moment_s):
    questions = _questions(12, length=400, max_tokens=20)
    async with cluster.connect() as stub:
        streams = _start(stub, questions)
        await asyncio.sleep(moment_s)
        cluster.kill("prefill-0")
        await _check_answers(questions, streams)
        await _serves(cluster)


@pytest.mark.nightly
async def test_nodes_of_both_roles_killed_at_once(cluster):
    questions = _questions(12, length=200, max_tokens=60)
    async with cluster.connect() as stub:
        streams = _start(stub, questions)
        await asyncio.sleep(0.5)
        cluster.kill("prefill-1", "decode-1")
        await _check_answers(questions, streams)
        await _serves(cluster)


async def test_coordinator_killed_and_started_again(cluster):
    async with cluster.connect() as stub:
        streams = _start(stub, _questions(10, max_tokens=LONG) + _questions(4, length=900, max_tokens=LONG))
        await _wait_tokens(streams[:10], 3)
        killed_at = time.monotonic()
        cluster.kill("coordinator")
        ended = [await answering.end(PROMISED_S) for answering in streams]
        assert time.monotonic() - killed_at < PROMISED_S
        assert {outcome(answering) for answering in ended} == {"UNAVAILABLE"}
        cluster.start_coordinator()
        cluster.wait_complete()
        cluster.wait_all_free()
        lost = [answering.answer.request_id for answering in ended[:10]]
        reply = await stub.Abort(AbortRequest(request_ids=lost), wait_for_ready=True)
        assert sorted(reply.unknown) == sorted(lost)
    await _serves(cluster)


@pytest.mark.nightly
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_last_node_of_a_role_killed(cluster, role):
    expected = f"NO_{role.upper()}_WORKER"
    max_tokens = LONG if role == "decode" else 300
    async with cluster.connect() as stub:
        streams = _start(stub, _questions(6, max_tokens=max_tokens) + _questions(6, length=900, max_tokens=max_tokens))
        await _wait_tokens(streams[:6], 3)
        killed_at = time.monotonic()
        cluster.kill(f"{role}-0", f"{role}-1")
        if role == "decode":
            ended = [await answering.end(PROMISED_S) for answering in streams]
            assert time.monotonic() - killed_at < PROMISED_S
            assert {outcome(answering) for answering in ended} <= {f"UNAVAILABLE {expected}", "UNAVAILABLE WORKER_LOST"}
        else:
            ended = [await answering.end() for answering in streams]
            assert _longest_silence_s(streams, killed_at) < PROMISED_S
            allowed = {"LENGTH", f"UNAVAILABLE {expected}", "UNAVAILABLE WORKER_LOST"}
            assert {outcome(answering) for answering in ended} <= allowed
        error = await refusal(stub, request([1, 2], max_tokens=4))
        assert (error.code().name, reason(error)) == ("UNAVAILABLE", expected)
        assert "RetryInfo" in details(error)
        assert not cluster.is_serving()
        cluster.start_node(f"{role}-1")
        wait_until(cluster.is_serving, "one node of each role is enough", START_DEADLINE_S)
        await _serves(cluster)


@pytest.mark.nightly
async def test_a_node_that_comes_and_goes(cluster):
    questions = _questions(8, max_tokens=150)
    async with cluster.connect() as stub:
        streams = _start(stub, questions)
        await _wait_tokens(streams, 3)
        cluster.kill("decode-1")
        cluster.start_node("decode-1")
        await _check_answers(questions, streams)
        cluster.wait_complete()
        cluster.kill("decode-0")
        await _serves(cluster)


# ---- hangs ----


@pytest.mark.parametrize("name", few(["decode-0", "prefill-0"]))
async def test_a_stopped_node_is_left_alone_and_fenced_when_it_wakes(cluster, name):
    questions = _questions(8, length=200, max_tokens=60)
    async with cluster.connect() as stub:
        streams = _start(stub, questions)
        await asyncio.sleep(0.4)
        stopped_at = time.monotonic()
        with _stopped(cluster, name):
            await _check_answers(questions, streams)
            assert _longest_silence_s(streams, stopped_at) < DETECTION_OF_HANGS_S
            await _serves(cluster)
        more = _start(stub, questions)
        await _check_answers(questions, more)
    cluster.wait_complete()


@pytest.mark.nightly
async def test_a_stopped_coordinator_leaves_no_client_hanging(cluster):
    async with cluster.connect() as stub:
        streams = _start(stub, _questions(6, max_tokens=2000))
        await _wait_tokens(streams, 3)
        with _stopped(cluster, "coordinator"):
            ended = [await answering.end(DETECTION_OF_HANGS_S) for answering in streams]
        assert {outcome(answering) for answering in ended} == {"UNAVAILABLE"}
    cluster.wait_complete()
    await _serves(cluster)


# ---- two processes with one name ----

WAITS = "another process is attached as decode-0"


def _holders(cluster):
    """The incarnations that are attached as decode-0."""
    return [node.incarnation for node in cluster.server_info().nodes if node.name == "decode-0"]


def _num_waits(cluster):
    """How often a process has said that it waits for the name: all decode-0 write to one log."""
    return cluster.children["decode-0"].output().count(WAITS)


def _wait_refused(cluster, num_before):
    wait_until(lambda: _num_waits(cluster) == num_before + 1, "it says once that it waits", START_DEADLINE_S)


def _wait_taken_over(cluster, old):
    wait_until(lambda: _holders(cluster) not in ([], old), "another process is attached", START_DEADLINE_S)
    assert len(_holders(cluster)) == 1


@pytest.mark.nightly
async def test_a_second_node_of_a_name_waits_and_takes_over_when_the_first_is_killed(cluster):
    questions = _questions(8, max_tokens=300)
    old = _holders(cluster)
    num_before = _num_waits(cluster)
    first = cluster.expect_end("decode-0")
    async with cluster.connect() as stub:
        streams = _start(stub, questions)
        await _wait_tokens(streams, 3)
        cluster.start_node("decode-0")
        await asyncio.to_thread(_wait_refused, cluster, num_before)
        await _check_answers(questions, streams)
        assert all(answering.answer.complete.timeline.num_restarts == 0 for answering in streams)
        assert _holders(cluster) == old
        streams = _start(stub, questions)
        await _wait_tokens(streams, 3)
        first.kill()
        await _check_answers(questions, streams)
    await asyncio.to_thread(_wait_taken_over, cluster, old)
    await _serves(cluster)


@pytest.mark.nightly
async def test_a_node_that_hung_and_lost_its_name_waits_in_turn(cluster):
    old = _holders(cluster)
    hung = cluster.expect_end("decode-0")
    with _stopped(cluster, "decode-0"):
        second = cluster.start_node("decode-0")
        await asyncio.to_thread(_wait_taken_over, cluster, old)
        new = _holders(cluster)
        await _serves(cluster)
        num_before = _num_waits(cluster)
    await asyncio.to_thread(_wait_refused, cluster, num_before)
    await _serves(cluster)
    assert _holders(cluster) == new
    cluster.expect_end("decode-0")
    second.kill()
    await asyncio.to_thread(_wait_taken_over, cluster, new)
    assert _holders(cluster) == old
    cluster.children["decode-0"] = hung


@contextlib.contextmanager
def _stopped(cluster, name):
    child = cluster.children[name]
    child.send(signal.SIGSTOP)
    try:
        yield
    finally:
        child.send(signal.SIGCONT)


@pytest.mark.nightly
async def test_a_storm(cluster):
    """Nodes are killed, stopped, drained and started again for some 15 s, one of each role at a time.

    Whatever a client is told must be true: the right tokens to the end, or a right beginning and UNAVAILABLE.
    """
    rng = random.Random(1854)
    calm = asyncio.Event()

    async def client(stub, number):
        outcomes = []
        own = random.Random(number)
        while not calm.is_set():
            prompt = [own.randrange(256) for _ in range(own.choice([3, 100, 500]))]
            answering = stream(stub, request(prompt, max_tokens=own.choice([1, 5, 80]), **GREEDY))
            if own.random() < 0.2:
                await asyncio.sleep(own.uniform(0, 0.3))
                answering.cancel()
            await answering.end()
            tokens = answering.answer.token_ids
            assert tokens == fake_answer(prompt, len(tokens)), "wrong tokens"
            outcomes.append(outcome(answering))
        return outcomes

    async with cluster.connect() as stub:
        clients = [asyncio.create_task(client(stub, number)) for number in range(12)]
        for _ in range(4):
            await asyncio.gather(
                *[_strike(cluster, f"{role}-{rng.randrange(2)}", rng) for role in ("prefill", "decode")]
            )
            await asyncio.to_thread(cluster.heal)
        calm.set()
        outcomes = [how for each in await asyncio.gather(*clients) for how in each]
    refused = [how for how in outcomes if how.split()[0] not in ("LENGTH", "CANCELLED")]
    assert {how.split()[0] for how in refused} <= {"UNAVAILABLE"}
    assert len(refused) < len(outcomes) / 10, f"{len(refused)} of {len(outcomes)} lost, with a node of each role left"


async def _strike(cluster, name, rng):
    how = rng.choice([signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
    child = cluster.expect_end(name)
    child.send(how)
    await asyncio.sleep(rng.uniform(0.5, 1.3 * NODE_TIMEOUT_S if how is signal.SIGSTOP else 4))
    if how is signal.SIGSTOP:
        child.send(signal.SIGCONT)
    else:
        await asyncio.to_thread(child.wait, STOP_DEADLINE_S)


# ---- leaving in good order ----


@pytest.mark.parametrize("name", ["decode-0", pytest.param("prefill-0", marks=pytest.mark.nightly)])
async def test_a_draining_node_costs_no_request(cluster, name):
    questions = _questions(4, length=100, max_tokens=40)
    leaving = cluster.expect_end(name)
    stop_load = asyncio.Event()

    async def client(stub):
        num_sequences = 0
        while not stop_load.is_set():
            streams = _start(stub, questions)
            await _check_answers(questions, streams)
            assert all(answering.answer.complete.timeline.num_restarts == 0 for answering in streams)
            num_sequences += len(streams)
        return num_sequences

    async with cluster.connect() as stub:
        load = [asyncio.create_task(client(stub)) for _ in range(3)]
        await asyncio.sleep(1)
        leaving.send(signal.SIGTERM)
        exit_code = await asyncio.to_thread(leaving.wait, STOP_DEADLINE_S)
        await asyncio.sleep(0.5)
        stop_load.set()
        assert sum(await asyncio.gather(*load)) > 0
    assert exit_code == 0
    assert name not in cluster.attached()


async def test_a_draining_coordinator_finishes_what_it_has(cluster):
    questions = _questions(6, max_tokens=150)
    leaving = cluster.expect_end("coordinator")
    async with cluster.connect() as stub:
        streams = _start(stub, questions)
        await _wait_tokens(streams, 3)
        leaving.send(signal.SIGTERM)
        wait_until(lambda: not cluster.is_serving(), "not serving while draining", 60.0)
        error = await refusal(stub, request([1], max_tokens=2))
        assert error.code().name == "UNAVAILABLE"
        assert reason(error) in ("DRAINING", "")  # "": the API server is closed already
        await _check_answers(questions, streams)
    assert leaving.wait(STOP_DEADLINE_S) == 0


@pytest.mark.nightly
async def test_a_second_signal_ends_the_drain(cluster):
    cluster.kill("decode-1")  # the answers have nowhere else to go
    wait_until(lambda: "decode-1" not in cluster.loads(), "the loss of decode-1", 60.0)
    leaving = cluster.expect_end("decode-0")
    async with cluster.connect() as stub:
        streams = _start(stub, _questions(4, max_tokens=LONG))
        await _wait_tokens(streams, 3)
        leaving.send(signal.SIGTERM)
        await asyncio.to_thread(wait_until, lambda: "decode-0" not in cluster.attached(), "it drains", 60.0)
        await asyncio.sleep(0.5)
        assert leaving.is_running, "the drain did not wait for the answers"
        leaving.send(signal.SIGTERM)
        await asyncio.to_thread(leaving.wait, STOP_DEADLINE_S)
        for answering in streams:
            await answering.end()
            assert outcome(answering) == "UNAVAILABLE NO_DECODE_WORKER"
