"""A whole cluster that computes likely tokens ahead: what it answers is what an engine answers without, to the bit of a
logprob, also where answers move."""

import asyncio

import pytest

from engine.build import build_engine
from serving_core.requests import SamplingParams
from serving_core.settings import EngineSettings
from splitserve import AsyncClient
from tests.system.answers import request, stream
from tests.system.cluster import wait_until
from tests.tiny_models import write_fake_model, write_tiny_model
from tests.toy_scheduler import run_all

pytestmark = pytest.mark.nightly

ENGINE = {"dtype": "bfloat16", "block_size": 16, "num_kv_blocks": 600}
DEADLINE_S = 600.0
MAX_TOKENS = 250
FEW = range(40, 44)
WAYS = (
    {"temperature": 0.0},
    {"temperature": 0.0, "frequency_penalty": 0.02},
    {"temperature": 0.05, "seed": 3},
    {"temperature": 0.3, "top_p": 0.9, "seed": 4},
)


def _questions():
    """A model of random weights says nothing twice. It is left with few tokens, which soon come as before."""
    prompts = [[(7 * index + at % (9 + index)) % 250 for at in range(60)] for index in range(2 * len(WAYS))]
    fields = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "logprobs": 2, "logit_bias": dict.fromkeys(FEW, 100.0)}
    return [{"prompt": prompt, **WAYS[index % len(WAYS)], **fields} for index, prompt in enumerate(prompts)]


def _expected(model, questions):
    """By one engine in this process."""
    engine = build_engine(EngineSettings(model=str(model), device="cpu", **ENGINE))
    if not engine.is_batch_invariant:
        pytest.skip("bits depend on the batch here, so nothing is promised")
    asked = [dict(question) for question in questions]
    prompts = [question.pop("prompt") for question in asked]
    biases = [tuple(question.pop("logit_bias").items()) for question in asked]
    params = [SamplingParams(**question, logit_bias=bias) for question, bias in zip(asked, biases, strict=True)]
    return run_all(engine, prompts, params)


async def test_answers_that_move(start_cluster, tmp_path):
    model = write_tiny_model(tmp_path / "tiny", max_position_embeddings=1024)
    questions = _questions()
    expected = _expected(model, questions)
    node = {**ENGINE, "max_num_seqs": 8, "speculation": "lookup"}
    options = {"num_prefill": 1, "num_decode": 2, "coordinator": {"heartbeat_s": 0.05}}
    cluster = start_cluster(model, node=node, **options)
    async with cluster.connect() as stub, AsyncClient(cluster.target) as client, asyncio.timeout(DEADLINE_S):
        streams = [stream(stub, request(**question)) for question in questions]
        for answering in streams:
            await answering.tokens(5)
        _, from_node, to_node = cluster.names
        while not all(answering.has_ended for answering in streams):
            await client.set_role(to_node, "decode")
            await client.set_role(from_node, "prefill")
            while cluster.loads()[from_node].num_running:
                await asyncio.sleep(0.02)
            from_node, to_node = to_node, from_node
        answers = [await answering.complete() for answering in streams]
    for answer, tokens in zip(answers, expected, strict=True):
        assert answer.token_ids == [token.token_id for token in tokens]
        told = [[(each.token_id, each.logprob) for each in logprobs.top] for logprobs in answer.logprobs]
        assert told == [[(token_id, logprob) for token_id, logprob in token.top_logprobs] for token in tokens]
    assert sum(answer.complete.timeline.num_migrations for answer in answers) >= 2
    assert not any(answer.complete.timeline.num_restarts for answer in answers)
    assert any(answer.complete.accepted_tokens for answer in answers)
    cluster.wait_all_free()


async def test_one_answer_takes_fewer_steps_than_tokens(start_cluster, tmp_path):
    model = write_tiny_model(tmp_path / "tiny", max_position_embeddings=1024)
    question = _questions()[0]
    (tokens,) = _expected(model, [question])
    cluster = start_cluster(model, node={**ENGINE, "speculation": "lookup", "num_speculative_tokens": 4})
    async with cluster.connect() as stub, asyncio.timeout(DEADLINE_S):
        answer = await stream(stub, request(**question)).complete()
    assert answer.token_ids == [token.token_id for token in tokens]
    end = answer.complete
    assert 0 < end.accepted_tokens <= end.proposed_tokens
    # The first token is the prefill node's; each other one took a step, but for those that had been draft tokens.
    cluster.wait_all_free()
    num_steps = len(tokens) - 1 - end.accepted_tokens
    wait_until(lambda: cluster.loads()["decode-0"].num_steps >= num_steps, "a heartbeat tells of all", DEADLINE_S)
    assert cluster.loads()["decode-0"].num_steps == num_steps


DRAFTED_TOKENS = 200  # of which most are still to come when their node is lost
DRAFTED = 6  # answers
WAYS_OF_FAKE = ({"temperature": 0.0}, {"temperature": 0.5, "seed": 5}, {"temperature": 0.0, "presence_penalty": 1.5})


async def test_a_draft_model_writes_ahead_of_answers_that_move_and_begin_again(start_cluster, tmp_path):
    """The draft model says what the model says, and takes no time where that takes 50 ms a step."""
    model = write_fake_model(tmp_path / "model", step_s=0.05)
    small = write_fake_model(tmp_path / "small", num_layers=1)
    fields = {"max_tokens": DRAFTED_TOKENS, "ignore_eos": True}
    questions = [
        {"prompt": [97 + (at * index) % 20 for at in range(10 + 30 * index)], **WAYS_OF_FAKE[index % 3], **fields}
        for index in range(DRAFTED)
    ]
    engine = build_engine(EngineSettings(model=str(write_fake_model(tmp_path / "quick")), num_kv_blocks=200))
    asked = [dict(question) for question in questions]
    prompts = [question.pop("prompt") for question in asked]
    expected = run_all(engine, prompts, [SamplingParams(**question) for question in asked])
    node = {"max_num_seqs": 8, "speculation": "draft", "speculative_model": str(small), "num_speculative_tokens": 4}
    cluster = start_cluster(model, node=node, num_prefill=1, num_decode=2, coordinator={"heartbeat_s": 0.05})
    async with cluster.connect() as stub, AsyncClient(cluster.target) as client, asyncio.timeout(DEADLINE_S):
        streams = [stream(stub, request(**question)) for question in questions]
        for answering in streams:
            await answering.tokens(15)
        prefill, lost, left = cluster.names
        await client.set_role(lost, "prefill")  # what it writes moves
        while cluster.loads()[lost].num_running:
            await asyncio.sleep(0.02)
        await client.set_role(lost, "decode")
        again = [stream(stub, request(**question)) for question in questions]
        for answering in again:
            await answering.tokens(5)
        cluster.kill(lost)
        answers = [await answering.complete() for answering in (*streams, *again)]
    for answer, tokens in zip(answers, [*expected, *expected], strict=True):
        assert answer.token_ids == [token.token_id for token in tokens]
    assert any(answer.complete.timeline.num_migrations for answer in answers)
    assert any(answer.complete.timeline.num_restarts for answer in answers)
    assert sum(answer.complete.accepted_tokens for answer in answers) > 0
    assert all(answer.complete.accepted_tokens <= answer.complete.proposed_tokens for answer in answers)
    (rank,) = cluster.loads()[left].ranks
    assert rank.kv_pool_bytes > 512 * 2**20  # of both models
    (rank,) = cluster.loads()[prefill].ranks
    assert rank.kv_pool_bytes <= 512 * 2**20  # a prefill node has no use for the other one
    cluster.wait_all_free()
