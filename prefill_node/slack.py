"""How long the chunks of prompts may make a step, so that the answers in it keep their limits. No I/O, no clock.

An answer that is ahead of its limit has time in the bank: until its next token is due. What the step takes without
chunks is not to be spent, nor a part for what the costs get wrong; the rest may be, of the answer that has the least.
An answer that is late, and would be for its next tokens without any chunks, is lost, and holds nobody up; one that
would catch up is let. Prompts that are held back so have a floor: they earn a share of the time, and what they have
earned they get, whoever is late for it. Few tokens at a time would pay again and again for what every chunk costs
whatever its length: they wait until at least half of its time is theirs.

Where no answer has a limit nothing is held back.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

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
    """One that is planned, with answers that have limits."""

    answers: Sequence[Resident]
    now: float
    planned_s: float = 0.0  # with the chunks so far; 0: nobody has asked yet
    left_s: float = 0.0  # for more chunks
    chunks_s: float = 0.0
    is_short: bool = False  # whether a prompt was held back


class Slack:
    """What the prompts of one node may take of each step. `begin`, then `afford` for each chunk, then `took`."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._errors: deque[float] = deque(maxlen=NUM_RECENT)  # what steps took, by what they were to take
        self._owed_s = 0.0  # to prompts that were held back
        self._step: _Step | None = None

    def begin(self, answers: Sequence[Resident], now: float) -> None:
        """A step is planned, in which these answers get a token each."""
        is_limited = any(each.due is not None and each.due.tpot_s < math.inf for each in answers)
        self._step = _Step(answers, now) if is_limited else None

    def afford(self, start: int, num_tokens: int) -> int:
        """How many of these tokens of a prompt, which come after `start` ones, the step may compute; they count as
        planned."""
        step = self._step
        if step is None:
            return num_tokens
        if not step.planned_s:
            self._weigh(step)
        is_first = not step.chunks_s
        most = self._costs.num_tokens_within(step.left_s, start, is_first=is_first)
        num_afforded = num_tokens if most >= num_tokens else int(most)
        step.is_short |= num_afforded < num_tokens
        least = max(LEAST_TOKENS, self._costs.num_tokens_worth_it if is_first else 0)
        if num_afforded < min(num_tokens, least):
            return 0
        chunk_s = self._costs.chunk_s(start, num_afforded, is_first=is_first)
        step.left_s -= chunk_s
        step.chunks_s += chunk_s
        step.planned_s += chunk_s
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

    def _weigh(self, step: _Step) -> None:
        num_cached = sum(each.num_computed for each in step.answers)
        step.planned_s = self._costs.step_s(StepLoad(len(step.answers), num_cached))
        error = _high(self._errors)
        bank_s = least_bank_s(step.answers, step.now, step.planned_s)
        step.left_s = max(SPENT * (bank_s / error - step.planned_s), self._owed_s)


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
