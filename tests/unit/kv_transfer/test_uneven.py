"""Layers of unlike widths, some without V, from the middle of a model: they travel as uniform ones do."""

import itertools
from dataclasses import replace

import pytest

from kv_transfer.descriptor import Channel
from kv_transfer.receiver import KVReceiver, Received, ReceivingChannel
from kv_transfer.results import TransferError
from kv_transfer.sender import KVSender, SendingChannel, Sent
from kv_transfer.transports.torch_dist import TorchDistDialer, TorchDistListener
from kv_transfer.wire import decode, encode
from serving_core.layout import KVLayout, Widths
from tests.effort import few, pairwise
from tests.unit.kv_transfer.channels_kit import SOURCE_IDS, TARGET_IDS, check_pools, nodes_of, sliced
from tests.unit.kv_transfer.fabric_kinds import FABRIC_KINDS
from tests.unit.kv_transfer.torch_dist_kit import CPU, bytes_of, tensor_store
from tests.unit.kv_transfer.transfer_kit import (
    PATIENCE_S,
    ByteStore,
    Fabric,
    Once,
    check_arrived,
    grant,
    pair,
    run,
    transfer,
)

WIDTHS = (Widths(4, 4), Widths(12, 8), Widths(20, 0), Widths(4, 12), Widths(4, 4))
LATENT = (Widths(20, 0),) * 4
LARGE = (Widths(640, 512), Widths(576, 0), Widths(64, 64))  # caches that are frames of their own
FIRST = 5


def layout_of(widths=WIDTHS, dtype="bfloat16", num_heads=2, block_size=2):
    return KVLayout(FIRST, widths, num_heads, block_size, dtype)


@pairwise(kind=FABRIC_KINDS, dtype=["bfloat16", "int8"], widths=[WIDTHS, LATENT, LARGE])
def test_every_byte_arrives_in_its_layer(tmp_path, kind, dtype, widths):
    layout = layout_of(widths, dtype, block_size=128 if widths is LARGE else 2)
    source, target = ByteStore(layout, 6, seed=1), ByteStore(layout, 8)

    async def scenario():
        async with pair(Fabric(kind, tmp_path), source, target) as (sender, receiver):
            results = await transfer(sender, receiver, SOURCE_IDS, TARGET_IDS)
            check_arrived(source, SOURCE_IDS, target, TARGET_IDS, results)
            assert sender.num_bytes == receiver.num_bytes == 5 * layout.block_bytes, "something was sent twice"
            assert not any(target.bytes_of([4, 5, 7])), "a neighbour was written"

    run(scenario())


@pytest.mark.parametrize("dtype", few(["bfloat16", "int8", "fp8_e4m3"], "int8"))
@pytest.mark.parametrize("widths", [WIDTHS, LATENT])
def test_tensors_arrive_over_torch_distributed(widths, dtype):
    layout = layout_of(widths, dtype)
    source, target = tensor_store(layout, 6, seed=2), tensor_store(layout, 8)

    async def scenario():
        sender = KVSender(TorchDistDialer(CPU), source, deadline_s=PATIENCE_S)
        receiver = KVReceiver(TorchDistListener("dist://127.0.0.1:*", CPU), target)
        sent, received = await transfer(sender, receiver, SOURCE_IDS, TARGET_IDS)
        assert (sent.num_bytes, received.num_bytes) == (5 * layout.block_bytes,) * 2
        await sender.close()
        await receiver.close()

    run(scenario())
    assert bytes_of(target, TARGET_IDS) == bytes_of(source, SOURCE_IDS)
    assert not any(bytes_of(target, [4, 5, 7]))


@pytest.mark.parametrize("tp_sizes", few([(1, 2), (4, 2), (2, 3)], (2, 3)), ids=str)
def test_nodes_of_unlike_sizes_layer_by_layer(fabric, tp_sizes):
    prefill_tp, decode_tp = tp_sizes
    layout = layout_of(dtype="int8", num_heads=4)
    whole = ByteStore(layout, 6, seed=3)

    async def scenario():
        async with nodes_of(fabric, whole, prefill_tp, decode_tp, 8) as nodes:
            attempt = nodes.begin(TARGET_IDS, num_cached_blocks=1)
            for ids, num_layers in itertools.product((SOURCE_IDS[:2], SOURCE_IDS[:4]), range(1, len(WIDTHS) + 1)):
                attempt.blocks_ready(ids, num_layers)
            attempt.finish(SOURCE_IDS)
            assert await attempt.results() == nodes.expected(4)
            expected = [store.bytes_of(SOURCE_IDS[1:]) for store in sliced(whole, decode_tp)]
            assert nodes.bytes_of(TARGET_IDS[1:]) == expected
            assert not any(map(any, nodes.bytes_of([TARGET_IDS[0], 4, 5, 7])))

    run(scenario())


@pytest.mark.parametrize("tp_sizes", few([(1, 1), (2, 1), (1, 2)], (2, 1)), ids=str)
def test_the_pools_of_the_engine(fabric, tp_sizes):
    whole = ByteStore(layout_of(dtype="fp8_e4m3"), 6, seed=4)
    run(check_pools(fabric, whole, *tp_sizes))


# ---- layouts that differ ----

OTHERS = [
    replace(layout_of(), first_layer=0),
    replace(layout_of(), widths=WIDTHS[:-1]),
    replace(layout_of(), widths=(*WIDTHS[:-1], Widths(4, 8))),
    replace(layout_of(), widths=(*WIDTHS[:-1], Widths(4, 0))),
    replace(layout_of(), widths=(WIDTHS[1], WIDTHS[0], *WIDTHS[2:])),
    layout_of(dtype="float16"),
    layout_of(num_heads=3),
    layout_of(block_size=4),
]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_a_descriptor_for_another_layout_is_refused_at_both_ends_with_both(tmp_path, other):
    source, target = ByteStore(layout_of(), 6, seed=5), ByteStore(other, 8)

    async def scenario():
        async with pair(Fabric("loopback", tmp_path), source, target) as (sender, receiver):
            descriptor = grant(receiver, TARGET_IDS, Once())
            with pytest.raises(TransferError) as refusal:
                sender.start(descriptor.encode(), Once())
            assert str(refusal.value) == f"the descriptor asks this rank for blocks of {other}; it has {source.layout}"
            with pytest.raises(TransferError) as refusal:
                receiver.expect(replace(descriptor, layout=source.layout), TARGET_IDS, Once())
            assert str(refusal.value) == f"the descriptor gives this rank blocks of {source.layout}; it has {other}"

    run(scenario())


# ---- channels of some layers ----


class Owner:
    """Of one channel at both ends."""

    def __init__(self, listener):
        self._listener = listener
        self.sent, self.received, self.num_bytes = Once(), Once(), 0

    def reply(self, peer, message):
        self._listener.reply(peer, encode(message))

    def channel_sent(self, num_bytes):
        self.num_bytes += num_bytes

    def channel_wrote(self, num_bytes):
        self.num_bytes -= num_bytes

    def channel_found_corrupt(self, num_blocks):
        assert num_blocks == 0

    def channel_ended(self, *channel_and_result):
        once = self.sent if len(channel_and_result) == 1 else self.received
        once(channel_and_result[-1])

    def channel_caught_up(self):
        pass

    def channel_released(self):
        pass


class Stages:
    """A channel for each of these ranges of layers, from one store to another."""

    def __init__(self, fabric, ends):
        self._listener, self._dialer = fabric.listener(), fabric.dialer()
        self._listener.start(self._take)
        self._dialer.start(self._take_reply, lambda address: None)
        self.owners, self.sending, self._receiving = [], [], {}
        for number, (layers, source, target) in enumerate(ends):
            layout = source.layout.with_layers(layers)
            assert layout == target.layout.with_layers(layers)
            channel = Channel(bytes([number] * 16), 1, self._listener.address, layout, len(TARGET_IDS), 0, PATIENCE_S)
            self.owners.append(Owner(self._listener))
            receiving = ReceivingChannel(channel, self._listener.payload, target, TARGET_IDS, self.owners[-1])
            self._receiving[channel.transfer_id] = receiving
            self.sending.append(SendingChannel(channel, self._dialer, source, PATIENCE_S, self.owners[-1]))

    def _take(self, peer, header, frames):
        message = decode(header)
        self._receiving[message.transfer_id].take(peer, message, frames)

    def _take_reply(self, header):
        message = decode(header)
        self.sending[message.transfer_id[0]].handle(message)

    async def close(self):
        await self._dialer.close()
        await self._listener.close()


def stage_of(whole, layers):
    """A store of some layers of another."""
    stage = ByteStore(whole.layout.with_layers(layers), whole.num_blocks)
    for layer in layers:
        stage.write(layer, range(whole.num_blocks), *whole.read(layer, range(whole.num_blocks)))
    return stage


@pytest.mark.parametrize("stages_send", [False, True])
def test_a_channel_carries_the_layers_that_its_layout_says(fabric, stages_send):
    """From a rank that holds all layers to the ranks of two stages, or the other way round, as layers become ready."""
    layout, ranges = layout_of(dtype="int8"), (range(5, 7), range(7, 10))
    source, target = ByteStore(layout, 6, seed=6), ByteStore(layout, 8)
    if stages_send:
        ends = [(layers, stage_of(source, layers), target) for layers in ranges]
    else:
        ends = [(layers, source, stage_of(target, layers)) for layers in ranges]

    async def scenario():
        stages = Stages(fabric, ends)
        for ids, stop in itertools.product((SOURCE_IDS[:2], SOURCE_IDS[:4]), range(6, 11)):
            for channel in stages.sending:
                channel.blocks_ready(ids, range(5, stop))
        for channel in stages.sending:
            channel.finish(SOURCE_IDS, b"tail")
        for (layers, _, part), owner in zip(ends, stages.owners, strict=True):
            num_bytes = 5 * layout.with_layers(layers).block_bytes
            assert await owner.sent.result() == Sent(num_bytes)
            assert await owner.received.result() == Received(b"tail", num_bytes)
            assert owner.num_bytes == 0, "something was sent that was not written"
            for layer in layers:
                assert b"".join(part.read(layer, TARGET_IDS)) == b"".join(source.read(layer, SOURCE_IDS))
        await stages.close()

    run(scenario())
