"""How many requests are good with `auto`, colocated and split, on two nodes in the simulator: `python -m
tests.simulated_modes conversation|code|short|long --rates R,... [--trace FILE]` prints a table with what was missed.

The limits are 6 times the TTFT and 2.5 times the TPOT of a request alone. Choose a rule by other seeds than those that
it is judged by.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Final

import click

from splitserve_bench.compare.slo import Scales, Slo, fit_unloaded
from splitserve_bench.plan.loads import LoadOptions, Loads
from splitserve_bench.serve.arrivals import send_times_s
from splitserve_bench.serve.datasets import PlannedRequest, plan, random_load
from splitserve_bench.serve.metrics import Limits, is_good, missed, tpot_s, ttft_s, with_limits
from splitserve_bench.simulate.fleet import FleetSize, simulate
from splitserve_bench.simulate.profile import read_profile

PROFILE: Final = read_profile(Path(__file__).parent / "unit/splitserve_bench/amx_core.json")
VOCAB_SIZE: Final = PROFILE.node.vocab_size
MODES: Final = {
    "auto": FleetSize(0, 0, 2, admission="timely"),
    "colocated": FleetSize(0, 0, 2, policy="never"),
    "split": FleetSize(1, 1),
}
MIXES: Final = {"short": (96, 192, 0.5), "long": (400, 40, 0.9)}  # prompt tokens, output tokens, range
TRACES: Final = ("conversation", "code")
LENGTH_SCALE: Final = 0.25  # of a trace, whose prompts are for larger machines
ALONE: Final = (16, 256, 1024)  # prompt tokens of the requests that give the limits


def run(size: FleetSize, planned: Sequence[PlannedRequest], seed: int = 0):
    return simulate(PROFILE, size, planned, max_concurrency=None, request_timeout_s=600.0, seed=seed).outcomes


@cache
def limits_of() -> Callable[[PlannedRequest], Limits]:
    """Return the limits of a request, by the times of requests alone."""
    alone = [
        run(FleetSize(0, 0, 1), plan(random_load(1, size, 64, 0, VOCAB_SIZE, Random(0)), [0.0]))[0] for size in ALONE
    ]
    ttfts = zip(ALONE, map(ttft_s, alone), strict=True)
    return Slo(Scales(6, 2.5), fit_unloaded(ttfts, [*map(tpot_s, alone)])).limits_of


def load(kind: str, trace: str, rate: float, seed: int, number: int) -> Sequence[PlannedRequest]:
    if kind in TRACES:
        options = LoadOptions("azure", trace, LENGTH_SCALE, 1, 1, 0, 1.0, 0)
        return Loads(options, VOCAB_SIZE, PROFILE.node.max_model_len).load(rate, number, seed)
    shapes = random_load(number, *MIXES[kind], VOCAB_SIZE, Random(f"{seed} {kind}"))
    return plan(shapes, send_times_s(number, rate, 0.25, Random(f"{seed} arrivals")))


def outcomes(kind: str, trace: str, number: int, job: tuple[float, str, int]) -> Counter[str]:
    """Count what became of the requests of one run: good, or why not."""
    rate, mode, seed = job
    planned = with_limits(load(kind, trace, rate, seed, number), limits_of())
    found = Counter[str]()
    for request, outcome in zip(planned, run(MODES[mode], planned, seed), strict=True):
        limits = limits_of()(request)
        if is_good(outcome, limits):
            found["good"] += 1
        elif outcome.is_refused or outcome.error:
            found["refused"] += 1
        else:
            found.update(f"missed {name}" for name in missed(outcome, limits))
    return found


@click.command()
@click.argument("kind", type=click.Choice([*TRACES, *MIXES]))
@click.option("--rates", required=True)
@click.option("--trace", default="")
@click.option("--seeds", default=3)
@click.option("--first-seed", default=0)
@click.option("--num-prompts", default=200)
def main(kind: str, rates: str, trace: str, seeds: int, first_seed: int, num_prompts: int) -> None:
    places = [*product(map(float, rates.split(",")), MODES)]
    jobs = [(*place, first_seed + seed) for place in places for seed in range(seeds)]
    with ProcessPoolExecutor() as pool:
        found = dict(zip(jobs, pool.map(partial(outcomes, kind, trace, num_prompts), jobs), strict=True))
    for place in places:
        total = sum((found[job] for job in jobs if job[:2] == place), Counter[str]())
        shares = ", ".join(f"{name} {100 * number / seeds / num_prompts:.1f} %" for name, number in total.items())
        click.echo(f"{kind} at {place[0]:g} req/s, {place[1]:9}: {shares}")


if __name__ == "__main__":
    main()
