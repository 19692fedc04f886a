"""Processes of ours that need not import anything: each is forked from a server that has.

Importing torch and grpc is most of what a node's process does in a test. The server of this worker imports both once,
starts no thread and nothing of gRPC, and forks a child for each `popen`. A child runs its module as `python -m` does, in
the environment that it was given, and ends as any interpreter ends. What tests start-up itself uses `subprocess`.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]
PRELOADED = "serving_node.serve", "coordinator.process", "splitserve.cli"
READ_ON_IMPORT = "LD_", "OMP_", "GRPC_", "PYTHONPATH", "PYTHONWARNINGS"
"""Beginnings of the names of environment variables that count before a module runs."""
FIXED = {"OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "NONE"}
DEADLINE_S = 300.0
MAX_ORDER_BYTES = 128 * 1024
_NUMBER = struct.Struct("i")


def popen(
    module: str, *arguments: str, env: Mapping[str, str] | None = None, **options: Any
) -> "subprocess.Popen[Any]":
    """Starts `python -m module *arguments`, forked where the environment lets it. Options are those of subprocess.Popen."""
    environment = dict(os.environ if env is None else env) | FIXED
    kind = _Forked if _read_on_import(environment) == _server().environment else subprocess.Popen
    return kind([sys.executable, "-m", module, *arguments], env=environment, **options)


def _read_on_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_ON_IMPORT)}


class _Forked(subprocess.Popen[Any]):
    """A child of the fork server, which tells its exit code over a socket."""

    def _execute_child(self, *given: Any) -> None:
        names = subprocess.Popen._execute_child.__code__.co_varnames
        options = dict(zip(names, (self, *given), strict=False))
        order = {
            "argv": options["args"][2:],
            "env": options["env"],
            "cwd": os.fspath(options["cwd"] or os.getcwd()),
            "process_group": options["process_group"],
            "new_session": options["start_new_session"],
        }
        ends = [options[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        pipes = [options[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        self._codes, theirs = socket.socketpair()
        with theirs:
            _server().order(order, [number if end == -1 else end for number, end in enumerate(ends)], theirs)
        self._close_pipe_fds(*pipes)
        self.pid = self._next_number(DEADLINE_S)
        self._child_created = True

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._wait(0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            self.returncode = self._next_number(timeout)
            self._codes.close()
        return self.returncode

    def _next_number(self, timeout_s: float | None) -> int:
        if not select.select([self._codes], [], [], timeout_s)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout_s or 0.0)
        data = self._codes.recv(_NUMBER.size)
        assert data, "the fork server has ended"
        return int(_NUMBER.unpack(data)[0])


class _Server:
    """The fork server, as this process sees it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = {**os.environ, **FIXED}
        self.environment = _read_on_import(env)
        with theirs:
            command = [sys.executable, "-m", "tests.forked", str(theirs.fileno())]
            self._process = subprocess.Popen(command, env=env, cwd=ROOT, pass_fds=[theirs.fileno()])
        atexit.register(self._stop)

    def order(self, order: Mapping[str, Any], ends: Sequence[int], codes: socket.socket) -> None:
        with self._lock:
            socket.send_fds(self._orders, [json.dumps(order).encode()], [*ends, codes.fileno()])

    def _stop(self) -> None:
        self._orders.close()
        self._process.wait(timeout=DEADLINE_S)


@functools.cache
def _server() -> _Server:
    return _Server()


# ---- the server's own process ----


def main(orders: socket.socket) -> None:
    """Forks a child for each order until no more can come, and in a child runs the module that is wanted."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest and for the children
    for module in PRELOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # so that no collection of a child touches these pages
    order = _fork_until_child(orders)
    if order is not None:
        _run(order["argv"][0])


def _run(module: str) -> NoReturn:
    """Runs a module to the end of the process, less the interpreter's: that would write to every page of what was
    imported, which takes longer than most children live."""
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001  # as the interpreter does
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _fork_until_child(orders: socket.socket) -> dict[str, Any] | None:
    """None in the server, at its end; in a child its order, all done but to run it."""
    bell, ringing = socket.socketpair()
    ringing.setblocking(False)
    signal.set_wakeup_fd(ringing.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    codes: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([orders, bell], [], [])
        if bell in ready:
            bell.recv(4096)
            _tell_ends(codes)
        if orders not in ready:
            continue
        data, fds, _, _ = socket.recv_fds(orders, MAX_ORDER_BYTES, 4)
        if not data:
            return None
        *ends, code = fds
        if pid := os.fork():
            codes[pid] = socket.socket(fileno=code)
            codes[pid].send(_NUMBER.pack(pid))
            for end in ends:
                os.close(end)
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for each in (orders, bell, ringing, *codes.values()):
            each.close()
        os.close(code)
        order = json.loads(data)
        _become(order, ends)
        return order


def _tell_ends(codes: dict[int, socket.socket]) -> None:
    while codes:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with codes.pop(pid) as told, contextlib.suppress(OSError):  # nobody may want to know any more
            told.send(_NUMBER.pack(os.waitstatus_to_exitcode(status)))


def _become(order: Mapping[str, Any], ends: Sequence[int]) -> None:
    """Gives this process the surroundings that it is to have."""
    if order["new_session"]:
        os.setsid()
    if order["process_group"] is not None and order["process_group"] >= 0:
        os.setpgid(0, order["process_group"])
    for number, end in enumerate(ends):
        os.dup2(end, number)
    for end in ends:
        os.close(end)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    if "PYTHONSAFEPATH" in order["env"]:
        del sys.path[0]
    else:
        sys.path[0] = order["cwd"]
    sys.argv = ["-m", *order["argv"][1:]]
    through = "PYTHONUNBUFFERED" in order["env"]
    sys.stdin = open(0, closefd=False)
    sys.stdout = open(1, "w", closefd=False, buffering=-1)
    sys.stderr = open(2, "w", closefd=False, errors="backslashreplace")
    sys.stdout.reconfigure(write_through=through)
    sys.stderr.reconfigure(line_buffering=True, write_through=through)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
