"""More requests than a fleet can serve in time: goodput stays, comes back, refusals say when to come back, and what has
no limits ends all the same."""

import pytest

from coordinator.doors.statuses import retry_after_s
from coordinator.settings import ADMIT_ALL, ADMIT_TIMELY
from prefill_node.order import FLOOR
from serving_core.errors import RequestError
from serving_core.reasons import WOULD_BE_LATE
from splitserve_bench.overload.findings import findings_of
from splitserve_bench.overload.stages import parse_stages
from splitserve_bench.serve.metrics import ttft_s
from tests.effort import few
from tests.unit.splitserve_bench.goodput_kit import KNEES, LIMITS, Door, World, fleet_of, load, num_good
from tests.unit.splitserve_bench.simulate_kit import TOKEN_S

BACK_S = 10.0
SEEDS = 2
SEEDS_BACK = 8  # some 20 a seed come back, and whether they are served is one coin each
fleets = pytest.mark.parametrize(
    "counts",
    few(KNEES, (1, 0, 1)),
    ids=lambda counts: str(fleet_of(counts, ADMIT_ALL)),
)


def staged(text, counts, seed):
    """Stages by multiples of the knee, and their requests."""
    stages, planned = parse_stages(text, KNEES[counts]), []
    for number, stage in enumerate(stages):
        times = {"start_s": stage.start_s, "first_index": len(planned)}
        planned += load(stage.rate, stage.num_requests, f"{seed} {number}", **times)
    return stages, planned


@pytest.mark.nightly
@fleets
def test_at_three_times_the_knee_goodput_is_near_its_peak_where_only_the_timely_are_admitted(counts):
    goodputs = {}
    for times in (0.8, 1.0, 1.3, 3.0):
        found = 0
        for seed in range(SEEDS):
            _, planned = staged(f"{times}x15", counts, seed)
            found += num_good(World(fleet_of(counts, ADMIT_TIMELY), planned).run()[0])
        goodputs[times] = found / (SEEDS * 15)
    assert goodputs.pop(3.0) >= 0.8 * max(goodputs.values()), goodputs


@pytest.mark.nightly
@fleets
def test_goodput_is_back_soon_after_an_overload_where_only_the_timely_are_admitted(counts):
    for seed in range(SEEDS):
        stages, planned = staged("0.5x5,3x15,0.5x20", counts, seed)
        findings = findings_of(World(fleet_of(counts, ADMIT_TIMELY), planned).run()[0], stages, LIMITS, 0.9)
        assert findings.back_s is not None, findings.windows
        assert findings.back_s <= BACK_S


@pytest.mark.nightly
@fleets
def test_an_overload_of_half_a_minute_costs_little_and_is_soon_over(counts):
    """And nobody is turned away who has read the beginning of an answer."""
    stages, planned = staged("0.8x20,3x30,0.8x30", counts, 0)
    outcomes, _ = World(fleet_of(counts, ADMIT_TIMELY), planned).run()
    before, during, after = findings_of(outcomes, stages, LIMITS, 0.9).by_stage
    assert during.goodput_per_s >= 0.8 * max(before.goodput_per_s, after.goodput_per_s)
    back_s = findings_of(outcomes, stages, LIMITS, 0.8 * before.attainment).back_s
    assert back_s is not None
    assert back_s <= BACK_S
    assert not [outcome for outcome in outcomes if outcome.error and outcome.arrivals_s]


class Leaving(Door):
    """Clients wait so long and no longer."""

    PATIENCE_S = 3.0

    def submit(self, request_id, *arguments, **options):
        super().submit(request_id, *arguments, **options)
        self.agenda.after(self.PATIENCE_S, lambda: self.coordinator.abort(request_id))


@pytest.mark.parametrize(
    "options",
    [{"timeout_s": Leaving.PATIENCE_S}, {"door": Leaving}],
    ids=["their time is up", "their clients are gone"],
)
@fleets
def test_what_nobody_waits_for_is_not_computed(counts, options):
    """All is taken in, and 40 s of work left when the overload is over."""
    stages, planned = staged("3x20,0.4x15", counts, 0)
    outcomes, _ = World(fleet_of(counts, ADMIT_ALL), planned, **options).run()
    calm_s = stages[0].end_s + Leaving.PATIENCE_S + 1.0
    calm = [outcome for outcome in outcomes if outcome.scheduled_s > calm_s]
    in_time = [outcome for outcome in calm if outcome.arrivals_s and ttft_s(outcome) <= LIMITS.ttft_s]
    assert len(in_time) >= 0.9 * len(calm) > 10


class Returning(Door):
    """Whoever is told that it would be late comes back once, when it is told to."""

    PART = 1.0  # of the wait

    def __init__(self, agenda, clients):
        super().__init__(agenda, clients)
        self.asked = {}
        self.back = {}  # seconds waited, by index

    def submit(self, request_id, *arguments, **options):
        self.asked[request_id] = (arguments, options)
        super().submit(request_id, *arguments, **options)

    def ended(self, request_id, outcome):
        index = int(request_id.split("/")[0])
        if index in self.back or not (isinstance(outcome, RequestError) and outcome.reason == WOULD_BE_LATE):
            super().ended(request_id, outcome)
            return
        self.back[index] = wait_s = self.PART * retry_after_s(outcome)
        arguments, options = self.asked[request_id]
        self.agenda.after(wait_s, lambda: super(Returning, self).submit(request_id, *arguments, **options))


class Hasty(Returning):
    PART = 0.1


def returned(counts, text, door):
    """How many came back, and how many of these were served."""
    num_back = num_served = 0
    for seed in range(SEEDS_BACK):
        _, planned = staged(text, counts, seed)
        outcomes, clients = World(fleet_of(counts, ADMIT_TIMELY), planned, door=door).run()
        num_back += len(clients.back)
        num_served += sum(not outcomes[index].error for index in clients.back)
    return num_back, num_served


def share(found):
    num_back, num_served = found
    return num_served / num_back


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("text", "least"),
    [
        pytest.param("3x4,0.5x12", 0.35, id="a short overload"),
        pytest.param("1.5x15", 0.4, id="a lasting one"),
    ],
)
@fleets
def test_who_comes_back_when_told_to_is_served_more_often_than_who_comes_back_before(counts, text, least):
    """Not always: the wait is for what the fleet has now, and newcomers and others who were told the same come too."""
    told = share(returned(counts, text, Returning))
    assert told >= least
    assert told > share(returned(counts, text, Hasty))


class Few(Door):
    """Some of the requests have no limits."""

    FREE = (5, 8, 11)

    def submit(self, request_id, *arguments, **options):
        if int(request_id.split("/")[0]) in self.FREE:
            options["slo"] = None
        super().submit(request_id, *arguments, **options)


@pytest.mark.parametrize("admission", [pytest.param(ADMIT_ALL, marks=pytest.mark.nightly), ADMIT_TIMELY])
@pytest.mark.parametrize(
    "counts", few([(1, 1, 0), (0, 0, 2), (1, 0, 1)]), ids=lambda counts: str(fleet_of(counts, ADMIT_ALL))
)
def test_what_has_no_limits_ends_while_more_that_has_some_comes_than_can_be_served(counts, admission):
    """A twentieth of what is read goes to the oldest of those that others are read before: so each waits for those
    before it, at twenty times what they take, and for as long again where answers are written beside them."""
    _, planned = staged("20x0.5,1.8x40", counts, 0)
    outcomes, _ = World(fleet_of(counts, admission), planned, door=Few).run()
    for index in Few.FREE:
        assert not outcomes[index].error
        assert outcomes[index].ended_s < planned[-1].send_at_s
        num_before = sum(len(each.prompt) for each in planned[: index + 1])
        assert ttft_s(outcomes[index]) <= 2 * TOKEN_S * num_before / FLOOR
