"""Mark moments of a KV transfer and a migration at which tests kill, fail or pause a process.

Without SPLITSERVE_FAILPOINTS the marks do nothing, and no further code is imported. failpoint_actions.py defines its
syntax.
"""

import os
from collections.abc import Callable
from typing import Any, Final

ENVIRONMENT: Final = "SPLITSERVE_FAILPOINTS"

is_armed = False  # whether `reach` does anything: for callers that pass a point with each message or step
_act: Callable[[str, Any], None] | None = None


def reach(point: str, message: Any = None) -> None:
    """Mark that the process is at `point`, or at POINT.KIND with a message between node and coordinator.

    Carries out the actions of the failpoints there, if any are armed.
    """
    if _act is not None:
        _act(point, message)


def arm() -> None:
    """Arm the failpoints that the variable SPLITSERVE_FAILPOINTS names. Raises SettingsError for a malformed rule."""
    global _act, is_armed
    if text := os.environ.get(ENVIRONMENT):
        from serving_core.process.failpoint_actions import Failpoints

        _act, is_armed = Failpoints(text, ENVIRONMENT).act, True
