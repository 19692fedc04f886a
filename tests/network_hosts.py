"""Hosts of a network on this machine: network namespaces, each with an address of its own, on one bridge.

Each host has one interface, eth0, and knows the others by name. This machine is on the bridge too, which has a
namespace of its own: what this machine filters, as container engines have it do, does not concern it. Takes root and
iproute2. Names bear the id of the process; what a killed process has left is removed by the next.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

DEADLINE_S = 120.0
ETC = Path("/etc/netns")  # files that take the place of those in /etc, by namespace
OURS = re.compile(r"splitserve-(\d+)-.*")
SWITCH = "switch"  # the namespace of the bridge
NUM_NETS = 512  # of 254 hosts each, in the range that is set aside for tests of networks (RFC 2544)


class NoNetwork(Exception):
    """Why this machine cannot have such hosts."""


@dataclass(frozen=True)
class Shape:
    """How a link is, in tc's words: with netem, or where the kernel has none, with something that does like it."""

    netem: str
    otherwise: str


SLOW = Shape("netem delay 40ms 5ms rate 32mbit", "tbf rate 32mbit burst 16kb latency 400ms")
# A queue too short for a burst loses packets of it.
LOSSY = Shape("netem loss 8%", "tbf rate 32mbit burst 3kb limit 24kb")


class Network:
    """The hosts, by name; `network` makes it."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self.net = _free_net()

    def address(self, name: str) -> str:
        return f"{self.net}.{self.names.index(name) + 2}"

    def on(self, name: str) -> list[str]:
        """What a program is started by, to run on a host."""
        return ["ip", "netns", "exec", self.namespace(name)]

    def namespace(self, name: str) -> str:
        return f"splitserve-{os.getpid()}-{name}"

    @contextlib.contextmanager
    def cut(self, name: str) -> Iterator[None]:
        """Within it nothing comes to a host, nor from it."""
        at_switch = ["ip", "-n", self.namespace(SWITCH), "link", "set", name]
        _run(*at_switch, "down")
        try:
            yield
        finally:
            _run(*at_switch, "up")

    @contextlib.contextmanager
    def shaped(self, name: str, shape: Shape) -> Iterator[None]:
        """Within it the link of a host is worse, both ways."""
        ends = self._ends(name)
        try:
            for tc, device in ends:
                try:
                    _run(*tc, "qdisc", "add", *device, "root", *shape.netem.split())
                except NoNetwork:
                    _run(*tc, "qdisc", "add", *device, "root", *shape.otherwise.split())
            yield
        finally:
            for tc, device in ends:
                with contextlib.suppress(NoNetwork):  # it was never shaped
                    _run(*tc, "qdisc", "del", *device, "root")

    def num_dropped(self, name: str) -> int:
        """Packets that a host's link has lost, both ways, since it was shaped."""
        shown = [json.loads(_run(*tc, "-s", "-j", "qdisc", "show", *device)) for tc, device in self._ends(name)]
        return sum(queue["drops"] for queues in shown for queue in queues if queue.get("root"))

    def _ends(self, name: str) -> list[tuple[list[str], list[str]]]:
        inside, switch = self.namespace(name), self.namespace(SWITCH)
        return [(["tc", "-n", inside], ["dev", "eth0"]), (["tc", "-n", switch], ["dev", name])]


@contextlib.contextmanager
def network(names: Sequence[str]) -> Iterator[Network]:
    """Raises NoNetwork, and leaves nothing behind."""
    if sys.platform != "linux" or os.geteuid() != 0:
        raise NoNetwork("network namespaces take Linux, and root")
    if not (shutil.which("ip") and shutil.which("tc")):
        raise NoNetwork("there is no ip or no tc: they are in iproute2")
    _sweep()
    hosts = Network(names)
    try:
        _make(hosts)
        yield hosts
    finally:
        _remove(str(os.getpid()))


def _make(hosts: Network) -> None:
    switch, here = hosts.namespace(SWITCH), _link_here(str(os.getpid()))
    at_switch = ["ip", "-n", switch, "link"]
    _run("ip", "netns", "add", switch)
    _run(*at_switch, "add", "name", "bridge", "type", "bridge")
    _run(*at_switch, "set", "bridge", "up")
    _run("ip", "link", "add", here, "type", "veth", "peer", "name", "clients", "netns", switch)
    _run("ip", "address", "add", f"{hosts.net}.1/24", "dev", here)
    _run("ip", "link", "set", here, "up")
    _run(*at_switch, "set", "clients", "master", "bridge", "up")
    known = "".join(f"{hosts.address(name)} {name}\n" for name in hosts.names)
    for name in hosts.names:
        inside = hosts.namespace(name)
        (ETC / inside).mkdir(parents=True)
        (ETC / inside / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
        _run("ip", "netns", "add", inside)
        _run(*at_switch, "add", name, "type", "veth", "peer", "name", "eth0", "netns", inside)
        _run(*at_switch, "set", name, "master", "bridge", "up")
        _run("ip", "-n", inside, "address", "add", f"{hosts.address(name)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _run("ip", "-n", inside, "link", "set", device, "up")


def _sweep() -> None:
    """Removes what processes have left that are gone."""
    found = [*_run("ip", "netns", "list").split(), *(path.name for path in ETC.glob("*"))]
    for pid in {match[1] for name in found if (match := OURS.fullmatch(name))}:
        if not psutil.pid_exists(int(pid)):
            _remove(pid)


def _remove(pid: str) -> None:
    """What the process with this id has made."""
    if _link_here(pid) in psutil.net_if_addrs():
        _run("ip", "link", "delete", _link_here(pid))
    for name in _run("ip", "netns", "list").split():
        if name.startswith(f"splitserve-{pid}-"):
            _run("ip", "netns", "delete", name)
    for folder in ETC.glob(f"splitserve-{pid}-*"):
        shutil.rmtree(folder)


def _link_here(pid: str) -> str:
    return f"splits{pid}"


def _free_net() -> str:
    """The first three numbers of a network that this machine is not on."""
    addresses = [each.address for device in psutil.net_if_addrs().values() for each in device]
    numbers = [(os.getpid() + step) % NUM_NETS for step in range(NUM_NETS)]
    nets = [f"198.{18 + number // 256}.{number % 256}" for number in numbers]
    return next(net for net in nets if not any(address.startswith(f"{net}.") for address in addresses))


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode != 0:
        raise NoNetwork(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
