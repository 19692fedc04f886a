"""Nodes that read and write for each other under random loads: every answer once and as on paper, nothing left, no
deadlock, and the oldest always finishes."""

from random import Random

import pytest

from tests.unit.serving_node.fleet_kit import Fleet

NUM_BLOCKS = 9
MOST_TOKENS = NUM_BLOCKS * 4


def load(fleet, num_requests, seed, order="random"):
    """Requests of all sizes that fit at all, that share beginnings; their ages go by `order` of arrival."""
    random = Random(seed)
    ages = list(range(1, num_requests + 1))
    if order == "random":
        random.shuffle(ages)
    elif order == "backwards":
        ages.reverse()
    for age in ages:
        turn = [random.randrange(2) for _ in range(2)] * 20
        prompt = turn[: random.randint(0, 20)] + [random.randrange(3) for _ in range(random.randint(1, 6))]
        max_tokens = random.randint(1, min(MOST_TOKENS - len(prompt), random.choice([3, 30])))
        fleet.ask(prompt, max_tokens, age, random.choice(["", "salt"]))


@pytest.mark.parametrize("order", ["random", "as they come", "backwards"])
@pytest.mark.parametrize("first_seed", range(0, 40, 10))
def test_everyone_gets_their_answer(order, first_seed):
    for seed in range(first_seed, first_seed + 10):
        random = Random(seed)
        limits = {"budget": random.randint(4, 24), "seats": random.randint(1, 4), "caching": random.random() < 0.7}
        fleet = Fleet(seed, random.randint(2, 3), num_blocks=random.randint(NUM_BLOCKS, 14), **limits)
        load(fleet, 12, seed, order)
        fleet.run()
        fleet.check_end()
        assert fleet.num_failures == 0
