"""Prefill and decode nodes of any two sizes: every rank ends up with its slice of what one rank would have, byte for
byte."""

import itertools
import random
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.sessions.sender_session import MAX_ROUNDS
from serving_core.layout import KVLayout
from serving_core.sharding import head_range
from tests.unit.kv_transfer.channels_kit import SOURCE_IDS, TAIL, TARGET_IDS, check_pools, nodes_of, sliced
from tests.unit.kv_transfer.transfer_kit import (
    ByteStore,
    Fabric,
    Faults,
    FaultyDialer,
    check_arrived,
    pair,
    run,
    transfer,
)

pytestmark = pytest.mark.nightly

TP_SIZES = [1, 2, 4]
PAIRS = list(itertools.product(TP_SIZES, TP_SIZES))
HEADS = [1, 2, 3, 4, 8]


def layout_of(num_heads, dtype="bfloat16"):
    return KVLayout.uniform(num_layers=3, num_kv_heads=num_heads, head_dim=4, block_size=2, dtype=dtype)


async def arrived_at_one_rank(fabric, whole, num_cached_blocks):
    """The pool of a decode node of one rank, sent to by a prefill node of one."""
    target = ByteStore(whole.layout, 8)
    async with pair(fabric, whole, target) as (sender, receiver):
        await transfer(sender, receiver, SOURCE_IDS, TARGET_IDS, num_cached_blocks=num_cached_blocks)
    return target


async def check_sizes(fabric, whole, prefill_tp, decode_tp, num_cached_blocks=0):
    """A transfer layer by layer, in two chunks."""
    reference = await arrived_at_one_rank(fabric, whole, num_cached_blocks)
    async with nodes_of(fabric, whole, prefill_tp, decode_tp, 8) as nodes:
        attempt = nodes.begin(TARGET_IDS, num_cached_blocks=num_cached_blocks)
        for ids, num_layers in itertools.product((SOURCE_IDS[:2], SOURCE_IDS[:4]), range(1, 4)):
            attempt.blocks_ready(ids, num_layers)
        attempt.finish(SOURCE_IDS)
        num_sent = len(SOURCE_IDS) - num_cached_blocks
        assert await attempt.results() == nodes.expected(num_sent)
        expected = [store.bytes_of(range(8)) for store in sliced(reference, decode_tp)]
        assert nodes.bytes_of(range(8)) == expected
        num_bytes = sum(len(copy.source_heads) for copy in nodes.copies) * whole.layout.with_heads(1).block_bytes
        for ends in (nodes.senders, nodes.receivers):
            assert sum(end.num_bytes for end in ends) == num_sent * num_bytes, "something was sent twice"


def test_one_rank_gets_what_one_rank_has(tmp_path):
    """What the tests below compare with."""
    whole = ByteStore(layout_of(3), 6, seed=1)

    async def scenario():
        target = await arrived_at_one_rank(Fabric("loopback", tmp_path), whole, 0)
        assert target.bytes_of(TARGET_IDS) == whole.bytes_of(SOURCE_IDS)
        assert not any(target.bytes_of([4, 5, 7]))

    run(scenario())


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("num_heads", HEADS)
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), PAIRS)
def test_every_pair_of_sizes(tmp_path, prefill_tp, decode_tp, num_heads, dtype):
    whole = ByteStore(layout_of(num_heads, dtype), 6, seed=num_heads)
    run(check_sizes(Fabric("loopback", tmp_path), whole, prefill_tp, decode_tp))


@pytest.mark.parametrize(("prefill_tp", "decode_tp", "num_heads"), [(1, 4, 8), (4, 1, 3), (2, 4, 3), (4, 2, 1)])
def test_every_transport_carries_them(fabric, prefill_tp, decode_tp, num_heads):
    whole = ByteStore(layout_of(num_heads, "int8"), 6, seed=2)
    run(check_sizes(fabric, whole, prefill_tp, decode_tp))


@pytest.mark.parametrize("num_cached_blocks", range(6))
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (1, 4), (4, 2)])
def test_cached_blocks_are_neither_sent_nor_written(tmp_path, prefill_tp, decode_tp, num_cached_blocks):
    whole = ByteStore(layout_of(3), 6, seed=3)
    run(check_sizes(Fabric("loopback", tmp_path), whole, prefill_tp, decode_tp, num_cached_blocks))


def test_nothing_is_sent_when_everything_is_cached(fabric):
    source, target = ByteStore(layout_of(2), 6, seed=4), ByteStore(layout_of(2), 6)

    async def scenario():
        async with pair(fabric, source, target) as (sender, receiver):
            results = await transfer(sender, receiver, [0, 1], [2, 3], num_cached_blocks=2)
            assert [result.num_bytes for result in results] == [0, 0]
            assert results[1].tail == b"tail"
            assert (sender.num_messages, receiver.num_bytes) == (0, 0)
            assert not any(target.bytes_of(range(6)))
            check_arrived(source, [1], target, [5], await transfer(sender, receiver, [1], [5]))

    run(scenario())


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 2), (2, 1), (4, 2), (2, 4)])
def test_the_pools_of_the_engine(fabric, prefill_tp, decode_tp, dtype):
    whole = ByteStore(layout_of(4, dtype), 6, seed=5)
    run(check_pools(fabric, whole, prefill_tp, decode_tp))


@given(
    prefill_tp=st.integers(1, 5),
    decode_tp=st.integers(1, 5),
    num_heads=st.integers(1, 6),
    num_cached_blocks=st.integers(0, 5),
    dtype=st.sampled_from(["float32", "fp8_e4m3"]),
)
def test_any_sizes(prefill_tp, decode_tp, num_heads, num_cached_blocks, dtype):
    whole = ByteStore(layout_of(num_heads, dtype), 6, seed=6)
    run(check_sizes(Fabric("loopback", None), whole, prefill_tp, decode_tp, num_cached_blocks))


# ---- disturbed ----


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("prefill_tp", "decode_tp", "num_heads"), [(1, 4, 4), (4, 1, 4), (2, 3, 5), (4, 2, 1)])
def test_faults_cost_time_but_never_a_byte(fabric, prefill_tp, decode_tp, num_heads, seed):
    whole = ByteStore(layout_of(num_heads, "int8"), 6, seed=7)
    rates = {"drop": 0.1, "duplicate": 0.2, "delay": 0.2, "truncate": 0.1, "flip": 0.1}
    faults = Faults(random.Random(seed), **rates, num_per_transfer=MAX_ROUNDS)

    async def scenario():
        wrap = partial(FaultyDialer, faults=faults)
        async with nodes_of(fabric, whole, prefill_tp, decode_tp, 8, wrap=wrap) as nodes:
            attempt = nodes.begin(TARGET_IDS, num_cached_blocks=1)
            for num_ready in range(5):
                attempt.blocks_ready(SOURCE_IDS[:num_ready])
            attempt.finish(SOURCE_IDS)
            assert await attempt.results() == nodes.expected(4)
            expected = [store.bytes_of(SOURCE_IDS[1:]) for store in sliced(whole, decode_tp)]
            assert nodes.bytes_of(TARGET_IDS[1:]) == expected
            assert not any(map(any, nodes.bytes_of([TARGET_IDS[0], 4, 5, 7])))

    run(scenario())


@pytest.mark.parametrize("rates", [{"flip": 0.4}, {"drop": 0.4}, {"truncate": 0.4, "duplicate": 0.5, "delay": 0.5}])
def test_hopeless_faults_end_and_are_never_taken_for_success(tmp_path, rates):
    """Whatever says Received has every byte."""
    whole = ByteStore(layout_of(4), 6, seed=8)

    async def scenario():
        for seed in range(6):
            faults = Faults(random.Random(seed), **rates)
            wrap = partial(FaultyDialer, faults=faults)
            fabric = Fabric("loopback", tmp_path)
            async with nodes_of(fabric, whole, 4, 2, 8, wrap=wrap, deadline_s=0.3) as nodes:
                attempt = nodes.begin(TARGET_IDS, ttl_s=0.4)
                attempt.finish(SOURCE_IDS)
                _, received = await attempt.results()
                for result, target, expected in zip(received, nodes.targets, sliced(whole, 2), strict=True):
                    if getattr(result, "tail", None) == TAIL:
                        assert target.bytes_of(TARGET_IDS) == expected.bytes_of(SOURCE_IDS)

    run(scenario())


# ---- the stores of these tests ----


@given(st.sampled_from(["float32", "int8"]), st.integers(1, 5), st.data())
def test_two_ways_to_take_heads_out_of_a_store_agree(dtype, num_heads, data):
    whole = ByteStore(layout_of(num_heads, dtype), 3, seed=9)
    tp_size = data.draw(st.integers(1, 6))
    for rank, store in enumerate(sliced(whole, tp_size)):
        some = whole.heads(head_range(rank, tp_size, num_heads))
        assert some.layout == store.layout
        for layer in range(3):
            assert b"".join(some.read(layer, [2, 0])) == b"".join(store.read(layer, [2, 0]))
