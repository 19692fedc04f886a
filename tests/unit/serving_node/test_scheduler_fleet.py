"""Nodes that read and write for each other under random loads: every answer once and as on paper, nothing left, no
deadlock, and the oldest always finishes."""

from collections import Counter
from itertools import count
from random import Random

import pytest

from serving_core.node.prefix import MIXED_NUMERICS
from tests.effort import effort, few
from tests.toy_kv import NUMERICS
from tests.unit.serving_node.fleet_kit import Fleet

NUM_BLOCKS = 9
MOST_TOKENS = NUM_BLOCKS * 4
PRIORITIES = [(0,), (-1, 0, 1)]
ORDERS = ["random", "as they come", "backwards"]
EACH_ORDER = few(ORDERS, "random")


def ask(fleet, random, age, priorities):
    """Of any size that fits at all; many begin alike."""
    turn = [random.randrange(2) for _ in range(2)] * 20
    prompt = turn[: random.randint(0, 20)] + [random.randrange(3) for _ in range(random.randint(1, 6))]
    max_tokens = random.randint(1, min(MOST_TOKENS - len(prompt), random.choice([3, 30])))
    return fleet.ask(prompt, max_tokens, age, random.choice(["", "salt"]), random.choice(priorities))


def ask_alike(fleet, random, age, priorities):
    """One of which most is what every second one begins with."""
    prompt = [random.randrange(2), *range(1, 3)] * 7 + [random.randrange(3) for _ in range(random.randint(1, 4))]
    return fleet.ask(prompt, random.randint(1, random.choice([3, 10])), age, "", random.choice(priorities))


def load(fleet, num_requests, seed, order="random", ask=ask):
    """Requests whose ages go by `order` of arrival; half of the loads have unlike priorities."""
    random, priorities = Random(seed), PRIORITIES[seed // 2 % 2]
    ages = list(range(1, num_requests + 1))
    if order == "random":
        random.shuffle(ages)
    elif order == "backwards":
        ages.reverse()
    for age in ages:
        ask(fleet, random, age, priorities)


def make_fleet(seed, **options):
    random = Random(seed)
    limits = {"budget": random.randint(4, 24), "slots": random.randint(1, 4), "caching": random.random() < 0.7}
    sizes = {"num_nodes": random.randint(2, 3), "num_blocks": random.randint(NUM_BLOCKS, 12)}
    return Fleet(seed, **{**sizes, "is_batch_invariant": random.random() < 0.5, **limits, **options})


def seen(fleet):
    """How often what is rare has happened."""
    return Counter(
        revoked=fleet.num_revoked,
        evicted=sum(sum(node.num_evictions.values()) for node in fleet.nodes),
        preempted=sum(node.load.num_preemptions for node in fleet.nodes),
        failed=fleet.num_failures,
        cancelled=sum(each.is_cancelled for each in fleet.all),
        kept=fleet.num_kept,
        migrated=sum(each.num_migrations for each in fleet.all),
        migrations_off=fleet.num_migrations_off,
        copied=sum(
            any(numerics_id[:-1] in {*NUMERICS} - {node.numerics} for numerics_id in node.numerics_ids)
            for node in fleet.nodes
        ),
        mixed=sum(MIXED_NUMERICS in node.numerics_ids for node in fleet.nodes),
    )


@pytest.mark.nightly
@pytest.mark.parametrize("order", EACH_ORDER)
def test_everyone_gets_their_answer(order):
    """Nothing fails here; so nobody may be told of a failure, not even by time."""
    total = Counter()
    for seed in range(effort(40, 40, 80)):
        fleet = make_fleet(seed)
        load(fleet, 14, seed, order)
        fleet.run()
        fleet.check_end()
        total += seen(fleet)
    happened = [total[what] for what in ("revoked", "evicted", "preempted", "copied", "mixed")]
    assert min(happened) > 5, f"too little happened: {total}"
    assert not total["failed"]


@pytest.mark.nightly
@pytest.mark.parametrize("order", EACH_ORDER)
def test_answers_move_and_stay_and_everyone_gets_theirs(order):
    """Without a failure, but for moves that come to nothing."""
    total = Counter()
    for seed in range(effort(40, 40, 80)):
        fleet = make_fleet(seed, migrations=0.3, keeps=0.1)
        load(fleet, 14, seed, order)
        fleet.run()
        fleet.check_end()
        total += seen(fleet)
    assert min(total["migrated"], total["migrations_off"], total["kept"], total["revoked"], total["preempted"]) > 10, (
        total
    )
    assert not total["failed"]


@pytest.mark.parametrize("faults", [0.0, pytest.param(0.02, marks=pytest.mark.nightly)])
def test_who_begins_alike_gets_the_same_answers(faults):
    """Where nothing fails, nobody is told of a failure, not even by time."""
    total = Counter()
    for seed in range(16 if faults else effort(4, 8, 16)):
        fleet = make_fleet(seed, faults=faults, migrations=0.3, num_blocks=20, slots=4, caching=True)
        load(fleet, 14, seed, ORDERS[seed % 3], ask_alike)
        fleet.run()
        fleet.check_end()
        total += seen(fleet) + Counter(shared=fleet.num_shared)
    assert min(total[what] for what in ("shared", "revoked", "copied", "migrated")) > 2, total
    assert bool(total["failed"]) == bool(faults)


@pytest.mark.parametrize("faults", [0.0, pytest.param(0.01, marks=pytest.mark.nightly)])
def test_what_answers_that_move_begin_with_is_not_sent_to_who_holds_it(faults):
    """On nodes of one kind of numerics and of two: what goes by a name was made as the name says, wherever it
    stands.
    """
    total = Counter()
    for seed in range(effort(5, 12, 24)):
        sizes = {"num_blocks": 20, "slots": 4, "caching": True, "is_batch_invariant": True}
        fleet = make_fleet(seed, faults=faults, migrations=0.5, **sizes)
        load(fleet, 14, seed, ORDERS[seed % 3], ask_alike)
        fleet.run()
        fleet.check_end()
        total += seen(fleet) + Counter(held=fleet.num_held_there, unlike=fleet.num_unlike)
    assert min(total[what] for what in ("migrated", "held", "unlike", "mixed")) > effort(0, 2, 4), total
    assert bool(total["failed"]) == bool(faults)


@pytest.mark.parametrize("faults", [pytest.param(0.003, marks=pytest.mark.nightly), 0.03])
def test_everyone_gets_their_answer_or_an_end_whatever_fails(faults):
    """Transfers and steps fail, users cancel, streams to nodes break; what failed is tried again, as old as it was."""
    total, num_seeds = Counter(), effort(20, 60, 120)
    for seed in range(num_seeds):
        fleet = make_fleet(seed, faults=faults, migrations=0.2 * (seed % 2), keeps=0.05 * (seed % 2))
        load(fleet, 14, seed, ORDERS[seed % 3])
        fleet.run()
        fleet.check_end()
        total += seen(fleet)
    assert min(total.values()) > effort(1, 10, 20), f"too little happened: {total}"


@pytest.mark.parametrize("faults", [0.0, pytest.param(0.02, marks=pytest.mark.nightly)])
def test_answers_with_draft_tokens_are_the_same(faults):
    """They move, are put back and fail like all others. Of three kinds of tokens one is easily guessed."""
    total, num_seeds = Counter(), effort(6, 20, 40)
    for seed in range(num_seeds):
        fleet = make_fleet(
            seed, faults=faults, migrations=0.3, keeps=0.1, draft_tokens=4, is_batch_invariant=True, slots=3
        )
        load(fleet, 14, seed, ORDERS[seed % 3])
        fleet.run()
        fleet.check_end()
        total += seen(fleet)
        for node in fleet.nodes:
            counts = node.scheduler.speculation.counts
            total["came"] += counts.num_accepted
            total["missed"] += counts.num_proposed - counts.num_accepted
    happened = ("came", "missed", "migrated", "migrations_off", "preempted")
    assert min(total[what] for what in happened) > num_seeds / 4, f"too little happened: {total}"


@pytest.mark.parametrize("kind", few(["own", "each for the other", "all on one side"]))
def test_whoever_reads_and_whoever_writes(kind):
    for seed in range(effort(5, 25, 50)):
        fleet = make_fleet(seed)
        first, second = fleet.nodes[:2]
        turns = count()
        pairs = {
            "each for the other": lambda _, turns=turns, ways=((first, second), (second, first)): ways[next(turns) % 2],
            "all on one side": lambda _, way=(first, second): way,
            "own": lambda _, way=(first, first): way,
        }
        fleet.choose = pairs[kind]
        load(fleet, 14, seed, ORDERS[seed % 3])
        fleet.run()
        fleet.check_end()


@pytest.mark.parametrize("priorities", PRIORITIES, ids=["equal", "it is the least important"])
@pytest.mark.parametrize("first_seed", few(range(0, 16, 2)))
def test_the_oldest_finishes_though_younger_ones_come_without_end(first_seed, priorities):
    for seed in range(first_seed, first_seed + 2):
        chances = {"migrations": 0.1, "keeps": 0.05} if seed % 2 else {}
        fleet, random, ages = make_fleet(seed, **chances), Random(seed), count(2)
        for _ in range(8):
            ask(fleet, random, next(ages), priorities)
        fleet.run(until=lambda fleet=fleet: not fleet.to_come)
        least = max(priorities)
        oldest = fleet.ask([0, 1] * 9, MOST_TOKENS - 18, age=1, priority=least)  # needs the least pool whole

        def is_answered(fleet=fleet, random=random, ages=ages, oldest=oldest):
            while len(fleet.asks) + len(fleet.to_come) < 10:
                ask(fleet, random, next(ages), priorities)
            return oldest.is_over

        fleet.run(until=is_answered)
        fleet.run()
        fleet.check_end()


@pytest.mark.nightly
def test_a_pool_as_large_as_the_largest_request_is_enough_for_many_of_them():
    for seed in range(20):
        fleet = Fleet(seed, 2, num_blocks=NUM_BLOCKS, slots=4)
        for age in Random(seed).sample(range(8), 8):
            fleet.ask([age % 3] * 18, MOST_TOKENS - 18, age)
        fleet.run()
        fleet.check_end()


@pytest.mark.nightly
def test_those_that_wait_too_long_are_told_and_nothing_stays_behind():
    """Credit and descriptors with little time, on nodes that are much too small for the load."""
    num_failed = 0
    for seed in range(25):
        fleet = make_fleet(seed, faults=1e-9, credit_timeout_s=8.0, descriptor_timeout_s=8.0)
        load(fleet, 14, seed)
        for node in fleet.nodes:
            tick_with_every_plan(node)
        fleet.run()
        fleet.check_end()
        num_failed += fleet.num_failures
    assert num_failed > 10


def tick_with_every_plan(node):
    begin = node.begin

    def begin_later():
        node.tick(node.now + 0.1)
        return begin()

    node.begin = begin_later
