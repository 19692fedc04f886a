"""The health check, as a container engine runs it, of a real coordinator."""

import asyncio
import io
import runpy
import socket
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass

import pytest

from serving_core.net.tls import TlsFiles
from splitserve.client.clients import READINESS
from tests.effort import few
from tests.scripted_nodes import cluster, run
from tests.tls_kit import authority, flags_of

DEADLINE_S = 240.0


@dataclass
class Done:
    """What a run of the health check gives."""

    returncode: int
    stdout: str
    stderr: str


def check(*arguments, **environment):
    """Runs the module in this process."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said):
        patch.setattr(sys, "argv", ["splitserve.healthcheck", *arguments])
        patch.delitem(sys.modules, "splitserve.healthcheck", raising=False)  # else runpy warns
        for name, value in environment.items():
            patch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            runpy.run_module("splitserve.healthcheck", run_name="__main__")
    code = ended.value.code
    return Done(code, said.getvalue(), "") if isinstance(code, int) else Done(1, said.getvalue(), f"{code}\n")


def test_it_tells_whether_the_coordinator_answers_and_whether_it_can_take_requests(tmp_path):
    async def scenario():
        async with cluster(tmp_path, ("p0", "d0"), api_key="k") as c:
            target = f"127.0.0.1:{c.server.port}"
            asked = ((), (READINESS,), ("nobody",))
            done = [await asyncio.to_thread(check, target, *service) for service in asked]
            assert [each.returncode for each in done] == [0, 0, 1]
            assert done[-1].stderr.startswith(f"{target} does not answer: NOT_FOUND")
        async with cluster(tmp_path, ()) as c:
            target = f"127.0.0.1:{c.server.port}"
            assert (await asyncio.to_thread(check, target)).returncode == 0
            assert (await asyncio.to_thread(check, target, READINESS)).stderr == "not ready\n"

    run(scenario())


@pytest.mark.parametrize("arguments", few([(), ("localhost:1", READINESS, "more")]))
def test_it_says_how_it_is_called(arguments):
    command = [sys.executable, "-m", "splitserve.healthcheck", *arguments]
    for done in (
        check(*arguments),
        subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False),
    ):
        assert (done.returncode, done.stderr) == (1, "usage: python -m splitserve.healthcheck TARGET [SERVICE]\n")


def test_the_port_for_nodes_is_asked_over_tls_where_there_is_a_ca_and_never_by_a_proxy(tmp_path):
    files = TlsFiles(*flags_of(authority(tmp_path / "certs"), "coordinator").values())
    tls = {"SPLITSERVE_TLS_CERT": files.cert, "SPLITSERVE_TLS_KEY": files.key}
    proxy = {"http_proxy": "http://127.0.0.1:1"}  # nobody listens there

    async def scenario():
        async with cluster(tmp_path, (), fleet_secret="s") as c:
            target = f"fleet://127.0.0.1:{c.server.fleet_port}"
            for environment in ({}, tls, proxy):
                assert (await asyncio.to_thread(check, target, **environment)).returncode == 0
            with_ca = await asyncio.to_thread(check, target, **tls, SPLITSERVE_TLS_CA=files.ca)
            assert with_ca.returncode == 1

    run(scenario())


def test_a_coordinator_that_is_not_there_is_a_sentence():
    with socket.socket() as taken:  # so that nobody listens there
        taken.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{taken.getsockname()[1]}"
        done = check(target)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"{target} does not answer: UNAVAILABLE: ")
    assert len(done.stderr.splitlines()) == 1


def test_a_health_port_is_asked_in_the_open_whatever_the_process_uses_elsewhere(tmp_path):
    files = TlsFiles(*flags_of(authority(tmp_path / "certs"), "coordinator").values())
    tls = {"SPLITSERVE_TLS_CERT": files.cert, "SPLITSERVE_TLS_KEY": files.key, "SPLITSERVE_TLS_CA": files.ca}

    async def scenario():
        async with cluster(tmp_path, ("p0", "d0")) as c:
            target = f"127.0.0.1:{c.server.port}"
            assert (await asyncio.to_thread(check, f"http://{target}", **tls)).returncode == 0
            assert (await asyncio.to_thread(check, target, **tls)).returncode == 1

    run(scenario())
