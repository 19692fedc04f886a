"""Fork Python processes from a server that has already imported torch.

The import takes a node longer than the rest of its start. The fork server imports once, while the launcher does other
work, and its children share that memory. The server has one thread and no gRPC channel, so its forks are safe. A child
runs its module as `python -m` does, with the given environment, folder and streams. Children die with the server, and
the server ends with the process that started it.
"""

import errno
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
from atexit import _run_exitfuncs
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NoReturn

from serving_core.flags import without_flags
from serving_core.process.child import die_with

MAX_ORDER_BYTES: Final = 128 * 1024  # arguments and environment
NUM_STREAMS: Final = 3  # stdin, stdout, stderr
NODE_MODULES: Final = ("serving_node.process", "serving_node.serve", "serving_core.node.needs")
FORCED_ENVIRONMENT: Final = {"OPENBLAS_NUM_THREADS": "1"}  # for the server: NumPy would start threads
PID_OR_CODE: Final = struct.Struct("i")
"""A child's process id, later its exit code, or minus the signal that killed it."""


class ForkServer:
    """A process that has imported `modules` and forks children that run other modules."""

    def __init__(self, modules: Sequence[str], env: Mapping[str, str]) -> None:
        """Start the server with this environment; it imports in the background. Raises OSError when it cannot start."""
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), *modules],
                env={**env, **FORCED_ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # each child reports a module that cannot be imported
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is handled by the starting process
            )
        except BaseException:
            self._orders.close()
            raise
        finally:
            theirs.close()

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
    ) -> socket.socket:
        """Fork a child that runs the module argv[0] with the remaining arguments on these three file descriptors.

        Returns a socket with two `PID_OR_CODE` values: the process id at once, later the exit code. If the socket ends
        early, nothing could be forked, or the server and its children are gone. Closing the socket before the process
        id has come starts no child. Raises OSError when the server is gone.
        """
        order = {"argv": [*argv], "env": dict(env), "cwd": cwd or os.getcwd(), "process_group": process_group}
        data = json.dumps(order).encode()
        if len(data) > MAX_ORDER_BYTES:
            raise OSError(
                errno.E2BIG,
                f"arguments and environment of {len(data)} bytes, more than the {MAX_ORDER_BYTES} of a fork",
            )
        numbers, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._orders, [data], [*streams, theirs.fileno()])
        except BaseException:
            numbers.close()
            raise
        return numbers

    def stop(self) -> None:
        """Kill the server, and so its remaining children, and wait for its end."""
        self._orders.close()
        self._process.kill()  # it may be importing
        self._process.wait()


@contextmanager
def preloading(*, is_wanted: bool = True) -> Iterator[ForkServer | None]:
    """Yield a fork server that imports a node's modules in the background, and stop it at the end of the block.

    Yields None when none is wanted or possible.
    """
    server = None
    if is_wanted and sys.platform == "linux":
        with suppress(OSError):
            server = ForkServer(NODE_MODULES, without_flags())  # /proc shows the environment for each child, too
    try:
        yield server
    finally:
        if server is not None:
            server.stop()


# ---- in the server's process ----


def main(orders: socket.socket, modules: Sequence[str]) -> None:
    """Import the modules, then fork a child for each order from the socket, until its other end is closed.

    In a child, runs the child's module to the end of the process.
    """
    for module in modules:
        importlib.import_module(module)
    num_threads = len(os.listdir("/proc/self/task"))
    assert num_threads == 1, f"a fork would lose {num_threads - 1} threads that imports have started"
    order = _serve(orders)
    if order is not None:
        _run(order["argv"][0])


def _serve(orders: socket.socket) -> dict[str, Any] | None:
    """Fork children until `orders` ends, and return None. In a child, prepare the process and return its order."""
    wakeup, wakeup_sender = socket.socketpair()
    wakeup_sender.setblocking(False)
    signal.set_wakeup_fd(wakeup_sender.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, socket.socket] = {}
    server = os.getpid()
    while True:
        ready, _, _ = select.select([orders, wakeup], [], [])
        if wakeup in ready:
            wakeup.recv(MAX_ORDER_BYTES)
            _tell_exits(children)
        if orders not in ready:
            continue
        data, descriptors, _, _ = socket.recv_fds(orders, MAX_ORDER_BYTES, NUM_STREAMS + 1)
        if not data:
            return None
        order: dict[str, Any] = json.loads(data)
        if _fork(order, descriptors, children):
            for each in (orders, wakeup, wakeup_sender, *children.values()):
                each.close()
            _become(order, descriptors[:NUM_STREAMS], server)
            return order
        for descriptor in descriptors[:NUM_STREAMS]:
            os.close(descriptor)


def _fork(order: Mapping[str, Any], descriptors: Sequence[int], children: dict[int, socket.socket]) -> bool:
    """Fork a child unless the system lacks memory or descriptors. Returns True in the child."""
    if len(descriptors) <= NUM_STREAMS:
        return False
    with socket.socket(fileno=descriptors[-1]) as numbers:
        try:
            pid = os.fork()
        except OSError:
            return False
        if not pid:
            return True
        if order["process_group"] is not None:  # here too: a caller may signal the group at once
            with suppress(OSError):
                os.setpgid(pid, order["process_group"])
        if not _tell(numbers, pid):
            os.kill(pid, signal.SIGKILL)
        children[pid] = socket.socket(fileno=numbers.detach())
    return False


def _tell_exits(children: dict[int, socket.socket]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with children.pop(pid) as numbers:
            _tell(numbers, os.waitstatus_to_exitcode(status))


def _tell(numbers: socket.socket, number: int) -> bool:
    """Send a number to the child's socket. Returns whether anybody can read it."""
    try:
        numbers.send(PID_OR_CODE.pack(number))
    except OSError:
        return False
    return True


def _become(order: Mapping[str, Any], streams: Sequence[int], server: int) -> None:
    """Set the environment, folder, streams and signals of an order in this process."""
    if not die_with(server):
        os._exit(1)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if order["process_group"] is not None:
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
    """Run a module to the end of the process.

    Skips the interpreter's own cleanup, which would write to every page that the imports have filled.
    """
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
    except BaseException:  # noqa: BLE001  # as the interpreter does
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    _run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
