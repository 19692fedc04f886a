"""`popen` starts a module of ours as a process that need not import anything: splitserve/launch/fork_server.py.

Each worker of pytest has a fork server of its own. What tests start-up or the interpreter's end uses `subprocess`.
"""

import atexit
import contextlib
import functools
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from splitserve.launch.fork_server import FIXED, NODE_MODULES, NUMBER, ForkServer

PRELOADED = *NODE_MODULES, "coordinator.process", "splitserve.cli"
READ_ON_IMPORT = "LD_", "OMP_", "GRPC_", "PYTHONPATH", "PYTHONWARNINGS"
"""Beginnings of the names of environment variables that count before a module runs."""
OURS = {"OMP_NUM_THREADS": "1", **FIXED}
START_S = 300.0


Process = subprocess.Popen[Any]


def popen(module: str, *arguments: str, env: Mapping[str, str] | None = None, **options: Any) -> Process:
    """Start `python -m module *arguments`, forked where the environment lets it, with options of subprocess.Popen."""
    environment = dict(os.environ if env is None else env) | OURS
    is_alike = _read_on_import(environment) == _read_on_import({**os.environ, **OURS})
    kind = _Forked if is_alike else subprocess.Popen
    return kind([sys.executable, "-m", module, *arguments], env=environment, **options)


def _read_on_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_ON_IMPORT)}


@functools.cache
def _server() -> ForkServer:
    server = ForkServer(PRELOADED, {**os.environ, **OURS})
    atexit.register(server.stop)
    return server


class _Forked(subprocess.Popen[Any]):
    """A child of the fork server as subprocess.Popen has its own."""

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
            start_new_session=options["start_new_session"],
        )
        self._close_pipe_fds(
            *(options[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
        )
        self.pid = self._next_number(START_S)
        self._child_created = True

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._wait(0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            self.returncode = self._next_number(timeout)
            self._numbers.close()
        return self.returncode

    def _next_number(self, timeout_s: float | None) -> int:
        if not select.select([self._numbers], [], [], timeout_s)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout_s or 0.0)
        data = self._numbers.recv(NUMBER.size, socket.MSG_WAITALL)
        assert data, "the fork server has ended"
        return int(NUMBER.unpack(data)[0])
