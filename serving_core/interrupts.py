"""Ctrl-C, however early: exit code 130 and no traceback.

While modules are imported there is nothing to clean up, and an exception in the middle of an import may come out of it
as another one: until a command begins, Ctrl-C ends the process at once, and so it does after it has ended, while the
interpreter does. In between it is a KeyboardInterrupt; a process of a cluster, once it can drain, takes it for SIGTERM.
Where Ctrl-C is ignored, as in a shell's background, it stays so.
"""

import os
import signal
from typing import Any, Final

INTERRUPTED: Final = 130  # 128 + SIGINT


def end_at_once() -> None:
    """Until `raise_again`, Ctrl-C ends this process."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """Undoes `end_at_once`, if that was called."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def leave_to_system() -> None:
    """No handler is run any more when the interpreter ends, which may take a while or hang in somebody's threads."""
    if signal.getsignal(signal.SIGINT) in (_end, signal.default_int_handler):
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end(*_: Any) -> None:
    os._exit(INTERRUPTED)
