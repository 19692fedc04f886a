"""Fixtures that put stand-ins in the place of processes."""

import functools

import httpx2
import pytest

from tests.unit.splitserve_bench.stand_ins import fork_process, run_crew_here

create_ssl_context_once = functools.cache(httpx2.create_ssl_context)


@pytest.fixture(autouse=True, scope="module")
def certificates_read_once():
    """Each client reads the system's certificates, which takes longer than most of its requests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("httpx2.create_ssl_context", create_ssl_context_once)
        yield


@pytest.fixture
def crew_here(monkeypatch):
    """Searches and grids are simulated in this process instead of in workers."""
    for user in ("plan.crew", "dominance.play"):
        monkeypatch.setattr(f"splitserve_bench.{user}.run_crew", run_crew_here)


@pytest.fixture
def forked_processes(monkeypatch):
    """Processes that measure are forked from a server that has imported what they import."""
    monkeypatch.setattr("asyncio.create_subprocess_exec", fork_process)
