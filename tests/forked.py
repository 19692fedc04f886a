"""`popen` starts a module of ours as a process that need not import anything: splitserve/launch/fork_server.py.

Each worker of pytest has a fork server of its own. What tests start-up or the interpreter's end uses `subprocess`.
"""

import atexit
import contextlib
import functools
import math
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from serving_core.net.grpc_environment import GRPC_ENVIRONMENT
from splitserve.launch.fork_server import FORCED_ENVIRONMENT, NODE_MODULES, PID_OR_CODE, ForkServer

PRELOADED = *NODE_MODULES, "coordinator.process", "splitserve.cli"
READ_ON_IMPORT = "LD_", "OMP_", "GRPC_", "PYTHONPATH", "PYTHONWARNINGS"
"""Beginnings of the names of environment variables that count before a module runs."""
OURS = {"OMP_NUM_THREADS": "1", **GRPC_ENVIRONMENT, **FORCED_ENVIRONMENT}
AT_START = {**os.environ, **OURS}  # the server's environment
START_S = 300.0
SLICE_S = 0.05  # of a wait, after which another thread has its turn
Process = subprocess.Popen[Any]


def popen(module: str, *arguments: str, env: Mapping[str, str] | None = None, **options: Any) -> Process:
    """Start `python -m module *arguments` with options of subprocess.Popen; forked, unless environment or options need
    an interpreter of its own."""
    environment = dict(os.environ if env is None else env) | OURS
    is_alike = _read_on_import(environment) == _read_on_import(AT_START)
    kind = _Forked if is_alike and not options.get("start_new_session") else subprocess.Popen
    return kind([sys.executable, "-m", module, *arguments], env=environment, **options)


def _read_on_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_ON_IMPORT)}


@functools.cache
def _server() -> ForkServer:
    server = ForkServer(PRELOADED, AT_START)
    atexit.register(server.stop)
    return server


class _Forked(subprocess.Popen[Any]):
    """A child of the fork server with all that subprocess.Popen gives. It has no public place to start a process, or
    to wait for one, in another way: hence its private names."""

    def _execute_child(self, *given: Any) -> None:
        names = subprocess.Popen._execute_child.__code__.co_varnames
        options = dict(zip(names, (self, *given), strict=False))
        streams = [options[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        self._numbers = _server().start(
            options["args"][2:],
            [number if stream == -1 else stream for number, stream in enumerate(streams)],
            env=options["env"],
            cwd=os.fspath(options["cwd"] or ""),
            process_group=None if options["process_group"] == -1 else options["process_group"],
        )
        self._close_pipe_fds(
            *(options[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
        )
        assert self._has_number(START_S), f"the fork server has started nothing within {START_S:.0f} s"
        self.pid = self._next_number()
        self._child_created = True

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._wait(0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        end = math.inf if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left_s = max(0.0, end - time.monotonic())
            with self._waitpid_lock:  # several threads may wait
                if self.returncode is None and self._has_number(min(left_s, SLICE_S)):
                    self.returncode = self._next_number()
                    self._numbers.close()
            if self.returncode is None and not left_s:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def _has_number(self, timeout_s: float) -> bool:
        return bool(select.select([self._numbers], [], [], timeout_s)[0])

    def _next_number(self) -> int:
        data = self._numbers.recv(PID_OR_CODE.size, socket.MSG_WAITALL)
        assert data, "the fork server has ended"
        return int(PID_OR_CODE.unpack(data)[0])
