"""What each rank holds: against tables worked out by hand, and against the definition."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_core.errors import SettingsError
from serving_core.layout import KVLayout
from serving_core.model_files.config import read_model_config
from serving_core.model_files.differences import Differences, Experts
from serving_core.sharding import (
    Extent,
    Shard,
    check_num_ranks,
    check_pp_size,
    check_tp_size,
    head_range,
    is_first_holder,
    most_kv_heads,
    query_head_range,
    rank_layout,
    shard_of,
    share_of,
)
from tests.tiny_models import write_fake_model

SIZES = st.integers(1, 40)


@pytest.mark.parametrize(
    ("total", "size", "runs"),
    [(4, 2, ["01", "23"]), (5, 2, ["01", "234"]), (7, 3, ["01", "23", "456"]), (2, 4, ["", "0", "", "1"])],
)
def test_shares(total, size, runs):
    assert ["".join(map(str, share_of(total, rank, size))) for rank in range(size)] == runs


@given(st.integers(0, 10_000), SIZES)
def test_shares_partition_and_differ_by_one_at_most(total, size):
    shares = [share_of(total, rank, size) for rank in range(size)]
    assert [at for share in shares for at in share] == list(range(total))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "tp_size", "query_heads", "kv_heads"),
    [
        (4, 2, 1, ["0123"], ["01"]),
        (4, 2, 2, ["01", "23"], ["0", "1"]),
        (4, 2, 3, ["0", "1", "23"], ["0", "0", "1"]),
        (4, 2, 4, ["0", "1", "2", "3"], ["0", "0", "1", "1"]),
        (9, 3, 2, ["012", "345678"], ["0", "12"]),
        (9, 3, 4, ["0", "12", "345", "678"], ["0", "0", "1", "2"]),
        (6, 1, 4, ["0", "12", "3", "45"], ["0", "0", "0", "0"]),
        (8, 8, 4, ["01", "23", "45", "67"], ["01", "23", "45", "67"]),
    ],
)
def test_heads_worked_out_by_hand(num_heads, num_kv_heads, tp_size, query_heads, kv_heads):
    ranks = range(tp_size)
    assert ["".join(map(str, head_range(rank, tp_size, num_kv_heads))) for rank in ranks] == kv_heads
    assert ["".join(map(str, query_head_range(rank, tp_size, num_heads, num_kv_heads))) for rank in ranks] == (
        query_heads
    )


@given(tp_size=SIZES, num_kv_heads=SIZES, group_size=st.integers(1, 12))
def test_every_query_head_is_on_one_rank_which_holds_its_kv_head(tp_size, num_kv_heads, group_size):
    num_heads = num_kv_heads * group_size
    queries = [query_head_range(rank, tp_size, num_heads, num_kv_heads) for rank in range(tp_size)]
    keys = [head_range(rank, tp_size, num_kv_heads) for rank in range(tp_size)]
    assert [head for held in queries for head in held] == list(range(num_heads))
    for held, kv_heads in zip(queries, keys, strict=True):
        assert {head // group_size for head in held} <= set(kv_heads)
        # Attention takes a whole number of query heads to a key, in order.
        assert len(held) % len(kv_heads) == 0
        assert [head // group_size - kv_heads.start for head in held] == [
            index // (len(held) // len(kv_heads)) for index in range(len(held))
        ]
    if num_heads >= tp_size:
        assert all(queries)


@given(tp_size=SIZES, num_kv_heads=SIZES)
def test_every_kv_head_has_one_first_holder(tp_size, num_kv_heads):
    nothing = Extent(0, range(0))
    shards = [
        Shard(rank, nothing, Extent(num_kv_heads, head_range(rank, tp_size, num_kv_heads)), *[nothing] * 3)
        for rank in range(tp_size)
    ]
    first = [head for shard in shards if is_first_holder(shard, tp_size) for head in shard.kv_heads.held]
    assert first == list(range(num_kv_heads))


@given(tp_size=SIZES, num_kv_heads=SIZES)
def test_kv_heads_are_all_held_and_replicated_only_where_there_are_too_few(tp_size, num_kv_heads):
    held = [head_range(rank, tp_size, num_kv_heads) for rank in range(tp_size)]
    assert {head for heads in held for head in heads} == set(range(num_kv_heads))
    assert all(before.start <= after.start for before, after in pairwise(held))
    assert sum(map(len, held)) == max(tp_size, num_kv_heads)
    assert max(map(len, held)) == most_kv_heads(tp_size, num_kv_heads)


@pytest.mark.parametrize("sizes", [(0, 1), (-1, 4), (2, 0)])
def test_sizes_below_one_are_refused(sizes):
    with pytest.raises(ValueError, match="must be at least 1"):
        head_range(0, *sizes)


def test_a_head_is_as_wide_as_its_elements():
    assert Extent(3, range(1, 3)).times(4) == Extent(12, range(4, 12))


@pytest.fixture
def config(tmp_path):
    config = read_model_config(write_fake_model(tmp_path))
    return replace(config, num_heads=6, num_kv_heads=2, intermediate_size=11, vocab_size=261)


def test_one_ranks_part_of_a_model(config):
    shard = shard_of(config, 2, 3)
    assert shard.query_heads == Extent(6, range(3, 6))
    assert shard.kv_heads == Extent(2, range(1, 2))
    assert shard.neurons == Extent(11, range(7, 11))
    assert shard.vocabulary == Extent(261, range(174, 261))


def test_one_rank_alone_holds_everything(config):
    shard = shard_of(config, 0, 1)
    extents = [shard.query_heads, shard.kv_heads, shard.neurons, shard.vocabulary, shard.layers]
    assert [extent.total for extent in extents] == [6, 2, 11, 261, config.num_layers]
    assert all(extent.is_whole for extent in extents)
    assert (shard.is_first, shard.is_last) == (True, True)


def test_ranks_are_numbered_stage_by_stage(config):
    """Five layers over two stages of three ranks."""
    shards = [shard_of(replace(config, num_layers=5), rank, 3, 2) for rank in range(6)]
    assert [shard.layers.held for shard in shards] == [range(2)] * 3 + [range(2, 5)] * 3
    assert [(shard.is_first, shard.is_last) for shard in shards] == [(True, False)] * 3 + [(False, True)] * 3
    for first, second in zip(shards[:3], shards[3:], strict=True):
        assert replace(second, layers=first.layers) == first


def test_a_rank_holds_its_heads_in_the_layers_of_its_stage():
    layout = KVLayout.uniform(5, 3, 4, 2, "float32")
    held = [rank_layout(layout, rank, 2, 2) for rank in range(4)]
    assert [(part.layers, part.num_kv_heads) for part in held] == [
        (range(2), 1),
        (range(2), 2),
        (range(2, 5), 1),
        (range(2, 5), 2),
    ]
    assert sum(part.block_bytes for part in held) == layout.block_bytes


def test_no_stage_goes_without_a_layer_and_no_node_has_more_than_64_ranks(config):
    check_pp_size(replace(config, num_layers=3), 3)
    with pytest.raises(SettingsError, match="the model has 3 layers, which cannot be divided over 4 stages"):
        check_pp_size(replace(config, num_layers=3), 4)
    check_num_ranks(16, 4)
    sentence = "--tensor-parallel-size is 16, --pipeline-parallel-size is 5, and 64 ranks are the most"
    with pytest.raises(SettingsError, match=sentence):
        check_num_ranks(16, 5)


def of_experts(experts):
    return {"num_heads": 8, "differences": Differences(experts=experts)}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "the model has 6 attention heads, which cannot be divided over 7 ranks"),
        ({"num_heads": 8, "intermediate_size": 5}, "the model has 5 feed-forward neurons"),
        ({"num_heads": 8, "vocab_size": 4}, "the model has 4 tokens in its vocabulary"),
        (of_experts(Experts(9, 2, 6, True)), "the model has 6 neurons in an expert"),
        (of_experts(Experts(9, 2, 7, True, 5)), "the model has 5 neurons in a shared expert"),
    ],
)
def test_more_ranks_than_the_model_has_parts(config, fields, sentence):
    check_tp_size(config, 6)
    with pytest.raises(SettingsError, match=sentence):
        check_tp_size(replace(config, **fields), 7)
