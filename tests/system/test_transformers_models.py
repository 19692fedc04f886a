"""Models that transformers knows, through a real split: read by a node of one rank, written by a node of two.

To a split families differ by what is kept of their tokens, so there is one of each kind here. On ranks, in stages and
by our own decoder all are computed in the tests of the engine.
"""

import asyncio

import pytest

from splitserve import AsyncClient
from tests.system.answers import request, stream
from tests.system.cluster import Cluster
from tests.transformers_models import generated, greedy_answers, transformers_model, write_transformers_model

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]

DEADLINE_S = 400.0  # for three processes to import transformers, or to end
PROMPTS = [[5, 6, 7], [(7 * at * at + 3) % 250 for at in range(41)], [(11 * at + at * at) % 250 for at in range(90)]]
NUM_TOKENS = 24
# Grouped heads, one for each query, one for all, windows, a sink and experts, latents.
OF_TRANSFORMERS = ("llama", "gpt2", "gpt_bigcode", "gemma3", "gpt_oss", "deepseek_v3")
OF_OURS = ("granite", "phi3", "gemma3", "mixtral")


@pytest.mark.parametrize(
    ("family", "model_impl"),
    [*((family, "transformers") for family in OF_TRANSFORMERS), *((family, "native") for family in OF_OURS)],
)
async def test_answers_are_those_of_transformers(family, model_impl, tmp_path):
    await check_answers(write_transformers_model(tmp_path / "model", family), tmp_path, model_impl)


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt2"])
async def test_prompts_are_read_in_two_stages(family, tmp_path):
    model = write_transformers_model(tmp_path / "model", family)
    await check_answers(model, tmp_path, "transformers", pipeline_parallel_size=2)


async def check_answers(model, tmp_path, model_impl, **prefill):
    cluster = Cluster(
        model,
        tmp_path,
        coordinator={"model_impl": model_impl},
        node={"model_impl": model_impl, "num_kv_blocks": 64, "block_size": 8},
        prefill={"max_num_batched_tokens": 19, **prefill},
        decode={"tensor_parallel_size": 2},
        start_deadline_s=DEADLINE_S,
    ).start()
    try:
        async with cluster.connect() as stub:
            streams = [stream(stub, request(prompt, max_tokens=NUM_TOKENS, temperature=0)) for prompt in PROMPTS]
            answers = [await answering.complete() for answering in streams]
        assert [answer.token_ids for answer in answers] == generated(model, PROMPTS, NUM_TOKENS)
        cluster.wait_all_free()
    finally:
        cluster.stop(deadline_s=DEADLINE_S)


# A state beside attention, one in every layer, a state that goes on one token at a time, keys of an indexer.
BY_SEQUENCE = ("qwen3_5", "falcon_h1", "mamba", "jamba", "deepseek_v32")


@pytest.mark.parametrize("family", BY_SEQUENCE)
async def test_what_a_sequence_keeps_is_transferred_and_migrates(family, tmp_path):
    """Prompts are read by one node and written by two others in turn, between which an answer migrates. Asked again,
    they are found with their state."""
    model = write_transformers_model(tmp_path / "model", family)
    node = {"model_impl": "transformers", "num_kv_blocks": 200, "block_size": 8, "max_num_batched_tokens": 19}
    cluster = Cluster(
        model,
        tmp_path,
        num_decode=2,
        coordinator={"model_impl": "transformers", "heartbeat_s": 0.05},
        node=node,
        start_deadline_s=DEADLINE_S,
    ).start()
    try:
        async with cluster.connect() as stub, AsyncClient(cluster.target) as client, asyncio.timeout(DEADLINE_S):
            streams = [stream(stub, request(prompt, max_tokens=NUM_TOKENS, temperature=0)) for prompt in PROMPTS]
            answers = [await answering.complete() for answering in streams]
            again = [
                await stream(stub, request(each, max_tokens=NUM_TOKENS, temperature=0)).complete() for each in PROMPTS
            ]
            long = request(PROMPTS[1], max_tokens=300, temperature=0, ignore_eos=True)
            stayed = await stream(stub, long, timeout=DEADLINE_S).complete(DEADLINE_S)
            long.request_id = "migrates"
            migrating = stream(stub, long, timeout=DEADLINE_S)
            await migrating.tokens(10)
            at: list[str] = []
            while not at:  # until a heartbeat has told
                at = [name for name in cluster.names[1:] if cluster.loads()[name].num_running]
                await asyncio.sleep(0.01)
            left = [num_left async for num_left in client.drain(at[0], deadline_s=DEADLINE_S)]
            migrated = await migrating.complete(DEADLINE_S)
        assert [answer.token_ids for answer in answers] == generated(model, PROMPTS, NUM_TOKENS)
        assert [answer.token_ids for answer in again] == [answer.token_ids for answer in answers]
        found = cluster.loads()[cluster.names[0]].num_cached_tokens
        assert (found > 0) == (family not in ("mamba", "jamba")), "their states go on one token at a time"
        assert left[-1] == 0
        assert migrated.complete.timeline.num_migrations == 1
        assert migrated.complete.timeline.num_restarts == 0
        assert migrated.token_ids == stayed.token_ids
        cluster.wait_all_free()
    finally:
        cluster.stop(deadline_s=DEADLINE_S)


@pytest.mark.parametrize(("family", "sizes"), [("qwen3_5", (2, 1)), ("qwen3_5", (1, 2)), ("mamba", (1, 2))])
async def test_a_state_is_divided_over_the_ranks_of_each_node(family, sizes, tmp_path):
    """Asked again, prompts are found with their state, which ranks read from blocks of its own."""
    model = write_transformers_model(tmp_path / "model", family)
    cluster = Cluster(
        model,
        tmp_path,
        node={"num_kv_blocks": 200, "block_size": 8},
        prefill={"max_num_batched_tokens": 19, "tensor_parallel_size": sizes[0]},
        decode={"tensor_parallel_size": sizes[1]},
        start_deadline_s=DEADLINE_S,
    ).start()
    try:
        async with cluster.connect() as stub:
            for _ in range(2):
                asked = [request(prompt, max_tokens=NUM_TOKENS, temperature=0) for prompt in PROMPTS]
                answers = [await each.complete() for each in [stream(stub, message) for message in asked]]
                assert [each.token_ids for each in answers] == generated(model, PROMPTS, NUM_TOKENS)
        assert (cluster.loads()[cluster.names[0]].num_cached_tokens > 0) == (family != "mamba")
        cluster.wait_all_free()
    finally:
        cluster.stop(deadline_s=DEADLINE_S)


async def test_a_state_begins_anew_after_a_preemption(tmp_path):
    """More answers than fit: some give back their blocks and their state, and their tokens are computed again."""
    model = write_transformers_model(tmp_path / "model", "qwen3_5")
    cluster = Cluster(
        model,
        tmp_path,
        num_prefill=0,
        num_decode=0,
        num_mixed=1,
        node={"num_kv_blocks": 30, "block_size": 8, "max_num_batched_tokens": 64},
        start_deadline_s=DEADLINE_S,
    ).start()
    prompts = [[(number * at + 3) % 250 for at in range(20 + number)] for number in range(1, 5)]
    try:
        async with cluster.connect() as stub:
            asked = [request(prompt, max_tokens=60, temperature=0, ignore_eos=True) for prompt in prompts]
            answers = [await each.complete() for each in [stream(stub, message) for message in asked]]
        assert sum(each.num_preemptions for each in cluster.loads().values()) > 0
        found = [answer.token_ids for answer in answers]
        assert found == greedy_answers(transformers_model(model), prompts, 60, found, ignore_eos=True)
        cluster.wait_all_free()
    finally:
        cluster.stop(deadline_s=DEADLINE_S)
