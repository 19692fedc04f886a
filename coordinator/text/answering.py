"""What a program of ours does all its life (program.py): it answers the lines of its input, and ends with that.

Each API server has its own, so what they import is little.
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

from serving_core.child import die_with
from serving_core.units import size_of

KILLED: Final = "killed"  # by the system, or by hand
MAX_ANSWERS: Final = 256  # of one fork
DONE, FAILED, LASTED = 0, 1, 2  # exit codes of a fork: the lines have ended, it has failed, it has had its answers

Answer = Callable[[Any], bytes]
"""From a question to the line that answers it."""


def line(value: object) -> bytes:
    """As both sides write it."""
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


def ended(code: int, max_cpu_s: float, max_bytes: int) -> dict[str, str]:
    """The answer of a process that has ended with this code instead: as "ended" what of the question has made it end,
    with KILLED where it may have been something else."""
    if code == -signal.SIGKILL:
        return {"ended": "takes more memory than the machine has", KILLED: ""}
    limits = {
        -signal.SIGPROF: f"takes more than {max_cpu_s:g} s of processor time",
        -signal.SIGSEGV: "is nested too deeply",  # for the stack
    }
    return {"ended": limits.get(code, f"takes more than {size_of(max_bytes)} of memory")}


def answer_lines(begin: Callable[[Any], Answer]) -> None:
    """Answer the lines of stdin until they end. `begin` gets what the program is given, and returns what answers. The
    first line also has the most memory and the most processor time that a question may take; the time is none of the
    clock: a busy machine changes nothing.

    A fork of this process answers, and another one takes its place when the system has ended it: what was begun with
    need not be read again."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which a terminal sends to all; the coordinator drains first
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
    """What the first line holds. Its length stands before it, so that not a byte behind it is read: that is for the
    forks."""
    with open(0, "rb", buffering=0, closefd=False) as given:
        num_left, first = int(given.readline() or 0), b""
        while part := given.read(num_left):
            first, num_left = first + part, num_left - len(part)
    return json.loads(first) if first else sys.exit(DONE)


def _answer_some(answer: Answer, is_busy: mmap.mmap, parent: int, max_cpu_s: float, max_bytes: int) -> NoReturn:
    """Be a fork until the lines end, or until it has answered so many that another one is to begin anew."""
    code = FAILED
    try:
        most = psutil.Process().memory_info().vms + max_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        num_left = MAX_ANSWERS if die_with(parent) else 0
        while num_left and (given := sys.stdin.buffer.readline()):
            is_busy[0] = True
            signal.setitimer(signal.ITIMER_PROF, max_cpu_s)  # SIGPROF, which nobody handles, ends the process
            answered = answer(json.loads(given))
            signal.setitimer(signal.ITIMER_PROF, 0)
            is_busy[0] = False
            _say(answered)
            num_left -= 1
        code = DONE if num_left else LASTED
    except MemoryError:
        pass  # which the code says
    except Exception:  # noqa: BLE001 - none may reach the parent's code
        traceback.print_exc()
    finally:
        os._exit(code)


def _say(answered: bytes) -> None:
    sys.stdout.buffer.write(answered)
    sys.stdout.buffer.flush()
