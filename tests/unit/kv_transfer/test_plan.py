"""The reshard plan, against tables worked out by hand and against its definition."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.errors import TransferError
from kv_transfer.plan import describe, plan_copies
from serving_core.sharding import head_range


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
    assert words(plan_copies(prefill_tp, decode_tp, num_heads)) == expected


def check_plan(prefill_tp, decode_tp, num_heads):
    """Carries the plan out on labelled heads: every decode rank gets each of its heads once, and the right one."""
    received = {(rank, head): [] for rank in range(decode_tp) for head in head_range(rank, decode_tp, num_heads)}
    for copy in plan_copies(prefill_tp, decode_tp, num_heads):
        assert len(copy.source_heads) == len(copy.destination_heads) > 0
        source = head_range(copy.source_rank, prefill_tp, num_heads)
        destination = head_range(copy.destination_rank, decode_tp, num_heads)
        for taken, put in zip(copy.source_heads, copy.destination_heads, strict=True):
            received[copy.destination_rank, destination[put]].append(source[taken])
    assert all(heads == [head] for (_, head), heads in received.items())


@pytest.mark.parametrize("num_heads", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("decode_tp", [1, 2, 4])
@pytest.mark.parametrize("prefill_tp", [1, 2, 4])
def test_every_pair_of_sizes(prefill_tp, decode_tp, num_heads):
    check_plan(prefill_tp, decode_tp, num_heads)


@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 32))
def test_any_sizes(prefill_tp, decode_tp, num_heads):
    check_plan(prefill_tp, decode_tp, num_heads)


@given(st.integers(1, 16), st.integers(1, 32))
def test_equal_sizes_need_one_copy_for_each_rank(tp_size, num_heads):
    copies = plan_copies(tp_size, tp_size, num_heads)
    assert [(c.source_rank, c.destination_rank) for c in copies] == [(rank, rank) for rank in range(tp_size)]


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (-1, 1, 1)])
def test_sizes_below_one_are_refused(sizes):
    with pytest.raises(TransferError, match="must be at least 1"):
        plan_copies(*sizes)


@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 32))
def test_no_pair_of_ranks_has_two_lanes_and_no_plan_more_than_a_lane_for_each_rank(prefill_tp, decode_tp, num_heads):
    copies = plan_copies(prefill_tp, decode_tp, num_heads)
    assert len({(copy.source_rank, copy.destination_rank) for copy in copies}) == len(copies)
    assert decode_tp <= len(copies) <= prefill_tp + decode_tp - 1


@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 32))
def test_rank_0_always_has_a_lane(prefill_tp, decode_tp, num_heads):
    assert plan_copies(prefill_tp, decode_tp, num_heads)[0].source_rank == 0


# ---- in words ----


@pytest.mark.parametrize(
    ("sizes", "lines"),
    [
        (
            (1, 1, 3),
            [
                "prefill rank 0 holds heads 0-2 of 3",
                "decode rank 0 holds heads 0-2 of 3",
                "prefill rank 0 sends heads 0-2 to decode rank 0: 100 % of the bytes sent",
                "total sent: 1 x the bytes of the unreplicated cache",
            ],
        ),
        (
            (2, 1, 3),
            [
                "prefill rank 0 holds head 0 of 3",
                "prefill rank 1 holds heads 1-2 of 3",
                "decode rank 0 holds heads 0-2 of 3",
                "prefill rank 0 sends head 0 to decode rank 0: 33.3 % of the bytes sent",
                "prefill rank 1 sends heads 1-2 to decode rank 0: 66.7 % of the bytes sent",
                "total sent: 1 x the bytes of the unreplicated cache",
            ],
        ),
        (
            (1, 4, 3),
            [
                "prefill rank 0 holds heads 0-2 of 3",
                "decode rank 0 holds head 0 of 3, as decode rank 1 does",
                "decode rank 1 holds head 0 of 3, as decode rank 0 does",
                "decode rank 2 holds head 1 of 3",
                "decode rank 3 holds head 2 of 3",
                "prefill rank 0 sends head 0 to decode rank 0: 25 % of the bytes sent",
                "prefill rank 0 sends head 0 to decode rank 1: 25 % of the bytes sent",
                "prefill rank 0 sends head 1 to decode rank 2: 25 % of the bytes sent",
                "prefill rank 0 sends head 2 to decode rank 3: 25 % of the bytes sent",
                "total sent: 1.33 x the bytes of the unreplicated cache",
            ],
        ),
        (
            (3, 1, 1),
            [
                "prefill rank 0 holds head 0 of 1, as prefill ranks 1 and 2 do",
                "prefill rank 1 holds head 0 of 1, as prefill ranks 0 and 2 do",
                "prefill rank 2 holds head 0 of 1, as prefill ranks 0 and 1 do",
                "decode rank 0 holds head 0 of 1",
                "prefill rank 0 sends head 0 to decode rank 0: 100 % of the bytes sent",
                "prefill rank 1 sends nothing",
                "prefill rank 2 sends nothing",
                "total sent: 1 x the bytes of the unreplicated cache",
            ],
        ),
    ],
)
def test_the_plan_in_words(sizes, lines):
    assert describe(*sizes) == lines


def test_the_words_count_heads_over_the_whole_model():
    assert "prefill rank 1 sends heads 6-7 to decode rank 3: 25 % of the bytes sent" in describe(2, 4, 8)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_a_plan_for_sizes_below_one_has_no_words(sizes):
    with pytest.raises(TransferError, match="must be at least 1"):
        describe(*sizes)
