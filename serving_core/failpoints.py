"""Moments of a hand-over and of a move at which tests have a process die, fail or stand still. Nothing happens at any
of them, and nothing of it is imported, unless SPLITSERVE_FAILPOINTS is set: failpoint_actions.py has its words."""

import os
from collections.abc import Callable
from typing import Any, Final

ENVIRONMENT: Final = "SPLITSERVE_FAILPOINTS"

_act: Callable[[str, Any], None] | None = None


def reach(point: str, message: Any = None) -> None:
    """The process is at this point; with a message between node and coordinator, at POINT.KIND."""
    if _act is not None:
        _act(point, message)


def arm() -> None:
    """Lets this process act at the points that its environment names. Raises SettingsError for words that it does not
    know."""
    global _act
    if text := os.environ.get(ENVIRONMENT):
        from serving_core.failpoint_actions import Failpoints

        _act = Failpoints(text, ENVIRONMENT).act
