"""Answers go on at any token as if nothing had happened: through the client where their coordinator is killed, stopped
or cut off, through the coordinator where their node is killed."""

import asyncio
import contextlib
import json
import random
import signal
import subprocess
import sys
from functools import partial

import pytest
import torch

from engine.native.linear import best_variant
from splitserve import AsyncClient, Client
from splitserve.client.errors import Unavailable
from tests.system.cluster import free_port, wait_until
from tests.system.oracle import fake_answer
from tests.tiny_models import write_fake_model, write_tiny_model

DEADLINE_S = 300.0
LENGTH = 1500  # of an answer in tokens, so that it is far from its end when its coordinator is gone
GREEDY = {"temperature": 0, "ignore_eos": True}
SAMPLED = {"temperature": 0.8, "seed": 11, "ignore_eos": True}


@pytest.fixture(scope="module")
def tiny(start_cluster, tmp_path_factory):
    model = write_tiny_model(tmp_path_factory.mktemp("model"), dtype="bfloat16", max_position_embeddings=2048)
    return start_cluster(model, num_decode=2, coordinator={"node_wait_s": 120}, node={"num_kv_blocks": 2000})


@pytest.fixture(scope="module")
def fake(start_cluster, tmp_path_factory):
    model = write_fake_model(tmp_path_factory.mktemp("fake"), step_s=0.01, token_s=0.001)
    return start_cluster(model, coordinator={"drain_s": 0.2})


@pytest.fixture(autouse=True)
def _healed(request):
    yield
    for name in {"tiny", "fake"} & set(request.fixturenames):
        cluster = request.getfixturevalue(name)
        cluster.heal()
        cluster.wait_all_free()


def restart(cluster, name="coordinator"):
    cluster.kill(name)
    cluster.start_coordinator() if name == "coordinator" else cluster.start_node(name)


class Heard:
    """What one request's user has of it."""

    def __init__(self):
        self.text, self.token_ids, self.logprobs, self.ends = {}, {}, {}, {}

    @property
    def num_tokens(self):
        return sum(map(len, self.token_ids.values()))

    @property
    def num_resumes(self):
        return max(end.num_resumes for end in self.ends.values())

    def take(self, chunk):
        index = chunk.index
        token_ids = self.token_ids.setdefault(index, [])
        assert not chunk.token_ids or chunk.first_token_index == len(token_ids), "a gap or a repeat"
        assert index not in self.ends, "something after the end"
        token_ids += chunk.token_ids
        self.text[index] = self.text.get(index, "") + chunk.text
        self.logprobs.setdefault(index, []).extend(chunk.logprobs)
        if chunk.completion is not None:
            self.ends[index] = chunk.completion

    def __eq__(self, other):
        return self._all == other._all

    @property
    def _all(self):
        ends = {
            index: (end.finish_reason, end.matched_stop, end.prompt_tokens, end.completion_tokens)
            for index, end in self.ends.items()
        }
        return self.text, self.token_ids, self.logprobs, ends


async def hear(client, heard, prompt, **options):
    async for chunk in client.generate(prompt, deadline_s=DEADLINE_S, **options):
        heard.take(chunk)
    return heard


async def hear_all(cluster, questions, *strikes):
    """The answers to questions that are asked at once. A strike is a process that is killed and starts again, and the
    tokens more that the first of them has by then; each of the others has one more, so that each strike costs each call
    a resume."""
    async with AsyncClient(cluster.target) as client:
        answers = [Heard() for _ in questions]
        tasks = [
            asyncio.create_task(hear(client, heard, **question))
            for heard, question in zip(answers, questions, strict=True)
        ]
        for name, num_tokens in strikes:
            wanted = [answer.num_tokens + (1 if index else num_tokens) for index, answer in enumerate(answers)]
            async with asyncio.timeout(DEADLINE_S):
                while any(answer.num_tokens < most for answer, most in zip(answers, wanted, strict=True)):
                    assert not any(task.done() for task in tasks), "an answer was over before the strike"
                    await asyncio.sleep(0.001)
            await asyncio.to_thread(restart, cluster, name)
        return await asyncio.gather(*tasks)


QUESTIONS = [
    {"prompt": "Once", **GREEDY},
    {"prompt": [5, 6, 7] * 30, **SAMPLED, "logprobs": 2},
    {"prompt": "upon", **SAMPLED, "n": 2, "top_p": 0.9, "top_k": 50},
    {"prompt": "a", **SAMPLED, "frequency_penalty": 0.3, "presence_penalty": 0.2, "repetition_penalty": 1.1},
    {"prompt": "time", **SAMPLED, "logit_bias": {65: 2.0}, "ignore_eos": False, "min_tokens": LENGTH - 20},
]


@pytest.fixture(scope="module")
def unbroken(tiny):
    """Questions with their answers of a calm cluster; the last one has a stop string, late in its answer."""
    questions = [{**question, "max_tokens": LENGTH} for question in QUESTIONS]
    answers = asyncio.run(hear_all(tiny, questions))
    text = answers[0].text[0]
    stop = next(text[at : at + 6] for at in range(len(text) // 2, len(text)) if text.find(text[at : at + 6]) == at)
    questions.append({**questions[0], "stop": [stop]})
    answers += asyncio.run(hear_all(tiny, questions[-1:]))
    assert answers[-1].ends[0].matched_stop == stop
    return questions, answers


is_native = pytest.mark.skipif(best_variant(torch.bfloat16) is None, reason="products are not native here")


@pytest.mark.nightly
@is_native
@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_answers_of_a_killed_coordinator_are_those_of_one_that_lives(tiny, unbroken, seed):
    questions, answers = unbroken
    rng = random.Random(seed)
    strikes = [("coordinator", rng.randrange(1, 300)), ("coordinator", rng.randrange(1, 200))]
    broken = asyncio.run(hear_all(tiny, questions, *strikes))
    assert broken == answers
    assert [heard.num_resumes for heard in broken] == [2] * len(questions)


@is_native
@pytest.mark.timeout(2 * DEADLINE_S)
@pytest.mark.nightly
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_answers_of_killed_decode_nodes_are_those_of_nodes_that_live(tiny, unbroken, seed):
    """Of both, one after the other: by then there may be none."""
    questions, answers = unbroken
    rng = random.Random(seed)
    strikes = [(f"decode-{index}", rng.randrange(1, 250)) for index in rng.sample(range(2), 2)]
    broken = asyncio.run(hear_all(tiny, questions, *strikes))
    assert broken == answers
    assert all(heard.num_resumes == 0 for heard in broken)
    assert sum(end.timeline.num_restarts for heard in broken for end in heard.ends.values()) >= len(questions)


@pytest.mark.nightly
async def test_an_answer_without_a_token_yet_comes_too(fake):
    prompt = [index % 256 for index in range(4000)]  # takes 4 s to read
    async with AsyncClient(fake.target) as client:
        heard = Heard()
        answering = asyncio.create_task(hear(client, heard, prompt, max_tokens=5, **GREEDY))
        await asyncio.to_thread(wait_until, partial(is_at_work, fake), "the prompt is read", DEADLINE_S)
        await asyncio.to_thread(restart, fake)
        await answering
    assert heard.token_ids[0] == fake_answer(prompt, 5)
    assert (heard.num_resumes, heard.ends[0].resumed_tokens) == (1, 0)


def is_at_work(cluster):
    return any(load.num_waiting_tokens or load.num_running for load in cluster.loads().values())


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_blocking_client_goes_on_and_says_so(fake, number):
    heard = Heard()
    with Client(fake.target) as client:
        for chunk in client.generate([1, 2, 3], max_tokens=400, deadline_s=DEADLINE_S, **GREEDY):
            heard.take(chunk)
            if heard.num_tokens == 20:
                leaving = fake.expect_end("coordinator")
                leaving.send(number)
                leaving.wait(DEADLINE_S)
                fake.start_coordinator()
    assert heard.token_ids[0] == fake_answer([1, 2, 3], 400)
    end = heard.ends[0]
    assert (end.num_resumes, end.completion_tokens) == (1, 400)
    assert 20 <= end.resumed_tokens < 400


def test_without_resume_the_loss_is_the_callers(fake):
    with Client(fake.target) as client:
        stream = client.generate([1, 2, 3], max_tokens=1000, resume=False, **GREEDY)
        next(stream)
        restart(fake)
        with pytest.raises(Unavailable):
            list(stream)


@contextlib.asynccontextmanager
async def proxy(target):
    """A port that leads to another one, and what cuts all its connections."""
    writers = []

    async def carry(reader, writer):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(2**16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connect(reader, writer):
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", target)
        writers.extend([writer, far_writer])
        await asyncio.gather(carry(reader, far_writer), carry(far_reader, writer))

    def cut():
        while writers:
            writers.pop().transport.abort()

    port = free_port()
    server = await asyncio.start_server(connect, "127.0.0.1", port)
    try:
        yield port, cut
    finally:
        server.close()
        cut()


async def test_a_connection_that_is_cut_costs_nothing(fake):
    async with proxy(fake.port) as (port, cut), AsyncClient(f"127.0.0.1:{port}") as client:
        heard = Heard()
        next_cut = 10
        async for chunk in client.generate([4, 5, 6], max_tokens=400, deadline_s=DEADLINE_S, **GREEDY):
            heard.take(chunk)
            if next_cut <= heard.num_tokens < 250:
                cut()
                next_cut = heard.num_tokens + 50
    assert heard.token_ids[0] == fake_answer([4, 5, 6], 400)
    assert heard.num_resumes >= 2


@pytest.mark.nightly
@pytest.mark.parametrize("flags", [(), ("--no-resume",)])
def test_the_command_line_goes_on_too(fake, flags):
    options = ["--raw", "--json", "--max-tokens", "400", "--temperature", "0", "--ignore-eos", "--server", fake.target]
    command = [sys.executable, "-m", "splitserve", "generate", "hi", *options, *flags]
    token_ids, last = [], {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            last = json.loads(line)
            was_short = len(token_ids) < 20
            token_ids += last["token_ids"]
            if was_short and len(token_ids) >= 20:
                restart(fake)
        process.wait(DEADLINE_S)
        stderr = process.stderr.read()
    assert token_ids == fake_answer(b"hi", 400)[: len(token_ids)]
    if flags:
        assert process.returncode != 0
        assert "Error" in stderr
    else:
        assert (process.returncode, len(token_ids)) == (0, 400), stderr
        assert last["completion"]["num_resumes"] == 1
