"""Decode steps in a row, the step that is built while another one runs, and counts of steps. Pure.

A streak gives what NodeLogic's `step_done` and `plan` give for that many decode steps, at less cost, to a simulation
that computes nothing in the steps.

Async scheduling: the next step is built while one runs only where nothing else could have a part in it, so that
`NodeLogic.plan` would give the same step if the running one ends no request and no event comes. Otherwise the built
step never begins, and nothing has to be undone but a block that a request may have got one step early.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from prefill_node.reading import Reading
from serving_core.costs import StepLoad, StepRates
from serving_core.figures import BATCH, Histogram
from serving_core.leases import Leases
from serving_core.node_requests import NodeRequest, NodeRequests, Stage
from serving_core.requests import Request, Work
from serving_node.room import Room

PHASES: Final = ("prefill", "decode", "mixed")


class StepCounts:
    """Of all steps that gave anything."""

    def __init__(self) -> None:
        self.seconds = {phase: Histogram() for phase in PHASES}
        self.tokens = Histogram(BATCH)  # of prompts, and those that answers got
        self.answers = Histogram(BATCH)
        self.num_prompt_tokens = 0
        self.num_answer_tokens = 0

    def add(self, load: StepLoad, step_s: float, num_more: int = 0) -> None:
        """A step is done, which gave the answers so many tokens more than one each."""
        num_prompt_tokens, num_answers = load.num_prompt_tokens, load.num_answers
        num_answer_tokens = num_answers + num_more
        phase = "decode" if not num_prompt_tokens else "mixed" if num_answers else "prefill"
        self.seconds[phase].observe(step_s)
        self.tokens.observe(num_prompt_tokens + num_answer_tokens)
        self.answers.observe(num_answers)
        self.num_prompt_tokens += num_prompt_tokens
        self.num_answer_tokens += num_answer_tokens


WAITING: Final = (Stage.QUEUED, Stage.READING)


@dataclass(slots=True, eq=False)
class Streak:
    """Of its steps, one runs; so many, that one too, end none of the answers."""

    node_requests: Sequence[NodeRequest]  # as they are in each step: oldest first
    num_steps: int
    requests: Sequence[Request] = field(init=False)

    def __post_init__(self) -> None:
        self.requests = [node_request.request for node_request in self.node_requests]

    @property
    def is_staying(self) -> bool:
        """Whether nobody has an end or a way to another node to go."""
        return not any(each.ending is not None or each.is_sending for each in self.node_requests)

    @property
    def works(self) -> list[Work]:
        """The shares of the running step, for whoever goes on with it as with any other."""
        return [node_request.work(1) for node_request in self.node_requests]


class Streaks:
    """Begins streaks of one node's answers, and takes their steps in."""

    def __init__(
        self,
        node_requests: NodeRequests,
        leases: Leases,
        eos_token_ids: Sequence[int],
        room: Room,
        reading: Reading,
        rates: StepRates,
        counts: StepCounts,
        grant: Callable[[], None],
    ) -> None:
        """`grant` gives credit to whom it can."""
        self._node_requests = node_requests
        self._leases = leases
        self._eos_token_ids = eos_token_ids
        self._room = room
        self._reading = reading
        self._rates = rates
        self._counts = counts
        self._grant = grant
        self._is_calm = False  # whether all that can happen to a streak is its own steps

    def disturb(self) -> None:
        """Something has happened."""
        self._is_calm = False

    def begin(self, works: Sequence[Work]) -> Streak:
        """The steps, from this planned one on, that `advance` may take in for less, as long as the streak goes on; none
        where this one cannot be of any. Where it does not, NodeLogic.step_done takes the running step in, with the
        streak's works."""
        self._is_calm = is_calm(self._node_requests)
        at_work = [self._node_requests.of(work.request) for work in works]
        streak = Streak(at_work, min((_num_steps(each, self._eos_token_ids) for each in at_work), default=0))
        return streak if self._is_of_all(streak) else Streak(at_work, 0)

    def goes_on(self, streak: Streak) -> bool:
        """Whether the running step may end as one of the streak."""
        return streak.num_steps > 0 and (self._is_calm or streak.is_staying)

    def num_steps_ahead(self, streak: Streak) -> int:
        """So many steps of the streak, the running one too, `advance` may take in together, unless anything happens to
        the node before the last of them ends."""
        is_room = len(streak.node_requests) <= self._leases.num_free  # for one block each: so many steps fill no more
        return min(streak.num_steps, self._leases.block_size) if self._is_calm and is_room else 0

    def advance(self, streak: Streak, token_ids: Sequence[Sequence[int]], steps_s: Sequence[float]) -> bool:
        """Takes in finished steps of a streak that goes on, in which each answer got these tokens, and tells whether
        the next one is planned by that. If not, the streak is over, and NodeLogic.plan is to follow."""
        num_answers = len(token_ids)
        num_cached = sum([each.num_computed for each in streak.node_requests])
        self._rates.add(0, num_answers, *steps_s)
        for step_s in steps_s:
            load = StepLoad(num_answers, num_cached)
            self._reading.took(load, step_s)
            self._counts.add(load, step_s)
            num_cached += num_answers
        full = _take_in(streak, token_ids, self._leases)
        if not self._is_disturbed(streak) and grow(full, self._leases):
            return True
        for node_request in streak.node_requests:
            node_request.in_step = False
        return False

    def _is_disturbed(self, streak: Streak) -> bool:
        """Whether somebody else may have a part in the next step."""
        if self._is_calm:
            return False
        self._grant()
        self._is_calm = is_calm(self._node_requests)
        has_prompts = bool(self._node_requests.count(Stage.READING)) or self._room.may_start_any
        return has_prompts or not self._is_of_all(streak)

    def _is_of_all(self, streak: Streak) -> bool:
        """Whether nobody else writes."""
        return self._node_requests.count(Stage.WRITING) == len(streak.node_requests)


def is_calm(node_requests: NodeRequests) -> bool:
    """Whether nobody waits for what a step may bring, blocks or a running slot, and nobody has an end or a way to
    another node to go. Then steps that end no answer decide nothing until something else happens."""
    if node_requests.count(*WAITING):
        return False
    if any(not each.is_to_share for each in node_requests.in_stage(Stage.AWAITING)):
        return False
    return not any(each.is_kept or each.ending is not None or each.is_sending for each in node_requests)


def _take_in(streak: Streak, token_ids: Sequence[Sequence[int]], leases: Leases) -> list[NodeRequest]:
    """Steps of the streak are done, which gave each answer these tokens: no more than a block holds, and there were
    blocks for all. Tells those that have filled one with the last token."""
    num_steps, block_size = len(token_ids[0]), leases.block_size
    streak.num_steps -= num_steps
    full: list[list[NodeRequest]] = [[] for _ in range(num_steps)]
    for node_request, new in zip(streak.node_requests, token_ids, strict=True):
        node_request.request.token_ids += new
        num_left = block_size - node_request.num_computed % block_size
        node_request.num_computed += num_steps
        if num_left <= num_steps:
            full[num_left - 1].append(node_request)
    for index, node_requests in enumerate(full):
        for node_request in node_requests:
            leases.publish(node_request)
        if index < num_steps - 1:
            grow(node_requests, leases)
    return full[-1]


def grow(full: Sequence[NodeRequest], leases: Leases, num_tokens: int = 1) -> bool:
    """Gives those that have filled a block one for their next tokens, if they have none. Tells whether there were
    enough; else nobody got any."""
    missing = [leases.num_missing(each, each.num_computed + num_tokens) for each in full]
    if sum(missing) > leases.num_free:
        return False
    for node_request, num_missing in zip(full, missing, strict=True):
        if num_missing:
            leases.grow(node_request, num_missing)
    return True


def _num_steps(node_request: NodeRequest, eos_token_ids: Sequence[int]) -> int:
    """Steps that do not end it."""
    request, sampling = node_request.request, node_request.request.sampling
    may_end = bool(sampling.stop_token_ids) or (bool(eos_token_ids) and not sampling.ignore_eos)
    if node_request.stage is not Stage.WRITING or node_request.num_to_compute != 1 or may_end or node_request.hosts:
        return 0
    return sampling.max_tokens - request.num_output_tokens - 1


def works_ahead(works: Sequence[Work], node_requests: NodeRequests, leases: Leases) -> list[Work]:
    """One token more of each answer of the running step, whose own is not known yet; with the blocks for it. Empty
    where the step is of anything but all answers, one is at its last token or may have blocks elsewhere, or blocks are
    short."""
    if len(works) != node_requests.count(Stage.WRITING) or not is_calm(node_requests):
        return []
    at_work = [node_requests.of(work.request) for work in works]
    for work, node_request in zip(works, at_work, strict=True):
        request = work.request
        if (
            node_request.stage is not Stage.WRITING
            or work.num_tokens != 1
            or work.candidates
            or not node_request.in_step
        ):
            return []
        if node_request.hosts:
            return []
        if request.num_output_tokens + 1 >= request.sampling.max_tokens:
            return []
    if not grow(at_work, leases, 2):
        return []
    for node_request in at_work:
        node_request.num_candidates = 1
    return [Work(work.request, work.start + 1, 1, work.block_ids) for work in works]
