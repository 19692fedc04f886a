"""What a comparison concludes: of found rates, and of the same requests one by one."""

import dataclasses
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve_bench.compare import verdict as causes
from splitserve_bench.compare.search import Probe, SearchResult
from splitserve_bench.compare.verdict import (
    Cause,
    Loss,
    Standing,
    causes_between,
    causes_of,
    is_above,
    loss_of,
    main_cause,
    paired_sentences,
    pairs_of,
    rate_of,
    verdict,
)
from splitserve_bench.serve.arrivals import send_times_s
from splitserve_bench.serve.metrics import Judged, Limits, Misses, effective_size, paired_interval
from tests.unit.splitserve_bench.bench_serve_kit import answered, failed

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


# ---- the same requests, one by one ----

TWO, FOUR = Probe(2.0, 0), Probe(4.0, 0)


def queue(send_at_s, service_s):
    free_s, are_good = 0.0, []
    for sent_s in send_at_s:
        free_s = max(free_s, sent_s) + service_s
        are_good.append(free_s - sent_s <= 0.5)
    return are_good


def differences(seed):
    """Of two servers with one queue each, 0.2 s and 0.18 s a request, under the same 300 arrivals."""
    send_at_s = send_times_s(300, 3.5, 1.0, random.Random(seed))
    return [one - other for one, other in zip(queue(send_at_s, 0.2), queue(send_at_s, 0.18), strict=True)]


def interval_of(series, size):
    return paired_interval(series.count(1) / len(series), series.count(-1) / len(series), size)


def test_the_difference_of_two_queues_lies_in_the_interval_as_often_as_it_says():
    runs = [differences(seed) for seed in range(1000, 1400)]
    truth = sum(map(sum, runs)) / (300 * len(runs))
    num_covered = num_naive = 0
    for seed in range(200):
        series = differences(seed)
        low, high = interval_of(series, effective_size(series))
        num_covered += low <= truth <= high
        low, high = interval_of(series, 300)
        num_naive += low <= truth <= high
    assert num_covered >= 0.92 * 200
    assert num_naive < 0.88 * 200  # as if requests were independent


def test_the_same_requests_tell_more_than_as_many_others():
    """Wald's interval of two shares of different requests is wider."""
    low, high = paired_interval(20 / 300, 5 / 300, 300)
    unpaired = 2 * 1.959964 * math.sqrt(0.75 * 0.25 / 300 + 0.70 * 0.30 / 300)  # 225 and 210 of 300 were good
    assert high - low < 0.5 * unpaired
    assert low > 0


def test_one_more_request_of_either_kind_is_added_to_walds_interval():
    half = 1.959964 * math.sqrt((13 + 5 - (13 - 5) ** 2 / 102) / 102**2)
    assert paired_interval(0.12, 0.04, 100) == pytest.approx((8 / 102 - half, 8 / 102 + half), rel=1e-6)
    assert paired_interval(0.0, 0.0, 0) == (-1.0, 1.0)


@given(st.lists(st.sampled_from([-1, 0, 1]), min_size=1, max_size=60))
def test_the_difference_is_in_its_interval(series):
    low, high = interval_of(series, effective_size(series))
    assert -1 <= low <= sum(series) / len(series) <= high <= 1
    mirrored = interval_of([-each for each in series], effective_size(series))
    assert mirrored == pytest.approx((-high, -low))


def kept(*numbers, of=100):
    return [index in numbers for index in range(of)]


def test_every_two_are_paired_request_by_request_where_both_had_the_same():
    everybody = {
        "a": {TWO: kept(*range(90)), FOUR: kept(*range(10))},
        "b": {TWO: kept(*range(5, 92)), Probe(2.0, 1): kept(1)},
        "c": {TWO: kept(*range(90))},
    }
    pairs = pairs_of(everybody)
    assert [(pair.one, pair.other, pair.rate) for pair in pairs] == [("a", "b", 2.0), ("a", "c", 2.0), ("b", "c", 2.0)]
    ab, ac, bc = pairs
    assert (ab.num_total, ab.num_one_alone, ab.num_other_alone) == (100, 5, 2)
    assert ab.difference == pytest.approx(0.03)
    assert (ac.num_one_alone, ac.num_other_alone, ac.difference) == (0, 0, 0)
    assert (bc.num_one_alone, bc.num_other_alone, bc.num_effective) == (2, 5, pytest.approx(ab.num_effective))
    assert (bc.difference, *bc.interval) == pytest.approx((-0.03, -ab.interval[1], -ab.interval[0]))


def test_probes_of_one_rate_are_pooled():
    seeds = [Probe(2.0, number) for number in range(3)]
    one = {probe: kept(*range(50)) for probe in seeds}
    other = {probe: kept(*range(number)) for number, probe in enumerate(seeds)}
    (pair,) = pairs_of({"one": one, "other": other})
    assert (pair.num_total, pair.num_one_alone, pair.num_other_alone) == (300, 150 - 3, 0)


def test_at_each_rate_the_best_stands_beside_the_others():
    everybody = {
        "slow": {TWO: kept(*range(90)), FOUR: kept(*range(0, 100, 2))},
        "auto": {TWO: kept(*range(91)), FOUR: kept()},
        "peer": {TWO: kept(), FOUR: kept()},
    }
    at_two, at_four = paired_sentences(pairs_of(everybody))
    assert at_two.startswith(
        "At 2 req/s, of the same 100 requests, auto keeps not surely more than slow by 1.0 points ("
    )
    assert ", more than peer by 91.0 points (+" in at_two
    assert at_four.startswith("At 4 req/s, of the same 100 requests, slow keeps more than auto by 50.0 points (+")
    assert list(paired_sentences([])) == []


# ---- why requests were lost that another contender kept: each rule by hand ----


LIMITS = Limits(ttft_s=1.0, tpot_s=0.1)
EXPECTED = {"expected_ttft_s": 0.75, "expected_prefill_s": 0.25, "ttft_margin_s": 0.125, "expected_tpot_s": 0.0625}


def lost(first_s=2.0, tpot_s=0.05, limits=LIMITS, **told):
    """An answer of three tokens, of which the server tells this beside what it expected."""
    return loss_of(answered(0, 5.0, [5.0 + first_s + tpot_s * k for k in range(3)], timeline=EXPECTED | told), limits)


def refused(limits=LIMITS, **told):
    return loss_of(failed(is_refused=True, timeline=told or None), limits)


def first_token(decision, predicted_s=0.75, actual_s=2.0, margin_s=0.125, limit_s=1.0):
    return Loss(decision, "TTFT", predicted_s, actual_s, margin_s, limit_s)


@pytest.mark.parametrize(
    ("told", "decision"),
    [
        ({"prefill_queue_s": 1.5, "prefill_s": 0.5}, causes.QUEUE),  # 1 s and 0.25 s more than expected
        ({"prefill_queue_s": 0.75, "prefill_s": 1.25}, causes.PREFILL),  # 0.25 s and 1 s
        ({"prefill_queue_s": 0.5, "prefill_s": 0.25}, causes.ON_ITS_WAY),  # 0, 0 and 1.25 s
        ({"prefill_queue_s": 1.75, "prefill_s": 0.25, "deferred_s": 1.0}, causes.DEFERRED),  # 1 s without that: in time
        ({"prefill_queue_s": 1.75, "prefill_s": 0.25, "deferred_s": 0.9375}, causes.QUEUE),  # 1.06 s without that
        ({"prefill_queue_s": 1.75, "prefill_s": 0.25, "is_late": 1.0, "deferred_s": 1.5}, causes.LATE),
        ({"prefill_queue_s": 1.75, "prefill_s": 0.25, "is_late": 0.0}, causes.QUEUE),
    ],
)
def test_a_late_first_token_is_lost_by_a_decision(told, decision):
    assert lost(**told) == first_token(decision)


def test_what_was_deferred_for_less_than_its_margin_was_not_deferred_too_long():
    told = {"prefill_queue_s": 0.875, "prefill_s": 0.1875, "deferred_s": 0.125}
    assert lost(1.0625, **told) == first_token(causes.QUEUE, actual_s=1.0625)
    assert lost(1.0625, **told, ttft_margin_s=0.0625).decision == causes.DEFERRED
    assert lost(1.0625, **told, ttft_margin_s=0.0) == first_token(causes.DEFERRED, actual_s=1.0625, margin_s=0.0)


def test_what_was_expected_late_is_not_lost_to_a_phase():
    told = {"prefill_queue_s": 1.5, "prefill_s": 0.5}
    assert lost(**told, expected_ttft_s=1.25) == first_token(causes.EXPECTED_LATE, 1.25)
    assert lost(**told, expected_ttft_s=1.0).decision == causes.QUEUE
    assert lost(**told, expected_ttft_s=1.25, is_late=1.0).decision == causes.LATE
    assert lost(**told, expected_ttft_s=1.25, deferred_s=1.0).decision == causes.DEFERRED


def test_without_an_expectation_the_longest_phase_is_named():
    for queue_s, prefill_s, decision in ((1.5, 0.5, causes.QUEUE), (0.5, 1.5, causes.PREFILL)):
        told = {"prefill_queue_s": queue_s, "prefill_s": prefill_s, "expected_ttft_s": 0.0, "ttft_margin_s": 0.0}
        outcome = answered(0, 5.0, (7.0, 7.05), timeline=told)
        assert loss_of(outcome, LIMITS) == first_token(decision, predicted_s=None, margin_s=None)
    assert loss_of(answered(0, 5.0, (7.0, 7.05)), LIMITS).decision == causes.ON_ITS_WAY, "it tells nothing"


def test_the_first_token_is_judged_before_the_others():
    slow = {"tpot_s": 0.5, "prefill_queue_s": 1.75, "prefill_s": 0.25}
    assert lost(**slow).decision == causes.QUEUE
    assert lost(0.5, **slow) == Loss(causes.DECODE, "TPOT", 0.0625, 0.5, None, 0.1)
    assert lost(0.5, **slow | {"is_late": 1.0}).decision == causes.DECODE
    assert lost(0.5, 0.25, Limits(e2el_s=0.75)) == Loss(causes.LENGTH, "E2EL", None, 1.0, None, 0.75)


@pytest.mark.parametrize(
    ("told", "loss"),
    [
        ({}, first_token(causes.REFUSED, None, None, None)),
        (EXPECTED | {"expected_ttft_s": 0.9375}, first_token(causes.REFUSED, 0.9375, None)),
        (EXPECTED, Loss(causes.REFUSED, "TPOT", 0.0625, None, None, 0.1)),  # 0.875 s with its margin: in time
        (EXPECTED | {"deferred_s": 0.5}, Loss(causes.DEFERRED, "TPOT", 0.0625, None, None, 0.1)),
        (EXPECTED | {"deferred_s": 0.5, "expected_ttft_s": 1.25}, first_token(causes.DEFERRED, 1.25, None)),
        (EXPECTED | {"deferred_s": 0.5, "prefill_queue_s": 0.75}, first_token(causes.QUEUE, 0.75, None)),
        (
            EXPECTED | {"expected_ttft_s": 1.25, "prefill_queue_s": 0.75},
            first_token(causes.EXPECTED_LATE, 1.25, None),
        ),
    ],
)
def test_a_refused_request_is_lost_by_a_decision(told, loss):
    assert refused(**told) == loss


def test_a_refusal_is_for_a_limit_that_there_is():
    assert refused(Limits(ttft_s=1.0), **EXPECTED) == first_token(causes.REFUSED, actual_s=None)
    assert refused(Limits(tpot_s=0.1), **EXPECTED) == Loss(causes.REFUSED, "TPOT", 0.0625, None, None, 0.1)


def test_a_failed_request_has_no_figures():
    assert loss_of(failed(timeline=None), LIMITS) == Loss(causes.FAILED, "")


def test_causes_are_counted_with_medians_of_what_is_known():
    queues = [first_token(causes.QUEUE, *seconds) for seconds in ((0.5, 1.0), (None, 2.0), (1.0, 4.0))]
    late = first_token(causes.LATE, None, 9.0, None)
    assert causes_of([Loss(causes.FAILED, ""), queues[0], late, *queues[1:]]) == (
        Cause(causes.QUEUE, "TTFT", 3, 750.0, 2000.0, 125.0, 1000.0),
        Cause(causes.LATE, "TTFT", 1, None, 9000.0, None, 1000.0),
        Cause(causes.FAILED, "", 1, None, None, None, None),
    )
    assert causes_of([]) == ()


def test_only_what_the_one_lost_and_the_other_kept_counts():
    """Of four requests at 2 req/s two are lost by both, or by the other alone; at 1 req/s they have no probe in
    common."""
    good, bad = answered(arrivals_s=(0.5, 0.55)), failed()
    first, second, three = Probe(2.0, 0), Probe(2.0, 1), Probe(3.0, 0)
    probes = {
        "auto": {first: [bad, bad, good, good], second: [bad], three: [good], Probe(1.0, 0): [bad]},
        "split": {three: [bad], second: [good], first: [good, bad, bad, good], Probe(1.0, 1): [good]},
    }
    judged = {
        name: {probe: [Judged(each, LIMITS) for each in outcomes] for probe, outcomes in found.items()}
        for name, found in probes.items()
    }
    at_two, at_three = causes_between("auto", "split", judged)
    assert (at_two.loser, at_two.keeper, at_two.rate, at_two.num_total, at_two.num_lost) == ("auto", "split", 2.0, 5, 2)
    assert [(each.decision, each.num_lost) for each in at_two.causes] == [(causes.FAILED, 2)]
    assert (at_three.rate, at_three.num_total, at_three.num_lost, at_three.causes) == (3.0, 1, 0, ())
