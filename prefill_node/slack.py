"""How long the chunks of prompts may make a step, so that the answers in it keep their limits. No I/O, no clock.

An answer that is ahead of its limit has time in the bank: until its next token is due. What the step takes without
chunks is not to be spent; the rest may be, of the answer that has the least.
An answer that is late, and would be for its next tokens without any chunks, is lost, and holds nobody up; one that
would catch up is let. Prompts that are held back so have a floor: they earn a share of the time, and what they have
earned they get, whoever is late for it. Few tokens at a time would pay again and again for what every chunk costs
whatever its length: they wait until at least half of its time is theirs.

A prompt whose last tokens are in a step has its first token when that ends: what it has until then is all that others
may add, and it does not join a step that would make it late where one of its own would not. While prompts come with
limits on their first token no step takes long, since who comes meanwhile waits for its end.

All seconds are taken times the margin of such steps (serving_core/margin.py).

Where nobody has a limit nothing is held back.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from prefill_node.order import Pace, due_s
from serving_core.costs import StepCosts, StepLoad
from serving_core.margin import Margin
from serving_core.node_requests import NodeRequest

FLOOR: Final = 0.05  # of the time, for prompts that are held back
LEAST_TOKENS: Final = 16  # of a chunk, unless it is the last of its prompt
CATCH_UP_TOKENS: Final = 64  # that one which is late may take to be in time again
BLOCKING_SHARE: Final = 0.25  # of the time to their first token that prompts come with, for a step before them
LOW: Final = 0.1  # of these prompts have less time than is counted on
NUM_RECENT: Final = 32  # prompts
DECODE_PRIOR: Final = 1.02  # of the mean of many steps, as an answer has them
DECODE_RUN: Final = 16  # steps without prompts whose errors count together
WEIGHED_EVERY: Final = 2  # steps without prompts, of which one is predicted so that its error is known
SHORT_TOKENS: Final = 64  # that a step may compute however short it is to be
FIXED_SHARE: Final = 0.2  # of a step's time that may go to what it costs without chunks, to keep it short


@dataclass(slots=True)
class _Step:
    """One that is planned, with answers or prompts that have limits."""

    answers: Sequence[NodeRequest]
    now: float
    is_weighed: bool = False  # whether anyone has asked for what follows
    bare_s: float = 0.0  # without chunks
    chunks_s: float = 0.0
    factor: float = 1.0  # from what it is to take to what it rarely exceeds
    left_s: float = 0.0  # for more chunks, before the answers' next tokens are due
    longest_s: float = math.inf  # for all chunks, or who comes meanwhile waits too long
    beside_s: float = math.inf  # for more chunks, before the prompts that end in it are due, or it is too long
    is_short: bool = False  # whether a prompt was held back

    @property
    def planned_s(self) -> float:
        return self.bare_s + self.chunks_s


class Slack:
    """What the prompts of one node may take of each step. `begin`, then `afford` for each chunk, then `took`."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._margin = Margin()  # of a step with chunks
        self._decode_margin = Margin(DECODE_PRIOR)  # of DECODE_RUN steps without, together
        self._run_s: list[tuple[float, float]] = []  # of those that are to be one sample: predicted, actual
        self._owed_s = 0.0  # to prompts that were held back
        self._step: _Step | None = None
        self._is_limited = False  # whether anyone has limits in the running step, or in those of its streak
        self._num_decode_steps = 0
        self._newest_age = -1
        self._given_s: deque[float] = deque(maxlen=NUM_RECENT)  # until their first token, to prompts when they came

    def pace(self, budget: int) -> Pace:
        """Return what the steps are in which prompts are computed, `budget` tokens of them at most, and what answers
        leave of a step is not less for long. To be asked after `begin`, where a prompt has limits."""
        step = self._step
        assert step is not None, "nobody has limits"
        self._weigh(step)
        longest = self._costs.num_tokens_within(step.beside_s, 0, is_first=True)
        return Pace(step.bare_s, max(SHORT_TOKENS, int(min(budget, longest))), step.factor)

    @property
    def decode_margin(self) -> float:
        """Return what the mean of steps without chunks rarely exceeds, by the expected one."""
        return self._decode_margin.factor

    def begin(self, answers: Sequence[NodeRequest], prompts: Sequence[NodeRequest], now: float) -> None:
        """A step is planned, in which these answers get a token each, and chunks of these prompts may be computed."""
        self._note_new(prompts, now)
        is_limited = any(each.due is not None and each.due.tpot_s < math.inf for each in answers)
        is_limited = is_limited or any(due_s(each) < math.inf for each in prompts)
        self._step = _Step(answers, now) if is_limited else None
        self._is_limited = is_limited

    def afford(self, prompt: NodeRequest, num_tokens: int) -> int:
        """How many of these next tokens of a prompt the step may compute; they count as planned."""
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
        """Whether the last chunk of a prompt may be in the step: not if that makes it late, and a step of its own would
        not. Others may then add to the step what it leaves them."""
        has_s = (due_s(prompt) - step.now) / step.factor
        if step.planned_s + chunk_s <= has_s:
            if has_s < math.inf:
                step.beside_s = min(step.beside_s, has_s - step.planned_s)
            return True
        return not step.chunks_s or step.bare_s + chunk_s > has_s

    def _fits_alone(self, step: _Step, prompt: NodeRequest) -> bool:
        """Whether a step of its own could compute all of a prompt: to begin it behind others would win nothing, and
        would have spent something on it should it step back for more urgent ones."""
        most = self._costs.num_tokens_within(step.longest_s, prompt.num_computed, is_first=True)
        return most >= prompt.num_to_compute

    def took(self, load: StepLoad, step_s: float, now: float | None) -> None:
        """A step is done now, which has computed for so long; None: when it had."""
        step, self._step = self._step, None
        if not load.num_prompt_tokens and self._is_limited:
            self._learn_decode(load, step_s)
        elif step is not None and step.is_weighed:
            self._margin.note(step.planned_s, step_s if now is None else now - step.now)
        if step is not None and step.is_short:
            self._owed_s = max(0.0, self._owed_s + FLOOR * step_s - step.chunks_s)
        else:
            self._owed_s = 0.0
        self._costs.add(load, step_s)

    def _learn_decode(self, load: StepLoad, step_s: float) -> None:
        """An answer gets a token in each of many steps, whose errors are small in the mean."""
        self._num_decode_steps += 1
        if self._num_decode_steps % WEIGHED_EVERY:
            return
        self._run_s.append((self._costs.step_s(load), step_s))
        if len(self._run_s) == DECODE_RUN:
            planned, actual = zip(*self._run_s, strict=True)
            self._decode_margin.note(sum(planned), sum(actual))
            self._run_s.clear()

    def _weigh(self, step: _Step) -> None:
        """Work out what there is to give, once a step."""
        if step.is_weighed:
            return
        step.is_weighed = True
        num_cached = sum(each.num_computed for each in step.answers)
        step.bare_s = self._costs.step_s(StepLoad(len(step.answers), num_cached))
        step.factor = self._margin.factor
        bank_s = least_bank_s(step.answers, step.now, step.bare_s)
        step.left_s = max(bank_s / step.factor - step.bare_s, self._owed_s)
        step.longest_s = step.beside_s = self._longest_s(step.bare_s)

    def _longest_s(self, bare_s: float) -> float:
        """Seconds that the chunks of a step may take, so that who comes meanwhile waits only so long for its end."""
        if not self._given_s:
            return math.inf
        given_s = sorted(self._given_s)[int(LOW * len(self._given_s))]
        fixed_s = bare_s + self._costs.chunk_s(0, 0, is_first=True)
        least_s = max(fixed_s * (1 / FIXED_SHARE - 1), self._costs.chunk_s(0, SHORT_TOKENS, is_first=True))
        return max(BLOCKING_SHARE * given_s - bare_s, least_s)

    def _note_new(self, prompts: Sequence[NodeRequest], now: float) -> None:
        """Prompts come oldest first."""
        for each in reversed(prompts):
            if each.age <= self._newest_age:
                break
            if not each.request.num_output_tokens and now < (at_s := due_s(each)) < math.inf:
                self._given_s.append(at_s - now)
        self._newest_age = prompts[-1].age if prompts else -1


def least_bank_s(answers: Sequence[NodeRequest], now: float, step_s: float) -> float:
    """Until the next token of an answer is due that is not lost, in steps of this length; inf where there is none."""
    banks_s = [math.inf]
    for each in answers:
        if each.due is None:
            continue
        index = each.request.num_output_tokens
        last = index + min(CATCH_UP_TOKENS, each.request.sampling.max_tokens - index) - 1
        bank_s = each.due.token_s(index) - now
        is_lost = step_s > bank_s and now + (last - index + 1) * step_s > each.due.token_s(last)
        if not is_lost:
            banks_s.append(bank_s)
    return min(banks_s)
