"""What a program of ours does all its life (program.py): it answers the lines of its input, and ends with that.

Each door has its own, so what they import is little.
"""

import json
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

Answer = Callable[[Any], bytes]
"""From a question to the line that answers it."""


def line(value: object) -> bytes:
    """As both sides write it."""
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


def answer_lines(begin: Callable[[Any], Answer], *, max_memory_bytes: int) -> None:
    """Answer the lines of stdin until they end. `begin` reads the first one, and returns what answers the others. The
    first also has the most processor time that a question may take, which is no time of the clock: a busy machine
    changes nothing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which a terminal sends to all; the coordinator drains first
    resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, max_memory_bytes))
    answer: Answer | None = None
    max_cpu_s = 0.0
    for given in sys.stdin.buffer:
        if answer is None:
            first = json.loads(given)
            max_cpu_s, answer = first["max_cpu_s"], begin(first["given"])
            continue
        signal.setitimer(signal.ITIMER_PROF, max_cpu_s)  # SIGPROF, which nobody handles, ends the process
        answered = answer(json.loads(given))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.buffer.write(answered)
        sys.stdout.buffer.flush()
