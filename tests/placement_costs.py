"""What placing one request beside 1,024 live ones with limits costs the coordinator, in milliseconds of CPU:
`python -m tests.placement_costs`. Mixed nodes, and as many prefill as decode nodes; the best of several rounds.
"""

import time
from random import Random
from typing import Final

import click

from coordinator.control.load import Arrivals, Prompt
from coordinator.control.placement.costs import TransferEstimates, Wanted
from coordinator.control.placement.policy import AUTO, POLICIES
from serving_core.shapes import DECODE, MIXED, PREFILL
from serving_core.slo import Due
from tests.unit.coordinator.placement_kit import NOW, Fleet

NUM_LIVE: Final = 1024
WAITING_SHARE: Final = 0.1  # of the live requests, whose prompts are still to be prefilled
WEIGHTS: Final = [0.006, 0.00005, 1e-7, 0.001, 0.00002, 1e-9, 0.0]
GAP_S: Final = 0.005  # from one placement to the next
ROUNDS: Final = 7
PLACEMENTS: Final = 40


def fleet_of(roles: list[str]) -> Fleet:
    fleet, rng = Fleet(), Random(0)
    nodes = [fleet.add(f"n{index}", WEIGHTS, 1.05, role=role) for index, role in enumerate(roles)]
    prefill = [node for node in nodes if node.prefills]
    decode = [node for node in nodes if node.decodes]
    for number in range(NUM_LIVE):
        decode_node = decode[number % len(decode)]
        if rng.random() < WAITING_SHARE:
            node = decode_node if decode_node.prefills else prefill[number % len(prefill)]
            fleet.reads(node, rng.randint(50, 600), rng.uniform(0.1, 2.0), decode_node, 0.03)
        else:
            num_output = rng.randint(1, 300)
            fleet.writes(decode_node, 0.03, num_output, num_output * rng.uniform(0.02, 0.03), rng.randint(1, 400))
    return fleet


def cpu_ms(fleet: Fleet) -> float:
    policy, rng, best = POLICIES[AUTO], Random(1), float("inf")
    for _ in range(ROUNDS):
        prompts = [Prompt([rng.randrange(1000) for _ in range(rng.randint(50, 600))]) for _ in range(PLACEMENTS)]
        began_ns = time.thread_time_ns()
        for number, prompt in enumerate(prompts):
            now = NOW + number * GAP_S
            wanted = Wanted(prompt, len(prompt) + 300, due=Due(now + 1.0, 0.03), arrivals=Arrivals(50.0, 800.0, 200.0))
            policy.place(fleet.registry.nodes, fleet.ledger, wanted, TransferEstimates(0.0, 0.01), now)
        best = min(best, (time.thread_time_ns() - began_ns) / PLACEMENTS / 1e6)
    return best


def main() -> None:
    for number in (32, 128):
        mixed, split = [MIXED] * number, [PREFILL, DECODE] * (number // 2)
        click.echo(f"{number:3} nodes: mixed {cpu_ms(fleet_of(mixed)):.2f} ms, split {cpu_ms(fleet_of(split)):.2f} ms")


if __name__ == "__main__":
    main()
