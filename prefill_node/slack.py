"""How long the chunks of prompts may make a step, so that the answers in it keep their limits. No I/O, no clock.

An answer that is ahead of its limit has time in the bank: until its next token is due. What the step takes without
chunks is not to be spent, nor a part for what the costs get wrong; the rest may be, of the answer that has the least.
An answer that is late, and would be for its next tokens without any chunks, is lost, and holds nobody up; one that
would catch up is let. Prompts that are held back so have a floor: they earn a share of the time, and what they have
earned they get, whoever is late for it. Few tokens at a time would pay again and again for what every chunk costs
whatever its length: they wait until at least half of its time is theirs.

A prompt whose last tokens are in a step has its first token when that ends: what it has until then is all that others
may add.

Where nobody has a limit nothing is held back.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from prefill_node.order import due_s
from serving_core.costs import StepCosts, StepLoad
from serving_core.residents import Resident

SPENT: Final = 0.9  # of what there is: messages and the work between steps take time too
FLOOR: Final = 0.05  # of the time, for prompts that are held back
LEAST_TOKENS: Final = 16  # of a chunk, unless it is the last of its prompt
CATCH_UP_TOKENS: Final = 64  # that one which is late may take to be in time again
NUM_RECENT: Final = 64  # steps
HIGH: Final = 0.95  # of them have taken no longer, by what they were to take, than is reckoned with


@dataclass(slots=True)
class _Step:
    """One that is planned, with answers or prompts that have limits."""

    answers: Sequence[Resident]
    now: float
    planned_s: float = 0.0  # with the chunks so far; 0: nobody has asked yet
    left_s: float = 0.0  # for more chunks, before the answers' next tokens are due
    beside_s: float = math.inf  # for more chunks, before the prompts that end in it are due
    error: float = 1.0  # that is reckoned with: what it takes, by what it is to take
    chunks_s: float = 0.0
    is_short: bool = False  # whether a prompt was held back


class Slack:
    """What the prompts of one node may take of each step. `begin`, then `afford` for each chunk, then `took`."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._errors: deque[float] = deque(maxlen=NUM_RECENT)  # what steps took, by what they were to take
        self._owed_s = 0.0  # to prompts that were held back
        self._step: _Step | None = None

    def begin(self, answers: Sequence[Resident], prompts: Sequence[Resident], now: float) -> None:
        """A step is planned, in which these answers get a token each, and chunks of these prompts may be computed."""
        is_limited = any(each.due is not None and each.due.tpot_s < math.inf for each in answers)
        is_limited = is_limited or any(due_s(each) < math.inf for each in prompts)
        self._step = _Step(answers, now) if is_limited else None

    def afford(self, prompt: Resident, num_tokens: int) -> int:
        """How many of these next tokens of a prompt the step may compute; they count as planned."""
        step = self._step
        if step is None:
            return num_tokens
        if not step.planned_s:
            self._weigh(step)
        is_first, start = not step.chunks_s, prompt.num_computed
        most = self._costs.num_tokens_within(step.left_s, start, is_first=is_first)
        step.is_short |= most < num_tokens
        most = min(most, self._costs.num_tokens_within(step.beside_s, start, is_first=is_first))
        num_afforded = num_tokens if most >= num_tokens else int(most)
        least = max(LEAST_TOKENS, self._costs.num_tokens_worth_it if is_first else 0)
        if num_afforded < min(num_tokens, least):
            return 0
        self._add(step, prompt, num_afforded, self._costs.chunk_s(start, num_afforded, is_first=is_first))
        return num_afforded

    def took(self, load: StepLoad, step_s: float) -> None:
        """A step is done."""
        step, self._step = self._step, None
        if step is not None and step.planned_s:
            self._errors.append(step_s / step.planned_s)
        if step is not None and step.is_short:
            self._owed_s = max(0.0, self._owed_s + FLOOR * step_s - step.chunks_s)
        else:
            self._owed_s = 0.0
        self._costs.add(load, step_s)

    def _add(self, step: _Step, prompt: Resident, num_tokens: int, chunk_s: float) -> None:
        """A chunk of a prompt, to the plan."""
        step.left_s -= chunk_s
        step.beside_s -= chunk_s
        step.chunks_s += chunk_s
        step.planned_s += chunk_s
        has_s = due_s(prompt) - step.now
        if num_tokens == prompt.num_to_compute and step.planned_s <= has_s < math.inf:
            step.beside_s = min(step.beside_s, max(0.0, SPENT * (has_s / step.error - step.planned_s)))

    def _weigh(self, step: _Step) -> None:
        num_cached = sum(each.num_computed for each in step.answers)
        step.planned_s = self._costs.step_s(StepLoad(len(step.answers), num_cached))
        step.error = _high(self._errors)
        bank_s = least_bank_s(step.answers, step.now, step.planned_s)
        step.left_s = max(SPENT * (bank_s / step.error - step.planned_s), self._owed_s)


def least_bank_s(answers: Sequence[Resident], now: float, step_s: float) -> float:
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


def _high(errors: Sequence[float]) -> float:
    return sorted(errors)[int(HIGH * len(errors))] if errors else 1.0
