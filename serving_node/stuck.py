"""Whether the running step is stuck, and whether it is ever to end. Pure.

A step is stuck when it takes far longer than steps like it. Of one that is like none before, nothing is known here: it
has only the coordinator's limit (--step-timeout-s). A node that is stuck stays away until the step has ended; if that
takes too long, nothing but a new process helps.
"""

import math
from typing import Final

from serving_core.errors import SplitServeError

LEAST_S: Final = 3.0  # that any step may take
MARGIN: Final = 5.0  # beyond those, so many times what is expected
# How long a node stays away after a stuck step has ended, and after how long without one the next is the first again.
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0
UNKNOWN_S: Final = 600.0  # after which a step of which nothing is known counts as stuck here too
CALM_S: Final = 600.0


class StuckForGood(SplitServeError):
    """The running step is not waited for any longer."""


def why_stuck(step_age_s: float, expected_s: float) -> str | None:
    """Why a step that runs for so long counts as stuck, in words; None where it does not. inf: nothing is expected."""
    if step_age_s <= _most_s(expected_s):
        return None
    return f"one step has taken {step_age_s:.1f} s so far, and about {expected_s:.2g} s were expected"


def check_hope(step_age_s: float, expected_s: float, stuck_exit_s: float) -> None:
    """Raises StuckForGood for a step that has counted as stuck for so long."""
    stuck_from_s = UNKNOWN_S if math.isinf(expected_s) else _most_s(expected_s)
    if step_age_s > stuck_from_s + stuck_exit_s:
        message = f"one step has not ended in {step_age_s:.0f} s, --stuck-exit-s ({stuck_exit_s:g}) after it was stuck"
        raise StuckForGood(message)


def _most_s(expected_s: float) -> float:
    """How long a step may take of which so much is expected."""
    return LEAST_S + MARGIN * expected_s
