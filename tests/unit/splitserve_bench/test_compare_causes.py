"""Why requests were lost that another contender kept: each rule by hand."""

import pytest

from splitserve_bench.compare import verdict as causes
from splitserve_bench.compare.search import Probe
from splitserve_bench.compare.verdict import Cause, Judged, Loss, causes_between, causes_of, loss_of
from splitserve_bench.serve.metrics import Limits
from tests.unit.splitserve_bench.bench_serve_kit import answered, failed

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
