"""A process that simulates: `python -m splitserve_bench.plan.worker ASKED`, ASKED a JSON object of the search.

It says one JSON object a line, {"plans": number} when it is ready, and for each line {"index", "rate", "seed"} that it
is told {"played": figures}; or {"error": text}, its last one.
"""

import dataclasses
import gc
import json
import sys
from typing import Any

from serving_core.errors import SplitServeError
from splitserve_bench.plan.asked import asked_from_json
from splitserve_bench.plan.study import study_of


def main() -> None:
    """Until its input ends."""
    try:
        study = study_of(asked_from_json(sys.argv[1]))
        gc.freeze()  # what a search knows stays, and is much to look through
        _say(plans=len(study.plans))
        for line in sys.stdin:
            told = json.loads(line)
            played = study.probe(told["index"], told["rate"], told["seed"])
            _say(played=dataclasses.asdict(played))
    except SplitServeError as error:
        _say(error=str(error))


def _say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
