"""How many answers with limits become late through one more request. Pure.

A node is asked to do more: to read the prompt, to write the answer, or both. What it has with limits is known, and what
its steps take, as it has learnt it itself. Then

    answers   are late whose last token is: all that a node writes go on together, each step takes what it takes with
              those that have begun and not ended, and one whose prompt is yet to be read begins when that is expected;
              one that another node hands over must also have gained, by its last token, what the longest chunk takes
              that it may have to wait for when it comes
    prompts   are late as far as the node could not read them in time one after the other, the most of them that it can

Where a node has no running slot, or no room in its pool, the answer waits until enough of those with limits have ended,
or as long as others waited lately.

What is expected is not what will be: tokens are due before their limits, by margins that the coordinator has learnt
from its own errors (coordinator/control/admission.py), and decode steps count as long as they rarely are in the mean,
by those of the nodes (serving_core/margin.py).

Where the node writes answers too, its prompts get the time that these leave: at once what they are ahead of their
limits, and then of each step what the tightest limit that can be kept has left beside the answers; at least FLOOR of
the time, and all of it once the answers are over. Of answers whose prompts it has yet to read BEGUN count there.
Answers without limits leave it a chunk with each of their steps. So a node itself shares out its time
(prefill_node/slack.py, prefill_node/order.py): what is expected here is what it will try. How long answers become is
guessed from those that ended (coordinator/control/load.py).

An answer that makes nobody late as things stand is too many where, at any time while it is written, a step of all
answers takes longer than the tightest limit (`crowding`): prompts would get no time, and whoever gets more tokens than
is expected would be late.

An answer also costs prompts that are not there yet: while it is being written its node reads little. Where answers are
being written anyway one more hardly matters; so they do no harm if they leave one node alone (`spared`). On that one an
answer counts as LOST late ones for each of the requests that come, as lately, and that it could not read in the time
that the answer adds. A prompt that is read on another one is read beside answers, also of those that come
(`lasting_begins_s`).
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property, partial
from heapq import heappop, heappush
from typing import Final, NamedTuple

from coordinator.control.load import Ledger, Owed
from coordinator.control.nodes import Node
from coordinator.control.placement.policy import Wanted
from prefill_node.order import timely
from prefill_node.slack import FLOOR
from serving_core.costs import StepLoad

BEGUN: Final = 0.4  # of the answers whose prompts wait are written while these are read; found in simulation
LOST: Final = 4  # for each request that is lost directly: those behind it are later too; found in simulation


class Job(NamedTuple):
    """A prompt that a node is to read."""

    seconds: float
    due_s: float  # from now on


@dataclass(frozen=True, slots=True)
class Pace:
    """How prompts get through on a node: so many seconds of their work at once, and then by this share of the time;
    they lose at most so many seconds by that."""

    bank_s: float
    share: float
    most_lost_s: float = math.inf

    def work_s(self, seconds: float) -> float:
        """Seconds of work that are done by then."""
        beyond_s = max(0.0, seconds - self.bank_s)
        return seconds - min(beyond_s * (1 - self.share), self.most_lost_s)

    def seconds(self, work_s: float) -> float:
        """That so much work takes."""
        beyond_s = max(0.0, work_s - self.bank_s)
        return work_s + min(beyond_s * (1 / self.share - 1), self.most_lost_s)


def step_s(node: Node, ledger: Ledger, num_more: int = 0, num_more_cached: int = 0) -> float:
    """Seconds of a step of the node with all its answers, and so many more behind so many tokens; 0 where there are
    none. An answer whose prompt the node has yet to read is in none."""
    account = ledger.of(node)
    num_answers = account.num_answers - account.num_unread + num_more
    if not num_answers:
        return 0.0
    return node.step_weights.of_step(StepLoad(num_answers, account.tokens_held + num_more_cached))


def spared(nodes: Collection[Node], ledger: Ledger, now: float) -> Node | None:
    """Of nodes that read, the one on which answers with limits are over first; None where several are equal."""
    most_left = ledger.most_left(now)
    by_left = [(most_left.get(node, 0), node) for node in nodes if node.usable.reads and node.is_ready]
    least = min((num_left for num_left, _ in by_left), default=0)
    first = [node for num_left, node in by_left if num_left == least]
    return first[0] if len(first) == 1 else None


class Lateness:
    """Of one request, on any node."""

    def __init__(
        self, ledger: Ledger, wanted: Wanted, now: float, num_lent: Callable[[Node], int] = lambda node: 0
    ) -> None:
        """`num_lent` tells how many tokens of the prompt a node would have from another one."""
        self._ledger, self._wanted, self._now, self._num_lent = ledger, wanted, now, num_lent
        self._nodes: dict[Node, NodeLateness] = {}

    @property
    def is_at_stake(self) -> bool:
        """Whether anyone has limits."""
        return self._wanted.due is not None or self._ledger.has_limits

    def on(self, node: Node) -> "NodeLateness":
        """What it would be there."""
        if node not in self._nodes:
            coming = self._ledger.marks_read(node)
            num_tokens = self._wanted.prompt.tokens_to_compute(node, coming) - self._num_lent(node)
            self._nodes[node] = NodeLateness(node, self._ledger, self._wanted, num_tokens, self._now, self)
        return self._nodes[node]

    def begins_s(self, owed: Owed) -> float:
        """Seconds until an answer begins: until its prompt is read, wherever that is."""
        return 0.0 if owed.reader is None else self.on(owed.reader).read_s[id(owed.due)]

    def least_begins_s(self, owed: Owed) -> float:
        """The same if prompts got all of the reader's time."""
        return 0.0 if owed.reader is None else self.on(owed.reader).least_read_by_s[id(owed.due)]


class _Answer(NamedTuple):
    """That a node writes, or is to write: it begins so many seconds from now, or has begun, and has so many tokens to
    come then, the last of which is due so much later. Another node reads its prompt where it is to come: then it may
    have to wait for a chunk."""

    begins_s: float
    num_left: int
    due_s: float
    is_to_come: bool = False


def _yet_to_begin(begins_s: float, num_left: int, tpot_s: float, is_to_come: bool) -> _Answer:
    """With so many tokens after the first; one of the first alone cannot be late for another."""
    return _Answer(begins_s, num_left, begins_s + num_left * tpot_s if num_left else math.inf, is_to_come)


class NodeLateness:
    """What one node has, and what it would have with the request."""

    def __init__(
        self,
        node: Node,
        ledger: Ledger,
        wanted: Wanted,
        num_own_tokens: int,
        now: float,
        lateness: Lateness,
    ) -> None:
        self._weights, self._chunk_tokens, self._now = node.step_weights, node.usable.prompt_tokens, now
        self._decode_margin = node.decode_margin * wanted.tpot_margin
        self._begins_s, self._least_begins_s = lateness.begins_s, lateness.least_begins_s
        account = ledger.of(node)
        self._num_prompt_tokens = account.tokens_to_compute
        self._num_slots_lacking = account.num_answers + 1 - node.usable.slots
        num_needed = len(wanted.prompt) - ledger.tokens_shared(node, wanted.prompt)
        self._num_tokens_lacking = ledger.tokens_taken(node) + num_needed - node.pool_tokens
        self._tokens_alone = partial(ledger.tokens_alone, node)
        self._steps_s = step_s(node, ledger), step_s(node, ledger, 1, len(wanted.prompt))
        owed = list(ledger.owed(node))
        self._unread = [each for each in owed if each.num_to_compute]
        num_begin = round(BEGUN * sum(each.is_written for each in self._unread))
        self._paces_s = step_s(node, ledger, num_begin), step_s(node, ledger, 1 + num_begin, len(wanted.prompt))
        self._written = [each for each in owed if each.is_written]
        self._jobs = [self._job(each.num_to_compute, each.due.token_s(each.num_output)) for each in self._unread]
        self._each_s: dict[int, float] = {}  # a step's seconds, by its answers
        self._paces: dict[int, Pace] = {}  # by how many answers more there are
        num_read = sum(not each.num_to_compute for each in self._written)
        self._num_unlimited = account.num_answers - account.num_unread - num_read
        self._cached_each = (account.tokens_held + len(wanted.prompt)) / (account.num_answers + 1)
        self._coming = wanted.coming
        self._num_ahead, self._num_spare = wanted.num_ahead, wanted.num_spare
        self._most_left = max((each.num_left for each in self._written), default=0)
        num_left = wanted.num_tokens - len(wanted.prompt) if wanted.num_left is None else wanted.num_left
        self._own_num_left = num_left - 1  # once its prompt is read
        self._own = None if wanted.due is None else wanted.due.tpot_s
        own_due_s = math.inf if wanted.due is None else wanted.due.token_s(wanted.num_output)
        self._own_tokens = num_own_tokens
        self._own_job = self._job(self._own_tokens, own_due_s)

    @cached_property
    def reading(self) -> int:
        """More that are late when it reads the prompt."""
        num_late = self._late_answers(num_prompt_tokens=self._own_tokens)
        return num_late + self._late_prompts([*self._jobs, self._own_job]) - self._num_late

    @cached_property
    def least_read_s(self) -> float:
        """Seconds after which the prompt would be read if prompts got all of the time, behind those that are due before
        and not late already."""
        work_s = sum(each.seconds for each in self._jobs if 0 < each.due_s <= self._own_job.due_s)
        return work_s + self._own_job.seconds

    @property
    def own_due_s(self) -> float:
        """Seconds until the first token of its own is due."""
        return self._own_job.due_s

    @property
    def is_own_late(self) -> bool:
        """Whether even so its first token would be late."""
        return self.least_read_s > self._own_job.due_s

    def writing(self, waits_s: float, begins_s: float = 0.0) -> int:
        """More that are late when it writes the answer, which another node has read by then, and which waits so long
        for blocks there."""
        own = self._own_answer(max(waits_s, begins_s), is_to_come=True)
        is_late = self._own is not None and self._own < math.inf and waits_s > begins_s
        if is_late:
            own = own._replace(due_s=math.inf)  # it counts once
        num_more = self._late_answers(own) + is_late - self._num_late_answers
        # One that is lost by it leaves prompts more time, but that is no merit.
        return num_more + max(0, self._late_prompts(self._jobs, 1) - self._num_late_prompts)

    def alone(self, waits_s: float) -> int:
        """More that are late when it does both: answers wait for blocks before their prompts are read."""
        num_late = self._late_answers(self._own_answer(waits_s + self.own_begins_s), self._own_tokens)
        own = self._own_job._replace(due_s=self._own_job.due_s - waits_s)
        return num_late + self._late_prompts([*self._jobs, own]) - self._num_late

    @cached_property
    def own_begins_s(self) -> float:
        """Until it would have read the prompt, after those that are due before it."""
        work_s = sum(each.seconds for each in self._jobs if each.due_s <= self._own_job.due_s)
        return self._pace(0).seconds(work_s + self._own_job.seconds)

    @property
    def own_reads_s(self) -> float:
        """That reading its prompt takes beside the answers there, with no other to read."""
        return self._pace(0).seconds(self._own_job.seconds)

    @property
    def is_beyond(self) -> bool:
        """Whether its limit on TPOT is less than a step of its answer alone takes."""
        return self._own is not None and self._own < self._step_s(1)

    @cached_property
    def least_read_by_s(self) -> dict[int, float]:
        """Of prompts, by the identity of their dues: seconds until it could have read them if they got all its time."""
        work_s, read_s = 0.0, {}
        for job, owed in sorted(zip(self._jobs, self._unread, strict=True), key=lambda pair: pair[0].due_s):
            work_s += job.seconds
            read_s[id(owed.due)] = work_s
        return read_s

    @cached_property
    def read_s(self) -> dict[int, float]:
        """Of prompts, by the identity of their dues: seconds until it has read them."""
        pace = self._pace(0)
        return {due: pace.seconds(work_s) for due, work_s in self.least_read_by_s.items()}

    def num_lost(self) -> int:
        """Requests to come that are late because it writes the answer: as many as it could read in the part of the time
        that this takes from them, and that they would need."""
        each_s = self._weights.of_chunk(0, round(self._coming.num_tokens), is_first=False)
        if not each_s:
            return 0
        added_s = (self._own_num_left - self._most_left) * self._steps_s[1]
        lost_share = min(1.0, self._coming.per_s * each_s) - self._pace(1).share
        return max(0, int(LOST * lost_share / each_s * added_s))

    @cached_property
    def lasting_begins_s(self) -> float:
        """Until it would have read the prompt if it always wrote the answers that are expected of what comes, all of
        them."""
        each_s = self._step_s(max(1, round(self._coming.per_s * self._own_num_left * self._step_s(1))))
        share = 1 - each_s / self._tightest_s if self._tightest_s < math.inf else self._chunk_share(each_s)
        return max(self.own_begins_s, self._own_job.seconds / max(FLOOR, share))

    def crowding(self, begins_s: float) -> float:
        """What a step would rarely exceed while this answer is written, which begins so many seconds from now at the
        soonest, by the tightest limit that can be kept; 0 without limits. Answers that have not begun count from when
        their prompts can be read at the soonest, and all until they end in steps that take that limit."""
        limit_s = self._tightest_s
        if limit_s == math.inf:
            return 0.0
        num_answers = self._num_unlimited + self._most_beside(begins_s, limit_s) + 1 + self._num_spare
        return self._decode_margin * self._step_s(num_answers) / limit_s

    @cached_property
    def _tightest_s(self) -> float:
        """The tightest limit that a step of one answer keeps, of those that it writes and its own."""
        limits_s = [each.due.tpot_s for each in self._written] + ([] if self._own is None else [self._own])
        return min((each for each in limits_s if each >= self._step_s(1)), default=math.inf)

    def num_late_beside(self, begins_s: float) -> int:
        """Return how many answers are late, all in all, that it writes with this one, which begins then."""
        return self._late_answers(self._own_answer(begins_s))

    def _most_beside(self, begins_s: float, each_s: float) -> int:
        """Return the most answers with limits that are written at any time beside one that begins then, in such
        steps."""
        ends_s = begins_s + self._own_num_left * each_s
        moments = []
        for each in self._written:
            from_s = 0.0 if each.num_output else self._least_begins_s(each)
            until_s = from_s + each.num_left * each_s
            if from_s < ends_s and until_s > begins_s:
                moments += [(max(from_s, begins_s), 1), (until_s, -1)]
        most = num_now = 0
        for _, change in sorted(moments):
            num_now += change
            most = max(most, num_now)
        return most

    def reading_wait_s(self) -> float:
        """Seconds after which it could read the prompt in time behind all that are due, with what it has now."""
        work_s = sum(each.seconds for each in self._jobs if each.due_s < math.inf) + self._own_job.seconds
        return max(0.0, self._pace(0).seconds(work_s) - self._own_job.due_s)

    def writing_wait_s(self) -> float:
        """Seconds after which those that are ahead, and this one, have found the running slots of answers with limits
        that have begun; all of these where they are fewer, and 0 where none has."""
        nums_left = sorted(each.num_left for each in self._written if each.num_output)
        return self._steps_s[0] * nums_left[min(self._num_ahead, len(nums_left) - 1)] if nums_left else 0.0

    @cached_property
    def room_s(self) -> float:
        """Seconds until enough answers have ended that there are a running slot and room in the pool for one more; 0
        where there are. Of answers without limits it is not known when they end: the last of the others is as far as it
        sees."""
        num_slots, num_tokens = self._num_slots_lacking, self._num_tokens_lacking
        num_left = 0
        for each in sorted(self._written, key=lambda owed: owed.num_left):
            if num_slots <= 0 and num_tokens <= 0:
                break
            num_slots, num_tokens = num_slots - 1, num_tokens - self._tokens_alone(each)
            num_left = each.num_left
        return num_left * self._steps_s[0]

    def _job(self, num_tokens: int, due_s: float) -> Job:
        if not num_tokens:
            return Job(0.0, due_s - self._now)
        weights = self._weights
        seconds = weights.of_prompt(0, num_tokens, max(1, self._chunk_tokens), weights.step_s)
        return Job(seconds, due_s - self._now)

    @property
    def _num_late(self) -> int:
        return self._num_late_answers + self._num_late_prompts

    @cached_property
    def _num_late_answers(self) -> int:
        return self._late_answers()

    @cached_property
    def _num_late_prompts(self) -> int:
        return self._late_prompts(self._jobs)

    @cached_property
    def _answers(self) -> list[_Answer]:
        return [self._answer(each) for each in self._written]

    def _answer(self, owed: Owed) -> _Answer:
        due = owed.due
        if owed.num_output and due.began_s is not None:
            due_s = due.token_s(owed.num_output + owed.num_left - 1) - self._now
            return _Answer(0.0, owed.num_left, due_s)
        return _yet_to_begin(self._begins_s(owed), owed.num_left - 1, due.tpot_s, owed.is_to_come)

    def _own_answer(self, begins_s: float, *, is_to_come: bool = False) -> _Answer:
        return _yet_to_begin(begins_s, self._own_num_left, math.inf if self._own is None else self._own, is_to_come)

    def _late_answers(self, own: _Answer | None = None, num_prompt_tokens: int = 0) -> int:
        """Of those that it writes, and the request's own where it is one more, with so many more prompt tokens to
        compute. One is late whose last token is, in steps of all that go on at the same time."""
        answers = [*self._answers, own] if own is not None else self._answers
        chunk_s, num_late = self._longest_chunk_s(num_prompt_tokens), 0
        longest_s = self._step_s(self._num_unlimited + len(answers))

        def is_late(answer: _Answer, elapsed_s: float) -> bool:
            return self._decode_margin * elapsed_s + answer.is_to_come * chunk_s > answer.due_s - answer.begins_s

        if not any(is_late(each, each.num_left * longest_s) for each in answers):
            return 0  # even if they all went on until the last one ends
        answers = sorted(answers)
        now_s, num_steps, place = 0.0, 0.0, 0
        running: list[tuple[float, _Answer]] = []  # by how many steps are over when it ends
        while place < len(answers) or running:
            each_s = self._step_s(self._num_unlimited + len(running))
            ends_s = now_s + (running[0][0] - num_steps) * each_s if running else math.inf
            if place < len(answers) and answers[place].begins_s <= ends_s:
                begins_s = answers[place].begins_s
                if running and each_s > 0:
                    num_steps += (begins_s - now_s) / each_s
                now_s = begins_s
                heappush(running, (num_steps + answers[place].num_left, answers[place]))
                place += 1
            else:
                now_s = ends_s
                num_steps, ended = heappop(running)
                num_late += is_late(ended, now_s - ended.begins_s)
        return num_late

    def _step_s(self, num_answers: int) -> float:
        if num_answers not in self._each_s:
            load = StepLoad(num_answers, round(num_answers * self._cached_each))
            self._each_s[num_answers] = self._weights.of_step(load)
        return self._each_s[num_answers]

    def _longest_chunk_s(self, num_more_tokens: int) -> float:
        """Of its prompts: the answers that have begun let none take longer than one of their tokens may."""
        num_tokens = min(self._num_prompt_tokens + num_more_tokens, self._chunk_tokens)
        chunk_s = self._weights.of_chunk(0, num_tokens, is_first=True) if num_tokens else 0.0
        return min([chunk_s, *(each.due.tpot_s for each in self._written if each.num_output)])

    def _late_prompts(self, jobs: list[Job], num_more: int = 0) -> int:
        due = [each for each in jobs if each.seconds and each.due_s < math.inf]
        if not due:
            return 0
        pace = self._pace(num_more)
        found = timely([each.seconds for each in due], [pace.work_s(each.due_s) for each in due])
        return len(due) - len(found)

    def _is_overdue(self, owed: Owed) -> bool:
        """Whether it should have its first token by now, and is read behind those that can be in time."""
        return not owed.num_output and owed.due.first_s <= self._now

    def _pace(self, num_more: int) -> Pace:
        """Of prompts, beside the answers and so many more."""
        if num_more not in self._paces:
            num_left = max(self._most_left, self._own_num_left if num_more else 0)
            own_s = self._own if num_more and self._own is not None else math.inf
            self._paces[num_more] = self._pace_beside(self._paces_s[num_more], num_left, own_s)
        return self._paces[num_more]

    def _pace_beside(self, step_s: float, num_left: int, own_s: float) -> Pace:
        """Beside answers that take such steps, the longest of them so many, and one more of this limit that begins
        now; inf is none."""
        if not step_s:
            return Pace(math.inf, 1.0)
        share = self._chunk_share(step_s)
        dues = [each for each in self._written if each.due.tpot_s >= step_s]
        own_s = own_s if own_s >= step_s else math.inf
        tightest_s = min((each.due.tpot_s for each in dues), default=math.inf)
        tightest_s = min(tightest_s, own_s)
        if tightest_s == math.inf:
            return Pace(0.0, share)
        next_s = [*(self._next_s(each) for each in dues if not self._is_overdue(each)), own_s]
        bank_s = min((each for each in next_s if each < math.inf), default=0.0) - step_s
        share = max(FLOOR, min(share, 1 - step_s / tightest_s))
        return Pace(max(0.0, bank_s), share, num_left * step_s)

    def _chunk_share(self, step_s: float) -> float:
        """Of the time, that prompts get which have a whole chunk in each such step."""
        chunk_s = self._weights.of_chunk(0, self._chunk_tokens, is_first=True)
        return chunk_s / (chunk_s + step_s) if chunk_s else 1.0

    def _next_s(self, owed: Owed) -> float:
        """Seconds until the next token that it is to write is due: one whose prompt another node reads comes with its
        first one."""
        if owed.is_to_come and not owed.num_output:
            return self._least_begins_s(owed) + owed.due.tpot_s
        return owed.due.token_s(owed.num_output) - self._now
