"""A process that simulates: `python -m splitserve_bench.dominance.worker ""`. Its jobs are runs, and what comes of them
are figures."""

import dataclasses
from collections.abc import Callable
from typing import Any

from splitserve_bench.crew import work
from splitserve_bench.dominance.runs import run_from_json
from splitserve_bench.dominance.simulator import Simulator


def prepare(asked: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Jobs say all."""
    simulator = Simulator()
    return lambda job: dataclasses.asdict(simulator.do(run_from_json(job)))


if __name__ == "__main__":
    work(prepare)
