"""The arithmetic of the bench, worked out by hand."""

import pytest

from splitserve.client.answers import Timeline
from splitserve_bench.clusters.cluster import copy_s, handoff_of, tpot_while_all_stream
from splitserve_bench.errors import BenchError
from splitserve_bench.prompts import Prompts


def test_tpot_counts_only_while_all_answers_stream():
    slow = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]  # alone at first: faster then would not count
    late = [2.4, 3.0, 3.5, 4.0, 4.5, 5.0, 9.0]
    # From 3.0 (the second token of the later one) to 5.0 (the end of the earlier one): 2 s, 2 and 4 steps.
    assert tpot_while_all_stream([slow, late]) == pytest.approx((1.0 + 0.5) / 2)


def test_answers_that_never_overlap_are_refused():
    with pytest.raises(BenchError, match="never all under way"):
        tpot_while_all_stream([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])


def test_the_handoff_is_what_lies_between_prefill_and_decode():
    timeline = Timeline(1.0, 2.0, 0.004, 0.02, 0.1, 30.0, 33.124, 3.0, "p", "d", 0, 0, 0.0)
    assert handoff_of(timeline) == pytest.approx(0.124)


def test_prompts_are_the_same_in_every_run_and_none_twice():
    first, second = Prompts(100, 8), Prompts(100, 8)
    drawn = [first.draw(), first.draw()]
    assert drawn == [second.draw(), second.draw()]
    assert drawn[0] != drawn[1]
    assert all(len(prompt) == 8 and min(prompt) >= 0 and max(prompt) < 100 for prompt in drawn)


def test_a_copy_takes_time():
    assert copy_s(1 << 20) > 0
