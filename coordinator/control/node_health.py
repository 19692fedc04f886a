"""How the node of one name does: how its heartbeats come, and how often it was lost. Pure.

It is kept over the node's attachments: a process that was lost because it was slow is waited for longer when it is
back, and a node that comes and goes is known as one that flaps.
"""

from collections import deque
from enum import StrEnum
from typing import Final

from protos.fleet_pb2 import Hello
from serving_core.failure_detector import FailureDetector

STARVED: Final = 0.25  # of the time before it attached again, in which the process had no core
FLAP_WINDOW_S: Final = 600.0
MIN_FLAPS: Final = 3  # losses within the window from which on a node flaps


class LossCause(StrEnum):
    """Why the coordinator has lost a node that did not stop in good order."""

    CONNECTION = "connection"  # its stream has ended: the process died, or its connection did
    SILENCE = "silence"  # its heartbeats stay away: the process stands still, or the network does
    STEP = "step"  # one step does not end
    MESSAGE = "message"  # a message of its stream has not come
    COMMANDS = "commands"  # it does not read what it is sent


class NodeHealth:
    """What is known of the node of one name."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._session = 0
        self._detector = FailureDetector(timeout_s, 0.0)
        self._losses_s: deque[float] = deque(maxlen=100)

    def attached(self, session: int, hello: Hello, awake_s: float) -> None:
        """The node has attached under this session. A process that shows the last session is known already; if it was
        silent for want of a core, it may be so again, and will be waited for longer."""
        if hello.session and hello.session == self._session:
            self._detector.heard(awake_s, learns=hello.starved_share >= STARVED)
        else:
            self._detector = FailureDetector(self._timeout_s, awake_s)
        self._session = session

    def heard(self, awake_s: float) -> None:
        """A heartbeat has come."""
        self._detector.heard(awake_s)

    def lost(self, now: float) -> None:
        self._losses_s.append(now)

    def why_silent(self, awake_s: float) -> str | None:
        """Return why the node counts as lost for its silence, in words; None while it does not."""
        return self._detector.why_suspected(awake_s)

    @property
    def longest_gap_s(self) -> float:
        """Return the longest recent gap between two heartbeats."""
        return self._detector.longest_gap_s

    def num_losses(self, now: float) -> int:
        """Return how often the node was lost within FLAP_WINDOW_S; MIN_FLAPS times or more: it flaps."""
        return sum(now - lost_s < FLAP_WINDOW_S for lost_s in self._losses_s)
