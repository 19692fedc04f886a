"""Runs a race on several processes, each of which simulates one probe at a time."""

from collections.abc import Callable
from typing import Any, Final

from splitserve_bench.crew import Job, run_crew
from splitserve_bench.plan.asked import Asked
from splitserve_bench.plan.fleets import Played
from splitserve_bench.plan.race import Race, Turns

MODULE: Final = "splitserve_bench.plan.worker"


async def run_race(race: Race, asked: Asked, num_workers: int, on_played: Callable[[], None]) -> None:
    """Until nothing is left to probe, with the same outcome on however many processes. `on_played` is called after each
    probe. The processes are gone at the end. Raises BenchError."""
    turns = Turns(race)

    def next_job() -> tuple[int, Job] | None:
        if (chosen := turns.next()) is None:
            return None
        index, probe = chosen
        return index, {"index": index, "rate": probe.rate, "seed": probe.seed, "is_quick": race.is_survey}

    def record(index: int, played: dict[str, Any]) -> None:
        for _ in turns.record(index, Played(**played)):
            on_played()

    await run_crew(MODULE, asked.to_json(), num_workers, next_job, record)
