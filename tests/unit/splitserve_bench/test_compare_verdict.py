import dataclasses

import pytest

from splitserve_bench.compare.search import SearchResult
from splitserve_bench.compare.verdict import Standing, is_above, main_cause, rate_of, verdict
from splitserve_bench.serve.misses import Misses

NO_MISSES = Misses(ttft=0, tpot=0, e2el=0, failed=0, refused=0, ttft_phases={}, tpot_phases={})
LATE = dataclasses.replace(NO_MISSES, ttft=30, tpot=4, ttft_phases={"prefill_queue_s": 28, "prefill_s": 2})
SLOW = dataclasses.replace(NO_MISSES, tpot=41, refused=2, tpot_phases={"decode_s": 41})


def found(best, low, high, failing=1000.0):
    return SearchResult(best, failing, low, high, 95, 100, 0.95, 0.9, 0.98, 8, is_settled=True)


def standing(name, *rates, misses=LATE):
    return Standing(name, name.split()[0], found(*rates), misses)


def test_the_winner_is_the_one_whose_interval_lies_above_all_others():
    lines = verdict([standing("colocated 1x2", 4.0, 3.5, 4.4), standing("split 1P+1D", 6.0, 5.5, 6.6, misses=SLOW)])
    assert lines == [
        "split 1P+1D wins: split 1P+1D 6 req/s (5.5 to 6.6), colocated 1x2 4 req/s (3.5 to 4.4), 1.50x "
        "(1.25x to 1.89x).",
        "Disaggregation wins.",
        "split 1P+1D loses its requests at 1000 req/s to TPOT (41: decode 41) and refusals (2).",
        "colocated 1x2 loses its requests at 1000 req/s to TTFT (30: prefill queue 28, prefill 2) and TPOT (4).",
    ]


def test_overlapping_intervals_have_no_winner():
    lines = verdict([standing("colocated 1x2", 4.0, 3.5, 5.0), standing("split 1P+1D", 5.0, 4.5, 5.5)])
    reached = "No winner: split 1P+1D reaches 5 req/s (4.5 to 5.5), and so may colocated 1x2: intervals overlap."
    assert lines[0] == reached
    assert lines[1].startswith("Disaggregation neither wins nor loses: ")


def test_it_is_said_when_disaggregation_loses():
    lines = verdict(
        [
            standing("colocated 2x1", 6.0, 5.8, 6.2),
            standing("split 1P+3D", 2.0, 1.9, 2.1),
            standing("split 2P+2D", 4.0, 3.9, 4.1),
        ]
    )
    assert lines[0].startswith("colocated 2x1 wins: ")
    assert "colocated 2x1 6 req/s (5.8 to 6.2), split 2P+2D 4 req/s (3.9 to 4.1), 1.50x" in lines[0]
    assert lines[1] == "Disaggregation loses."


def test_a_loss_is_said_in_full_when_others_win():
    lines = verdict(
        [
            standing("peer fast", 9.0, 8.9, 9.1),
            standing("colocated 2x1", 6.0, 5.8, 6.2),
            standing("split 1P+1D", 4.0, 3.9, 4.1),
        ]
    )
    figures = "colocated 2x1 6 req/s (5.8 to 6.2), split 1P+1D 4 req/s (3.9 to 4.1), 1.50x (1.41x to 1.59x)"
    assert f"Disaggregation loses: {figures}." in lines


def test_auto_is_compared_with_the_best_static_one_and_ours_with_each_peer():
    lines = verdict(
        [
            standing("colocated 1x2", 4.0, 3.9, 4.1),
            standing("split 1P+1D", 5.0, 4.9, 5.1),
            standing("auto 1P+1D", 6.0, 5.9, 6.1),
            standing("peer slow", 1.0, 0.9, 1.1),
            standing("peer fast", 9.0, 8.9, 9.1),
            standing("peer equal", 6.0, 5.9, 6.1),
        ]
    )
    assert any(line.startswith("auto 1P+1D beats split 1P+1D: ") for line in lines)
    assert any(line.startswith("auto 1P+1D beats peer slow: ") for line in lines)
    assert any(line.startswith("auto 1P+1D loses to peer fast: ") for line in lines)
    assert any(line.startswith("auto 1P+1D and peer equal cannot be told apart: ") for line in lines)


def test_who_never_failed_has_no_known_limit_and_beats_who_did():
    unbounded = Standing("split 1P+1D", "split", found(8.0, 8.0, None, None), None)
    lines = verdict([unbounded, standing("colocated 1x2", 4.0, 3.5, 4.4)])
    assert lines[0].startswith("split 1P+1D wins: split 1P+1D at least 8 req/s (8 to ?)")
    assert "split 1P+1D lost too few requests at every tested rate: its limit is not known." in lines


def test_when_nobody_passes_nobody_wins():
    nothing = found(None, None, 0.5)
    lines = verdict(
        [Standing("colocated 1x2", "colocated", nothing, LATE), Standing("split 1P+1D", "split", nothing, LATE)]
    )
    assert lines[0] == "No winner: no contender reaches the goal at any tested rate."
    assert rate_of(nothing) == "no tested rate (0 to 0.5)"


def test_one_alone_neither_wins_nor_loses():
    (line,) = verdict([standing("colocated 1x2", 4.0, 3.5, 4.4)])
    assert line.startswith("colocated 1x2 loses its requests at")


def test_nobody_is_above_without_a_known_edge():
    assert is_above(found(5, 5, None), found(4, 3, 4.5))
    assert not is_above(found(4, 3, 4.5), found(5, 5, None))
    assert not is_above(found(5, None, 6), found(1, 0.5, 2))
    assert not is_above(found(5, 4.5, 6), found(4, 4, 4.5))


@pytest.mark.parametrize(
    ("misses", "cause"),
    [
        (LATE, "TTFT: prefill queue"),
        (SLOW, "TPOT: decode"),
        (dataclasses.replace(LATE, ttft_phases={}), "TTFT"),  # a peer tells no phases
        (dataclasses.replace(SLOW, refused=50), "refusals"),
        (dataclasses.replace(SLOW, failed=50), "failures"),
        (NO_MISSES, ""),
    ],
)
def test_the_main_cause_is_what_most_misses_are_due_to(misses, cause):
    assert main_cause(misses) == cause


@pytest.mark.parametrize(("name", "is_mixed"), [("colocated 1x2", True), ("auto 1P+1D", True), ("split 1P+1D", False)])
def test_where_prompts_are_computed_between_tokens_that_is_said(name, is_mixed):
    (line,) = verdict([standing(name, 4.0, 3.5, 4.4, misses=SLOW)])
    assert ("its decode includes the prompts" in line) is is_mixed
    (line,) = verdict([standing(name, 4.0, 3.5, 4.4, misses=LATE)])  # not by decode
    assert "its decode includes" not in line
