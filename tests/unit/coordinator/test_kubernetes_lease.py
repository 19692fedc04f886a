"""Coordinators that ask for one Lease of Kubernetes: at no time do two serve, whatever becomes of their requests."""

import asyncio
import random
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime

import pytest

from coordinator import kubernetes_lease
from coordinator.kubernetes_lease import LEASE_S, RENEW_DEADLINE_S, Election, KubernetesLease, LeaseApi, LeaseError
from coordinator.settings import CoordinatorSettings, check_settings
from serving_core.errors import SettingsError
from tests.lease_server import LeaseServer

NAME = "llm-coordinator"
DEADLINE_S = 60.0
CLOCK = datetime(2026, 5, 4, 3, 2, 1, 12, UTC)

SLOW = {"LEASE_S": 5, "RENEW_DEADLINE_S": 4.5, "REQUEST_S": 4.0}  # for a busy machine

HOLDER = f"""
import asyncio, sys
from pathlib import Path
from coordinator import kubernetes_lease
from coordinator.kubernetes_lease import KubernetesLease, LeaseApi
vars(kubernetes_lease).update({SLOW})
async def main(url, name, account):
    async with KubernetesLease(LeaseApi.of_account(url, name, Path(account)), "holder") as lease:
        await lease.taken([])
        print("taken", flush=True)
        await asyncio.sleep(600)
asyncio.run(main(*sys.argv[1:]))
"""


# ---- the decision ----


def lease(holder, version, duration_s=LEASE_S):
    return {
        "metadata": {"name": NAME, "resourceVersion": version},
        "spec": {"holderIdentity": holder, "leaseDurationSeconds": duration_s, "leaseTransitions": 4},
    }


def test_a_lease_expires_by_the_clock_of_whoever_sees_it():
    """Whatever times it says: clocks differ."""
    election = Election("b")
    election.seen(lease("a", "7"), 1000.0)
    assert election.free_in_s(1000.5) == LEASE_S - 0.5
    election.seen(lease("a", "7"), 1001.0)
    assert election.free_in_s(1001.0) == LEASE_S - 1
    election.seen(lease("a", "8"), 1001.5)
    assert election.free_in_s(1001.5) == LEASE_S
    assert election.free_in_s(1001.5 + LEASE_S) <= 0


@pytest.mark.parametrize(("duration_s", "free_in_s"), [(15, 15), (1, LEASE_S), (None, LEASE_S), ("9", LEASE_S)])
def test_a_lease_lasts_as_long_as_its_holder_says_if_that_is_longer(duration_s, free_in_s):
    election = Election("b")
    election.seen(lease("a", "7", duration_s), 0.0)
    assert election.free_in_s(0.0) == free_in_s


def test_what_is_written_keeps_what_others_have_written():
    election, found = Election("b"), lease("", "7")
    found["metadata"]["labels"] = {"team": "x"}
    election.seen(found, 0.0)
    assert election.free_in_s(0.0) == 0
    written = election.wanted(CLOCK)
    assert written["metadata"] == found["metadata"]
    assert written["spec"] == {
        "holderIdentity": "b",
        "leaseDurationSeconds": LEASE_S,
        "leaseTransitions": 5,
        "acquireTime": "2026-05-04T03:02:01.000012Z",
        "renewTime": "2026-05-04T03:02:01.000012Z",
    }
    election.wrote({**written, "metadata": {"resourceVersion": "8"}}, 0.0, 0.1)
    renewed = election.wanted(CLOCK.replace(second=2))["spec"]
    assert renewed == written["spec"] | {"renewTime": "2026-05-04T03:02:02.000012Z"}
    assert "holderIdentity" not in election.released()["spec"]


def test_a_lease_that_is_missing_may_have_been_deleted_under_its_holder():
    election = Election("b")
    election.seen(None, 10.0)
    election.seen(None, 11.0)
    assert election.free_in_s(11.0) == LEASE_S - 1
    assert "metadata" not in election.wanted(CLOCK)
    election.wrote(lease("b", "1"), 12.0, 12.5)
    election.seen(None, 13.0)
    assert election.free_in_s(13.0) == 0, "the holder writes it again"
    assert election.free_in_s(12.0 + RENEW_DEADLINE_S) > 0


class Store:
    """One Lease that is replaced by whoever knows its version."""

    def __init__(self):
        self.lease, self.num_writes = None, 0

    def write(self, wanted):
        version = wanted.get("metadata", {}).get("resourceVersion")
        if version != (self.lease and self.lease["metadata"]["resourceVersion"]):
            return None
        self.num_writes += 1
        self.lease = {**wanted, "metadata": {"resourceVersion": str(self.num_writes)}}
        return self.lease


class Candidate:
    """Reads and writes the Lease, with a pause after each half of a request."""

    def __init__(self, identity, store, offset_s):
        self.election, self.store, self.offset_s = Election(identity), store, offset_s
        self.now, self.loses = offset_s, False  # its own clock; whether the next answer is lost
        self.steps = self._steps()

    def _steps(self):
        while True:
            found = self.store.lease
            yield
            if self.loses:
                continue
            self.election.seen(found, self.now)
            if self.election.free_in_s(self.now) > 0:
                yield
                continue
            while True:
                sent_s = self.now
                wanted = self.election.wanted(CLOCK)
                yield
                written = self.store.write(wanted)  # which may come late
                yield
                if written is None or self.loses:
                    break
                self.election.wrote(written, sent_s, self.now)
                yield

    @property
    def serves(self):
        return self.now < self.election.holds_until_s


@pytest.mark.parametrize("seed", range(20))
def test_no_two_candidates_serve_at_once(seed):
    """Whoever takes its next step, how much time goes by, which answers are lost, and how their clocks differ."""
    chance, store = random.Random(seed), Store()
    candidates = [Candidate(str(i), store, chance.uniform(0, 1e6)) for i in range(3)]
    have_served, elapsed_s = set(), 0.0
    for number in range(4000):
        if number % 100 == 0:
            *awake, _ = chance.sample(candidates, 3)  # one is stopped for a while
        elapsed_s += chance.choice([0, 0, 0.05, 0.3])
        for each in candidates:
            each.now = each.offset_s + elapsed_s
        chosen = chance.choice(awake)
        chosen.loses = chance.random() < 0.1
        next(chosen.steps)
        serving = [each for each in candidates if each.serves]
        assert len(serving) <= 1
        have_served.update(serving)
    assert len(have_served) == len(candidates)


# ---- over HTTP ----


@pytest.fixture
def server(tmp_path, monkeypatch):
    for name, value in SLOW.items():
        monkeypatch.setattr(kubernetes_lease, name, value)
    with LeaseServer(tmp_path) as server:
        yield server


def candidate(server, identity, armed=None):
    """A candidate that a test's process survives."""
    arm = (armed if armed is not None else []).append
    return KubernetesLease(LeaseApi.of_account(server.url, NAME, server.account), identity, arm=arm, end=pytest.fail)


def run(scenario):
    async def limited():
        async with asyncio.timeout(DEADLINE_S):
            return await scenario

    return asyncio.run(limited())


def holder_of(server):
    return server.leases[NAME]["spec"].get("holderIdentity")


def test_a_lease_is_made_renewed_and_released(server):
    async def scenario():
        armed = []
        async with candidate(server, "a", armed) as first:
            await first.taken([])
            taken = server.leases[NAME]
            while int(server.leases[NAME]["metadata"]["resourceVersion"]) < 3:
                await asyncio.sleep(0.01)
            assert holder_of(server) == "a"
            assert server.leases[NAME]["spec"]["acquireTime"] == taken["spec"]["acquireTime"]
        assert holder_of(server) is None
        assert armed[-1] == 0
        assert all(0 < seconds <= SLOW["RENEW_DEADLINE_S"] for seconds in armed[:-1])

    run(scenario())


def test_a_standby_takes_a_lease_that_is_released(server):
    async def scenario():
        async with candidate(server, "b") as second:
            async with candidate(server, "a") as first:
                await first.taken([])
                waiting = asyncio.create_task(second.taken([]))
                await asyncio.sleep(0.2)
                assert not waiting.done()
            await waiting
            assert holder_of(server) == "b"
            assert server.leases[NAME]["spec"]["leaseTransitions"] == 1

    run(scenario())


def test_a_standby_takes_a_lease_that_is_no_more_renewed_after_its_holders_end(server):
    async def scenario():
        armed = []
        first = candidate(server, "a", armed)
        await first.taken([])
        async with candidate(server, "b") as second:
            first._keeping.cancel()  # as if it were killed
            ends_s = time.monotonic() + armed[-1]
            await second.taken([])
            assert time.monotonic() > ends_s
            assert holder_of(server) == "b"
        await first._api.client.aclose()

    run(scenario())


def test_of_two_that_write_at_once_one_has_it(server):
    server.put(NAME, lease("", "0") | {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"})
    server.leases[NAME]["spec"].pop("holderIdentity")

    def other_is_first():
        server.before_write = lambda: None
        server.put(NAME, {**server.leases[NAME], "spec": {"holderIdentity": "other", "leaseDurationSeconds": 60}})

    server.before_write = other_is_first

    async def scenario():
        async with candidate(server, "a") as first:
            waiting = asyncio.create_task(first.taken([]))
            while holder_of(server) != "other":
                await asyncio.sleep(0.01)
            await asyncio.sleep(1.0)
            assert not waiting.done()
            assert holder_of(server) == "other"
            waiting.cancel()

    run(scenario())


def test_what_the_server_refuses_is_told_with_its_status(server, caplog):
    (server.account / "token").write_text("another")

    async def scenario():
        api = LeaseApi.of_account(server.url, NAME, server.account)
        with pytest.raises(LeaseError, match=r"GET.*403"):
            await api.read()
        await api.client.aclose()

    run(scenario())


def test_a_server_that_is_silent_or_gone_is_an_error_in_time(server):
    async def scenario():
        api = LeaseApi.of_account(server.url, NAME, server.account)
        server.answers.clear()
        with pytest.raises(LeaseError, match="GET"):
            await api.read()
        server.answers.set()
        gone = LeaseApi.of_account("https://localhost:1", NAME, server.account)
        with pytest.raises(LeaseError, match="GET"):
            await gone.read()
        await asyncio.gather(api.client.aclose(), gone.client.aclose())

    run(scenario())


@pytest.fixture
def holder(server):
    """A process that has the Lease."""
    argv = [sys.executable, "-c", HOLDER, server.url, NAME, str(server.account)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "taken\n", process.stderr.read()
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_holder_that_cannot_renew_ends_before_another_takes_its_place(server, holder):
    server.answers.clear()
    assert holder.wait(DEADLINE_S) == kubernetes_lease.LOST_EXIT_CODE
    assert f"the Lease is lost, so this coordinator ends: {NAME}: " in holder.stderr.read()


def test_a_holder_whose_lease_another_has_ends(server, holder):
    server.put(NAME, {**server.leases[NAME], "spec": {"holderIdentity": "other", "leaseDurationSeconds": 60}})
    assert holder.wait(DEADLINE_S) == kubernetes_lease.LOST_EXIT_CODE
    assert "other has it" in holder.stderr.read()


def test_a_holder_that_was_stopped_ends_before_it_computes_anything(server, holder):
    holder.send_signal(signal.SIGSTOP)

    async def take():
        async with candidate(server, "b") as second:
            await second.taken([])

    run(take())
    holder.send_signal(signal.SIGCONT)
    assert holder.wait(DEADLINE_S) == -signal.SIGALRM


# ---- settings ----


def test_a_lease_is_a_standbys():
    with pytest.raises(SettingsError, match="needs --standby"):
        check_settings(CoordinatorSettings(model="m", standby_lease=NAME))


def test_outside_of_a_pod_there_is_no_lease(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(SettingsError, match="needs a pod of Kubernetes"):
        LeaseApi.of_this_pod(NAME)
