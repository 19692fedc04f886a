"""What a seeded choice of two nodes brings `auto`, in the simulator: `python -m tests.choice_of_two` prints a table.

Placement takes the best pair that it finds, and of equal ones the first by name. Where each caller decides for himself
by figures that are old, all of them find the same node best, and a choice between two helps. There is one coordinator,
and it counts what it has assigned.
"""

from dataclasses import replace
from random import Random
from typing import Final

import click

from coordinator.control.placement.policy import AUTO, POLICIES
from serving_core.errors import RequestError
from splitserve_bench.simulate.fleet import FleetSize
from tests.unit.splitserve_bench.goodput_kit import attainment

LOADS: Final = (
    (FleetSize(0, 0, 2), 4.8), (FleetSize(0, 0, 2), 7.2), (FleetSize(0, 0, 8), 19.2), (FleetSize(0, 0, 8), 28.8),
    (FleetSize(4, 4), 24.0), (FleetSize(4, 4), 36.0),
)  # fmt: skip
HEARTBEATS_S: Final = (0.25, 1.0, 2.0)
SEEDS: Final = 3
NUM_REQUESTS: Final = 250


class TieBySeed:
    """As `auto`, but of equal pairs a random one."""

    def __init__(self):
        self._random, self._auto = Random(0), POLICIES[AUTO]

    def place(self, nodes, ledger, wanted, transfers, now):
        names = [(node, node.name) for node in nodes]
        for node, _ in names:
            node.name = str(self._random.random())
        try:
            return self._auto.place(self._random.sample(nodes, len(nodes)), ledger, wanted, transfers, now)
        finally:
            for node, name in names:
                node.name = name


class OneOfTwo:
    """As `auto`, but a random one of the best decode node and the best other one, unless that one makes more late."""

    def __init__(self):
        self._random, self._auto = Random(0), POLICIES[AUTO]

    def place(self, nodes, ledger, wanted, transfers, now):
        best = self._auto.place(nodes, ledger, wanted, transfers, now)
        others = [node for node in nodes if node is not best.decode_node]
        try:
            second = self._auto.place(others, ledger, wanted, transfers, now)
        except RequestError:
            return best
        return second if second.num_late <= best.num_late and self._random.random() < 0.5 else best


def main():
    usual = POLICIES[AUTO]
    click.echo("| fleet, requests/s, heartbeats | `auto` | equal ones by seed | one of two by seed |")
    click.echo("|---|---:|---:|---:|")
    for size, rate in LOADS:
        for heartbeat_s in HEARTBEATS_S:
            found = []
            settings = replace(size.settings, heartbeat_s=heartbeat_s)
            for policy in (usual, TieBySeed(), OneOfTwo()):
                POLICIES[AUTO] = policy
                found.append(attainment(size, rate, SEEDS, num_requests=NUM_REQUESTS, settings=settings))
                POLICIES[AUTO] = usual
            figures = " | ".join(f"{100 * each:.1f}" for each in found)
            click.echo(f"| {size}, {rate:g}, {heartbeat_s:g} s | {figures} |")


if __name__ == "__main__":
    main()
