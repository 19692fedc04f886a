"""How many answers with limits become late through one more request. Pure.

A node is asked to do more: to read the prompt, to write the answer, or both. What it has with limits is known, and what
its steps take, as it has learnt it itself. Then

    answers   are late that have less time for a token than a step takes with all answers in it
    to come   answers whose prompts other nodes read are late, too, that would have gained less on their limit by their
              last token than the longest chunk takes that they may have to wait for when they come
    prompts   are late as far as the node could not read them in time one after the other, the most of them that it can

Where the node writes answers too, its prompts get the time that these leave: at once what they are ahead of their
limits, and then of each step what the tightest limit that can be kept has left beside the answers; at least FLOOR of
the time, and all of it once the answers are over. Answers without limits leave it a chunk with each of their steps. So
a node itself shares out its time (prefill_node/slack.py, prefill_node/order.py): what is expected here is what it will
try. How long answers become is guessed from those that ended (coordinator/control/lengths.py).

An answer also costs prompts that are not there yet: while it is being written its node reads little. Where answers are
being written anyway one more hardly matters; so they do no harm if they leave one node alone (`spared`). On that one an
answer counts as LOST late ones for each request that is to come in the time that it adds, by how many came lately.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from coordinator.control.ledger import Ledger
from coordinator.control.placement.policy import Wanted
from coordinator.control.registry import Node
from prefill_node.order import timely
from prefill_node.slack import FLOOR, SPENT
from serving_core.costs import StepLoad
from serving_core.due import Due

LOST: Final = 2  # for each request that is expected meanwhile; found in simulation


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
    num_answers = account.num_answers - ledger.num_unread(node) + num_more
    if not num_answers:
        return 0.0
    return node.step_weights.of_step(StepLoad(num_answers, account.tokens_held + num_more_cached))


def spared(nodes: Sequence[Node], ledger: Ledger) -> Node | None:
    """Of nodes that read, the one on which answers with limits are over first; None where several are equal."""
    by_left = [(ledger.most_left(node), node) for node in nodes if node.usable.reads]
    least = min((num_left for num_left, _ in by_left), default=0)
    first = [node for num_left, node in by_left if num_left == least]
    return first[0] if len(first) == 1 else None


class Lateness:
    """Of one request, on any node."""

    def __init__(self, ledger: Ledger, wanted: Wanted, now: float) -> None:
        self._ledger, self._wanted, self._now = ledger, wanted, now
        self._nodes: dict[Node, NodeLateness] = {}

    @property
    def is_at_stake(self) -> bool:
        """Whether anyone has limits."""
        return self._wanted.due is not None or self._ledger.has_limits

    def on(self, node: Node) -> "NodeLateness":
        """What it would be there."""
        if node not in self._nodes:
            self._nodes[node] = NodeLateness(node, self._ledger, self._wanted, self._now)
        return self._nodes[node]


class NodeLateness:
    """What one node has, and what it would have with the request."""

    def __init__(self, node: Node, ledger: Ledger, wanted: Wanted, now: float) -> None:
        self._weights, self._chunk_tokens, self._now = node.step_weights, node.usable.prompt_tokens, now
        self._num_prompt_tokens = ledger.of(node).tokens_to_compute
        self._steps_s = step_s(node, ledger), step_s(node, ledger, 1, len(wanted.prompt))
        owed = list(ledger.owed(node))
        self._written = [each for each in owed if each.is_written]
        self._jobs = [self._job(each.num_to_compute, each.due.token_s(each.num_output)) for each in owed]
        self._to_come = [each for each in owed if each.is_to_come and each.num_left > 1]
        self._requests_per_s = wanted.requests_per_s
        self._most_left = max((each.num_left for each in self._written), default=0)
        self._own = wanted.due
        num_left = wanted.num_tokens - len(wanted.prompt) if wanted.num_left is None else wanted.num_left
        self._own_num_left = num_left - 1  # once its prompt is read
        own_due_s = math.inf if wanted.due is None else wanted.due.token_s(wanted.num_output)
        self._own_tokens = wanted.prompt.tokens_to_compute(node)
        self._own_job = self._job(self._own_tokens, own_due_s)
        self._num_late = self._late_answers() + self._late_to_come() + self._late_prompts(self._jobs)

    def reading(self) -> int:
        """More that are late when it reads the prompt."""
        num_late = self._late_answers() + self._late_to_come(self._own_tokens)
        return num_late + self._late_prompts([*self._jobs, self._own_job]) - self._num_late

    def writing(self, waits_s: float) -> int:
        """More that are late when it writes the answer, which waits so long for blocks there."""
        num_late = self._late_answers(1) + self._late_to_come(num_more=1) + self._late_prompts(self._jobs, 1)
        if self._own is not None:
            num_late += waits_s > 0 or self._is_held_up(self._own, self._own_num_left, 1, 0)
        return num_late - self._num_late

    def alone(self, waits_s: float) -> int:
        """More that are late when it does both: answers wait for blocks before their prompts are read."""
        num_late = self._late_answers(1) + self._late_to_come(self._own_tokens, 1)
        own = self._own_job._replace(due_s=self._own_job.due_s - waits_s)
        return num_late + self._late_prompts([*self._jobs, own]) - self._num_late

    def num_lost(self) -> int:
        """Requests to come that are late because it writes the answer."""
        added_s = (self._own_num_left - self._most_left) * self._steps_s[1]
        return max(0, int(LOST * self._requests_per_s * added_s))

    def wait_s(self) -> float:
        """Seconds after which it could read the prompt in time, with what it has now."""
        work_s = sum(each.seconds for each in self._jobs) + self._own_job.seconds
        return max(0.0, self._pace(0).seconds(work_s) - self._own_job.due_s)

    def _job(self, num_tokens: int, due_s: float) -> Job:
        seconds = self._weights.of_chunk(0, num_tokens, is_first=True) if num_tokens else 0.0
        return Job(seconds, due_s - self._now)

    def _late_answers(self, num_more: int = 0) -> int:
        """Of those that it writes, and the request's own where it is one more."""
        step_s = self._steps_s[num_more]
        num_late = sum(each.due.tpot_s < step_s for each in self._written)
        return num_late + (num_more > 0 and self._own is not None and self._own.tpot_s < step_s)

    def _late_to_come(self, num_prompt_tokens: int = 0, num_more: int = 0) -> int:
        """With so many more prompt tokens to compute, and so many more answers."""
        return sum(self._is_held_up(each.due, each.num_left - 1, num_more, num_prompt_tokens) for each in self._to_come)

    def _is_held_up(self, due: Due, num_left: int, num_more: int, num_prompt_tokens: int) -> bool:
        """Whether an answer that comes with so many tokens left, and would be in time, is late for a chunk."""
        gained_s = num_left * (due.tpot_s - self._steps_s[num_more])
        return num_left > 0 and 0 <= gained_s < self._longest_chunk_s(num_prompt_tokens)

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

    def _pace(self, num_more: int) -> Pace:
        """Of prompts, beside the answers and so many more."""
        step_s = self._steps_s[num_more]
        if not step_s:
            return Pace(math.inf, 1.0)
        chunk_s = self._weights.of_chunk(0, self._chunk_tokens, is_first=True)
        share = chunk_s / (chunk_s + step_s) if chunk_s else 1.0
        dues = [each for each in self._written if each.due.tpot_s >= step_s]
        tightest_s = min((each.due.tpot_s for each in dues), default=math.inf)
        if tightest_s == math.inf:
            return Pace(0.0, share)
        begun_s = [due_s for each in dues if (due_s := each.due.token_s(each.num_output)) < math.inf]
        bank_s = min(begun_s, default=self._now) - self._now - step_s
        share = max(FLOOR, min(share, SPENT * (1 - step_s / tightest_s)))
        num_left = max(self._most_left, self._own_num_left if num_more else 0)
        return Pace(max(0.0, SPENT * bank_s), share, num_left * step_s)
