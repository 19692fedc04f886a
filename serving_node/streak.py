"""Run consecutive decode steps at less cost, build the next step while one runs, and count steps. Pure.

A streak gives the results of NodeLogic's `step_done` and `plan` for that many decode steps, for a simulation that
computes nothing in the steps.

Async scheduling: the next step is built while one runs only if no other request could be part of it, so that
`NodeLogic.plan` would return the same step if the running one ends no request and no event comes. Otherwise the built
step never begins, and nothing must be undone except a block that a request may have got one step early.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from prefill_node.reading import Reading
from serving_core.figures import BATCH, Histogram
from serving_core.node.costs import StepLoad, StepRates
from serving_core.node.leases import Leases
from serving_core.node.requests import NodeRequest, NodeRequests, RequestState
from serving_core.requests import Request, Work
from serving_node.room import Room

PHASES: Final = ("prefill", "decode", "mixed")


class StepCounts:
    """Count all steps that gave results."""

    def __init__(self) -> None:
        self.seconds = {phase: Histogram() for phase in PHASES}
        self.tokens = Histogram(BATCH)  # prompt tokens and output tokens
        self.answers = Histogram(BATCH)
        self.num_prompt_tokens = 0
        self.num_answer_tokens = 0

    def add(self, load: StepLoad, step_s: float, num_more: int = 0) -> None:
        """Count a finished step; `num_more` is the number of output tokens beyond one for each sequence."""
        num_prompt_tokens, num_answers = load.num_prompt_tokens, load.num_answers
        num_answer_tokens = num_answers + num_more
        phase = "decode" if not num_prompt_tokens else "mixed" if num_answers else "prefill"
        self.seconds[phase].observe(step_s)
        self.tokens.observe(num_prompt_tokens + num_answer_tokens)
        self.answers.observe(num_answers)
        self.num_prompt_tokens += num_prompt_tokens
        self.num_answer_tokens += num_answer_tokens


WAITING: Final = (RequestState.WAITING, RequestState.PREFILLING)


@dataclass(slots=True, eq=False)
class Streak:
    """Describe consecutive decode steps of the same sequences.

    One step runs; `num_steps` steps, including the running one, end no sequence.
    """

    node_requests: Sequence[NodeRequest]  # oldest first, the order within each step
    num_steps: int
    requests: Sequence[Request] = field(init=False)

    def __post_init__(self) -> None:
        self.requests = [node_request.request for node_request in self.node_requests]

    @property
    def is_staying(self) -> bool:
        """Return whether no sequence is ending or migrating."""
        return not any(each.ending is not None or each.is_sending for each in self.node_requests)

    @property
    def works(self) -> list[Work]:
        """Return the scheduled tokens of the running step, for callers that handle it as any other step."""
        return [node_request.work(1) for node_request in self.node_requests]


class Streaks:
    """Begin streaks of one node and record their steps."""

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
        """Create the recorder.

        `grant` grants credit to waiting requests.
        """
        self._node_requests = node_requests
        self._leases = leases
        self._eos_token_ids = eos_token_ids
        self._room = room
        self._reading = reading
        self._rates = rates
        self._counts = counts
        self._grant = grant
        self._is_calm = False  # whether only the streak's own steps can change it

    def disturb(self) -> None:
        """Note that an event happened."""
        self._is_calm = False

    def begin(self, works: Sequence[Work]) -> Streak:
        """Return the streak that begins with this planned step; it has 0 steps if the step cannot be part of one.

        `advance` records the steps of a streak at less cost. Without a streak, NodeLogic.step_done records the running
        step with the streak's `works`.
        """
        self._is_calm = is_calm(self._node_requests)
        at_work = [self._node_requests.of(work.request) for work in works]
        streak = Streak(at_work, min((_num_steps(each, self._eos_token_ids) for each in at_work), default=0))
        return streak if self._is_of_all(streak) else Streak(at_work, 0)

    def goes_on(self, streak: Streak) -> bool:
        """Return whether the running step may end as part of the streak."""
        return streak.num_steps > 0 and (self._is_calm or streak.is_staying)

    def num_steps_ahead(self, streak: Streak) -> int:
        """Return how many steps `advance` may record at once if no event comes meanwhile.

        The number includes the running step.
        """
        is_room = len(streak.node_requests) <= self._leases.num_free  # one block for each sequence
        return min(streak.num_steps, self._leases.block_size) if self._is_calm and is_room else 0

    def advance(self, streak: Streak, token_ids: Sequence[Sequence[int]], steps_s: Sequence[float]) -> bool:
        """Record finished steps of a streak. Return whether the next step is planned by that.

        `token_ids` holds the tokens of each sequence. If the result is False, the streak is over and NodeLogic.plan
        must follow.
        """
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
            node_request.num_in_step = 0
        return False

    def _is_disturbed(self, streak: Streak) -> bool:
        """Return whether another request may be part of the next step."""
        if self._is_calm:
            return False
        self._grant()
        self._is_calm = is_calm(self._node_requests)
        has_prompts = bool(self._node_requests.count(RequestState.PREFILLING)) or self._room.may_start_any
        return has_prompts or not self._is_of_all(streak)

    def _is_of_all(self, streak: Streak) -> bool:
        """Return whether the streak holds all running sequences."""
        return self._node_requests.count(RequestState.RUNNING) == len(streak.node_requests)


def is_calm(node_requests: NodeRequests) -> bool:
    """Return whether no request waits for blocks or a slot, and none is ending or migrating.

    Steps that end no sequence then decide nothing until an event comes.
    """
    if node_requests.count(*WAITING):
        return False
    if any(not each.is_to_share for each in node_requests.in_state(RequestState.WAITING_FOR_BLOCKS)):
        return False
    return not any(each.is_kept or each.ending is not None or each.is_sending for each in node_requests)


def _take_in(streak: Streak, token_ids: Sequence[Sequence[int]], leases: Leases) -> list[NodeRequest]:
    """Record finished steps of a streak. Return the sequences whose last token has filled a block.

    Each sequence got at most one block of tokens, and blocks for all were free.
    """
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
    """Allocate a block for the next tokens of sequences that have none. Return whether there were enough.

    Without enough free blocks nothing is allocated.
    """
    missing = [leases.num_missing(each, each.num_computed + num_tokens) for each in full]
    if sum(missing) > leases.num_free:
        return False
    for node_request, num_missing in zip(full, missing, strict=True):
        if num_missing:
            leases.grow(node_request, num_missing)
    return True


def _num_steps(node_request: NodeRequest, eos_token_ids: Sequence[int]) -> int:
    """Return the number of steps that do not end the sequence."""
    request, sampling = node_request.request, node_request.request.sampling
    may_end = bool(sampling.stop_token_ids) or (bool(eos_token_ids) and not sampling.ignore_eos)
    if (
        node_request.state is not RequestState.RUNNING
        or node_request.num_to_compute != 1
        or may_end
        or node_request.distributed
    ):
        return 0
    return sampling.max_tokens - request.num_output_tokens - 1


def works_ahead(works: Sequence[Work], node_requests: NodeRequests, leases: Leases) -> list[Work]:
    """Return the decode step behind the running one, with its blocks; the running step's tokens are not known yet.

    The list is empty if the running step is not a decode step of all sequences, if a sequence is at its last token or
    may have blocks on other nodes, or if blocks are short.
    """
    if len(works) != node_requests.count(RequestState.RUNNING) or not is_calm(node_requests):
        return []
    at_work = [node_requests.of(work.request) for work in works]
    for work, node_request in zip(works, at_work, strict=True):
        request = work.request
        if (
            node_request.state is not RequestState.RUNNING
            or work.num_tokens != 1
            or work.candidates
            or not node_request.in_step
        ):
            return []
        if node_request.distributed is not None:
            return []
        if request.num_output_tokens + 1 >= request.sampling.max_tokens:
            return []
    if not grow(at_work, leases, 2):
        return []
    for node_request in at_work:
        node_request.num_in_step = 2
    return [Work(work.request, work.start + 1, 1, work.block_ids) for work in works]
