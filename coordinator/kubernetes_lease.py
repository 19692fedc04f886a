"""Let one of several coordinators of a Kubernetes namespace serve at a time, by a Lease of coordination.k8s.io/v1.

As in client-go's leader election, every change is a write with the resourceVersion of what was read, of which the
server accepts one, and a Lease expires by the monotonic clock of whoever observes it, since wall clocks differ. The
holder ends itself at RENEW_DEADLINE_S after it sent its last renewal; another coordinator waits LEASE_S after it has
seen that renewal, which is later, and so never serves beside it.
"""

import asyncio
import logging
import os
import secrets
import signal
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NoReturn, Self

import httpx2

from serving_core.errors import SettingsError
from serving_core.net.backoff import Reminder
from serving_core.net.ports import Port, before_port

logger = logging.getLogger(__name__)

LEASE_S: Final = 2
RENEW_DEADLINE_S: Final = 1.8
LAST_WORDS_S: Final = 0.1  # before the deadline, to log why this process ends
RETRY_S: Final = 0.5  # between two renewals of the holder, or two looks of a standby
REQUEST_S: Final = 0.6
NOT_FOUND: Final = 404
CONFLICT: Final = 409
LOST_EXIT_CODE: Final = 1
ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")

Object = dict[str, Any]


class LeaseError(Exception):
    """Raised when the API server of Kubernetes refuses a request, cannot be reached, or returns no Lease."""


class Election:
    """Decide from a Lease, as it is seen from time to time, whether it may be taken, and what to write. Pure."""

    def __init__(self, identity: str) -> None:
        """Create the election of a candidate that has seen no Lease yet."""
        self.identity: Final = identity
        self._lease: Object | None = None
        self._version: object = ""  # of the Lease; None: there is none; "": none has been looked for
        self._changed_s = 0.0  # when the latest change was seen, in monotonic time
        self.holds_until_s = 0.0  # in monotonic time; 0: never held

    def seen(self, lease: Object | None, now: float) -> None:
        """Note the Lease as it has been read or written by `now`; None: there is none."""
        version = None if lease is None else _version(lease)
        if version != self._version:
            self._version, self._changed_s = version, now
        self._lease = lease

    def wrote(self, lease: Object, sent_s: float, now: float) -> None:
        """Note the Lease as the server has accepted it from this candidate, in a request that was sent at `sent_s`."""
        self.seen(lease, now)
        self.holds_until_s = sent_s + RENEW_DEADLINE_S

    @property
    def holder(self) -> str:
        """Return the identity of the holder; empty when the Lease is free."""
        return str(self._spec.get("holderIdentity") or "")

    def free_in_s(self, now: float) -> float:
        """Return for how long the Lease may not be taken, in seconds; 0 or less when it may.

        One that is missing may have been deleted while its holder serves.
        """
        if now < self.holds_until_s if self._lease is None else self.holder in ("", self.identity):
            return 0.0
        duration_s = self._spec.get("leaseDurationSeconds")
        return self._changed_s + max(LEASE_S, duration_s if isinstance(duration_s, int) else LEASE_S) - now

    def wanted(self, clock: datetime) -> Object:
        """Return the Lease with which this candidate takes or renews it. `clock` is what readers see as the time."""
        spec, stamp = dict(self._spec), clock.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        if self.holder != self.identity:
            num_before = spec.get("leaseTransitions") or 0
            spec |= {"acquireTime": stamp, "leaseTransitions": num_before + (self._lease is not None)}
        spec |= {"holderIdentity": self.identity, "leaseDurationSeconds": LEASE_S, "renewTime": stamp}
        return {**(self._lease or {}), "spec": spec}

    def released(self) -> Object:
        """Return the Lease without a holder."""
        spec = {name: value for name, value in self._spec.items() if name != "holderIdentity"}
        return {**(self._lease or {}), "spec": spec}

    @property
    def _spec(self) -> Object:
        return (self._lease or {}).get("spec") or {}


def _version(lease: Object) -> object:
    return lease["metadata"].get("resourceVersion")


@dataclass(frozen=True, slots=True)
class LeaseApi:
    """Read and write one Lease. Methods raise LeaseError."""

    url: str  # of the API server of Kubernetes
    name: str
    account: Path  # folder with the `token`, the `namespace` and the `ca.crt` of a service account
    client: httpx2.AsyncClient

    @classmethod
    def of_this_pod(cls, name: str) -> Self:
        """Return the API for a Lease in this pod's namespace, by its service account.

        Raises SettingsError outside of a pod, and in one that has no service account.
        """
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host or not (ACCOUNT / "token").exists():
            raise SettingsError("standby_lease needs a pod of Kubernetes whose service account is mounted")
        return cls.of_account(f"https://{before_port(host)}:{port}", name, ACCOUNT)

    @classmethod
    def of_account(cls, url: str, name: str, account: Path) -> Self:
        """Return the API for a Lease in the namespace of a service account."""
        context = ssl.create_default_context(cafile=account / "ca.crt")
        return cls(url, name, account, httpx2.AsyncClient(verify=context, timeout=REQUEST_S, trust_env=False))

    async def read(self) -> Object | None:
        """Return the Lease, or None when there is none."""
        return await self._ask("GET", f"/{self.name}")

    async def write(self, lease: Object) -> Object | None:
        """Create a Lease that was not read, or replace the one that was read. None if another has changed it since."""
        if "metadata" in lease:
            return await self._ask("PUT", f"/{self.name}", lease)
        head = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": self.name}}
        return await self._ask("POST", "", {**head, **lease})

    async def _ask(self, method: str, path: str, lease: Object | None = None) -> Object | None:
        try:
            namespace = (self.account / "namespace").read_text().strip()
            token = (self.account / "token").read_text().strip()  # the kubelet replaces it from time to time
            url = f"{self.url}/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases{path}"
            async with asyncio.timeout(REQUEST_S):
                response = await self.client.request(
                    method, url, json=lease, headers={"authorization": f"Bearer {token}"}
                )
            if response.status_code in (NOT_FOUND, CONFLICT):
                return None
            found: Object = response.raise_for_status().json()
            _version(found)
        except TimeoutError as error:
            raise LeaseError(f"{method}: no answer within {REQUEST_S:g} s") from error
        except (OSError, httpx2.HTTPError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise LeaseError(f"{method}: {error or type(error).__name__}") from error
        return found


def end_process(why: str) -> NoReturn:
    """End this process, as if it were killed: its API servers and nodes go on at the next coordinator."""
    logger.critical("the Lease is lost, so this coordinator ends: %s", why)
    logging.shutdown()
    os._exit(LOST_EXIT_CODE)


def arm_alarm(seconds: float) -> None:
    """Let the kernel end this process in so many seconds, in place of what it was told before; 0: not at all.

    A process that was stopped meanwhile ends before it computes anything.
    """
    signal.setitimer(signal.ITIMER_REAL, seconds)


class KubernetesLease:
    """The right to serve, which this process has from `taken` until it ends. An asynchronous context manager."""

    def __init__(
        self,
        api: LeaseApi,
        identity: str = "",
        *,
        arm: Callable[[float], None] = arm_alarm,
        end: Callable[[str], object] = end_process,
    ) -> None:
        """Create a candidate, of a random identity unless one is given.

        `end` is called with the reason when the Lease is lost. `arm` sees to it, whatever this process does by then.
        """
        self._api = api
        self._election = Election(identity or f"{os.uname().nodename}_{secrets.token_hex(8)}")
        self._arm, self._end = arm, end
        self._is_known = False  # whether the Lease has been read since the last failure
        self._keeping: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Release the Lease, so that a standby need not wait for its end."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
            try:
                if await self._api.write(self._election.released()) is None:  # a renewal was under way
                    await self._release_again()
            except LeaseError as error:
                logger.warning("the Lease %s is not released, and expires: %s", self._api.name, error)
            self._arm(0)
        await self._api.client.aclose()

    async def _release_again(self) -> None:
        self._election.seen(await self._api.read(), time.monotonic())
        if self._election.holder == self._election.identity:
            await self._api.write(self._election.released())

    async def taken(self, _: list[Port]) -> None:
        """Wait until this process has the Lease, without limit. From then on it is renewed."""
        reminder = Reminder()
        while True:
            try:
                if await self._try():
                    break
                why = f"another coordinator serves: this one is its standby ({self._election.holder})"
            except LeaseError as error:
                why = f"the Lease {self._api.name} cannot be read or written: {error}"
            if reminder.is_due(why, time.monotonic()):
                logger.info(why)
            await asyncio.sleep(min(RETRY_S, max(0.0, self._election.free_in_s(time.monotonic())) or RETRY_S))
        logger.info("this coordinator has the Lease %s, as %s", self._api.name, self._election.identity)
        self._keeping = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        """Renew the Lease until it cannot be renewed in time, or another has it."""
        why = "it was not renewed in time"
        while (left_s := self._election.holds_until_s - LAST_WORDS_S - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(left_s):
                    await asyncio.sleep(RETRY_S)
                    if not await self._try() and self._election.free_in_s(time.monotonic()) > 0:
                        why = f"{self._election.holder} has it"
                        break
            except LeaseError as error:
                why = str(error)
            except TimeoutError:
                break
        self._end(f"{self._api.name}: {why}")

    async def _try(self) -> bool:
        """Take or renew the Lease if it may be taken, and return whether this process has it. Raises LeaseError."""
        election, was_known, self._is_known = self._election, self._is_known, False
        if not was_known or election.holder != election.identity:
            election.seen(await self._api.read(), time.monotonic())
            if election.free_in_s(time.monotonic()) > 0:
                return False
        sent_s = time.monotonic()
        written = await self._api.write(election.wanted(datetime.now(UTC)))
        if written is None:  # another has changed the Lease: read it again
            return False
        election.wrote(written, sent_s, time.monotonic())
        self._arm(max(1e-3, election.holds_until_s - time.monotonic()))
        self._is_known = True
        return True
