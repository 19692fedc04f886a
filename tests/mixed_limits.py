"""What becomes of requests with different limits in one load, in the simulator: `python -m tests.mixed_limits` prints a
table. Half of the requests have the first limits, the others the second."""

from pathlib import Path
from random import Random
from typing import Final

import click

from splitserve_bench.serve.arrivals import send_times_s
from splitserve_bench.serve.datasets import plan, random_load
from splitserve_bench.serve.metrics import Limits, is_good, with_limits
from splitserve_bench.simulate.fleet import FleetSize, simulate
from splitserve_bench.simulate.profile import read_profile

PROFILE: Final = read_profile(Path(__file__).parent / "unit/splitserve_bench/amx_core.json")
FLEETS: Final = ((FleetSize(1, 1), 3.0), (FleetSize(0, 0, 2, admission="timely"), 4.0), (FleetSize(2, 2), 8.0))
MIXES: Final = (
    (Limits(1.0, 0.05), Limits(10.0, 0.05)), (Limits(1.0, 0.04), Limits(10.0, 0.08)),
    (Limits(1.0, 0.08), Limits(10.0, 0.04)),
)  # fmt: skip
SEEDS: Final = 6
NUM_REQUESTS: Final = 150


def load(rate: float, seed: int):
    """Prompts of some 96 tokens and answers of some 192, in bursts."""
    shapes = random_load(NUM_REQUESTS, 96, 192, 0.5, PROFILE.node.vocab_size, Random(seed))
    return plan(shapes, send_times_s(NUM_REQUESTS, rate, 0.25, Random(f"{seed} arrivals")))


def attainments(size: FleetSize, rate: float, mix: tuple[Limits, Limits]) -> list[float]:
    """Of those with the first limits, and of those with the second."""
    met: dict[Limits, list[bool]] = {limits: [] for limits in mix}
    for seed in range(SEEDS):
        random = Random(f"{seed} limits")
        limits_of = {index: random.choice(mix) for index in range(NUM_REQUESTS)}
        planned = with_limits(load(rate, seed), lambda each, of=limits_of: of[each.index])
        for outcome in simulate(PROFILE, size, planned, max_concurrency=None, request_timeout_s=600.0).outcomes:
            limits = limits_of[outcome.index]
            met[limits].append(is_good(outcome, limits))
    return [sum(each) / len(each) for each in met.values()]


def main():
    click.echo("| fleet, requests/s | first: TTFT, TPOT | second: TTFT, TPOT | first, % | second, % |")
    click.echo("|---|---|---|---:|---:|")
    for size, rate in FLEETS:
        for mix in MIXES:
            names = " | ".join(f"{each.ttft_s:g} s, {1000 * each.tpot_s:g} ms" for each in mix)
            figures = " | ".join(f"{100 * each:.1f}" for each in attainments(size, rate, mix))
            click.echo(f"| {size}, {rate:g} | {names} | {figures} |")


if __name__ == "__main__":
    main()
