"""The reshard plan, against tables worked out by hand and against its definition."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.plan import Grid, Holding, KVCopy, holdings, plan_copies, plan_nodes
from kv_transfer.results import TransferError
from serving_core.sharding import head_range, share_of
from tests.effort import pairwise


@pytest.mark.parametrize(
    ("num_heads", "tp_size", "shares"),
    [
        (1, 1, ["0"]),
        (1, 2, ["0", "0"]),
        (1, 4, ["0", "0", "0", "0"]),
        (2, 1, ["01"]),
        (2, 2, ["0", "1"]),
        (2, 4, ["0", "0", "1", "1"]),
        (3, 1, ["012"]),
        (3, 2, ["0", "12"]),
        (3, 4, ["0", "0", "1", "2"]),
        (4, 1, ["0123"]),
        (4, 2, ["01", "23"]),
        (4, 4, ["0", "1", "2", "3"]),
        (8, 1, ["01234567"]),
        (8, 2, ["0123", "4567"]),
        (8, 4, ["01", "23", "45", "67"]),
    ],
)
def test_what_each_rank_holds(num_heads, tp_size, shares):
    assert ["".join(map(str, head_range(rank, tp_size, num_heads))) for rank in range(tp_size)] == shares


def plan_tp(prefill_tp, decode_tp, num_heads, layers=range(1)):
    """That of two nodes without stages."""
    return list(plan_nodes(Grid(prefill_tp), Grid(decode_tp), num_heads, layers))


def words(copies):
    """source rank[its heads] > destination rank[its heads]"""

    def digits(heads):
        return "".join(map(str, heads))

    return [
        f"{c.source_rank}[{digits(c.source_heads)}]>{c.destination_rank}[{digits(c.destination_heads)}]" for c in copies
    ]


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "num_heads", "expected"),
    [
        (1, 1, 1, ["0[0]>0[0]"]),
        (1, 1, 8, ["0[01234567]>0[01234567]"]),
        (1, 2, 1, ["0[0]>0[0]", "0[0]>1[0]"]),
        (1, 2, 2, ["0[0]>0[0]", "0[1]>1[0]"]),
        (1, 2, 3, ["0[0]>0[0]", "0[12]>1[01]"]),
        (1, 4, 8, ["0[01]>0[01]", "0[23]>1[01]", "0[45]>2[01]", "0[67]>3[01]"]),
        (2, 1, 1, ["0[0]>0[0]"]),
        (2, 1, 3, ["0[0]>0[0]", "1[01]>0[12]"]),
        (2, 1, 4, ["0[01]>0[01]", "1[01]>0[23]"]),
        (2, 2, 1, ["0[0]>0[0]", "1[0]>1[0]"]),
        (2, 2, 8, ["0[0123]>0[0123]", "1[0123]>1[0123]"]),
        (2, 4, 2, ["0[0]>0[0]", "0[0]>1[0]", "1[0]>2[0]", "1[0]>3[0]"]),
        (2, 4, 3, ["0[0]>0[0]", "0[0]>1[0]", "1[0]>2[0]", "1[1]>3[0]"]),
        (2, 4, 4, ["0[0]>0[0]", "0[1]>1[0]", "1[0]>2[0]", "1[1]>3[0]"]),
        (4, 1, 2, ["0[0]>0[0]", "2[0]>0[1]"]),
        (4, 2, 1, ["0[0]>0[0]", "1[0]>1[0]"]),
        (4, 2, 3, ["0[0]>0[0]", "2[0]>1[0]", "3[0]>1[1]"]),
        (4, 2, 8, ["0[01]>0[01]", "1[01]>0[23]", "2[01]>1[01]", "3[01]>1[23]"]),
        (4, 4, 1, ["0[0]>0[0]", "1[0]>1[0]", "2[0]>2[0]", "3[0]>3[0]"]),
        (4, 4, 2, ["0[0]>0[0]", "1[0]>1[0]", "2[0]>2[0]", "3[0]>3[0]"]),
        (4, 4, 3, ["0[0]>0[0]", "1[0]>1[0]", "2[0]>2[0]", "3[0]>3[0]"]),
    ],
)
def test_plans_worked_out_by_hand(prefill_tp, decode_tp, num_heads, expected):
    assert words(plan_tp(prefill_tp, decode_tp, num_heads)) == expected


def check_plan(prefill_tp, decode_tp, num_heads):
    """Carries the plan out on labelled heads: every decode rank gets each of its heads once, and the right one."""
    received = {(rank, head): [] for rank in range(decode_tp) for head in head_range(rank, decode_tp, num_heads)}
    for copy in plan_tp(prefill_tp, decode_tp, num_heads):
        assert len(copy.source_heads) == len(copy.destination_heads) > 0
        source = head_range(copy.source_rank, prefill_tp, num_heads)
        destination = head_range(copy.destination_rank, decode_tp, num_heads)
        for taken, put in zip(copy.source_heads, copy.destination_heads, strict=True):
            received[copy.destination_rank, destination[put]].append(source[taken])
    assert all(heads == [head] for (_, head), heads in received.items())


@pairwise(prefill_tp=[1, 2, 4], decode_tp=[1, 2, 4], num_heads=[1, 2, 3, 4, 8])
def test_every_pair_of_sizes(prefill_tp, decode_tp, num_heads):
    check_plan(prefill_tp, decode_tp, num_heads)


@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 32))
def test_any_sizes(prefill_tp, decode_tp, num_heads):
    check_plan(prefill_tp, decode_tp, num_heads)


@given(st.integers(1, 16), st.integers(1, 32))
def test_equal_sizes_need_one_copy_for_each_rank(tp_size, num_heads):
    copies = plan_tp(tp_size, tp_size, num_heads)
    assert [(c.source_rank, c.destination_rank) for c in copies] == [(rank, rank) for rank in range(tp_size)]


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (-1, 1, 1)])
def test_sizes_below_one_are_refused(sizes):
    with pytest.raises(TransferError, match="must be at least 1"):
        plan_tp(*sizes)


@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 32))
def test_no_pair_of_ranks_has_two_channels_and_no_plan_more_than_a_channel_for_each_rank(
    prefill_tp, decode_tp, num_heads
):
    copies = plan_tp(prefill_tp, decode_tp, num_heads)
    assert len({(copy.source_rank, copy.destination_rank) for copy in copies}) == len(copies)
    assert decode_tp <= len(copies) <= prefill_tp + decode_tp - 1


@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 32))
def test_rank_0_always_has_a_channel(prefill_tp, decode_tp, num_heads):
    assert plan_tp(prefill_tp, decode_tp, num_heads)[0].source_rank == 0


# ---- ranges of layers ----


def grid(layers, num_heads, tp_size, num_stages):
    """What the ranks of a node of pipeline stages hold, stage by stage."""
    stages = [share_of(len(layers), stage, num_stages) for stage in range(num_stages)]
    return [
        Holding(layers[stage.start : stage.stop], head_range(rank, tp_size, num_heads))
        for stage in stages
        for rank in range(tp_size)
    ]


def check_holdings(sources, destinations):
    """Carries the plan out: every destination gets each of its heads in each of its layers once, from one that has it,
    and no pair has two channels."""
    copies = plan_copies(sources, destinations)
    received = {
        (rank, layer, head): 0
        for rank, wanted in enumerate(destinations)
        for layer in wanted.layers
        for head in wanted.heads
    }
    for copy in copies:
        source, destination = sources[copy.source_rank], destinations[copy.destination_rank]
        assert copy.layers
        for layer in copy.layers:
            assert layer in source.layers
            for taken, put in zip(copy.source_heads, copy.destination_heads, strict=True):
                assert source.heads[taken] == destination.heads[put]
                received[copy.destination_rank, layer, destination.heads[put]] += 1
    assert set(received.values()) <= {1}
    assert len({(copy.source_rank, copy.destination_rank) for copy in copies}) == len(copies)
    return copies


tp_sizes = st.integers(1, 4)
nodes = st.tuples(tp_sizes, st.integers(1, 3))  # TP size and stages


@pairwise(prefill_tp=range(1, 5), decode_tp=range(1, 5), prefill_pp=range(1, 4), decode_pp=range(1, 4))
def test_every_pair_of_grids(prefill_tp, decode_tp, prefill_pp, decode_pp):
    for num_heads in (1, 2, 3, 8):
        sources = grid(range(5, 12), num_heads, prefill_tp, prefill_pp)
        check_holdings(sources, grid(range(5, 12), num_heads, decode_tp, decode_pp))


@given(nodes, nodes, st.integers(1, 8), st.integers(0, 5), st.integers(1, 9))
def test_any_grids_of_stages_and_shares(prefill, decode, num_heads, first_layer, num_layers):
    layers = range(first_layer, first_layer + num_layers)
    check_holdings(grid(layers, num_heads, *prefill), grid(layers, num_heads, *decode))


@given(nodes, st.integers(1, 8), st.integers(3, 7))
def test_equal_grids_need_one_copy_for_each_rank(node, num_heads, num_layers):
    holdings = grid(range(num_layers), num_heads, *node)
    copies = check_holdings(holdings, holdings)
    assert [(c.source_rank, c.destination_rank) for c in copies] == [(rank, rank) for rank in range(len(holdings))]
    assert [copy.layers for copy in copies] == [held.layers for held in holdings]


@given(tp_sizes, tp_sizes, st.integers(1, 8))
def test_nodes_without_stages_have_the_plan_of_their_heads_in_all_layers(prefill_tp, decode_tp, num_heads):
    layers = range(5, 12)
    sources, destinations = (grid(layers, num_heads, tp_size, 1) for tp_size in (prefill_tp, decode_tp))
    copies = plan_copies(sources, destinations)
    assert copies == plan_tp(prefill_tp, decode_tp, num_heads, layers)
    assert words(copies) == words(plan_tp(prefill_tp, decode_tp, num_heads))
    assert {copy.layers for copy in copies} == {layers}


def test_two_stages_to_three_worked_out_by_hand():
    """Layers 0-2 and 3-5 to 0-1, 2-3 and 4-5."""
    heads = range(2)
    copies = plan_copies(grid(range(6), 2, 1, 2), grid(range(6), 2, 1, 3))
    assert copies == [
        KVCopy(0, 0, range(2), heads, heads),
        KVCopy(0, 1, range(2, 3), heads, heads),
        KVCopy(1, 1, range(3, 4), heads, heads),
        KVCopy(1, 2, range(4, 6), heads, heads),
    ]


def test_those_that_want_a_head_are_spread_over_its_holders_in_every_stage():
    copies = check_holdings(grid(range(4), 1, 2, 1), grid(range(4), 1, 2, 2))
    assert [copy.source_rank for copy in copies] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("held", "lacking"),
    [
        (Holding(range(1, 4), range(2)), "head 0 of layer 0"),
        (Holding(range(3), range(2)), "head 0 of layer 3"),
        (Holding(range(4), range(1, 2)), "head 0 of layer 0"),
        (Holding(range(4), range(1)), "head 1 of layer 0"),
    ],
)
def test_what_nobody_holds_cannot_be_sent(held, lacking):
    with pytest.raises(TransferError, match=f"no prefill rank holds {lacking}"):
        plan_copies([held], [Holding(range(4), range(2))])


@given(nodes, nodes, st.integers(1, 8), st.integers(3, 9))
def test_nodes_hold_the_runs_of_layers_and_heads_of_their_stages(prefill, decode, num_heads, num_layers):
    layers = range(2, 2 + num_layers)
    assert holdings(Grid(*prefill), num_heads, layers) == grid(layers, num_heads, *prefill)
    plans = plan_copies(grid(layers, num_heads, *prefill), grid(layers, num_heads, *decode))
    assert list(plan_nodes(Grid(*prefill), Grid(*decode), num_heads, layers)) == plans


@pytest.mark.parametrize("num_stages", [0, 4, -1])
def test_no_stage_goes_without_a_layer(num_stages):
    with pytest.raises(TransferError, match=f"3 layers cannot be split over {num_stages} stages"):
        holdings(Grid(1, num_stages), 1, range(3))
