"""How many nodes the load of now needs: the one number that an autoscaler asks for. Pure.

    offered   answers that are asked for in a second, over the last minute, those too that are refused for want of room
    read_s    tokens of a usual prompt that no node holds, at the rate of the median node
    write_s   tokens of a usual answer, each as its share of a step with as many answers as a node can hold: by its
              seats, its KV pool, where what they share counts once, and the limits of answers (as
              coordinator/control/pressure.py counts)
    needed    (offered + waiting / CATCH_UP_S) * (read_s + write_s) / BUSY, rounded up; one at least

What is usual is the mean of the answers that ended lately. How many nodes there are, and how busy, is not in it: what a
load needs does not depend on who serves it, so a fleet that has followed the number is told the same one again. (A node
that writes one answer is as busy as one that writes eight.) What the figures do not know, BUSY leaves room for; where
that is not enough, requests wait, and count. While costs are not known it is as many nodes as there are.

It goes up and down with the load. To hold it still for a while is the autoscaler's part.
"""

from collections import deque
from collections.abc import Sequence
from math import ceil, inf
from statistics import fmean, median
from typing import Final, NamedTuple

from coordinator.control.pressure import EVEN
from coordinator.control.registry import MAX_NODES, Node
from serving_core.costs import StepLoad

WINDOW_S: Final = 60.0
LEAST_S: Final = 10.0  # of a window: two requests in the first second are not two a second
CATCH_UP_S: Final = 30.0  # in which what waits is to be done, beside what comes
BUSY: Final = 0.8  # of a node's time that may be spoken for
MAX_SAMPLES: Final = 256


class Ended(NamedTuple):
    """An answer that has ended by itself, or an embedding."""

    num_prompt: int
    num_computed: int  # of its prompt's tokens, those that no node held
    num_output: int
    tpot_s: float = inf  # its limit
    num_spared: float = 0.0  # of its prompt's tokens, those that others held for it (Ledger.tokens_spared)


class Demand:
    """What is asked of the fleet, lately."""

    def __init__(self) -> None:
        self._now = 0.0
        self._began_s: float | None = None  # when the first request came
        self._by_second: deque[tuple[int, int]] = deque(maxlen=round(WINDOW_S))  # a second, and requests in it
        self._ended: deque[Ended] = deque(maxlen=MAX_SAMPLES)

    def tick(self, now: float) -> None:
        """Time has passed."""
        self._now = now

    def arrived(self, now: float) -> None:
        """An answer is asked for, whether it is to begin or not."""
        self._now = max(now, self._now)  # requests may come here in another order
        self._began_s = self._now if self._began_s is None else self._began_s
        last = self._by_second[-1] if self._by_second else None
        if last is not None and last[0] == int(self._now):
            self._by_second[-1] = (last[0], last[1] + 1)
        else:
            self._by_second.append((int(self._now), 1))

    def ended(self, answer: Ended) -> None:
        """An answer has got all its tokens."""
        self._ended.append(answer)

    def nodes_needed(self, nodes: Sequence[Node], num_waiting: int) -> int:
        """As of the last that was heard of the time; so many answers wait for their first token."""
        offered_per_s = self._per_s() + num_waiting / CATCH_UP_S
        if not offered_per_s:
            return 1
        ready = [node for node in nodes if node.is_ready]
        answer_s = self._answer_s(ready)
        if answer_s is None:
            return max(1, len(ready))
        return min(MAX_NODES, max(1, ceil(offered_per_s * answer_s / BUSY)))

    def _per_s(self) -> float:
        if self._began_s is None:
            return 0.0
        number = sum(number for second, number in self._by_second if second >= self._now - WINDOW_S)
        return number / min(WINDOW_S, max(LEAST_S, self._now - self._began_s))

    def _answer_s(self, nodes: Sequence[Node]) -> float | None:
        """Of one node's time, what a usual answer takes; None while that is not known."""
        rates = [rate for node in nodes if (rate := node.load.prefill_tokens_per_s) > 0]
        if not self._ended or not rates:
            return None
        read_s = fmean(each.num_computed for each in self._ended) / median(rates)
        # The prompt's last step gives the first token; an embedding has none.
        num_written = fmean(max(0, each.num_output - 1) for each in self._ended)
        if num_written <= 0:
            return read_s
        num_before = fmean(each.num_prompt + each.num_output / 2 for each in self._ended)
        num_held = num_before - fmean(each.num_spared for each in self._ended)
        tpot_s = median(each.tpot_s for each in self._ended)
        tokens_s = [seconds for node in nodes if (seconds := _token_s(node, num_before, num_held, tpot_s)) > 0]
        return read_s + num_written * median(tokens_s) if tokens_s else None


def _token_s(node: Node, num_before: float, num_held: float, tpot_s: float) -> float:
    """What a token of an answer with so many tokens before it, which takes so many of the pool, takes on a node that is
    full; 0: not known."""
    weights = node.step_weights
    in_time = EVEN * weights.num_answers_within(tpot_s, num_before) if tpot_s < inf else inf
    num_answers = max(1, int(min(node.hello.max_num_seqs, node.pool_tokens / num_held, in_time)))
    return weights.of_step(StepLoad(num_answers, round(num_answers * num_before))) / num_answers
