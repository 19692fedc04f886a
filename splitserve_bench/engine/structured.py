"""What it costs a decode step that each of its answers is kept to a grammar."""

import json
import statistics
from collections.abc import Sequence
from typing import Final

from engine.engine import Engine
from serving_core.errors import RequestError, SettingsError
from serving_core.requests import Guide
from splitserve_bench.engine.driver import DecodeRun
from splitserve_bench.engine.figures import StructuredFigures

# Many texts, so that no answer comes to its end.
SCHEMA: Final = {"type": "array", "minItems": 100, "items": {"type": "string"}}
GRAMMAR: Final = json.dumps({"grammars": [{"json_schema": SCHEMA}]})


def measure_structured(engine: Engine, run: DecodeRun, batch: int, repeats: int) -> StructuredFigures:
    """Steps with and without, by turns. Raises SettingsError where answers of the model cannot be kept to a grammar."""
    steps_s, plain_steps_s = [], []
    requests = run.requests[:batch]
    for _ in range(repeats):
        run.rewind(batch)
        plain_steps_s.append(run.run_s(batch))
        run.rewind(batch)
        for request in requests:
            request.guide = _Behind(_guide(engine), len(request.token_ids))
        steps_s.append(run.run_s(batch))
        for request in requests:
            request.guide = None
    return StructuredFigures(
        batch, engine.config.vocab_size, statistics.median(steps_s), statistics.median(plain_steps_s)
    )


def _guide(engine: Engine) -> Guide:
    try:
        return engine.grammars.guide(GRAMMAR)
    except RequestError as error:
        raise SettingsError(str(error)) from error


class _Behind:
    """A guide for what follows so many tokens, which are all output for the bench."""

    def __init__(self, guide: Guide, num_tokens: int) -> None:
        self._guide = guide
        self._num_tokens = num_tokens

    def allowed(self, output: Sequence[int]) -> bytes:
        return self._guide.allowed(output[self._num_tokens :])
