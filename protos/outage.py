"""Why a node is not attached to its coordinator, in words for whoever started it, and how often to say so. Pure."""

from typing import Final

import grpc

FIRST_PAUSE_S: Final = 5.0
LONGEST_PAUSE_S: Final = 300.0
MAX_SENTENCES: Final = 16  # remembered

LOST_STATUS: Final = "Internal error from Core"  # gRPC's, where it writes while the other end hangs up

SILENCE: Final = "nothing answers there"
HANGS_UP: Final = "what listens there hangs up at once, as a TLS port does"
# What gRPC's words for a connection that did not come about hold, and what it means; the first that fits counts.
_MEANINGS: Final = (
    ("errors resolving", "that is not an address that can be resolved"),
    ("Connection refused", "nothing listens there"),
    ("http1.x server", "an HTTP port answers there, not a gRPC one"),
    ("Failed parsing HTTP/2", "what listens there does not speak gRPC"),
    ("Socket closed", HANGS_UP),
    ("Connection reset", HANGS_UP),
    ("timeout", SILENCE),
)


def why_not_attached(error: Exception, address: str) -> str:
    """What keeps a node from the coordinator at `address`, or has parted it from it."""
    if isinstance(error, grpc.aio.AioRpcError):
        code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return _not_there(address, "a gRPC port answers that is not the fleet's, such as the public one")
        if details.startswith(("failed to connect", "errors resolving")):
            return _not_there(address, next((what for words, what in _MEANINGS if words in details), details))
        if details == LOST_STATUS:
            return "the coordinator ended the stream"
        return f"no stream to the coordinator: {code.name}: {details}"
    if isinstance(error, TimeoutError):
        return _not_there(address, SILENCE)
    return str(error) or type(error).__name__


def _not_there(address: str, what: str) -> str:
    return f"no coordinator at {address}: {what}; --coordinator must name its fleet port, by default 50052"


class Reminder:
    """Says when to repeat what stays true: at once, then after a pause that doubles each time."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[float, float]] = {}  # sentence to when it is due again, and the pause after that

    def is_due(self, sentence: str, now: float) -> bool:
        """Whether to say it now. Each sentence has pauses of its own, so two that take turns are not always news."""
        due_s, pause_s = self._said.pop(sentence, (now, FIRST_PAUSE_S))
        is_due = now >= due_s
        self._said[sentence] = (now + pause_s, min(2 * pause_s, LONGEST_PAUSE_S)) if is_due else (due_s, pause_s)
        if len(self._said) > MAX_SENTENCES:
            del self._said[next(iter(self._said))]
        return is_due

    def forget(self) -> None:
        """Nothing of it is true any more."""
        self._said.clear()
