"""Nodes that divide layers over stages, and the heads of each over its ranks: any grid sends to any other."""

import itertools

import pytest

from kv_transfer.results import TransferError
from serving_core.layout import KVLayout
from tests.effort import few
from tests.unit.kv_transfer.channels_kit import SOURCE_IDS, TARGET_IDS, nodes_of, sliced
from tests.unit.kv_transfer.transfer_kit import ByteStore, Fabric, Once, run

LAYOUT = KVLayout.uniform(num_layers=5, num_kv_heads=2, head_dim=4, block_size=2, dtype="bfloat16")
GRIDS = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 5)]  # TP and PP


async def check(fabric, prefill, decode):
    """A transfer layer by layer, in two chunks, whose ranks are not in step."""
    whole = ByteStore(LAYOUT, 6, seed=1)
    stages = {"prefill_pp": prefill[1], "decode_pp": decode[1]}
    async with nodes_of(fabric, whole, prefill[0], decode[0], 8, **stages) as nodes:
        attempt = nodes.begin(TARGET_IDS)
        for sending in attempt.sendings:
            for ids, num_layers in itertools.product((SOURCE_IDS[:2], SOURCE_IDS[:4]), range(1, 6)):
                sending.blocks_ready(ids, num_layers)
        attempt.finish(SOURCE_IDS)
        assert await attempt.results() == nodes.expected(len(SOURCE_IDS))
        for target, expected in zip(nodes.targets, sliced(whole, *decode), strict=True):
            assert target.bytes_of(TARGET_IDS) == expected.bytes_of(SOURCE_IDS)
            assert not any(target.bytes_of([4, 5, 7])), "a neighbour was written"


@pytest.mark.parametrize(
    "grids",
    few(
        itertools.product(GRIDS, GRIDS),
        ((1, 1), (2, 2)),
        ((1, 2), (2, 1)),
        ((2, 1), (1, 2)),
        ((2, 2), (3, 5)),
        ((3, 5), (1, 2)),
    ),
    ids=str,
)
def test_every_pair_of_grids(tmp_path, grids):
    run(check(Fabric("loopback", tmp_path), *grids))


def test_every_transport_carries_them(fabric):
    run(check(fabric, (2, 1), (1, 2)))


def test_a_descriptor_is_for_nodes_of_its_stages(tmp_path):
    async def scenario():
        whole = ByteStore(LAYOUT, 6, seed=1)
        fabric = Fabric("loopback", tmp_path)
        async with (
            nodes_of(fabric, whole, 2, 2, 8) as flat,
            nodes_of(fabric, whole, 1, 1, 8, prefill_pp=2, decode_pp=2) as staged,
        ):
            descriptor = flat.descriptor(len(TARGET_IDS))
            with pytest.raises(TransferError, match="for a prefill node of 2 ranks, not 2 stages of 1 ranks"):
                staged.senders[1].start(descriptor.encode(), Once())
            with pytest.raises(TransferError, match="for a decode node of 2 ranks, not 2 stages of 1 ranks"):
                staged.receivers[1].expect(descriptor, TARGET_IDS, Once())

    run(scenario())
