"""The supervisor with real child processes."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest

from serving_core.process.telemetry import parse_line
from splitserve.launch import supervisor as supervisor_module
from splitserve.launch.cluster import Process
from splitserve.launch.fork_server import ForkServer
from splitserve.launch.supervisor import LastWords, LogFile, Supervisor

DEADLINE_S = 240.0
FOREVER = "import time; print('started', flush=True); time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + FOREVER


def python(name: str, code: str, **environment: str) -> Process:
    return Process(name, "prefill", (sys.executable, "-c", code), {**os.environ, **environment})


def supervised(log_dir, scenario):
    """Runs scenario(supervisor) and returns what it returned and the lines reported meanwhile."""
    reported: list[str] = []

    async def run():
        supervisor = Supervisor(log_dir, reported.append)
        async with asyncio.timeout(DEADLINE_S):
            return await scenario(supervisor)

    return asyncio.run(run()), reported


async def until_it_says(log_file, text: str) -> None:
    while not log_file.exists() or text not in log_file.read_text():
        await asyncio.sleep(0.01)


def wait_until_gone(pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(DEADLINE_S)


def test_a_childs_words_are_logged_and_its_death_is_told(tmp_path):
    code = """
        import json, os, sys
        print(json.dumps({"level": "info", "event": "loading"}))
        print(json.dumps({"level": "error", "event": "the disk is full"}))
        print("plain words, " + os.environ["COLOUR"], file=sys.stderr, flush=True)
        sys.stderr.write("last words\\n\\n")
        sys.exit(3)
    """

    async def scenario(supervisor):
        await supervisor.start(python("prefill-0", textwrap.dedent(code), COLOUR="red"))
        return await supervisor.next_death()

    death, reported = supervised(tmp_path, scenario)
    assert (death.returncode, str(death)) == (3, "prefill-0 ended: it did not say why")
    assert reported == ["prefill-0: the disk is full"]
    assert "plain words, red\n" in (tmp_path / "prefill-0.log").read_text()


def test_nodes_are_forked_and_without_the_server_started(tmp_path):
    (tmp_path / "told.py").write_text("import os, sys; print(os.getppid(), flush=True); sys.exit(int(sys.argv[1]))")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    server, reported = ForkServer([], environment), []

    async def scenario(_):
        supervisor = Supervisor(tmp_path, reported.append, server)
        for code, role in enumerate(["prefill", "coordinator", "decode"]):
            await supervisor.start(Process(role, role, (sys.executable, "-m", "told", str(code)), environment))
            yield (await supervisor.next_death()).returncode, int((tmp_path / f"{role}.log").read_text())
            if role == "coordinator":
                server.stop()

    async def deaths(supervisor):
        return [death async for death in scenario(supervisor)]

    (of_prefill, of_coordinator, of_decode), _ = supervised(tmp_path, deaths)
    assert [code for code, _ in (of_prefill, of_coordinator, of_decode)] == [0, 1, 2]
    parents = [parent for _, parent in (of_prefill, of_coordinator, of_decode)]
    assert parents == [server.pid, os.getpid(), os.getpid()]
    assert [line.split(":")[0] for line in reported] == ["Nodes start more slowly"]


def test_a_forked_node_is_stopped_and_its_end_is_told(tmp_path):
    (tmp_path / "told.py").write_text("import signal; print('started', flush=True); signal.pause()")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    server = ForkServer([], environment)

    async def scenario(_):
        supervisor = Supervisor(tmp_path, str, server)
        await supervisor.start(Process("decode-0", "decode", (sys.executable, "-m", "told"), environment))
        await until_it_says(tmp_path / "decode-0.log", "started")
        await supervisor.stop(["decode-0"], deadline_s=DEADLINE_S)
        return (await supervisor.next_death()).returncode

    ended, _ = supervised(tmp_path, scenario)
    server.stop()
    assert ended == -signal.SIGTERM


def test_a_failure_nobody_expected_is_told_by_its_exception(tmp_path):
    async def scenario(supervisor):
        await supervisor.start(python("decode-0", "print('loading', flush=True); raise RuntimeError('no more heads')"))
        return await supervisor.next_death()

    death, _ = supervised(tmp_path, scenario)
    assert (str(death), death.refusal) == ("decode-0 ended: RuntimeError: no more heads", "")


TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "x.py", line 1',
    "    1 / 0",
    "ZeroDivisionError: division by zero",
]


@pytest.mark.parametrize(
    ("lines", "refusal", "failure"),
    [
        (["decode-1: no such folder", "leaked semaphores: 2"], "no such folder", ""),
        (["decode-1.3: of another rank", "decode-1: of the first"], "of another rank", ""),
        (["decode-10: of another node", "decode-1 without a colon"], "", ""),
        (["a warning", *TRACEBACK, "unrelated"], "", "ZeroDivisionError: division by zero"),
        ([*TRACEBACK, "", "During handling ...:", "", *TRACEBACK[:-1], "KeyError: 3"], "", "KeyError: 3"),
        (['{"level": "info", "event": "decode-1: loading"}'], "", ""),
        (
            ['{"level": "critical", "event": "a rank is lost"}', '{"level": "info", "event": "bye"}'],
            "",
            "a rank is lost",
        ),
    ],
)
def test_why_a_process_ended_is_read_from_what_it_wrote(lines, refusal, failure):
    words = LastWords("decode-1")
    for line in lines:
        words.hear(*parse_line(line))
    assert (words.refusal, words.failure) == (refusal, failure)


def a_file(log_dir):
    log_dir.touch()


def with_a_full_disk(log_dir):
    log_dir.mkdir()
    (log_dir / "prefill-0.log").symlink_to("/dev/full")


@pytest.mark.parametrize("make", [a_file, with_a_full_disk, lambda log_dir: None], ids=["a file", "full", "nothing"])
def test_a_log_that_cannot_be_written_is_told_once_and_the_child_is_heard_to_its_end(tmp_path, make):
    """It writes more than a pipe holds, so it would stand still if nobody read on."""
    code = "import sys; print(*['x' * 99] * 2000, sep='\\n'); print('prefill-0: no such folder'); sys.exit(3)"
    make(tmp_path / "logs")

    async def scenario(supervisor):
        await supervisor.start(python("prefill-0", code))
        return await supervisor.next_death()

    death, [line] = supervised(tmp_path / "logs", scenario)
    assert (death.returncode, death.refusal) == (3, "no such folder")
    assert line.startswith(f"{tmp_path}/logs/prefill-0.log cannot be written, and lines of it are lost: ")


def test_a_log_goes_on_once_it_can_be_written(tmp_path):
    reported = []
    log = LogFile(tmp_path / "logs" / "a.log", reported.append)
    log.write(b"one\n")
    (tmp_path / "logs").mkdir()
    log.write(b"two\n")
    log.write(b"three\n")
    log.close()
    assert (tmp_path / "logs" / "a.log").read_bytes() == b"two\nthree\n"
    assert len(reported) == 1


def test_a_log_is_bounded_and_its_last_lines_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor_module, "MAX_LOG_BYTES", 8)
    log = LogFile(tmp_path / "a.log", pytest.fail)
    for line in (b"one\n", b"two\n", b"three\n", b"four\n", b"longer than the limit\n", b"six\n"):
        log.write(line)
    log.close()
    assert (tmp_path / "a.log").read_bytes() == b"six\n"
    assert (tmp_path / "a.log.1").read_bytes() == b"longer than the limit\n"
    assert len(list(tmp_path.iterdir())) == 2


def test_how_far_a_load_is_is_read_from_the_log(tmp_path):
    """Of the process that runs now: one that starts again has loaded nothing."""
    code = """
        import sys, time
        from serving_core.process.telemetry import LogSettings, configure_logging
        from serving_core.model_files import load_progress
        load_progress.LOG_EVERY_S = 0.0
        configure_logging("decode", "decode-0", LogSettings())
        with load_progress.LoadProgress(1000, 2) as progress:
            progress.add(450)
            print("half", file=sys.stderr, flush=True)
            time.sleep(600)
    """

    async def scenario(supervisor):
        child = python("decode-0", textwrap.dedent(code))
        await supervisor.start(child)
        await until_it_says(tmp_path / "decode-0.log", "half")
        told = dict(supervisor.loading)
        await supervisor.stop(["decode-0"], deadline_s=DEADLINE_S)
        await supervisor.start(python("decode-0", FOREVER))
        told_again = dict(supervisor.loading)
        await supervisor.stop(["decode-0"], deadline_s=DEADLINE_S)
        return told, told_again

    told, _ = supervised(tmp_path, scenario)
    assert told == ({"decode-0": "45% of 1000 B"}, {})


def test_a_killed_child_is_told_with_its_signal(tmp_path):
    async def scenario(supervisor):
        await supervisor.start(python("decode-1", FOREVER))
        await until_it_says(tmp_path / "decode-1.log", "started")
        os.kill(supervisor.pid("decode-1"), signal.SIGKILL)
        return await supervisor.next_death()

    death, _ = supervised(tmp_path, scenario)
    assert (death.returncode, str(death)) == (-9, "decode-1 was killed by SIGKILL")


def test_a_child_that_cannot_be_started_leaves_nothing_open(tmp_path):
    """The system says so of one whose environment is too long, and alike of too few processes or too little memory."""

    async def scenario(supervisor):
        too_long = {f"v{number}": "x" * 2**16 for number in range(2**8)}
        before = os.listdir("/proc/self/fd")
        with pytest.raises(OSError, match="Argument list too long"):
            await supervisor.start(python("a", FOREVER, **too_long))
        assert len(os.listdir("/proc/self/fd")) == len(before)
        assert supervisor.names == ()

    supervised(tmp_path, scenario)


@pytest.mark.parametrize(("code", "ended_by"), [(FOREVER, signal.SIGTERM), (STUBBORN, signal.SIGKILL)])
def test_stop_asks_and_then_kills(tmp_path, code, ended_by):
    async def scenario(supervisor):
        for name in ("a", "b"):
            await supervisor.start(python(name, code))
            await until_it_says(tmp_path / f"{name}.log", "started")
        await supervisor.stop(["a", "b", "never started"], deadline_s=0.3 if ended_by is signal.SIGKILL else DEADLINE_S)
        return [await supervisor.next_death(), await supervisor.next_death()]

    deaths, _ = supervised(tmp_path, scenario)
    assert {death.returncode for death in deaths} == {-ended_by}


def test_a_cancelled_stop_kills_at_once(tmp_path):
    async def scenario(supervisor):
        await supervisor.start(python("a", STUBBORN))
        await until_it_says(tmp_path / "a.log", "started")
        stopping = asyncio.create_task(supervisor.stop(["a"], deadline_s=600))
        await asyncio.sleep(0)
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        return await supervisor.next_death()

    death, _ = supervised(tmp_path, scenario)
    assert death.returncode == -signal.SIGKILL


def test_what_a_child_started_ends_with_it(tmp_path):
    code = """
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(child.pid, flush=True)
    """

    async def scenario(supervisor):
        await supervisor.start(python("a", textwrap.dedent(code)))
        return await supervisor.next_death()

    death, _ = supervised(tmp_path, scenario)
    assert death.returncode == 0
    wait_until_gone(int((tmp_path / "a.log").read_text()))


def test_children_are_out_of_reach_of_the_terminals_ctrl_c(tmp_path):
    async def scenario(supervisor):
        await supervisor.start(python("a", FOREVER))
        group = os.getpgid(supervisor.pid("a"))
        await supervisor.stop(["a"], deadline_s=DEADLINE_S)
        return group

    group, _ = supervised(tmp_path, scenario)
    assert group != os.getpgid(0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tie a child's life to its parent's")
def test_nothing_is_left_when_the_launcher_is_killed(tmp_path):
    launcher_code = f"""
        import asyncio, os, sys
        from pathlib import Path
        from splitserve.launch.cluster import Process
        from splitserve.launch.supervisor import Supervisor

        async def main():
            supervisor = Supervisor(Path({str(tmp_path)!r}), print)
            argv = (sys.executable, "-c", {STUBBORN!r})
            await supervisor.start(Process("a", "prefill", argv, dict(os.environ)))
            print(supervisor.pid("a"), flush=True)
            await supervisor.next_death()

        asyncio.run(main())
    """
    launcher = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(launcher_code)], stdout=subprocess.PIPE, text=True
    )
    with launcher:
        child = int(launcher.stdout.readline())
        launcher.kill()
    wait_until_gone(child)


def test_a_child_whose_launcher_is_gone_does_not_start():
    command = [sys.executable, "-m", "serving_core.process.child", "1", sys.executable, "-c", "print('started')"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.parametrize(
    ("line", "parsed"),
    [
        ('{"level": "error", "event": "no"}', ("error", "no")),
        ("Error: port 1 is in use\n", ("", "Error: port 1 is in use")),
        ("[1, 2]", ("", "[1, 2]")),
        ("7", ("", "7")),
        ('{"level": "error"}', ("", '{"level": "error"}')),
        ("2026-11-23T03:24:29.123Z error decode-0: no room request_id=r", ("error", "no room request_id=r")),
        ('2026-11-23T03:24:29.123Z critical d.1: it broke exception="a\\nb"', ("critical", "it broke")),
        ("2026-11-23T03:24:29.123Z loud decode-0: no", ("", "2026-11-23T03:24:29.123Z loud decode-0: no")),
        ("", ("", "")),
    ],
)
def test_log_lines_of_any_kind_are_read(line, parsed):
    assert parse_line(line) == parsed
