"""Answer questions on stdin, line by line, until stdin ends: the main loop of a helper process (program.py).

Each API server has its own helper processes, so this module and its imports are small.
"""

import json
import mmap
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, Final, NoReturn

import psutil

from serving_core.process.child import die_with
from serving_core.units import size_of

KILLED: Final = "killed"  # by the system or by hand
MAX_ANSWERS: Final = 256  # of one fork
DONE, FAILED, LASTED = 0, 1, 2  # exit codes of a fork: end of input, failure, MAX_ANSWERS reached

Answer = Callable[[Any], bytes]
"""Return the answer line for a question."""


def line(value: object) -> bytes:
    """Return a value as a line of JSON, the format of questions and answers."""
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


def ended(code: int, max_cpu_s: float, max_bytes: int) -> dict[str, str]:
    """Return the answer to a question whose process has ended with this exit code.

    "ended" says which limit, of processor time or memory, the question has exceeded; KILLED is set if the question may
    not be the cause.
    """
    if code == -signal.SIGKILL:
        return {"ended": "takes more memory than the machine has", KILLED: ""}
    limits = {
        -signal.SIGPROF: f"takes more than {max_cpu_s:g} s of processor time",
        -signal.SIGSEGV: "is nested too deeply",  # for the stack
    }
    return {"ended": limits.get(code, f"takes more than {size_of(max_bytes)} of memory")}


def answer_lines(begin: Callable[[Any], Answer]) -> None:
    """Answer the lines of stdin until they end.

    `begin` gets the program's settings and returns the function that answers. The first line also has the largest
    memory and processor time of a question; processor time does not depend on how busy the machine is.

    A fork of this process answers. When the system has ended a fork, another takes its place without a new start.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the coordinator drains first
    first = _first()
    max_cpu_s, max_bytes = first["max_cpu_s"], first["max_bytes"]
    answer = begin(first["given"])
    is_busy = mmap.mmap(-1, 1)  # shared
    parent = os.getpid()
    code = None
    while code != DONE:
        if not (pid := os.fork()):
            _answer_some(answer, is_busy, parent, max_cpu_s, max_bytes)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if is_busy[0]:
            is_busy[0] = False
            _say(line(ended(code, max_cpu_s, max_bytes)))
        elif code == FAILED:
            sys.exit(code)


def _first() -> Any:
    """Return the contents of the first line.

    The line's length precedes it, so that no byte after it is read: the forks read those.
    """
    with open(0, "rb", buffering=0, closefd=False) as given:
        num_left, first = int(given.readline() or 0), b""
        while part := given.read(num_left):
            first, num_left = first + part, num_left - len(part)
    return json.loads(first) if first else sys.exit(DONE)


def _answer_some(answer: Answer, is_busy: mmap.mmap, parent: int, max_cpu_s: float, max_bytes: int) -> NoReturn:
    """Answer in a fork until the input ends or MAX_ANSWERS is reached, when a fresh fork takes over."""
    code = FAILED
    try:
        most = psutil.Process().memory_info().vms + max_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        num_left = MAX_ANSWERS if die_with(parent) else 0
        while num_left and (given := sys.stdin.buffer.readline()):
            is_busy[0] = True
            signal.setitimer(signal.ITIMER_PROF, max_cpu_s)  # SIGPROF has no handler and ends the process
            answered = answer(json.loads(given))
            signal.setitimer(signal.ITIMER_PROF, 0)
            is_busy[0] = False
            _say(answered)
            num_left -= 1
        code = DONE if num_left else LASTED
    except MemoryError:
        pass  # the exit code reports it
    except Exception:  # noqa: BLE001 - none may reach the parent's code
        traceback.print_exc()
    finally:
        os._exit(code)


def _say(answered: bytes) -> None:
    sys.stdout.buffer.write(answered)
    sys.stdout.buffer.flush()
