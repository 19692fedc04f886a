"""Fleets of nodes with real vLLM and with our engine, which send each other KV: against transformers."""

import asyncio

import pytest

from tests.system.answers import ask_all, request
from tests.system.greedy import NUM_TOKENS
from tests.system.oracle import Reference
from tests.system.vllm_nodes import BLOCK, MARKS, TWO_RANKS, VllmCluster, prompts, started, write_model

pytestmark = MARKS

NODES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
OURS = ("prefill-1", "decode-1")


class MixedCluster(VllmCluster):
    """Nodes with vLLM have one rank and two, nodes with ours two."""

    ours = OURS

    def start_node(self, name, **flags):
        own = (
            {
                "block_size": BLOCK,
                "dtype": "float32",
                "num_kv_blocks": 200,
                "tensor_parallel_size": 2,
                "rank_timeout_s": 600,
            }
            if name in OURS
            else {"kv_order": "splitserve", **(TWO_RANKS if name == "prefill-0" else {})}
        )
        self._node_flags = {}
        return super().start_node(name, **own, **flags)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    model = write_model(tmp_path_factory.mktemp("model"))
    cluster = started(model, tmp_path_factory.mktemp("cluster"), MixedCluster, num_prefill=2, num_decode=2)
    try:
        yield cluster
    finally:
        cluster.kill_everything()


async def test_answers_through_both_engines_are_those_of_transformers(cluster):
    asked = [request(each, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True) for each in prompts(60, seed=21)]
    ways = set()
    async with cluster.connect() as stub:
        answers = await ask_all(stub, asked)
    reference = Reference(cluster.model)
    for each, answer in zip(asked, answers, strict=True):
        assert answer.token_ids == reference.greedy(list(each.tokenized.input_ids), NUM_TOKENS, eos_token_id=-1)
        timeline = answer.complete.timeline
        ways.add((timeline.prefill_node, timeline.decode_node))
    assert {(prefill, decode) for prefill in NODES[:2] for decode in NODES[2:]} <= ways
    assert all(load.num_transfers_failed == 0 for load in cluster.loads().values())
    await asyncio.to_thread(cluster.wait_all_free)


async def test_an_answer_goes_on_at_a_node_with_another_engine(cluster):
    """Its tokens so far are prefilled there."""
    asked = [request(each, max_tokens=150, temperature=0, ignore_eos=True) for each in prompts(8, seed=22)]
    async with cluster.connect() as stub:
        answers = asyncio.create_task(ask_all(stub, asked))
        while cluster.loads()["decode-1"].num_running == 0:
            await asyncio.sleep(0.05)
        cluster.kill("decode-1")
        answers = await answers
    reference = Reference(cluster.model)
    for each, answer in zip(asked, answers, strict=True):
        assert answer.token_ids == reference.greedy(list(each.tokenized.input_ids), 150, eos_token_id=-1)
