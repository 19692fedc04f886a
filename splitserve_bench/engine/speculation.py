"""Compare the rate of a model with draft tokens and without, by a node's own scheduler and engine in this process.

Both runs must generate the same tokens. Rates are of the tokens that decode steps gave, over the time of these steps
and of a draft model between them. With one thread, seconds are CPU seconds of this process, so that other work on the
machine counts for little. A scheduler keeps from run to run what it has measured. Prompts are made of Python's own
library and help.
"""

import asyncio
import calendar
import dataclasses
import fractions
import heapq
import inspect
import pydoc_data.topics
import shlex
import statistics
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

import torch
from rich.console import Group, RenderableType
from rich.markup import escape

from coordinator.text.tokenizer import TokenLimit, read_tokenizer
from engine.build import build_engine
from engine.drafting import Drafter
from engine.engine import Engine
from protos import convert, fleet_pb2
from serving_core.errors import RequestError, SettingsError
from serving_core.model_files.config import read_model_config
from serving_core.node.blocks import BlockAllocator
from serving_core.node.costs import StepCosts, StepRates
from serving_core.reasons import PROMPT_TOO_LONG
from serving_core.requests import Request, SamplingParams, Work
from serving_core.settings import EngineSettings
from serving_core.shapes import MIXED, preset
from serving_node.scheduler import Limits, NodeScheduler
from serving_node.step_loop import draft_model_of
from splitserve.launch.models import Report
from splitserve_bench.engine.driver import load_engine, threads
from splitserve_bench.report import engine_line, table_of

EDIT, SUMMARY, CHAT, RANDOM = "code edit", "summary with quotes", "chat", "random"
KINDS: Final = (EDIT, SUMMARY, CHAT, RANDOM)
OUTPUT_TOKENS: Final = 120
MODULES: Final = (textwrap, heapq, statistics, fractions, calendar, shlex)
CODE_CHARS: Final = (400, 1400)
TEXT_CHARS: Final = 1500
RANDOM_TOKENS: Final = 300
LIMIT: Final = TokenLimit(2**20, lambda num: RequestError(PROMPT_TOO_LONG, f"the text has {num} tokens"))
SUBJECTS: Final = (
    *("the sea", "a bicycle", "bread", "the moon", "a library", "rain", "a violin", "the heart"),
    *("a volcano", "chess", "honey", "a glacier", "paper", "the wind", "a lighthouse", "copper"),
)
MAX_STEP_TOKENS: Final = 512
NEVER_S: Final = 1e9


@dataclass(frozen=True, slots=True)
class KindFigures:
    """Requests of one kind of prompt, in one batch size, with draft tokens and without.

    Rates are medians of the repeats.
    """

    kind: str
    batch: int
    plain_tokens_per_s: float
    tokens_per_s: float
    speedup: float  # the median of the repeats' own ratios
    drafts_per_token: float
    acceptance_rate: float
    tokens_per_step: float  # of each sequence


@dataclass(frozen=True, slots=True)
class SpeculationFigures:
    """One model with draft tokens of one drafter: lookup in the request's own tokens, or a draft model."""

    model: str
    engine: dict[str, str]
    drafter: str
    kinds: tuple[KindFigures, ...]


@dataclass(frozen=True, slots=True)
class _Run:
    outputs: list[list[int]]
    tokens_per_s: float
    num_drafts: int
    num_accepted: int
    num_sequence_steps: int  # steps that were timed, times their sequences
    num_tokens: int  # that these gave


def measure_speculation(
    folder: Path,
    settings: EngineSettings,
    draft: EngineSettings | None,
    num_speculative_tokens: int,
    batches: Sequence[int],
    repeats: int,
    num_threads: int,
    report: Report,
) -> SpeculationFigures:
    """Return the rates with and without draft tokens for each kind of prompt and batch size.

    `draft` are the settings of the draft model, None for lookup in the request's own tokens; `num_threads` is 0 for
    torch's own number; `report` gets progress. A kind whose outputs all end with their first token is left out. Raises
    SettingsError when the bits of outputs depend on the batch, or outputs with draft tokens differ from those without,
    and ModelError when a model cannot be loaded.
    """
    figures = []
    with threads(num_threads):
        engine = load_engine(folder, settings)
        if not engine.is_batch_invariant:
            raise SettingsError("the bits of this engine's outputs depend on the batch: there is no speculation")
        engine.warm_up()
        drafter = None if draft is None else Drafter(build_engine(draft))
        plain = {batch: _Node(engine, batch) for batch in batches}
        nodes = {batch: _Node(engine, batch, num_speculative_tokens, drafter) for batch in batches}
        for kind in KINDS:
            prompts, sampling = prompts_of(kind, folder, max(batches)), sampling_of(kind)
            for batch, node in nodes.items():
                runs = [_pair(plain[batch], node, prompts[:batch], sampling) for _ in range(repeats)]
                if not all(run.num_tokens for pair in runs for run in pair):
                    report(f"{kind}, batch {batch}: outputs end with their first tokens, so that no step was timed")
                    continue
                figures.append(_figures(kind, batch, runs))
                report(f"{kind}, batch {batch}: {figures[-1].speedup:.2f} times as fast")
    name = "lookup" if draft is None else f"draft model {Path(draft.model).name}, quantization {draft.quantization}"
    return SpeculationFigures(folder.name, engine.description, name, tuple(figures))


def speculation_view(figures: SpeculationFigures) -> RenderableType:
    """Return a table of rates with and without draft tokens."""
    table = table_of(
        figures.kinds,
        {
            "prompts": lambda row: row.kind,
            "batch": lambda row: str(row.batch),
            "tokens/s without": lambda row: f"{row.plain_tokens_per_s:.1f}",
            "with": lambda row: f"{row.tokens_per_s:.1f}",
            "ratio": lambda row: f"{row.speedup:.2f}",
            "draft tokens a token": lambda row: f"{row.drafts_per_token:.2f}",
            "acceptance rate": lambda row: f"{row.acceptance_rate:.0%}",
            "tokens a step": lambda row: f"{row.tokens_per_step:.2f}",
        },
    )
    return Group(escape(engine_line(figures.model, figures.engine)), escape(f"draft tokens: {figures.drafter}"), table)


def prompts_of(kind: str, folder: Path, count: int) -> list[list[int]]:
    """Return `count` prompts of a kind of KINDS as token ids for the model of a folder, the same in every run.

    Raises RequestError when the model has no chat template.
    """
    if kind == RANDOM:
        draw, vocab_size = Random(0), read_model_config(folder).vocab_size
        return [draw.choices(range(vocab_size), k=RANDOM_TOKENS) for _ in range(count)]
    texts = {EDIT: _edits, SUMMARY: _summaries, CHAT: _chats}[kind]()
    tokenizer = read_tokenizer(folder)

    async def encode() -> list[list[int]]:
        messages = [[{"role": "user", "content": texts[index % len(texts)]}] for index in range(count)]
        return [await tokenizer.encode_chat(each, LIMIT) for each in messages]

    return asyncio.run(encode())


def sampling_of(kind: str) -> SamplingParams:
    """Return the sampling of a kind's requests: greedy, but for RANDOM prompts, whose outputs are random too."""
    return SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=float(kind == RANDOM), ignore_eos=kind == RANDOM)


def _edits() -> list[str]:
    ask = "Write this code again with a comment at its top. Change nothing else.\n\n```python\n{}\n```"
    return [ask.format(source) for module in MODULES for source in _functions(module)]


def _functions(module: Any) -> list[str]:
    """Return the source of each of a module's functions whose length is within CODE_CHARS."""
    found = [inspect.getsource(each) for _, each in inspect.getmembers(module, inspect.isfunction)]
    return [source for source in found if CODE_CHARS[0] <= len(source) <= CODE_CHARS[1]]


def _summaries() -> list[str]:
    ask = "Sum this text up in its own words: quote its three most important sentences.\n\n{}"
    texts = [text.strip() for _, text in sorted(pydoc_data.topics.topics.items()) if len(text) > TEXT_CHARS]
    return [ask.format(text[:TEXT_CHARS]) for text in texts]


def _chats() -> list[str]:
    return [f"What is special about {subject}? Answer in a few sentences." for subject in SUBJECTS]


def _pair(plain: "_Node", node: "_Node", prompts: Sequence[list[int]], sampling: SamplingParams) -> tuple[_Run, _Run]:
    without, given = plain.run(prompts, sampling), node.run(prompts, sampling)
    if without.outputs != given.outputs:
        raise SettingsError("outputs with draft tokens differ from those without: that is a bug")
    return without, given


def _figures(kind: str, batch: int, runs: Sequence[tuple[_Run, _Run]]) -> KindFigures:
    given = [run for _, run in runs]
    num_drafts, num_tokens = sum(run.num_drafts for run in given), sum(run.num_tokens for run in given)
    return KindFigures(
        kind,
        batch,
        statistics.median(plain.tokens_per_s for plain, _ in runs),
        statistics.median(run.tokens_per_s for run in given),
        statistics.median(run.tokens_per_s / plain.tokens_per_s for plain, run in runs),
        num_drafts / num_tokens,
        sum(run.num_accepted for run in given) / max(1, num_drafts),
        num_tokens / sum(run.num_sequence_steps for run in given),
    )


class _Node:
    """An engine behind a node's own scheduler, for a batch of requests."""

    def __init__(
        self, engine: Engine, batch: int, num_speculative_tokens: int = 0, drafter: Drafter | None = None
    ) -> None:
        self._engine, self._drafter = engine, drafter
        limits = Limits(
            MAX_STEP_TOKENS, batch, batch, NEVER_S, NEVER_S, num_speculative_tokens, draft_model_of(drafter)
        )
        self._scheduler = NodeScheduler(
            BlockAllocator(engine.num_blocks, caching=False),
            engine.layout,
            limits,
            preset(MIXED, max_num_batched_tokens=MAX_STEP_TOKENS, max_num_seqs=batch),
            block_bytes=engine.layout.block_bytes,
            fingerprint=engine.fingerprint,
            numerics=engine.numerics,
            is_batch_invariant=engine.is_batch_invariant,
            eos_token_ids=engine.eos_token_ids,
            rates=StepRates(),
            costs=StepCosts(),
        )
        self._clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def run(self, prompts: Sequence[list[int]], sampling: SamplingParams) -> _Run:
        """Submit all prompts at once, step until the last output ends, and return the outputs and rates."""
        for index, prompt in enumerate(prompts):
            request = Request(str(index), index + 1, prompt, len(prompt), sampling)
            job = convert.job_to_wire(request, request.epoch)
            self._scheduler.handle(fleet_pb2.NodeCommand(reserve=fleet_pb2.Reserve(job=job, local_prefill=True)), 0.0)
        known = [node_request.request for node_request in self._scheduler.node_requests]
        before = dataclasses.replace(self._scheduler.speculation.counts)
        took_s, num_sequence_steps, num_given, before_s = 0.0, 0, 0, self._clock()
        while works := self._scheduler.plan(before_s):
            num_before = sum(len(request.token_ids) for request in known)
            self._step(works)
            now_s = self._clock()
            if all(work.num_tokens == 1 for work in works):
                took_s += now_s - before_s
                num_sequence_steps += len(works)
                num_given += sum(len(request.token_ids) for request in known) - num_before
            before_s = now_s
        counts = self._scheduler.speculation.counts
        return _Run(
            outputs=[request.output for request in known],
            tokens_per_s=num_given / took_s if num_given else 0.0,
            num_drafts=counts.num_proposed - before.num_proposed,
            num_accepted=counts.num_accepted - before.num_accepted,
            num_sequence_steps=num_sequence_steps,
            num_tokens=num_given,
        )

    def _step(self, works: list[Work]) -> None:
        """Run one step, and have the draft model draft for the next one."""
        begun_s = self._clock()
        tokens = self._engine.step(works)
        self._scheduler.step_done(works, tokens, self._clock() - begun_s, begun_s)
        self._scheduler.decisions.take()
        drafts = self._scheduler.speculation.drafts
        if self._drafter is None or drafts is None or not (ahead := drafts.plan()):
            return
        begun_s = self._clock()
        drafts.drafted(ahead, self._drafter.propose(ahead), self._clock() - begun_s)
