"""Whether candidates are worth their time, by what steps took and what came of candidates. Pure.

A step with so many answers takes a certain time, and a candidate in it a part of that more; both are measured, apart
for each power of two of answers. A candidate that comes is worth the time that a token takes without it. So it is to
come with a probability of at least

    seconds of a candidate / (seconds of a step / answers)

and a little more. On hardware that has arithmetic to spare that is little for few answers, and more than 1 for many:
then there are no candidates.

Those that a draft model writes take its time too, which is measured beside the other. What it takes to be tried, where
it may never help, is bounded by a budget.
"""

import math
import statistics
from collections import defaultdict, deque
from typing import Final

MARGIN: Final = 1.15  # by which a candidate is to be worth more than it takes
NUM_RECENT: Final = 16  # steps of each kind that count
LEAST_STEPS: Final = 4  # without candidates, before there are any
FIRST_SHARE: Final = 0.5  # of a token's time, that a candidate is taken to need before it is measured
FORGET_STEPS: Final = 32  # without candidates, behind which one that had some counts no more
KEPT: Final = 0.9  # of what is known of an answer's candidates, for each step that has more of them
BUDGET_SHARE: Final = 0.02  # of the time of steps, that a draft model may lose
BUDGET_S: Final = 0.25  # that it may lose at once, if it has gained nothing; so much there is at first
MOST_GAINED_S: Final = 5.0  # of what it has gained, that it may lose again


class _Size:
    """Steps with about as many answers."""

    def __init__(self) -> None:
        self.plain_s: deque[float] = deque(maxlen=NUM_RECENT)
        self.shares: deque[float] = deque(maxlen=NUM_RECENT)  # of a plain step that one candidate takes
        self.draft_shares: deque[float] = deque(maxlen=NUM_RECENT)  # that it takes to be written by a draft model
        self.num_plain = 0


class Gate:
    """What steps of one node take, with candidates and without. All of them are without prompts."""

    def __init__(self) -> None:
        self._sizes: defaultdict[int, _Size] = defaultdict(_Size)  # by the bits of the number of answers

    def took(self, num_answers: int, num_candidates: int, step_s: float) -> None:
        """A step is done."""
        size = self._sizes[num_answers.bit_length()]
        if not num_candidates:
            size.plain_s.append(step_s)
            size.num_plain += 1
            if size.num_plain % FORGET_STEPS == 0:
                for shares in filter(None, (size.shares, size.draft_shares)):
                    shares.popleft()
        elif size.plain_s:
            plain_s = statistics.median(size.plain_s)
            size.shares.append(max(0.0, step_s / plain_s - 1) / num_candidates)

    def drafted(self, num_answers: int, num_candidates: int, draft_s: float) -> None:
        """A draft model has written so many candidates for a step of so many answers."""
        size = self._sizes[num_answers.bit_length()]
        if size.plain_s:
            size.draft_shares.append(draft_s / statistics.median(size.plain_s) / num_candidates)

    def plain_s(self, num_answers: int) -> float:
        """Seconds of a step of so many answers without candidates; 0 before one was measured."""
        size = self._sizes[num_answers.bit_length()]
        return statistics.median(size.plain_s) if size.plain_s else 0.0

    def least_probability(self, num_answers: int) -> float:
        """That a candidate has to come with in a step of so many answers; inf before enough is known."""
        size = self._sizes[num_answers.bit_length()]
        if len(size.plain_s) < LEAST_STEPS:
            return math.inf
        if not size.shares:
            return FIRST_SHARE
        return MARGIN * num_answers * statistics.median(size.shares)

    def least_probability_of_drafts(self, num_answers: int, step_s: float) -> float:
        """The same, where the candidate is still to be written by a draft model, which takes step_s for one token."""
        size, wider = self._sizes[num_answers.bit_length()], self.least_probability(num_answers)
        if wider == math.inf:
            return wider
        known = [num_answers * share for share in size.draft_shares] or [step_s / statistics.median(size.plain_s)]
        drafted = MARGIN * statistics.median(known)
        return wider + drafted if size.shares else max(wider, drafted)


class Budget:
    """The seconds that a draft model may lose: a share of the time of steps, and what it has gained before."""

    def __init__(self) -> None:
        self._left_s = BUDGET_S

    @property
    def is_open(self) -> bool:
        """Whether there is anything left."""
        return self._left_s > 0

    def add(self, gained_s: float) -> None:
        """So much was gained, or lost where it is negative."""
        self._left_s = min(MOST_GAINED_S, self._left_s + gained_s)

    def took(self, step_s: float) -> None:
        """A step without candidates is done."""
        if self._left_s < BUDGET_S:
            self._left_s = min(BUDGET_S, self._left_s + BUDGET_SHARE * step_s)


class Record:
    """What has come of one answer's candidates."""

    def __init__(self) -> None:
        self._num_come = self._num_missed = 0.0  # lately

    def add(self, num_candidates: int, num_come: int) -> None:
        """Of so many candidates the first so many have come."""
        self._num_come = KEPT * self._num_come + num_come
        self._num_missed = KEPT * self._num_missed + (num_come < num_candidates)

    def probability(self, num_matching: int) -> float:
        """That the next candidate comes, behind a match of so many tokens: the longer it is, the likelier, and the more
        that weighs against what has come so far."""
        return self.expected(num_matching / (num_matching + 2), num_matching / 2)

    def expected(self, probability: float, weight: float) -> float:
        """The probability that the next candidate comes, where so much was to be expected before any had, and that
        weighs as much as so many candidates."""
        return (self._num_come + weight * probability) / (self._num_come + self._num_missed + weight)

    def forget(self) -> None:
        """What is known counts less."""
        self._num_come, self._num_missed = KEPT * self._num_come, KEPT * self._num_missed

    def num_worth_it(self, num_matching: int, least_probability: float, most: int) -> int:
        """How many candidates in a row come with at least this probability, the last one too."""
        return num_in_a_row(self.probability(num_matching), least_probability, most)


def num_in_a_row(each: float, least_probability: float, most: int) -> int:
    """How many candidates come with at least this probability, the last one too, where each comes with its own behind
    those before it."""
    if each < least_probability:
        return 0
    if least_probability <= 0 or each >= 1:
        return most
    return min(most, int(math.log(least_probability) / math.log(each) + 1e-9))
