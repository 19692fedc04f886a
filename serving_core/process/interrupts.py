"""Handle Ctrl-C at any time: exit code 130 and no traceback.

During imports there is nothing to clean up, and an exception in the middle of an import may surface as another one. So
until a command begins, and again after it has ended, Ctrl-C ends the process at once. In between it is a
KeyboardInterrupt; a process of a cluster that can drain treats it as SIGTERM. Where Ctrl-C is ignored, as in a shell's
background, it stays ignored.
"""

import os
import signal
from typing import Any, Final

INTERRUPTED: Final = 130  # 128 + SIGINT


def end_at_once() -> None:
    """Let Ctrl-C end this process at once, with exit code 130, until `raise_again`. Does nothing if it is ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_again() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again. Does nothing unless `end_at_once` was called."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def leave_to_system() -> None:
    """Let Ctrl-C kill this process by the system's own handler, while the interpreter ends.

    That may take long, or hang in a library's threads. Does nothing if Ctrl-C is ignored.
    """
    if signal.getsignal(signal.SIGINT) in (_end, signal.default_int_handler):
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end(*_: Any) -> None:
    os._exit(INTERRUPTED)
