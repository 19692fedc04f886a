"""How many answers with limits become late through one more request. Pure.

A node is asked to do more: to read the prompt, to write the answer, or both. What it has with limits is known, and what
its steps take, as it has learnt it itself. Then

    answers   are late that have less time for a token than a step takes with all answers in it
    prompts   are late as far as the node could not read them in time one after the other, the most of them that it can

Where the node writes answers too, its prompts get the time that these leave: at once what they are ahead of their
limits, and then of each step what the tightest limit that can be kept has left beside the answers; at least FLOOR of
the time. Answers without limits leave it a chunk with each of their steps. So a node itself shares out its time
(prefill_node/slack.py, prefill_node/order.py): what is expected here is what it will try.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from coordinator.control.ledger import Ledger
from coordinator.control.placement.policy import Wanted
from coordinator.control.registry import Node
from prefill_node.order import timely
from prefill_node.slack import FLOOR, SPENT
from serving_core.costs import StepLoad


class Job(NamedTuple):
    """A prompt that a node is to read."""

    seconds: float
    due_s: float  # from now on


@dataclass(frozen=True, slots=True)
class Pace:
    """How prompts get through on a node: so many seconds of their work at once, and then by this share of the time."""

    bank_s: float
    share: float

    def work_s(self, seconds: float) -> float:
        """Seconds of work that are done by then."""
        return seconds if seconds <= self.bank_s else self.bank_s + (seconds - self.bank_s) * self.share

    def seconds(self, work_s: float) -> float:
        """That so much work takes."""
        return work_s if work_s <= self.bank_s else self.bank_s + (work_s - self.bank_s) / self.share


def step_s(node: Node, ledger: Ledger, num_more: int = 0, num_more_cached: int = 0) -> float:
    """Seconds of a step of the node with all its answers, and so many more behind so many tokens; 0 where there are
    none. An answer whose prompt the node has yet to read is in none."""
    account = ledger.of(node)
    num_unread = sum(each.is_written and each.num_to_compute > 0 for each in ledger.owed(node))
    num_answers = account.num_answers - num_unread + num_more
    if not num_answers:
        return 0.0
    return node.step_weights.of_step(StepLoad(num_answers, account.tokens_held + num_more_cached))


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
        self._steps_s = step_s(node, ledger), step_s(node, ledger, 1, len(wanted.prompt))
        owed = list(ledger.owed(node))
        self._written = [each for each in owed if each.is_written]
        self._jobs = [self._job(each.num_to_compute, each.due.token_s(each.num_output)) for each in owed]
        self._own = wanted.due
        own_due_s = math.inf if wanted.due is None else wanted.due.token_s(wanted.num_output)
        self._own_job = self._job(wanted.prompt.tokens_to_compute(node), own_due_s)
        self._num_late = self._late_answers() + self._late_prompts(self._jobs)

    def reading(self) -> int:
        """More that are late when it reads the prompt."""
        return self._late_answers() + self._late_prompts([*self._jobs, self._own_job]) - self._num_late

    def writing(self, waits_s: float) -> int:
        """More that are late when it writes the answer, which waits so long for blocks there."""
        num_late = self._late_answers(1) + self._late_prompts(self._jobs, 1)
        return num_late + (waits_s > 0 and self._own is not None) - self._num_late

    def alone(self, waits_s: float) -> int:
        """More that are late when it does both: answers wait for blocks before their prompts are read."""
        own = self._own_job._replace(due_s=self._own_job.due_s - waits_s)
        return self._late_answers(1) + self._late_prompts([*self._jobs, own]) - self._num_late

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
        return Pace(max(0.0, SPENT * bank_s), max(FLOOR, min(share, SPENT * (1 - step_s / tightest_s))))
