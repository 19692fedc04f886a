"""Blocks that a node gives to another one's request were somebody's before."""

import asyncio
from types import SimpleNamespace

import numpy as np

from kv_transfer.annexes.annex import open_annex
from kv_transfer.annexes.wire import Asker
from serving_core.residents import Host
from serving_node.decisions import OpenAnnex
from tests.tiny_models import write_tiny_model
from tests.unit.serving_node.runner_kit import make_request, running
from tests.unit.serving_node.test_runner_ahead import send

NUM_TILES = 3
MOST_BLOCKS = 256  # of four tokens


async def test_the_second_tier_has_copies_of_what_was_in_blocks_that_host_others(tmp_path):
    engine = {"model": str(write_tiny_model(tmp_path / "tiny")), "device": "cpu", "dtype": "bfloat16"}
    sizes = {"num_blocks": MOST_BLOCKS, "num_tier_blocks": MOST_BLOCKS, "max_num_seqs": 4}
    prompt = [(7 * at * at + 3 * at) % 200 for at in range(900)]
    async with running(tmp_path, engine=engine, **sizes, max_num_batched_tokens=512, kv_annexes=True) as node:
        send(node, make_request("first", prompt, max_tokens=12))
        await node.idle()
        await asyncio.to_thread(_host_others, node)
        await node.until(lambda: not node.load.num_blocks_hosted)
        send(node, make_request("again", prompt, max_tokens=12))
        await node.idle()
        assert node.load.tier.num_hits > 0
        assert node.of("again") == node.of("first")
        await node.node.close()


def _host_others(node):
    """Another node's request has most of the pool, for a while."""
    random = np.random.default_rng(1)

    def read(layer, num_tiles):
        keys, values = layout.plane_bytes(layer)
        num_blocks = num_tiles * 256 // layout.block_size
        return memoryview(random.bytes(keys * num_blocks)), memoryview(random.bytes(values * num_blocks))

    offer, layout = node.node.hello().annexes.host, node.engine.layout
    sizes = node.engine.partial_attention()
    bytes_of = {"row_bytes": sizes.row_bytes, "partial_bytes": sizes.partial_bytes}
    annex = open_annex(offer.address, offer.key, NUM_TILES, layout.layers, read, asker=Asker(0), **bytes_of)
    assert annex is not None
    assert annex.num_tiles == NUM_TILES
    annex.close()


async def test_a_host_that_cannot_even_be_asked_has_no_room(tmp_path):
    engine = {"model": str(write_tiny_model(tmp_path / "tiny")), "device": "cpu", "dtype": "bfloat16"}
    told = []
    async with running(tmp_path, engine=engine, kv_annexes=True) as node:
        ends = node.node._annexes
        ends._on_opened = lambda resident, annex: told.append(annex)
        ends.carry_out(
            OpenAnnex(
                SimpleNamespace(age=0, longest_step_s=0.0, hosts=(Host("127.0.0.1:99999", bytes(32)),)),
                list(range(64)),
                is_again=False,
            )
        )
        await node.until(lambda: told == [None])
        await node.node.close()


async def test_a_host_is_told_what_is_to_be_known_of_whoever_asks(tmp_path):
    engine = {"model": str(write_tiny_model(tmp_path / "tiny")), "device": "cpu", "dtype": "bfloat16"}
    async with running(tmp_path, engine=engine, kv_annexes=True) as node:
        ends, host, told = node.node._annexes, node.node.hello().annexes.host, []
        ends._lease = lambda number, most_tiles, asker: told.append((most_tiles, asker)) or []
        asker = SimpleNamespace(age=7, longest_step_s=5.5, hosts=(Host(host.address, host.key),))
        ends._on_opened = lambda resident, annex: told.append(annex)
        ends.carry_out(OpenAnnex(asker, list(range(2 * 256 // node.engine.layout.block_size)), is_again=True))
        await node.until(lambda: len(told) == 2)
        assert told == [(2, Asker(7, True, 5.5)), None]
        await node.node.close()
