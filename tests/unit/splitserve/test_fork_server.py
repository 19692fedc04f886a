"""Children of the fork server are what `python -m` would start, with the server's imports; and what ends when."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from splitserve.launch import fork_server
from splitserve.launch.fork_server import PID_OR_CODE, ForkServer, preloading
from tests.system.cluster import wait_until

DEADLINE_S = 60.0
PRELOADED = "colorsys"  # of the standard library, and imported by nothing else here
SHOW = f"""
import json, os, signal, sys
facts = {{
    "argv": sys.argv[1:],
    "name": __name__,
    "variables": sorted(os.environ),
    "cwd": os.getcwd(),
    "is_preloaded": "{PRELOADED}" in sys.modules,
    "leads_group": os.getpgid(0) == os.getpid(),
    "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "descriptors": len(os.listdir("/proc/self/fd")),
}}
print(json.dumps(facts))
sys.stderr.write("said")
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="children die with their server on Linux alone")


@pytest.fixture(scope="module")
def server():
    server = ForkServer([PRELOADED], os.environ)
    yield server
    server.stop()


@pytest.fixture
def start(server, tmp_path):
    """Starts a module of this source; gives the process id and the socket that tells its exit."""
    sockets = []

    def start(source, *arguments, **options):
        module = f"told_{len(sockets)}"
        (tmp_path / f"{module}.py").write_text(source)
        with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err, open(os.devnull) as nothing:
            streams = [nothing.fileno(), out.fileno(), err.fileno()]
            options = {"env": {}, "cwd": str(tmp_path), **options}
            numbers = server.start([module, *arguments], streams, **options)
        numbers.settimeout(DEADLINE_S)
        sockets.append(numbers)
        return next_number(numbers), numbers

    yield start
    for each in sockets:
        each.close()


def next_number(numbers):
    return PID_OR_CODE.unpack(numbers.recv(PID_OR_CODE.size))[0]


def test_a_child_has_its_own_surroundings_and_the_imports(start, tmp_path):
    _, numbers = start(SHOW, "--flag", "x y", env={"WORD": "a"}, process_group=0)
    assert next_number(numbers) == 0
    facts = json.loads((tmp_path / "out").read_text())
    assert facts.pop("descriptors") == 4  # three streams, and the folder that is listed
    assert facts == {
        "argv": ["--flag", "x y"],
        "name": "__main__",
        "variables": ["WORD"],
        "cwd": str(tmp_path),
        "is_preloaded": True,
        "leads_group": True,
        "sigint": True,
    }
    assert (tmp_path / "err").read_text() == "said"


@pytest.mark.parametrize(
    ("source", "code", "said"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('why')", 1, "why\n"),
        ("raise SystemExit", 0, ""),
        ("import os; os._exit(7)", 7, ""),
        ("import atexit, sys; atexit.register(sys.stderr.write, 'end')", 0, "end"),
        ("import threading, sys; threading.Timer(0.05, sys.stderr.write, ['end']).start()", 0, "end"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
    ],
)
def test_a_child_ends_as_any_interpreter_does(start, tmp_path, source, code, said):
    _, numbers = start(source)
    assert next_number(numbers) == code
    assert (tmp_path / "err").read_text() == said


def test_an_exception_is_a_traceback_and_code_1(start, tmp_path):
    _, numbers = start("1 / 0")
    assert next_number(numbers) == 1
    assert (tmp_path / "err").read_text().endswith("ZeroDivisionError: division by zero\n")


def test_an_exception_goes_to_the_hook_that_logs_it(start, tmp_path):
    _, numbers = start("import sys; sys.excepthook = lambda *error: sys.stderr.write(repr(error[1])); 1 / 0")
    assert next_number(numbers) == 1
    assert (tmp_path / "err").read_text() == "ZeroDivisionError('division by zero')"


def test_whoever_knows_a_child_can_signal_its_group(start):
    for _ in range(20):
        pid, numbers = start("import signal; signal.pause()", process_group=0)
        os.killpg(pid, signal.SIGTERM)
        assert next_number(numbers) == -signal.SIGTERM


def test_an_order_that_is_too_long_names_the_limit(start):
    with pytest.raises(OSError, match=r"environment of 131\d{3} bytes, more than the 131072 of a fork"):
        start("", env={"LONG": "x" * 131_000})


FULL = """
import os
fork, calls = os.fork, []
def refuse_the_second():
    calls.append(1)
    if len(calls) == 2:
        raise BlockingIOError("no process is left")
    return fork()
os.fork = refuse_the_second
"""


def order(server, folder):
    """Have the server fork a child that waits."""
    with open(os.devnull, "r+") as nothing:
        numbers = server.start(["told"], [nothing.fileno()] * 3, env={}, cwd=str(folder))
    numbers.settimeout(DEADLINE_S)
    return numbers


@pytest.fixture
def waiting(tmp_path):
    (tmp_path / "told.py").write_text("import signal; signal.pause()")
    return tmp_path


def test_where_nothing_can_be_forked_the_others_go_on(waiting):
    (waiting / "full.py").write_text(FULL)
    server = ForkServer(["full"], {**os.environ, "PYTHONPATH": f"{waiting}:{os.getcwd()}"})
    with order(server, waiting) as first, order(server, waiting) as second, order(server, waiting) as third:
        pids = next_number(first), next_number(third)
        assert second.recv(PID_OR_CODE.size) == b""
        assert all(psutil.Process(pid).is_running() for pid in pids)
        server.stop()


def test_a_start_that_is_given_up_leaves_no_child(waiting):
    server = ForkServer([], os.environ)
    with order(server, waiting) as first:
        next_number(first)
        os.kill(server.pid, signal.SIGSTOP)
        order(server, waiting).close()
        os.kill(server.pid, signal.SIGCONT)
        with order(server, waiting) as last:
            next_number(last)
            wait_until(lambda: len(psutil.Process(server.pid).children()) == 2, "two children are left", DEADLINE_S)
        server.stop()


def test_several_children_run_at_once(start):
    waiting = "import signal; signal.pause()"
    started = [start(waiting) for _ in range(3)]
    for pid, numbers in reversed(started):
        os.kill(pid, signal.SIGTERM)
        assert next_number(numbers) == -signal.SIGTERM


def test_children_end_with_their_server(waiting):
    server = ForkServer([], os.environ)
    with order(server, waiting) as numbers:
        child = psutil.Process(next_number(numbers))
        server.stop()
        child.wait(DEADLINE_S)
        assert numbers.recv(PID_OR_CODE.size) == b""


STARTER = """
import os, sys, time
from splitserve.launch.fork_server import PID_OR_CODE, ForkServer
server = ForkServer([], os.environ)
numbers = server.start(["told"], [0, 1, 2], env={}, cwd=sys.argv[1])
print(PID_OR_CODE.unpack(numbers.recv(PID_OR_CODE.size))[0], flush=True)
time.sleep(600)
"""


def test_nothing_is_left_when_the_starter_is_killed(waiting):
    command = [sys.executable, "-c", STARTER, str(waiting)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as starter:
        child = psutil.Process(int(starter.stdout.readline()))
        server = child.parent()
        starter.kill()
    wait_until(lambda: not child.is_running() and not server.is_running(), "both are gone", DEADLINE_S)


def test_neither_the_server_nor_its_children_hold_the_launchers_secrets(waiting, monkeypatch):
    """But for what a child is given: /proc shows the environment that the server was started with for both."""
    monkeypatch.setattr(fork_server, "NODE_MODULES", [PRELOADED])
    for name in ("SPLITSERVE_API_KEY", "SPLITSERVE_ADMIN_KEY", "SPLITSERVE_FLEET_SECRET_FILE"):
        monkeypatch.setenv(name, "secret")
    with preloading() as server, order(server, waiting) as numbers:
        child = psutil.Process(next_number(numbers))
        for process in (child, psutil.Process(server.pid)):
            names = process.environ().keys()
            assert "PATH" in names
            assert not [name for name in names if name.startswith("SPLITSERVE_")]


def test_where_nothing_is_to_be_preloaded_there_is_no_server():
    with preloading(is_wanted=False) as server:
        assert server is None
