"""What a comparison says of the simulator."""

import dataclasses
import json

import pytest

from serving_core.errors import SettingsError
from splitserve_bench.compare.comparison import (
    Comparison,
    Entry,
    Forecaster,
    ProbeRun,
    by_cores,
    concluded,
    forecast_sentences,
)
from splitserve_bench.compare.contenders import contenders, parse_custom
from splitserve_bench.compare.report import comparison_json
from splitserve_bench.compare.search import Goal, Probe, RateSearch
from splitserve_bench.compare.slo import Slo, judge
from splitserve_bench.serve.metrics import Limits, summarize
from splitserve_bench.simulate.fleet import FleetSize, simulate
from tests.unit.splitserve_bench.bench_serve_kit import answered, failed
from tests.unit.splitserve_bench.simulate_kit import PROFILE, request

WHOLE, TWO, SPLIT, AUTO = contenders(2, [], [])
GOAL = Goal(1.0, attainment=0.01)
LOAD = [dataclasses.replace(request(i, 300, 10, i * 0.2), ttft_ms=400.0, tpot_ms=40.0) for i in range(12)]


def forecaster(**flags):
    return Forecaster({1: PROFILE}, 2, flags)


@pytest.mark.parametrize(
    ("contender", "size"),
    [
        (TWO, FleetSize(0, 0, 2, policy="never")),
        (SPLIT, FleetSize(1, 1)),
        (AUTO, FleetSize(0, 0, 2, admission="timely")),
    ],
    ids=lambda each: str(getattr(each, "name", each)),
)
def test_a_load_is_simulated_on_the_nodes_of_a_contender(contender, size):
    outcomes = forecaster().outcomes(contender, LOAD, 60.0)
    assert outcomes == simulate(PROFILE, size, LOAD, max_concurrency=None, request_timeout_s=60.0).outcomes
    assert len(outcomes) == len(LOAD)


def test_nodes_without_a_profile_and_flags_that_are_not_simulated_are_left_out():
    small = parse_custom("small=2B max-num-seqs=1", lambda text: ("max_num_seqs", 1))
    assert forecaster().outcomes(WHOLE, LOAD, 60.0) is None
    assert forecaster().outcomes(small, LOAD, 60.0) is None
    assert forecaster(block_size=8).outcomes(TWO, LOAD, 60.0) is None
    assert forecaster(roles="fixed").outcomes(SPLIT, LOAD, 60.0) is not None
    assert forecaster().why_not(WHOLE) == "no --profile is of nodes of 2 cores"
    assert forecaster().why_not(small) == "the simulator does not know --max-num-seqs"
    assert forecaster(block_size=8).why_not(TWO) == "the simulator does not know --block-size"
    assert not forecaster(roles="fixed").why_not(SPLIT)


def test_a_profile_is_of_clusters_with_the_flags_that_it_was_measured_with():
    quantized = dataclasses.replace(PROFILE, flags={"quantization": "w8a8"})
    alike, other = (Forecaster({1: quantized}, 2, {"quantization": each}) for each in ("w8a8", "int8"))
    assert alike.outcomes(TWO, LOAD, 60.0) == forecaster().outcomes(TWO, LOAD, 60.0)
    why = "its nodes are not those of the profile, which have --quantization w8a8"
    assert other.why_not(TWO) == Forecaster({1: quantized}, 2, {}).why_not(TWO) == why
    assert forecaster(quantization="w8a8").why_not(TWO) == "the simulator does not know --quantization"


def test_two_profiles_of_one_size_are_refused():
    assert by_cores([PROFILE, dataclasses.replace(PROFILE, cores=2)]).keys() == {1, 2}
    with pytest.raises(SettingsError, match="the same number of cores"):
        by_cores([PROFILE, PROFILE])


def outcome(index, is_good):
    return answered(index) if is_good else failed(index)


def entry(contender, *shares):
    """At 1 req/s, then 2 req/s and so on: the shares of 100 requests that were good, measured and simulated."""
    found = Entry(contender, Slo(Limits(ttft_s=1.0)), RateSearch(GOAL, [1.0, 2.0][: len(shares)]))
    for rate, (measured, simulated) in enumerate(shares, 1):
        judged = [
            None if share is None else summarize([outcome(i, i * 37 % 100 < share) for i in range(100)], Limits())
            for share in (measured, simulated)
        ]
        found.record(ProbeRun(rate, contender.name, Probe(float(rate), 0), (), judged[0], simulated=judged[1]))
    return found


def compared(*entries):
    return concluded(Comparison(GOAL, "TTFT", None, entries))


def test_what_was_measured_and_simulated_stands_side_by_side():
    """Of six pairs at the two rates three are surely apart; the simulation turns one of them round."""
    comparison = compared(
        entry(TWO, (90, 91), (50, 54)), entry(SPLIT, (88, 90), (20, 60)), entry(AUTO, (91, 91), (70, 71))
    )
    *lines, last = forecast_sentences(comparison)
    assert lines[1] == "colocated 2x1, 2 req/s: 50.0% measured, 54.0% simulated (+4.0 points)"
    assert len(lines) == 6
    assert last == (
        "The simulation is 1.5 points off in the median of 6 loads, 40.0 at worst; of 3 pairs that are surely apart it "
        "has 2 in this order."
    )


def test_nothing_is_said_where_nothing_was_simulated():
    comparison = compared(entry(TWO, (90, None)), entry(SPLIT, (20, None)))
    assert list(forecast_sentences(comparison)) == []
    (probe,) = json.loads(json.dumps(comparison_json([comparison], {})))["contenders"][0]["probes"]
    assert probe["simulated_attainment"] is None


def test_a_simulated_load_is_judged_by_the_limits_of_the_measured_one():
    outcomes = forecaster().outcomes(SPLIT, LOAD, 60.0)
    pairs = list(zip(LOAD, outcomes, strict=True))
    strict, loose = (judge(Slo(Limits(ttft_s=limit_s)), pairs) for limit_s in (0.3, 30.0))
    assert strict.attainment < loose.attainment == 1.0


@pytest.mark.parametrize("order", [(TWO, SPLIT), (SPLIT, TWO)], ids=["better one first", "better one last"])
def test_a_tie_in_the_simulation_is_no_order(order):
    shares = {TWO: (90, 50), SPLIT: (20, 50)}
    *_, last = forecast_sentences(compared(*(entry(each, shares[each]) for each in order)))
    assert last.endswith("of 1 pairs that are surely apart it has 0 in this order.")
