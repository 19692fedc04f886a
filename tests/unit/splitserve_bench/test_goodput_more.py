"""Whoever asks for less, or gives the fleet more, does not get less for it: on average over loads, within two points at
the knee. Far beyond it other requests are late than before, now and then some more of them."""

from dataclasses import replace
from functools import cache

import pytest

from coordinator.settings import ADMIT_ALL, ADMIT_TIMELY
from splitserve_bench.serve.metrics import Limits
from tests.unit.splitserve_bench.goodput_kit import KNEES, LIMITS, attainment, fleet_of
from tests.unit.splitserve_bench.simulate_kit import SIZES

pytestmark = pytest.mark.nightly

MOST_LOST = {1.0: 0.02, 1.8: 0.06}  # by multiples of the knee
SCARCE, MORE = (120, 240)  # blocks; the longest request needs 51

CELLS = [
    (counts, admission, times)
    for counts, admission in zip(KNEES, [ADMIT_ALL, ADMIT_TIMELY] * 2, strict=True)
    for times in (1.0, 1.8)
]
_before = cache(attainment)


def cells(function):
    """All of them, over so many loads."""
    rows = [pytest.param(*cell, 4, id=_name(cell)) for cell in CELLS]
    return pytest.mark.parametrize(("counts", "admission", "times", "seeds"), rows)(function)


def _name(cell):
    counts, admission, times = cell
    return f"{fleet_of(counts, admission)}-x{times:g}"


@cells
def test_looser_limits_cost_nothing(counts, admission, times, seeds):
    size, rate = fleet_of(counts, admission), times * KNEES[counts]
    before = _before(size, rate, seeds)
    for ttft, tpot in ((1.25, 1.25), (2.0, 1.0), (1.0, 1.5)):
        looser = Limits(LIMITS.ttft_s * ttft, LIMITS.tpot_s * tpot)
        assert attainment(size, rate, seeds, limits=looser) >= before - MOST_LOST[times], looser


@cells
def test_one_more_node_costs_nothing(counts, admission, times, seeds):
    rate = times * KNEES[counts]
    before = _before(fleet_of(counts, admission), rate, seeds)
    for kind in range(3):
        more = fleet_of([count + (number == kind) for number, count in enumerate(counts)], admission)
        assert attainment(more, rate, seeds) >= before - MOST_LOST[times], more


@cells
def test_more_blocks_cost_nothing(counts, admission, times, seeds):
    size, rate = fleet_of(counts, admission), times * KNEES[counts]
    few, more = (attainment(size, rate, seeds, sizes=replace(SIZES, num_blocks=num)) for num in (SCARCE, MORE))
    assert more >= few - MOST_LOST[times]
