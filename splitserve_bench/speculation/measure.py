"""The same answers with candidates and without, by a node's own logic and engine in this process, without a network.

Both write the same tokens, or the bench fails. Rates are of the tokens that steps gave which read no prompt, over these
steps and what a draft model computes between them. With one thread, seconds are of its own: what else the machine does
counts for little then. A node's logic knows at each run what it has measured in those before.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from protos import convert, fleet_pb2
from serving_core.blocks import BlockAllocator
from serving_core.costs import StepCosts, StepRates
from serving_core.errors import SettingsError
from serving_core.requests import Request, SamplingParams, Work
from serving_core.settings import EngineSettings
from serving_core.shapes import BOTH, preset
from serving_node.logic import Limits, NodeLogic
from splitserve_bench.speculation.texts import prompts_of, sampling_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.drafting import Drafter
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
    draft: EngineSettings | None = None,
    *,
    are_free: bool = False,
) -> list[SpeculationFigures]:
    """A row for each kind and batch, unless answers end at once; with the model of `draft`, which writes ahead, as if
    for nothing if drafts `are_free`, or else with lookup. Raises SettingsError where candidates could change
    answers."""
    from engine.drafting import Drafter
    from engine.engine import Engine

    figures = []
    with _threads(threads):
        engine = Engine(EngineSettings(model=str(folder)))
        if not engine.is_history_free:
            raise SettingsError("the bits of this engine's answers depend on the batch: there is no speculation")
        engine.warm_up()
        drafter = None if draft is None else Drafter(Engine(draft))
        plain = {batch: _Node(engine, batch) for batch in batches}
        nodes = {batch: _Node(engine, batch, num_candidates, drafter, are_free=are_free) for batch in batches}
        for kind in kinds:
            prompts, sampling = prompts_of(kind, folder, max(batches)), sampling_of(kind, max_tokens)
            for batch, node in nodes.items():
                runs = [_pair(plain[batch], node, prompts[:batch], sampling) for _ in range(repeats)]
                if not all(run.num_tokens for pair in runs for run in pair):
                    report(f"{kind}, batch {batch}: answers end with their first tokens, so that no step was timed")
                    continue
                figures.append(_figures(kind, batch, runs))
                report(f"{kind}, batch {batch}: {figures[-1].speedup:.2f} times as fast")
    return figures


def _pair(plain: "_Node", node: "_Node", prompts: Sequence[list[int]], sampling: SamplingParams) -> tuple[_Run, _Run]:
    without, given = plain.run(prompts, sampling), node.run(prompts, sampling)
    if without.answers != given.answers:
        raise SettingsError("answers with candidates differ from those without: that is a bug")
    return without, given


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


class _Node:
    """An engine behind a node's logic, for so many answers at a time."""

    def __init__(
        self,
        engine: "Engine",
        batch: int,
        num_candidates: int = 0,
        drafter: "Drafter | None" = None,
        *,
        are_free: bool = False,
    ) -> None:
        from serving_node.drafting import draft_model_of

        draft = draft_model_of(drafter)
        if draft is not None and are_free:
            draft = dataclasses.replace(draft, step_s=0.0)
        self._engine, self._drafter, self._are_free = engine, drafter, are_free
        self._logic = NodeLogic(
            BlockAllocator(engine.num_blocks, caching=False),
            engine.layout,
            Limits(MOST_TOKENS, batch, batch, NEVER_S, NEVER_S, num_candidates, draft),
            preset(BOTH, max_num_batched_tokens=MOST_TOKENS, max_num_seqs=batch),
            block_bytes=engine.layout.block_bytes,
            fingerprint=engine.fingerprint,
            origin=engine.origin,
            is_history_free=engine.is_history_free,
            eos_token_ids=engine.eos_token_ids,
            rates=StepRates(),
            costs=StepCosts(),
        )
        self._clock = time.process_time if engine.description["threads"] == "1" else time.perf_counter

    def run(self, prompts: Sequence[list[int]], sampling: SamplingParams) -> _Run:
        """All prompts at once, until the last answer ends."""
        for index, prompt in enumerate(prompts):
            request = Request(str(index), index + 1, prompt, len(prompt), sampling)
            job = convert.job_to_wire(request, request.epoch)
            self._logic.handle(fleet_pb2.NodeCommand(reserve=fleet_pb2.Reserve(job=job, local_prefill=True)), 0.0)
        known = [resident.request for resident in self._logic.residents]
        before = dataclasses.replace(self._logic.speculation.counts)
        took_s, num_shares, num_given, before_s = 0.0, 0, 0, self._clock()
        while works := self._logic.plan(before_s):
            num_before = sum(len(request.token_ids) for request in known)
            free_s = self._step(works)
            now_s = self._clock()
            if all(work.num_tokens == 1 for work in works):
                took_s += now_s - before_s - free_s
                num_shares += len(works)
                num_given += sum(len(request.token_ids) for request in known) - num_before
            before_s = now_s
        counts = self._logic.speculation.counts
        num_proposed = counts.num_proposed - before.num_proposed
        num_accepted = counts.num_accepted - before.num_accepted
        answers = [request.output for request in known]
        tokens_per_s = num_given / took_s if num_given else 0.0
        return _Run(answers, tokens_per_s, num_proposed, num_accepted, num_shares, num_given)

    def _step(self, works: list[Work]) -> float:
        """And what follows it, before the next one is planned. Gives the seconds of it that do not count."""
        begun_s = self._clock()
        tokens = self._engine.step(works)
        self._logic.step_done(works, tokens, self._clock() - begun_s, begun_s)
        self._logic.take_decisions()
        drafts = self._logic.speculation.drafts
        if self._drafter is None or drafts is None or not (ahead := drafts.plan()):
            return 0.0
        begun_s = self._clock()
        candidates = self._drafter.write_ahead(ahead)
        draft_s = self._clock() - begun_s
        drafts.drafted(ahead, candidates, 0.0 if self._are_free else draft_s)
        return draft_s if self._are_free else 0.0


@contextmanager
def _threads(num_threads: int) -> "Iterator[None]":
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(num_threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
