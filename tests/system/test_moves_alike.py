"""Agents of one long prompt whose node drains: what they begin with travels once, is held once, and nobody notices."""

import asyncio
import random
import signal
import sys

import pytest
import torch

from engine.native.linear import best_variant
from splitserve import AsyncClient
from tests.system.answers import request, stream
from tests.system.cluster import wait_until
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.nightly

NUM_AGENTS = 12
BLOCK_SIZE = 16
DEADLINE_S = 400.0


def _questions(salt):
    rng = random.Random(2000)
    beginning = [rng.randrange(256) for _ in range(2000)]
    for number in range(NUM_AGENTS):
        sampling = {"max_tokens": 900, "temperature": 0.8, "seed": number, "ignore_eos": True, "logprobs": 0}
        message = request([*beginning, *[number] * 5], **sampling)
        message.cache_salt = salt
        yield message


async def _answers(streams):
    return [await answering.complete(DEADLINE_S) for answering in streams]


@pytest.mark.skipif(best_variant(torch.bfloat16) is None, reason="bfloat16 products are not native here")
async def test_what_agents_begin_with_moves_once(start_cluster, tmp_path, capsys):
    model = write_tiny_model(tmp_path / "model", dtype="bfloat16", max_position_embeddings=16384)
    sizes = {"num_kv_blocks": 4000, "block_size": BLOCK_SIZE, "max_num_seqs": 32}
    cluster = start_cluster(model, num_prefill=1, num_decode=2, node=sizes)
    target = cluster.children["decode-1"]
    target.send(signal.SIGSTOP)  # lost until there is something to move, and back sooner than one could start
    await asyncio.to_thread(wait_until, lambda: "decode-1" not in cluster.attached(), "it is lost", DEADLINE_S)
    async with cluster.connect() as stub, AsyncClient(cluster.target) as client, asyncio.timeout(DEADLINE_S):
        stayed = await _answers([stream(stub, each, timeout=DEADLINE_S) for each in _questions("stays")])
        streams = [stream(stub, each, timeout=DEADLINE_S) for each in _questions("migrations")]
        for answering in streams:
            await answering.tokens(20)
        target.send(signal.SIGCONT)
        await asyncio.to_thread(wait_until, lambda: "decode-1" in cluster.attached(), "it is back", DEADLINE_S)
        left = [num_left async for num_left in client.drain("decode-0", deadline_s=DEADLINE_S)]
        assert left[-1] == 0
        load = cluster.loads()["decode-1"]
        num_held = load.num_blocks - load.num_blocks_free
        num_blocks = sum(2005 + len(answering.answer.token_ids) for answering in streams) // BLOCK_SIZE
        migrated = await _answers(streams)
    first = stayed[0].complete
    block_bytes = (first.kv_bytes + first.kv_bytes_saved) // 126  # of 2005 tokens
    num_bytes = sum(each.complete.migrated_kv_bytes for each in migrated)
    pauses_ms = sorted(round(1000 * each.complete.timeline.migration_pause_s, 1) for each in migrated)
    with capsys.disabled():
        sys.stdout.write(f"\n{num_bytes} bytes moved, {num_held} blocks held of {num_blocks}, pauses {pauses_ms} ms\n")
    assert all(each.complete.timeline.num_migrations for each in migrated)
    assert num_held < num_blocks / 2
    assert num_bytes < block_bytes * num_blocks / 2
    for disturbed, expected in zip(migrated, stayed, strict=True):
        assert disturbed.complete.timeline.num_restarts == 0
        assert disturbed.token_ids == expected.token_ids
        assert [each.logprob for each in disturbed.logprobs] == [each.logprob for each in expected.logprobs]
    cluster.wait_all_free()
