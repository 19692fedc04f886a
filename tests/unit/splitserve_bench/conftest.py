"""Fixtures that put stand-ins in the place of processes."""

import asyncio
import functools

import httpx2
import pytest
from click.testing import CliRunner

from splitserve.cli import main
from tests.unit.splitserve_bench.stand_ins import fork_process, run_crew_here, run_load_here

create_ssl_context_once = functools.cache(httpx2.create_ssl_context)


@pytest.fixture(autouse=True, scope="module")
def certificates_read_once():
    """Each client reads the system's certificates, which takes longer than most of its requests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("httpx2.create_ssl_context", create_ssl_context_once)
        yield


@pytest.fixture
def crew_here(monkeypatch):
    """Simulate the fleets of a search in this process instead of in workers."""
    monkeypatch.setattr("splitserve_bench.plan.search.run_crew", run_crew_here)


@pytest.fixture
def forked_processes(monkeypatch):
    """Processes that measure are forked from a server that has imported what they import."""
    monkeypatch.setattr("asyncio.create_subprocess_exec", fork_process)


@pytest.fixture
def serve_here(monkeypatch, tmp_path):
    """Runs `bench serve` in the folder `tmp_path`, until it exits with this code. Returns its output, and what was said
    beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("splitserve_bench.serve.run.run_load", run_load_here)

    async def run(target, *words, exit_code=0):
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(
            "splitserve_bench.serve.command.run_to_end",
            lambda work: asyncio.run_coroutine_threadsafe(work, loop).result(),
        )
        words = ["bench", "serve", "--server", target.address, *words]
        ended = await asyncio.to_thread(CliRunner().invoke, main, words)
        assert ended.exit_code == exit_code, ended.output
        return ended.stdout, ended.stderr

    return run
