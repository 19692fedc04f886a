"""Limit the time that prompt chunks add to a step, so that the sequences in it meet their TPOT. No I/O, no clock.

A sequence that is ahead of its limit has slack: the time until its next token is due. The chunks of a step may spend
the least slack of all sequences, less the time that the step takes without chunks. A sequence that is late, and would
also be late for its next tokens without any chunks, counts as lost and limits no step; a sequence that would catch up
is allowed to.

Prompts that are held back have a floor: they earn a share of the time, and may spend it whoever is late. Since every
chunk has a fixed cost, they wait until at least half of the chunk's time is theirs.

A prompt whose last tokens are in a step gets its first token when the step ends. The time until its deadline limits
what other chunks add. The prompt does not join a step that would make it late if a step of its own would not. While
prompts with a TTFT deadline arrive, steps stay short, since later arrivals wait for the end of the step.

All seconds are multiplied by the margin of such steps (serving_core/slo.py). Without limits nothing is held back.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from serving_core.node.costs import StepCosts, StepLoad
from serving_core.node.requests import NodeRequest
from serving_core.slo import PROMPT_TIME_SHARE, Margin

LEAST_TOKENS: Final = 16  # in a chunk, unless the chunk is the last of its prompt
CATCH_UP_TOKENS: Final = 64  # within which a late sequence must be in time again
BLOCKING_SHARE: Final = 0.25  # share of new prompts' TTFT budget that a step before them may take
LOW: Final = 0.1  # share of recent prompts with a smaller TTFT budget than assumed
NUM_RECENT: Final = 32  # prompts whose TTFT budget is remembered
DECODE_PRIOR: Final = 1.02  # margin of the mean of many decode steps, before it is measured
DECODE_RUN: Final = 16  # steps without prompts whose errors count together
WEIGHED_EVERY: Final = 2  # one in so many decode steps is predicted to learn the error
SHORT_TOKENS: Final = 64  # that a step may compute whatever the time limit
FIXED_SHARE: Final = 0.2  # limit for the share of fixed costs in a step that is kept short


class StepPace(NamedTuple):
    """How fast a node computes prompts in its steps.

    A step takes `bare_s` seconds without prompts, computes at most `num_tokens` prompt tokens, and rarely takes longer
    than `factor` times the expected time.
    """

    bare_s: float
    num_tokens: int
    factor: float


@dataclass(slots=True)
class _Step:
    """Hold a planned step that has sequences or prompts with limits."""

    running: Sequence[NodeRequest]
    now: float
    is_weighed: bool = False  # whether the fields below are computed
    bare_s: float = 0.0  # without chunks
    chunks_s: float = 0.0
    factor: float = 1.0  # from the expected time to the time that it rarely exceeds
    left_s: float = 0.0  # for more chunks, before the next tokens of the sequences are due
    longest_s: float = math.inf  # for all chunks, so that later arrivals do not wait too long
    beside_s: float = math.inf  # for more chunks, before prompts that end in the step are due or the step is too long
    is_short: bool = False  # whether a prompt was held back

    @property
    def planned_s(self) -> float:
        return self.bare_s + self.chunks_s


class ChunkBudget:
    """Limits how many tokens of prompts each step of a node computes, so that running sequences meet their TPOT.

    Call `begin`, then `afford` for each chunk, then `record_step`.
    """

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._margin = Margin()  # of steps with chunks
        self._decode_margin = Margin(DECODE_PRIOR)  # of DECODE_RUN steps without chunks, together
        self._run_s: list[tuple[float, float]] = []  # (predicted, actual) of the steps that will form one sample
        self._owed_s = 0.0  # time that held-back prompts have earned
        self._step: _Step | None = None
        self._is_limited = False  # whether a request in the running step has limits
        self._num_decode_steps = 0
        self._newest_age = -1
        self._given_s: deque[float] = deque(maxlen=NUM_RECENT)  # TTFT budget of recent prompts at their arrival

    def pace(self, budget: int) -> StepPace:
        """Return how fast steps compute prompts, with at most `budget` tokens each.

        Call after `begin`, and only if a prompt has a limit. The slack of running sequences is not subtracted, since it
        does not stay low for long.
        """
        step = self._step
        assert step is not None, "nobody has limits"
        self._weigh(step)
        longest = self._costs.num_tokens_within(step.beside_s, 0, is_first=True)
        return StepPace(step.bare_s, max(SHORT_TOKENS, int(min(budget, longest))), step.factor)

    @property
    def decode_margin(self) -> float:
        """Return the factor over the expected time that the mean of steps without chunks rarely exceeds."""
        return self._decode_margin.factor

    def begin(self, running: Sequence[NodeRequest], prompts: Sequence[NodeRequest], now: float) -> None:
        """Begin to plan a step in which each sequence of `running` gets a token, and chunks of `prompts` may be added.

        `prompts` are ordered oldest first.
        """
        self._note_new(prompts, now)
        limits = [each.due for each in running if each.due is not None]
        is_limited = any(due.tpot_s < math.inf for due in limits) or any(due_s(each) < math.inf for each in prompts)
        self._step = _Step(running, now) if is_limited else None
        self._is_limited = is_limited

    def afford(self, prompt: NodeRequest, num_tokens: int) -> int:
        """Return how many of the next `num_tokens` tokens of a prompt fit into the step's time; count them as planned.

        All of them if no request has a limit.
        """
        step = self._step
        if step is None:
            return num_tokens
        self._weigh(step)
        is_first, start = not step.chunks_s, prompt.num_computed
        most = self._costs.num_tokens_within(step.left_s, start, is_first=is_first)
        step.is_short |= most < num_tokens
        if most < min(num_tokens, max(LEAST_TOKENS, self._costs.num_tokens_worth_it if is_first else 0)):
            return 0
        beside = self._costs.num_tokens_within(step.beside_s, start, is_first=is_first)
        most = min(most, max(beside, SHORT_TOKENS) if is_first else beside)
        num_afforded = num_tokens if most >= num_tokens else int(most)
        if num_afforded < min(num_tokens, LEAST_TOKENS):
            return 0
        if not is_first and num_afforded < num_tokens and self._fits_alone(step, prompt):
            return 0
        chunk_s = self._costs.chunk_s(start, num_afforded, is_first=is_first)
        if num_afforded == prompt.num_to_compute and not self._ends_in_time(step, prompt, chunk_s):
            return 0
        step.left_s -= chunk_s
        step.beside_s -= chunk_s
        step.chunks_s += chunk_s
        return num_afforded

    def _ends_in_time(self, step: _Step, prompt: NodeRequest, chunk_s: float) -> bool:
        """Return whether the last chunk of a prompt may be in the step.

        False if the step makes the prompt late and a step of its own would not. If true, the prompt's deadline limits
        further chunks.
        """
        has_s = (due_s(prompt) - step.now) / step.factor
        if step.planned_s + chunk_s <= has_s:
            if has_s < math.inf:
                step.beside_s = min(step.beside_s, has_s - step.planned_s)
            return True
        return not step.chunks_s or step.bare_s + chunk_s > has_s

    def _fits_alone(self, step: _Step, prompt: NodeRequest) -> bool:
        """Return whether a step of its own could compute the rest of a prompt.

        Beginning the prompt behind other prompts then wins nothing, and is wasted if the prompt steps back for a more
        urgent one.
        """
        most = self._costs.num_tokens_within(step.longest_s, prompt.num_computed, is_first=True)
        return most >= prompt.num_to_compute

    def record_step(self, load: StepLoad, step_s: float, now: float) -> None:
        """Record that the planned step, of this load, took `step_s` seconds and ended at `now`."""
        step, self._step = self._step, None
        if not load.num_prompt_tokens and self._is_limited:
            self._learn_decode(load, step_s)
        elif step is not None and step.is_weighed:
            self._margin.note(step.planned_s, now - step.now)
        if step is not None and step.is_short:
            self._owed_s = max(0.0, self._owed_s + PROMPT_TIME_SHARE * step_s - step.chunks_s)
        else:
            self._owed_s = 0.0
        self._costs.add(load, step_s)

    def _learn_decode(self, load: StepLoad, step_s: float) -> None:
        """Sample the error over a run of decode steps, since the errors of single steps cancel out for a sequence."""
        self._num_decode_steps += 1
        if self._num_decode_steps % WEIGHED_EVERY:
            return
        self._run_s.append((self._costs.step_s(load), step_s))
        if len(self._run_s) == DECODE_RUN:
            planned, actual = zip(*self._run_s, strict=True)
            self._decode_margin.note(sum(planned), sum(actual))
            self._run_s.clear()

    def _weigh(self, step: _Step) -> None:
        """Compute the time that the step may spend, once a step."""
        if step.is_weighed:
            return
        step.is_weighed = True
        num_cached = sum(each.num_computed for each in step.running)
        step.bare_s = self._costs.step_s(StepLoad(len(step.running), num_cached))
        step.factor = self._margin.factor
        bank_s = least_bank_s(step.running, step.now, step.bare_s)
        step.left_s = max(bank_s / step.factor - step.bare_s, self._owed_s)
        step.longest_s = step.beside_s = self._longest_s(step.bare_s)

    def _longest_s(self, bare_s: float) -> float:
        """Return the seconds that the chunks of a step may take, so that later arrivals wait a bounded time."""
        if not self._given_s:
            return math.inf
        given_s = sorted(self._given_s)[int(LOW * len(self._given_s))]
        fixed_s = bare_s + self._costs.chunk_s(0, 0, is_first=True)
        least_s = max(fixed_s * (1 / FIXED_SHARE - 1), self._costs.chunk_s(0, SHORT_TOKENS, is_first=True))
        return max(BLOCKING_SHARE * given_s - bare_s, least_s)

    def _note_new(self, prompts: Sequence[NodeRequest], now: float) -> None:
        """Record the TTFT budget of new prompts; `prompts` is ordered oldest first."""
        for each in reversed(prompts):
            if each.age <= self._newest_age:
                break
            if not each.request.num_output_tokens and now < (at_s := due_s(each)) < math.inf:
                self._given_s.append(at_s - now)
        self._newest_age = prompts[-1].age if prompts else -1


def least_bank_s(running: Sequence[NodeRequest], now: float, step_s: float) -> float:
    """Return the least time in seconds until the next token of a running sequence is due.

    Sequences that are lost, being late also without prompts if steps take `step_s` seconds, do not count. inf if none
    is left.
    """
    banks_s = [math.inf]
    for each in running:
        if each.due is None:
            continue
        index = each.request.num_output_tokens
        last = index + min(CATCH_UP_TOKENS, each.request.sampling.max_tokens - index) - 1
        bank_s = each.due.token_s(index) - now
        is_lost = step_s > bank_s and now + (last - index + 1) * step_s > each.due.token_s(last)
        if not is_lost:
            banks_s.append(bank_s)
    return min(banks_s)


def due_s(prompt: NodeRequest) -> float:
    """Return the time at which the prompt's next output token is due; inf without a deadline."""
    return math.inf if prompt.due is None else prompt.due.token_s(prompt.request.num_output_tokens)
