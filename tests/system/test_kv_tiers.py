"""Blocks that small pools give up come back from the KV offload, and answers stay the same, to the bit."""

import asyncio
import random

import pytest

from tests.effort import few
from tests.system.answers import ask, request, stream
from tests.system.cluster import CALL_DEADLINE_S, wait_until
from tests.system.oracle import Reference
from tests.tiny_models import write_tiny_model

NUM_BLOCKS = 40  # of 8 tokens
GREEDY = {"temperature": 0, "ignore_eos": True}
DISK = {"kv_disk_bytes": "16MiB"}
HOST = {"kv_host_bytes": "16MiB"}
BOTH = {"kv_host_bytes": "48KiB", "kv_disk_bytes": "16MiB"}
CASES = {
    "a file": DISK,
    "host memory": HOST,
    "8 bits, both": {**BOTH, "kv_cache_dtype": "int8", "dtype": "float32"},
    "two ranks, both": {**BOTH, "tensor_parallel_size": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), num_key_value_heads=2)


def _prompt(seed, length):
    return [random.Random(seed).randrange(256) for _ in range(length)]


@pytest.mark.parametrize("name", few(CASES))
async def test_a_chat_whose_beginning_was_evicted(start_cluster, model, tmp_path, name):
    """Chats of several turns take turns, so that each turn finds the earlier ones of its chat evicted. What is asked
    again at once, with all in the pool, has the same bits as what comes back from the tier."""
    has_disk = "kv_disk_bytes" in CASES[name]
    disk = {"kv_disk_path": tmp_path} if has_disk else {}
    node = {"num_kv_blocks": NUM_BLOCKS, "kv_read_back": "always", **disk, **CASES[name]}
    cluster = start_cluster(model, node=node)
    chats = {seed: _prompt(seed, 120) for seed in range(3)}
    reference = Reference(model)
    async with cluster.connect() as stub:
        for turn in range(3):
            for seed, chat in chats.items():
                answer = await ask(stub, chat, max_tokens=8, logprobs=2, **GREEDY)
                again = await ask(stub, chat, max_tokens=8, logprobs=2, **GREEDY)
                assert (again.token_ids, again.logprobs) == (answer.token_ids, answer.logprobs)
                if "8 bits" not in name:
                    assert answer.token_ids == reference.greedy(chat, 8, eos_token_id=-1)
                if turn:
                    assert answer.complete.cached_tokens >= 120
                chat += [*answer.token_ids, *_prompt(100 * turn + seed, 20)]
    cluster.wait_all_free()
    tier = cluster.loads()["prefill-0"].tier
    assert tier.num_hits >= 2 * 3 * 10  # some of the 15 and more are still in the pool
    assert tier.num_damaged == tier.num_late == tier.num_unwritten == 0
    assert tier.read_bytes > 0 < tier.written_bytes
    assert (tier.host_bytes > 0) == ("kv_host_bytes" in CASES[name])
    assert (tier.disk_bytes > 0) == has_disk
    assert not any(path.name.startswith("splitserve-kv-") for path in tmp_path.iterdir())
    cluster.stop()


@pytest.mark.nightly
async def test_answers_that_gave_way_read_what_they_had(start_cluster, model):
    """A pool too small for the batch: what is put back comes back from the tier."""
    node = {"kv_read_back": "always", **HOST}
    cluster = start_cluster(model, node=node, decode={"num_kv_blocks": 30, "max_num_seqs": 6})
    prompts = [_prompt(seed, 50) for seed in range(6)]
    reference = Reference(model)
    async with cluster.connect() as stub:
        streams = [stream(stub, request(prompt, max_tokens=70, **GREEDY)) for prompt in prompts]
        answers = await asyncio.gather(*(answering.complete() for answering in streams))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == reference.greedy(prompt, 70, eos_token_id=-1)
    cluster.wait_all_free()
    wait_until(lambda: cluster.loads()["decode-0"].tier.num_hits > 0, "blocks were read back", CALL_DEADLINE_S)
    assert cluster.loads()["decode-0"].num_preemptions > 0
    cluster.stop()
