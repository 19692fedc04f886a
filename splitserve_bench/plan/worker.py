"""A process that simulates: `python -m splitserve_bench.plan.worker ASKED`, ASKED a JSON object of the search. Its jobs
are what Study.probe takes, and what comes of them are figures."""

import dataclasses
from collections.abc import Callable
from typing import Any

from splitserve_bench.crew import work
from splitserve_bench.plan.asked import asked_from_json
from splitserve_bench.plan.study import study_of


def prepare(asked: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Raises SplitServeError for what cannot be searched."""
    study = study_of(asked_from_json(asked))
    return lambda job: dataclasses.asdict(study.probe(**job))


if __name__ == "__main__":
    work(prepare)
