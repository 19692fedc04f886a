"""Fork Python processes from a server that has already imported torch.

Its import takes a node longer than all else that it does before it serves. The fork server does it once, beside what
the launcher does meanwhile, and its children share that memory. It runs no second thread and opens no gRPC channel, so
its forks are safe. A child runs its module as `python -m` does, with the environment, folder and streams that it is
given. It dies with the server, which ends when the process that started it does.
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

from serving_core.child import die_with
from serving_core.flags import without_flags

MAX_ORDER_BYTES: Final = 128 * 1024  # of arguments and environment
NUM_STREAMS: Final = 3  # stdin, stdout, stderr
NODE_MODULES: Final = ("serving_node.process", "serving_node.serve", "serving_core.needs")
FORCED_ENVIRONMENT: Final = {"OPENBLAS_NUM_THREADS": "1"}  # of the server: NumPy would start threads
PID_OR_CODE: Final = struct.Struct("i")
"""A child's process id, later its exit code, or minus the signal that killed it."""


class ForkServer:
    """A process that has imported `modules`, and forks children that run others."""

    def __init__(self, modules: Sequence[str], env: Mapping[str, str]) -> None:
        """Start the server with this environment; it imports while the caller goes on. Raises OSError."""
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), *modules],
                env={**env, **FORCED_ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a module that cannot be imported is reported by each child
                pass_fds=[theirs.fileno()],
                process_group=0,  # Ctrl-C is for who started it
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
        """Fork a child that runs the module argv[0] with the other arguments on these three file descriptors. Return a
        socket from which two `PID_OR_CODE` can be read: the process id at once, and the exit code. Its end without them
        means that nothing could be forked, or that the server is gone, and the child with it. A socket that is closed
        before the process id has come starts no child. Raises OSError."""
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
        """End the server and what is left of its children."""
        self._orders.close()
        self._process.kill()  # it may still import
        self._process.wait()


@contextmanager
def preloading(*, is_wanted: bool = True) -> Iterator[ForkServer | None]:
    """Run a fork server that imports a node's modules; yield None where none is wanted or can be started."""
    server = None
    if is_wanted and sys.platform == "linux":
        with suppress(OSError):
            server = ForkServer(NODE_MODULES, without_flags())  # /proc shows it of each child, too
    try:
        yield server
    finally:
        if server is not None:
            server.stop()


# ---- in the server's process ----


def main(orders: socket.socket, modules: Sequence[str]) -> None:
    """Serve until the other end of `orders` is closed; in a child, run its module to the end of the process."""
    for module in modules:
        importlib.import_module(module)
    num_threads = len(os.listdir("/proc/self/task"))
    assert num_threads == 1, f"a fork would lose {num_threads - 1} threads that imports have started"
    order = _serve(orders)
    if order is not None:
        _run(order["argv"][0])


def _serve(orders: socket.socket) -> dict[str, Any] | None:
    """Fork children until `orders` ends, and return None. In a child, return its order, with all done but to run it."""
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
    """Add a child, unless the system has no room for it or its descriptors. Return True in the child."""
    if len(descriptors) <= NUM_STREAMS:
        return False
    with socket.socket(fileno=descriptors[-1]) as numbers:
        try:
            pid = os.fork()
        except OSError:
            return False
        if not pid:
            return True
        if order["process_group"] is not None:  # here too: whoever knows the child may signal its group at once
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
    """Return whether anybody is there to read it."""
    try:
        numbers.send(PID_OR_CODE.pack(number))
    except OSError:
        return False
    return True


def _become(order: Mapping[str, Any], streams: Sequence[int], server: int) -> None:
    """Give this process the surroundings of its order."""
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
    """Run a module to the end of the process. What the interpreter does at its own end is left out, as it would write
    to each page that the imports have filled."""
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
