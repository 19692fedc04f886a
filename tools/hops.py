"""Count the files and the cross-file calls that one prompt takes: `python tools/hops.py [MODEL]`.

A coordinator, a prefill node and a decode node serve the model (unless one is given, the demo model) under a profile
hook, which counts each call from one product file to another. Prompts have 16 tokens of the demo model. What a decode
step and a token take is the difference between a long and a short output. The calls of an idle window as long are
subtracted; what is left by chance, as a heartbeat is, is not what several prompts have in common.
"""

import collections
import contextlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial, reduce
from operator import and_
from pathlib import Path
from types import FrameType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
ROOMS = "coordinator", "serving_node", "prefill_node", "decode_node", "kv_transfer", "engine", "protos", "serving_core"
ROLES = "coordinator", "prefill_node", "decode_node"
SHORT_OUTPUT_TOKENS, LONG_OUTPUT_TOKENS = 8, 72
SHORT_PROMPTS = "In", "Up", "Of"  # their first words
DEADLINE_S = 300
Calls = collections.Counter[tuple[str, str]]  # by the caller's and the callee's file


def profiled(role: str, counts_path: str) -> None:
    """Run a role as `python -m` does; SIGUSR1 has it write its counts to the file."""
    sys.path[0] = str(ROOT)
    prefixes = tuple(f"{ROOT / room}/" for room in ROOMS)
    calls: Calls = Calls()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_back:
            caller, callee = frame.f_back.f_code.co_filename, frame.f_code.co_filename
            if caller != callee and callee.startswith(prefixes) and caller.startswith(prefixes):
                calls[caller, callee] += 1

    def write(*_: object) -> None:
        Path(f"{counts_path}.new").write_text("".join(f"{a}\t{b}\t{n}\n" for (a, b), n in [*calls.items()]))
        os.replace(f"{counts_path}.new", counts_path)

    signal.signal(signal.SIGUSR1, write)
    threading.setprofile(count)
    sys.setprofile(count)
    sys.argv = [role, *sys.argv[3:]]
    runpy.run_module(role, run_name="__main__", alter_sys=True)


class Fleet:
    """Three profiled processes."""

    def __init__(self, model: str, folder: Path) -> None:
        port, fleet_port = _free_ports(2)
        self.target = f"127.0.0.1:{port}"
        env = {**os.environ, "OMP_NUM_THREADS": "1", "SPLITSERVE_FLEET_SECRET": "hops", "PYTHONSAFEPATH": "1"}
        flags = {role: ["--coordinator", f"127.0.0.1:{fleet_port}"] for role in ROLES[1:]}
        flags["coordinator"] = ["--grpc-port", f"{port}", "--fleet-port", f"{fleet_port}", "--http-port", "-1"]
        self.counts = {role: folder / role for role in ROLES}
        self.processes = {}
        for role in ROLES:
            command = [sys.executable, __file__, role, self.counts[role], model, *flags[role]]
            with (folder / f"{role}.log").open("w") as log:
                self.processes[role] = subprocess.Popen(command, env=env, stderr=log)

    def calls(self) -> dict[str, Calls]:
        """The calls of each role so far."""
        found = {}
        for role, path in self.counts.items():
            path.unlink(missing_ok=True)
            self.processes[role].send_signal(signal.SIGUSR1)
            self.wait_for(path.exists, f"counts of {role}")
            rows = (line.split("\t") for line in path.read_text().splitlines())
            found[role] = Calls({(caller, callee): int(number) for caller, callee, number in rows})
        return found

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Return when the condition is met; end when a process ends before, or after DEADLINE_S."""
        end = time.monotonic() + DEADLINE_S
        while not condition():
            for role, process in self.processes.items():
                if process.poll() is not None:
                    sys.exit(f"{role} has ended: {self.counts[role].with_suffix('.log').read_text()[-2000:]}")
            if time.monotonic() > end:
                sys.exit(f"no {what} within {DEADLINE_S} s")
            time.sleep(0.01)

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait(DEADLINE_S)

    def during(self, act: Callable[[], None]) -> dict[str, Calls]:
        """The calls made while `act` runs, less those of as long a time in which nothing happens."""
        before, start = self.calls(), time.monotonic()
        act()
        between, taken_s = self.calls(), time.monotonic() - start
        time.sleep(taken_s)
        after = self.calls()
        return {role: (between[role] - before[role]) - (after[role] - between[role]) for role in ROLES}


class Hops(NamedTuple):
    """What one prompt, one decode step and one token at the coordinator take."""

    short: dict[str, Calls]  # of a prompt with SHORT_OUTPUT_TOKENS, by role
    long: dict[str, Calls]
    common: dict[str, Calls]  # that each of several short prompts makes

    @property
    def files(self) -> set[str]:
        """The files that the prompt crosses, in all processes."""
        return {file for calls in self.common.values() for pair in calls for file in pair}

    def per_token(self, role: str) -> dict[tuple[str, str], float]:
        """The cross-file calls of a role for each further output token, by caller and callee."""
        more = self.long[role] - self.short[role]
        return {pair: count / (LONG_OUTPUT_TOKENS - SHORT_OUTPUT_TOKENS) for pair, count in more.items()}


def measure(model: str) -> Hops:
    """Serve the model, and count. Ends the process if a role of the fleet does not come up."""
    from splitserve import Client
    from splitserve.client.errors import ClientError

    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(model, Path(folder))
        try:
            with Client(fleet.target) as client:

                def ask(first_word: str, num_tokens: int) -> None:
                    prompt = f"{first_word} the first week of May a small boat left the port with nine old people"
                    list(client.generate(prompt, max_tokens=num_tokens, temperature=0, ignore_eos=True))

                def is_complete() -> bool:
                    with contextlib.suppress(ClientError):
                        return len(client.server_info().nodes) == len(ROLES) - 1
                    return False

                fleet.wait_for(is_complete, "complete fleet")
                for first_word in ("On", "At"):  # what runs once is over then
                    ask(first_word, LONG_OUTPUT_TOKENS)
                shorts = [fleet.during(partial(ask, first_word, SHORT_OUTPUT_TOKENS)) for first_word in SHORT_PROMPTS]
                long = fleet.during(lambda: ask("By", LONG_OUTPUT_TOKENS))
        finally:
            fleet.stop()
    return Hops(shorts[0], long, {role: reduce(and_, (short[role] for short in shorts)) for role in ROLES})


def _report(hops: Hops) -> None:
    lines = sum(len(Path(file).read_text().splitlines()) for file in hops.files)
    num_calls = sum(calls.total() for calls in hops.common.values())
    print(f"one prompt: {len(hops.files)} files, {lines} lines, {num_calls} cross-file calls")
    for role, calls in hops.common.items():
        print(f"  {role}: {len({file for pair in calls for file in pair})} files, {calls.total()} calls")
    for role, what in (("decode_node", "decode step"), ("coordinator", "token at the coordinator")):
        each = hops.per_token(role)
        step = {file for pair, n in each.items() if n > 0.5 for file in pair}
        print(f"one {what}: {sum(each.values()):.0f} cross-file calls, {len(step)} files")


def _free_ports(number: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


if __name__ == "__main__":
    if len(sys.argv) > 2:
        profiled(sys.argv[1], sys.argv[2])
    else:
        from splitserve.launch.models import resolve

        _report(measure(str(resolve("".join(sys.argv[1:]), print).folder)))
