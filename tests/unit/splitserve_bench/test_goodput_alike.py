"""Agents: requests that begin with one long system prompt, of which a node's pool holds one copy."""

from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean

import pytest

from coordinator.settings import ADMIT_ALL, ADMIT_TIMELY
from splitserve_bench.serve.metrics import Limits
from splitserve_bench.simulate.costs import ProfileCosts
from splitserve_bench.simulate.fleet import FleetSize
from splitserve_bench.simulate.profile import read_profile
from tests.unit.splitserve_bench.goodput_kit import Door, World, fleet_of, load, num_good
from tests.unit.splitserve_bench.simulate_kit import BLOCK_SIZE, SIZES, VOCAB_SIZE

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


class Watching(Door):
    """Writes down, again and again, of each node that has told of some block: its answers, the tokens that its pool
    holds, those that the ledger takes it to hold, and those of each answer."""

    def __init__(self, agenda, clients):
        super().__init__(agenda, clients)
        self.seen = {}
        agenda.after(LOOK_S, self._look)

    def _look(self):
        ledger = self.coordinator.tracker._ledger
        ledger.check_integrity()
        for known, attachment in self.coordinator._attachments.items():
            allocator, account = attachment.node.allocator, ledger.of(known)
            num_held = (allocator.num_blocks - allocator.num_free) * BLOCK_SIZE
            if known.hints:
                row = account.num_answers, num_held, ledger.tokens_taken(known), account.tokens_held
                self.seen.setdefault(known.name, []).append(row)
        self.agenda.after(LOOK_S, self._look)


@pytest.mark.parametrize(
    ("counts", "writers"),
    [((1, 1, 0), ["decode-0"]), pytest.param((0, 0, 2), ["both-0", "both-1"], marks=pytest.mark.nightly)],
)
def test_the_account_has_what_the_pools_have(counts, writers):
    """Within a block for each answer, on average; counted for each request it would be many times as much."""
    size, sizes = fleet_of(counts, ADMIT_ALL), replace(SIZES, num_blocks=ENOUGH)
    _, door = World(size, agents(8.0, 60, 0), sizes=sizes, door=Watching).run()
    for name in writers:
        num_answers, held, taken, each = (fmean(column) for column in zip(*door.seen[name], strict=True))
        assert abs(taken - held) <= num_answers * BLOCK_SIZE
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
