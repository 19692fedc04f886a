"""Runs one step's program, within its time, and reads what it tells."""

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from splitserve_bench.device.steps import JUNIT_FILE, TESTS, Step

DONE, FAILED, TIMED_OUT, SKIPPED, NOT_REACHED = "done", "failed", "out of time", "skipped", "not reached"
LAST_LINES: Final = 25
STOP_S: Final = 10.0  # from being told to end to being made to
MOST_NAMES: Final = 50


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one step."""

    state: str
    wall_s: float = 0.0
    result: Any = None
    why: str = ""
    last_lines: tuple[str, ...] = ()  # of what it said beside its result


def run_step(step: Step, limit_s: float, out: Path, log: Path) -> Outcome:
    """Runs it to its end, or until its time is up; what it says beside its result goes to the end of the log."""
    if step.kind == TESTS:
        (out / JUNIT_FILE).unlink(missing_ok=True)  # what an earlier run told
    started_at = time.monotonic()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **step.environment}
    with log.open("a+", encoding="utf-8", errors="replace") as said:
        said.write(f"\n==== {step.name}: {step.shown}\n")
        said.flush()
        begin = said.seek(0, os.SEEK_END)
        code, output = _run(step.argv, environment, limit_s, said)
        if step.kind == TESTS:
            said.write(output)
        said.seek(begin)
        lines = tuple(said.read().splitlines()[-LAST_LINES:])
    wall_s = time.monotonic() - started_at
    result, why = _result(step, output, out)
    if code is None:
        return Outcome(
            TIMED_OUT, wall_s, result if step.kind == TESTS else None, f"not over after {limit_s:.0f} s", lines
        )
    if why:
        return Outcome(FAILED, wall_s, None, f"exit code {code}, and no result: {why}", lines)
    if code and not (step.kind == TESTS and code == 1):  # 1: some tests failed, which the result tells
        return Outcome(FAILED, wall_s, result, f"exit code {code}", lines)
    return Outcome(DONE, wall_s, result, "", lines)


def _result(step: Step, output: str, out: Path) -> tuple[Any, str]:
    """What it has told, or None and why that is nothing."""
    try:
        return (read_junit(out) if step.kind == TESTS else json.loads(output.splitlines()[-1])), ""
    except (OSError, ValueError, IndexError, ElementTree.ParseError) as error:
        return None, str(error)


def _run(argv: list[str], environment: Mapping[str, str], limit_s: float, said: Any) -> tuple[int | None, str]:
    """The exit code, None when the time was up, and what was printed. The program and its children end with it."""
    child = [sys.executable, "-m", "serving_core.child", str(os.getpid()), *argv]
    process = subprocess.Popen(
        child,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=said,
        stdin=subprocess.DEVNULL,
        text=True,
        process_group=0,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        return None, end(process)
    finally:
        if process.poll() is None:  # this process is told to end
            _signal(process, signal.SIGKILL)
            process.wait()


def end(process: "subprocess.Popen[str]") -> str:
    """End a process and its children, and return what was printed. The process is asked first: pytest then tells of its
    tests."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        _signal(process, number)
        try:
            return process.communicate(timeout=STOP_S)[0]
        except subprocess.TimeoutExpired:
            continue
    return process.communicate()[0]


def _signal(process: "subprocess.Popen[str]", number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        process.wait()


def read_junit(out: Path) -> dict[str, Any]:
    """Return counts of tests and the names of failed tests. Raises OSError or ParseError where none were written."""
    suites = ElementTree.parse(out / JUNIT_FILE).getroot().iter("testsuite")
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    failed: list[str] = []
    for suite in suites:
        for name in counts:
            counts[name] += int(suite.get(name, "0"))
        bad = [
            case
            for case in suite.iter("testcase")
            if case.find("failure") is not None or case.find("error") is not None
        ]
        failed += [f"{case.get('classname')}::{case.get('name')}" for case in bad]
    return {**counts, "failed": failed[:MOST_NAMES]}
