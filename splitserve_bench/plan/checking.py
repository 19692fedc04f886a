"""How good a source of step times is: against what was held out of a table, against the roofline, and against requests
that vLLM has really served."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Final

from serving_core.errors import ModelError
from serving_core.json_fields import JsonFields
from serving_core.shapes import BOTH
from splitserve_bench.errors import BenchError
from splitserve_bench.plan.clients import JudgingClients
from splitserve_bench.plan.fleets import run_clients
from splitserve_bench.plan.nodes import NodeKind
from splitserve_bench.plan.plans import Plan, Pool
from splitserve_bench.plan.tables import Check, check_of
from splitserve_bench.serve.datasets import ordinary_ids
from splitserve_bench.serve.metrics import Distribution, Limits
from splitserve_bench.serve.records import PlannedRequest
from splitserve_bench.simulate.agenda import Agenda
from splitserve_bench.simulate.costs import Steps

CHUNKS: Final = (128, 512, 1024, 2048)  # without tokens before them
ANSWERS: Final = ((1, 512), (8, 512), (32, 512), (64, 512))  # with the tokens before each
MOST_REQUESTS: Final = 100_000

Times = Sequence[float | None]
Pair = tuple[Times, Times]  # of the same requests, as served and as simulated


@dataclass(frozen=True, slots=True)
class Served:
    """One request that vLLM has served. Times in seconds, from the first one's."""

    queued_s: float
    input_tokens: int
    output_tokens: int
    ttft_s: float
    tpot_s: float | None  # None for an answer of one token


@dataclass(frozen=True, slots=True)
class Beside:
    """One figure, as served and as simulated, in seconds."""

    what: str
    served_s: float
    simulated_s: float


def against(steps: Steps, analytic: Steps) -> list[Check]:
    """What the roofline says of some steps, by what the table says."""
    chunks = [(analytic.chunk_s(num, 0), steps.chunk_s(num, 0)) for num in CHUNKS]
    answers = [(analytic.answers_s(*place), steps.answers_s(*place)) for place in ANSWERS]
    return check_of("prompts, the roofline by the table", chunks) + check_of("answers, the roofline by it", answers)


def read_served(path: Path) -> list[Served]:
    """vllm/requests.jsonl of LLMServingSim's bench/examples. Raises BenchError, which names the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"{path} cannot be read: {error}") from error
    if not 0 < len(lines) <= MOST_REQUESTS:
        raise BenchError(f"{path} has {len(lines)} lines, not 1 to {MOST_REQUESTS}")
    served = [_served(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]
    first_s = min(each.queued_s for each in served)
    moved = (replace(each, queued_s=each.queued_s - first_s) for each in served)
    return sorted(moved, key=lambda each: each.queued_s)


def replayed(kind: NodeKind, served: Sequence[Served], door_s: float) -> list[Beside]:
    """The same requests, to one simulated node that does both. Raises BenchError when it cannot hold them."""
    ids = ordinary_ids(kind.sizes.vocab_size)
    planned = [
        PlannedRequest(index, each.queued_s, tuple(Random(index).choices(ids, k=each.input_tokens)), each.output_tokens)
        for index, each in enumerate(served)
    ]
    clients = JudgingClients(Agenda(), planned, Limits(), door_s, 0, len(planned), len(planned))
    run_clients(Plan((Pool(BOTH, kind, 1),), kind.num_devices, kind.num_devices), clients)
    if clients.num_missed:
        raise BenchError(f"{clients.num_missed} of the {len(planned)} requests cannot be served by such a node")
    ttfts: Pair = ([each.ttft_s for each in served], [judged.ttft_s for judged in clients.judged])
    tpots: Pair = ([each.tpot_s for each in served], [judged.tpot_s for judged in clients.judged])
    return [
        Beside(f"{name}, {figure}", figure_of(real), figure_of(simulated))
        for name, (real, simulated) in {"TTFT": ttfts, "TPOT": tpots}.items()
        for figure, figure_of in FIGURES.items()
    ]


def _mean(values: Times) -> float:
    return Distribution(tuple(value for value in values if value is not None)).mean or 0.0


def _percentile(percent: float) -> Callable[[Times], float]:
    def of(values: Times) -> float:
        return Distribution(tuple(value for value in values if value is not None)).percentile(percent) or 0.0

    return of


FIGURES: Final[dict[str, Callable[[Times], float]]] = {
    "mean": _mean,
    "median": _percentile(50),
    "P90": _percentile(90),
}


def _served(line: str, where: str) -> Served:
    try:
        fields = JsonFields(json.loads(line), where)
        queued_s, first_s, last_s = (fields.number(name) for name in ("queued_ts", "first_token_ts", "last_token_ts"))
        input_tokens, output_tokens = fields.integer("input_toks"), fields.integer("output_toks")
    except (ValueError, AttributeError, ModelError) as error:
        raise BenchError(f"{where}: {error}") from error
    if not queued_s <= first_s <= last_s:
        raise BenchError(f"{where}: it was not queued, begun and ended in this order")
    tpot_s = (last_s - first_s) / (output_tokens - 1) if output_tokens > 1 else None
    return Served(queued_s, input_tokens, output_tokens, first_s - queued_s, tpot_s)
