"""Where the time of a node's steps goes: how long they compute, and each part of what is done between two of them.
What is done beside a step that computes is no part of its own.
"""

import time
from collections.abc import Callable
from typing import Final

PLAN = "plan"  # what the scheduler decides
HAND_OVER = "threads"  # from the event loop to the engine's thread, or back
BUILD = "build"  # the tensors of a batch
COMPUTE = "compute"  # of CUDA devices only what starts it: the first to await them is `sample`
SAMPLE = "sample"  # tokens out of logits
DRAFT = "draft"  # what a draft model computes, between two steps
AFTER = "after"  # what tokens mean: ends, records, blocks that are full
SEND = "send"  # what the coordinator is told, and other decisions
IDLE = "idle"  # nothing to compute
PARTS: Final = (PLAN, BUILD, COMPUTE, SAMPLE, DRAFT, AFTER, SEND, HAND_OVER, IDLE)
BETWEEN: Final = (PLAN, BUILD, SAMPLE, AFTER, SEND, HAND_OVER)


class StepClock:
    """Seconds of each part so far. They are one after the other, in whatever thread, so that they sum up to the time
    from the start to the last lap."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: Final = dict.fromkeys(PARTS, 0.0)
        self._now = now
        self._last_s = now()

    def lap(self, part: str) -> None:
        """All since the last lap was this part."""
        now_s = self._now()
        self.seconds[part] += now_s - self._last_s
        self._last_s = now_s
