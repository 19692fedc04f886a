"""Loads with limits on simulated fleets: pools that hold one copy of what agents share, KV that is slow to come, more
requests than a fleet can serve in time, and whoever asks for less or gives the fleet more."""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean

import pytest

from coordinator.api.statuses import retry_after_s
from coordinator.settings import ADMIT_ALL, ADMIT_TIMELY
from prefill_node.scheduler import FLOOR
from serving_core.errors import RequestError
from serving_core.reasons import WOULD_BE_LATE
from splitserve_bench.serve.arrivals import stages_of
from splitserve_bench.serve.metrics import Limits, ttft_s
from splitserve_bench.serve.stages import findings_of
from splitserve_bench.simulate.costs import ProfileCosts
from splitserve_bench.simulate.fleet import FleetSize
from splitserve_bench.simulate.profile import TransferProfile, read_profile
from tests.effort import effort, few
from tests.unit.splitserve_bench.goodput_kit import (
    KNEES,
    LIMITS,
    ApiServer,
    World,
    attainment,
    fleet_of,
    load,
    num_good,
)
from tests.unit.splitserve_bench.simulate_kit import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    LATENCY_S,
    PROFILE,
    SIZES,
    TOKEN_S,
    VOCAB_SIZE,
    abort,
    request,
    step_s,
)

# ---- agents, whose requests begin with one long system prompt ----

NUM_COMMON = 1600  # tokens
SYSTEM = tuple(Random("system").choices(range(VOCAB_SIZE), k=NUM_COMMON))
ENOUGH, PLENTY = 300, 3000  # blocks: one copy and what 32 answers have of their own; a copy for each of them
LOOK_S = 0.1
AMX = read_profile(Path(__file__).with_name("amx_core.json"))


def agents(rate, num_requests, seed, times=1):
    """Some 35 tokens of their own; answers of some 40, or so many times as long."""
    planned = load(rate, num_requests, seed)
    return [
        replace(
            each, prompt=SYSTEM + each.prompt[: 5 + len(each.prompt) // 5], output_tokens=times * each.output_tokens
        )
        for each in planned
    ]


class Watching(ApiServer):
    """Writes down, again and again, of each node that has told of some block: its answers, the tokens that its pool
    holds, those that the ledger takes it to hold, and those of each answer."""

    def __init__(self, agenda, clients):
        super().__init__(agenda, clients)
        self.seen = {}
        agenda.after(LOOK_S, self._look)

    def _look(self):
        ledger = self.fleet.coordinator.ledger
        ledger.check_integrity()
        for known in self.fleet.coordinator.registry.nodes:
            allocator, account = self.fleet.nodes[known.name].allocator, ledger.of(known)
            num_held = (allocator.num_blocks - allocator.num_free) * BLOCK_SIZE
            if known.hints:
                row = account.num_sequences, num_held, ledger.tokens_taken(known), account.tokens_held
                self.seen.setdefault(known.name, []).append(row)
        self.agenda.after(LOOK_S, self._look)


@pytest.mark.parametrize(
    ("counts", "writers"),
    [((1, 1, 0), ["decode-0"]), pytest.param((0, 0, 2), ["mixed-0", "mixed-1"], marks=pytest.mark.nightly)],
)
def test_the_account_has_what_the_pools_have(counts, writers):
    """Within a block for each answer, on average; counted for each request it would be many times as much."""
    size, sizes = fleet_of(counts, ADMIT_ALL), replace(SIZES, num_blocks=ENOUGH)
    _, api_server = World(size, agents(8.0, 60, 0), sizes=sizes, api_server=Watching).run()
    for name in writers:
        num_sequences, held, taken, each = (fmean(column) for column in zip(*api_server.seen[name], strict=True))
        assert abs(taken - held) <= num_sequences * BLOCK_SIZE
        assert each > 3 * held


def num_timely(size, rate, num_blocks, seed):
    outcomes, _ = World(size, agents(rate, 150, seed), sizes=replace(SIZES, num_blocks=num_blocks)).run()
    return num_good(outcomes)


@pytest.mark.nightly
@pytest.mark.parametrize("admission", [ADMIT_ALL, ADMIT_TIMELY])
@pytest.mark.parametrize(("counts", "rate"), [((1, 1, 0), 8.0), ((0, 0, 2), 8.0), ((2, 2, 0), 14.0)])
@pytest.mark.parametrize("seed", range(2))
def test_a_pool_that_holds_one_copy_is_as_good_as_one_that_holds_a_copy_for_each(counts, rate, admission, seed):
    size = fleet_of(counts, admission)
    assert num_timely(size, rate, ENOUGH, seed) == num_timely(size, rate, PLENTY, seed)


def mean_good(policy, admission):
    """Of loads on a machine on which attention over the system prompt takes most of a step."""
    size, limits = FleetSize(0, 0, 2, policy=policy, admission=admission), Limits(ttft_s=1.0, tpot_s=0.1)
    options = {"sizes": AMX.node, "costs": lambda _: ProfileCosts(AMX)}
    worlds = [World(size, agents(1.6, 150, seed, times=3), limits, **options) for seed in range(3)]
    return fmean(num_good(world.run()[0], limits) / 150 for world in worlds)


@pytest.mark.nightly
def test_no_node_is_spared_for_prompts_that_are_held():
    """Or one would be crowded with answers, and the other one would have little to read."""
    assert mean_good("auto", ADMIT_TIMELY) >= mean_good("lmetric", ADMIT_ALL) - 0.02


# ---- small pools, and KV that is slow to come ----

BLOCK_S = 2.0  # of each block on its way
PROMPT, ANSWER = 100, 300
NUM_BYSTANDERS = 2
MOST_BLOCKS = NUM_BYSTANDERS * -(-(PROMPT + ANSWER) // BLOCK_SIZE)
SLOW = replace(PROFILE, kv_transfer=TransferProfile(LATENCY_S, BLOCK_BYTES / BLOCK_S))


class SlowLater(ProfileCosts):
    """KV transfers are slow for what is sent once the bystanders run."""

    def __init__(self):
        super().__init__(PROFILE)
        self.num_transfers = 0

    def bytes_s(self, num_bytes):
        self.num_transfers += num_bytes > 0
        return (SLOW if self.num_transfers > NUM_BYSTANDERS else PROFILE).kv_transfer.bytes_per_s ** -1 * num_bytes


def longest_gap_s(outcome):
    return max(after - before for before, after in pairwise(outcome.arrivals_s))


@pytest.mark.parametrize("num_spare", [0, 5, 20])
def test_a_running_answer_does_not_wait_for_kv_that_is_not_there(num_spare):
    """Prompts are granted what the pool has left, and their KV takes half a minute: what the answers need is taken
    back."""
    planned = [request(index, PROMPT, ANSWER) for index in range(NUM_BYSTANDERS)]
    planned += [request(10 + index, 240, 2, at_s=1.0 + 0.1 * index) for index in range(6)]
    planned = [replace(each, index=index) for index, each in enumerate(planned)]
    sizes = replace(SIZES, num_blocks=MOST_BLOCKS + num_spare)
    outcomes, _ = World(fleet_of((1, 1, 0), ADMIT_ALL), planned, sizes=sizes, costs=lambda number: SlowLater()).run()
    for outcome in outcomes[:NUM_BYSTANDERS]:
        assert not outcome.error
        assert longest_gap_s(outcome) <= 5 * step_s(NUM_BYSTANDERS) + 2 * LATENCY_S
    assert all(longest_gap_s(outcome) > BLOCK_S for outcome in outcomes[NUM_BYSTANDERS:]), "their KV was there in time"


# ---- more requests than a fleet can serve in time ----

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
    stages, planned = stages_of(text, KNEES[counts]), []
    for number, stage in enumerate(stages):
        times = {"start_s": stage.start_s, "first_index": len(planned)}
        planned += load(stage.rate_per_s, stage.num_requests, f"{seed} {number}", **times)
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


class Leaving(ApiServer):
    """Clients wait so long and no longer."""

    PATIENCE_S = 3.0

    def submit(self, request_id, *arguments, **options):
        super().submit(request_id, *arguments, **options)
        self.agenda.after(self.PATIENCE_S, lambda: abort(self.coordinator, request_id, self.agenda.now))


@pytest.mark.parametrize(
    "options",
    few([{"api_server": Leaving}, {"timeout_s": Leaving.PATIENCE_S}]),
    ids=["their clients are gone", "their time is up"],
)
@fleets
def test_what_nobody_waits_for_is_not_computed(counts, options):
    """All is taken in, and twice as much work left when the overload is over as it lasted."""
    stages, planned = staged(effort("3x4,0.4x12", "3x20,0.4x15", "3x20,0.4x15"), counts, 0)
    outcomes, _ = World(fleet_of(counts, ADMIT_ALL), planned, **options).run()
    calm_s = stages[0].end_s + Leaving.PATIENCE_S + 1.0
    calm = [outcome for outcome in outcomes if outcome.scheduled_s > calm_s]
    in_time = [outcome for outcome in calm if outcome.arrivals_s and ttft_s(outcome) <= LIMITS.ttft_s]
    assert len(in_time) >= 0.9 * len(calm) > 10


class Returning(ApiServer):
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


def returned(counts, text, api_server):
    """How many came back, and how many of these were served."""
    num_back = num_served = 0
    for seed in range(SEEDS_BACK):
        _, planned = staged(text, counts, seed)
        outcomes, clients = World(fleet_of(counts, ADMIT_TIMELY), planned, api_server=api_server).run()
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
        pytest.param("3x4,0.5x12", 0.65, id="a short overload"),
        pytest.param("1.5x15", 0.6, id="a lasting one"),
    ],
)
@fleets
def test_who_comes_back_when_told_to_is_served_more_often_than_who_comes_back_before(counts, text, least):
    """Not always: what is kept for them is learnt from who has come back, of whom the first ones find nothing kept."""
    told = share(returned(counts, text, Returning))
    assert told >= least
    assert told > share(returned(counts, text, Hasty))


class Few(ApiServer):
    """Some of the requests have no limits."""

    FREE = (5, 8, 11)

    def submit(self, request_id, *arguments, **options):
        if int(request_id.split("/")[0]) in self.FREE:
            options["slo"] = None
        super().submit(request_id, *arguments, **options)


@pytest.mark.nightly
@pytest.mark.parametrize("admission", [ADMIT_ALL, ADMIT_TIMELY])
@pytest.mark.parametrize(
    "counts", [(1, 1, 0), (0, 0, 2), (1, 0, 1)], ids=lambda counts: str(fleet_of(counts, ADMIT_ALL))
)
def test_what_has_no_limits_ends_while_more_that_has_some_comes_than_can_be_served(counts, admission):
    """A twentieth of what is read goes to the oldest of those that others are read before: so each waits for those
    before it, at twenty times what they take, and for as long again where answers are written beside them."""
    _, planned = staged("20x0.5,1.8x40", counts, 0)
    outcomes, _ = World(fleet_of(counts, admission), planned, api_server=Few).run()
    for index in Few.FREE:
        assert not outcomes[index].error
        assert outcomes[index].ended_s < planned[-1].send_at_s
        num_before = sum(len(each.prompt) for each in planned[: index + 1])
        assert ttft_s(outcomes[index]) <= 2 * TOKEN_S * num_before / FLOOR


# ---- whoever asks for less, or gives the fleet more, does not get less for it ----

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


@pytest.mark.nightly
@cells
def test_looser_limits_cost_nothing(counts, admission, times, seeds):
    size, rate = fleet_of(counts, admission), times * KNEES[counts]
    before = _before(size, rate, seeds)
    for ttft, tpot in ((1.25, 1.25), (2.0, 1.0), (1.0, 1.5)):
        looser = Limits(LIMITS.ttft_s * ttft, LIMITS.tpot_s * tpot)
        assert attainment(size, rate, seeds, limits=looser) >= before - MOST_LOST[times], looser


@pytest.mark.nightly
@cells
def test_one_more_node_costs_nothing(counts, admission, times, seeds):
    rate = times * KNEES[counts]
    before = _before(fleet_of(counts, admission), rate, seeds)
    for kind in range(3):
        more = fleet_of([count + (number == kind) for number, count in enumerate(counts)], admission)
        assert attainment(more, rate, seeds) >= before - MOST_LOST[times], more


@pytest.mark.nightly
@cells
def test_more_blocks_cost_nothing(counts, admission, times, seeds):
    size, rate = fleet_of(counts, admission), times * KNEES[counts]
    scarce, plenty = (attainment(size, rate, seeds, sizes=replace(SIZES, num_blocks=num)) for num in (SCARCE, MORE))
    assert plenty >= scarce - MOST_LOST[times]
