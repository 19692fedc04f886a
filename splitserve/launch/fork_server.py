"""Start Python modules as processes that need not import anything: each is forked from a server that has.

Importing torch takes a node longer than all else that it does before it serves. The fork server imports it once, beside
what the launcher does meanwhile, and its children share that memory. It starts no thread and nothing of gRPC, so its
forks are safe. A child runs its module as `python -m` does, with the environment, folder and streams that it is given.
It dies with the server, which ends when the process that started it does.
"""

import ctypes
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
from atexit import _run_exitfuncs
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NoReturn

MAX_ORDER_BYTES: Final = 128 * 1024  # of arguments and environment
NUM_STREAMS: Final = 3  # stdin, stdout, stderr
PR_SET_PDEATHSIG: Final = 1  # <linux/prctl.h>
NODE_MODULES: Final = ("serving_node.process", "serving_node.serve", "serving_core.needs")
NUMBER: Final = struct.Struct("i")
"""What is sent of a child: its process id, later its exit code, or minus the signal that killed it."""
FIXED: Final = {"GRPC_VERBOSITY": "NONE", "OPENBLAS_NUM_THREADS": "1"}  # the latter, as NumPy would start threads


class ForkServer:
    """A process that has imported `modules`, and forks children that run others."""

    def __init__(self, modules: Sequence[str], env: Mapping[str, str]) -> None:
        """Start the server with this environment; it imports while the caller goes on. Raises OSError."""
        self._lock = threading.Lock()
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), *modules],
                env={**env, **FIXED},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is for who started it
            )

    @property
    def pid(self) -> int:
        """Return the server's process id."""
        return self._process.pid

    def start(
        self,
        argv: Sequence[str],
        streams: Sequence[int],
        *,
        env: Mapping[str, str],
        cwd: str = "",
        process_group: int | None = None,
        start_new_session: bool = False,
    ) -> socket.socket:
        """Fork a child that runs the module argv[0] with the other arguments on these three file descriptors. Return a
        socket from which two `NUMBER`s can be read: the process id at once, and the exit code. Its end without them
        means that the server is gone. Raises OSError."""
        order = {
            "argv": [*argv],
            "env": dict(env),
            "cwd": cwd or os.getcwd(),
            "process_group": process_group,
            "start_new_session": start_new_session,
        }
        numbers, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                socket.send_fds(self._orders, [json.dumps(order).encode()], [*streams, theirs.fileno()])
        except BaseException:
            numbers.close()
            raise
        return numbers

    def stop(self) -> None:
        """End the server and what is left of its children."""
        self._orders.close()
        self._process.kill()  # it may still import
        self._process.wait()


@contextmanager
def preloading(*, is_wanted: bool = True) -> Iterator[ForkServer | None]:
    """Have what a node imports imported meanwhile, where this system lets it."""
    if not is_wanted or sys.platform != "linux":
        yield None
        return
    server = ForkServer(NODE_MODULES, os.environ)
    try:
        yield server
    finally:
        server.stop()


# ---- in the server's process ----


def main(orders: socket.socket, modules: Sequence[str]) -> None:
    """Serve until the other end of `orders` is closed; in a child, run its module to the end of the process."""
    for module in modules:
        importlib.import_module(module)
    order = _serve(orders)
    if order is not None:
        _run(order["argv"][0])


def _serve(orders: socket.socket) -> dict[str, Any] | None:
    """Fork children. Return None at the server's end, and in a child its order, when all is done but to run it."""
    bell, ringer = socket.socketpair()
    ringer.setblocking(False)
    signal.set_wakeup_fd(ringer.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([orders, bell], [], [])
        if bell in ready:
            bell.recv(MAX_ORDER_BYTES)
            _tell_exits(children)
        if orders not in ready:
            continue
        data, descriptors, _, _ = socket.recv_fds(orders, MAX_ORDER_BYTES, NUM_STREAMS + 1)
        if not data:
            return None
        *streams, numbers = descriptors
        server = os.getpid()
        if not (pid := os.fork()):
            for each in (orders, bell, ringer, *children.values()):
                each.close()
            os.close(numbers)
            order: dict[str, Any] = json.loads(data)
            _become(order, streams, server)
            return order
        children[pid] = socket.socket(fileno=numbers)
        _tell(children[pid], pid)
        for stream in streams:
            os.close(stream)


def _tell_exits(children: dict[int, socket.socket]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with children.pop(pid) as numbers:
            _tell(numbers, os.waitstatus_to_exitcode(status))


def _tell(numbers: socket.socket, number: int) -> None:
    with suppress(OSError):  # who started it may be gone, or no longer want to know
        numbers.send(NUMBER.pack(number))


def _become(order: Mapping[str, Any], streams: Sequence[int], server: int) -> None:
    """Give this process the surroundings of its order."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if order["start_new_session"]:
        os.setsid()
    elif order["process_group"] is not None:
        os.setpgid(0, order["process_group"])
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    if "PYTHONSAFEPATH" not in os.environ:
        sys.path[0] = order["cwd"]
    sys.argv = ["-m", *order["argv"][1:]]
    sys.stdout.reconfigure(line_buffering=os.isatty(1), write_through="PYTHONUNBUFFERED" in os.environ)  # type: ignore[union-attr]


def _run(module: str) -> NoReturn:
    """Run a module to the end of the process, but not the interpreter's end, which would write to each page of what was
    imported."""
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
    except BaseException:  # noqa: BLE001  # as the interpreter does
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    _run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
