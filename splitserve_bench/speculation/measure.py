"""The same answers with candidates and without, by a node's own logic and engine in this process, without a network.

Both write the same tokens, or the bench fails. Rates are of the tokens that steps gave which read no prompt. With one
thread, seconds are of its own: what else the machine does counts for little then.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from protos import convert, fleet_pb2
from serving_core.blocks import BlockAllocator
from serving_core.costs import StepCosts
from serving_core.errors import SettingsError
from serving_core.rates import StepRates
from serving_core.requests import Request, SamplingParams
from serving_core.settings import EngineSettings
from serving_core.shapes import BOTH, preset
from serving_node.logic import Limits, NodeLogic
from splitserve_bench.speculation.texts import RANDOM, prompts_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.engine import Engine  # imports torch, which commands that measure nothing can do without

MOST_TOKENS: Final = 512  # of one step
NEVER_S: Final = 1e9


@dataclass(frozen=True, slots=True)
class SpeculationFigures:
    """Answers of one kind of prompt, so many at a time. Rates are medians of the repeats."""

    kind: str
    batch: int
    plain_tokens_per_s: float
    tokens_per_s: float
    speedup: float  # the median of the repeats' own ratios
    proposed: float  # candidates, for each token given
    accepted: float  # share of the candidates that came
    tokens_per_step: float  # of each answer


@dataclass(frozen=True, slots=True)
class _Run:
    answers: list[list[int]]
    tokens_per_s: float
    num_proposed: int
    num_accepted: int
    num_shares: int  # of answers, in steps that were timed
    num_tokens: int  # that these gave


def measure_speculation(
    folder: Path,
    kinds: Sequence[str],
    batches: Sequence[int],
    num_candidates: int,
    max_tokens: int,
    repeats: int,
    threads: int,
    report: Callable[[str], None],
) -> list[SpeculationFigures]:
    """A row for each kind and batch. Raises SettingsError where candidates could change answers."""
    from engine.engine import Engine

    figures = []
    with _threads(threads):
        engine = Engine(EngineSettings(model=str(folder)))
        if not engine.is_history_free:
            raise SettingsError("the bits of this engine's answers depend on the batch: there is no speculation")
        engine.warm_up()
        for kind in kinds:
            prompts = prompts_of(kind, folder, max(batches))
            for batch in batches:
                sampling = _sampling(kind, max_tokens)
                runs = [_pair(engine, prompts[:batch], sampling, num_candidates) for _ in range(repeats)]
                figures.append(_figures(kind, batch, runs))
                report(f"{kind}, batch {batch}: {figures[-1].speedup:.2f} times as fast")
    return figures


def _sampling(kind: str, max_tokens: int) -> SamplingParams:
    """What is random is so in its answers, too."""
    return SamplingParams(max_tokens=max_tokens, temperature=float(kind == RANDOM), ignore_eos=kind == RANDOM)


def _pair(
    engine: "Engine", prompts: Sequence[list[int]], sampling: SamplingParams, num_candidates: int
) -> tuple[_Run, _Run]:
    plain, run = _run(engine, prompts, sampling, 0), _run(engine, prompts, sampling, num_candidates)
    if plain.answers != run.answers:
        raise SettingsError("answers with candidates differ from those without: that is a bug")
    return plain, run


def _figures(kind: str, batch: int, runs: Sequence[tuple[_Run, _Run]]) -> SpeculationFigures:
    given = [run for _, run in runs]
    num_proposed, num_tokens = sum(run.num_proposed for run in given), sum(run.num_tokens for run in given)
    return SpeculationFigures(
        kind,
        batch,
        statistics.median(plain.tokens_per_s for plain, _ in runs),
        statistics.median(run.tokens_per_s for run in given),
        statistics.median(run.tokens_per_s / plain.tokens_per_s for plain, run in runs),
        num_proposed / num_tokens,
        sum(run.num_accepted for run in given) / max(1, num_proposed),
        num_tokens / sum(run.num_shares for run in given),
    )


def _run(engine: "Engine", prompts: Sequence[list[int]], sampling: SamplingParams, num_candidates: int) -> _Run:
    """All prompts at once, until the last answer ends."""
    logic = _logic(engine, num_candidates, len(prompts))
    requests = [Request(str(index), index + 1, prompt, len(prompt), sampling) for index, prompt in enumerate(prompts)]
    for request in requests:
        job = convert.job_to_wire(request, request.epoch)
        logic.handle(fleet_pb2.NodeCommand(reserve=fleet_pb2.Reserve(job=job, local_prefill=True)), 0.0)
    known = [resident.request for resident in logic.residents]
    clock = time.process_time if engine.description["threads"] == "1" else time.perf_counter
    took_s, num_shares, before_s = 0.0, 0, clock()
    num_given = 0
    while works := logic.plan(before_s):
        num_before = sum(len(request.token_ids) for request in known)
        begun_s = clock()
        tokens = engine.step(works)
        logic.step_done(works, tokens, clock() - begun_s, before_s)
        logic.take_decisions()
        now_s = clock()
        if all(work.num_tokens == 1 for work in works):
            took_s += now_s - before_s
            num_shares += len(works)
            num_given += sum(len(request.token_ids) for request in known) - num_before
        before_s = now_s
    counts = logic.speculation.counts
    answers = [request.output for request in known]
    return _Run(answers, num_given / took_s, counts.num_proposed, counts.num_accepted, num_shares, num_given)


def _logic(engine: "Engine", num_candidates: int, batch: int) -> NodeLogic:
    return NodeLogic(
        BlockAllocator(engine.num_blocks, caching=False),
        engine.layout,
        Limits(MOST_TOKENS, batch, batch, NEVER_S, NEVER_S, num_candidates),
        preset(BOTH, max_num_batched_tokens=MOST_TOKENS, max_num_seqs=batch),
        block_bytes=engine.layout.block_bytes,
        fingerprint=engine.fingerprint,
        origin=engine.origin,
        is_history_free=engine.is_history_free,
        eos_token_ids=engine.eos_token_ids,
        rates=StepRates(),
        costs=StepCosts(),
    )


@contextmanager
def _threads(num_threads: int) -> "Iterator[None]":
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
