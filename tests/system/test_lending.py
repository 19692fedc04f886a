"""Blocks that a node wrote while it answered travel back to the node that reads the chat's next turn."""

import random

import pytest

from tests.system.answers import ask
from tests.system.cluster import CALL_DEADLINE_S, wait_until
from tests.system.oracle import Reference
from tests.tiny_models import write_tiny_model

BLOCK_SIZE = 8
GREEDY = {"temperature": 0, "ignore_eos": True}
ALWAYS = {"remote_prefix_fetch": "always"}
CASES = {
    "one rank each": {},
    "two ranks read, one writes": {"prefill": {"tensor_parallel_size": 2}},
    "one reads, two stages write": {"decode": {"pipeline_parallel_size": 2}},
    "8 bits": {"node": {"kv_cache_dtype": "int8", "dtype": "float32"}},
    "torch_dist": {"node": {"kv_transport": "torch_dist"}},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), num_key_value_heads=2)


def _prompt(seed, length):
    return [random.Random(seed).randrange(256) for _ in range(length)]


@pytest.mark.parametrize(
    "name", [name if name == "one rank each" else pytest.param(name, marks=pytest.mark.nightly) for name in CASES]
)
async def test_a_chat_of_three_turns(start_cluster, model, name):
    """Of what was asked and answered before, all full blocks are there where the next turn is read."""
    case = CASES[name]
    node = {"num_kv_blocks": 100, **case.get("node", {})}
    cluster = start_cluster(model, coordinator=ALWAYS, **{**case, "node": node})
    reference, chat, num_known, lent = Reference(model), _prompt(1, 60), 0, []
    async with cluster.connect() as stub:
        for turn in range(3):
            answer = await ask(stub, chat, max_tokens=30, **GREEDY)
            if name != "8 bits":
                assert answer.token_ids == reference.greedy(chat, 30, eos_token_id=-1)
            assert answer.complete.cached_tokens == num_known // BLOCK_SIZE * BLOCK_SIZE
            lent.append(answer.complete.fetched_kv_bytes)
            num_known = len(chat) + 29  # no step has computed the KV of an answer's last token
            chat = [*chat, *answer.token_ids, *_prompt(10 + turn, 20)]
            assert (answer.complete.timeline.prefix_fetch_s > 0) == (turn > 0)
        again = await ask(stub, chat[: -20 - 30], max_tokens=30, **GREEDY)
        assert again.token_ids == answer.token_ids  # with all of it in the pool
    # 60, 110 and 160 tokens were asked for; of the second, 56 were read there before, and so 4 blocks were lent.
    assert lent[0] == 0 < lent[1] == lent[2]
    cluster.wait_all_free()
    cluster.stop()


@pytest.mark.nightly
async def test_what_the_writers_pool_gave_up_is_lent_too(start_cluster, model):
    """Others have taken its place since, and it lies in the KV offload."""
    decode = {"num_kv_blocks": 30, "kv_host_bytes": "1MiB", "kv_read_back": "always"}
    cluster = start_cluster(model, coordinator=ALWAYS, node={"num_kv_blocks": 100}, decode=decode)
    reference, chat = Reference(model), _prompt(1, 60)
    async with cluster.connect() as stub:
        answer = await ask(stub, chat, max_tokens=30, **GREEDY)
        for seed in (2, 3, 4):
            await ask(stub, _prompt(seed, 60), max_tokens=30, **GREEDY)
        cluster.wait_all_free()
        chat = [*chat, *answer.token_ids, *_prompt(10, 20)]
        again = await ask(stub, chat, max_tokens=20, **GREEDY)
    assert again.token_ids == reference.greedy(chat, 20, eos_token_id=-1)
    assert again.complete.cached_tokens == 88  # 89 tokens of the first turn have KV
    assert again.complete.fetched_kv_bytes > 0
    wait_until(lambda: cluster.loads()["decode-0"].tier.num_hits > 0, "blocks were read back", CALL_DEADLINE_S)
    cluster.stop()


@pytest.mark.nightly
async def test_never_means_never(start_cluster, model):
    cluster = start_cluster(model, coordinator={"remote_prefix_fetch": "never"}, node={"num_kv_blocks": 100})
    chat = _prompt(1, 60)
    async with cluster.connect() as stub:
        answer = await ask(stub, chat, max_tokens=30, **GREEDY)
        again = await ask(stub, [*chat, *answer.token_ids, 1, 2], max_tokens=2, **GREEDY)
    assert (again.complete.cached_tokens, again.complete.fetched_kv_bytes) == (56, 0)
    cluster.stop()


@pytest.mark.nightly
@pytest.mark.parametrize("struck", ["on.lend=kill", "on.lend=sleep:2"])
async def test_a_lender_that_dies_or_stands_still(start_cluster, model, struck):
    """What it held is computed, or comes late: the answer is the same."""
    env = {"SPLITSERVE_FAILPOINTS": struck}
    cluster = start_cluster(model, num_decode=2, coordinator=ALWAYS, node={"num_kv_blocks": 100}, env=env)
    reference, chat = Reference(model), _prompt(1, 100)
    async with cluster.connect() as stub:
        answer = await ask(stub, chat, max_tokens=30, **GREEDY)
        source = cluster.children[answer.complete.timeline.decode_node]
        if "kill" in struck:
            cluster.expect_end(source.name)
        chat = [*chat, *answer.token_ids, *_prompt(9, 20)]
        again = await ask(stub, chat, max_tokens=20, **GREEDY)
    assert again.token_ids == reference.greedy(chat, 20, eos_token_id=-1)
    if "kill" in struck:
        assert again.complete.fetched_kv_bytes == 0
        assert not source.is_running
    cluster.stop()
