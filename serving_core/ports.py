"""Hosts and ports: whether a process can listen on those it is told, asked before it does, and who can reach them."""

import errno
import ipaddress
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

import psutil

from serving_core.errors import SettingsError

ANY, ANY_OF_IPV4 = "::", "0.0.0.0"
EVERY_ADDRESS: Final = (ANY, ANY_OF_IPV4)

# What bind raises for an address that this machine does not have.
_NOT_OURS: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def before_port(host: str) -> str:
    """A host as it stands before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def listened_on(host: str) -> str:
    """A host as sockets take it, without brackets. `::` is every address of this machine: those of IPv4 too, and they
    alone where its kernel has no IPv6."""
    host = host.strip("[]")
    return ANY_OF_IPV4 if host == ANY and not _has_ipv6() else host


def _has_ipv6() -> bool:
    try:
        socket.socket(socket.AF_INET6).close()
    except OSError as error:
        return error.errno != errno.EAFNOSUPPORT
    return True


class Port(NamedTuple):
    """A port to be listened on and the flag that names it; 0 is any free one, and a negative one none."""

    flag: str
    host: str
    port: int


def check_ports(ports: Sequence[Port]) -> None:
    """Raises SettingsError, with the flag and the value, for the first port that cannot be listened on. Nobody holds
    the ports afterwards: what listens must still expect a refusal."""
    with ExitStack() as held:
        for index, port in enumerate(ports):
            if port.port > 0:
                _hold(port, ports[:index], held)


def _hold(port: Port, earlier: Sequence[Port], held: ExitStack) -> None:
    """Listens on every address of the host, as gRPC does; it is enough when one of them is this machine's."""
    num_held = 0
    for family, address in _addresses(port):
        dualstack = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        try:
            held.enter_context(socket.create_server(address, family=family, dualstack_ipv6=dualstack))
            num_held += 1
        except OSError as error:
            if error.errno not in _NOT_OURS:
                raise SettingsError(f"{port.flag} {port.port} {_why(error, port, earlier)}") from error
    if num_held == 0:
        raise SettingsError(f"{port.flag} {port.port}: {port.host[:80]!r} is not an address of this machine")


def _addresses(port: Port) -> list[tuple[socket.AddressFamily, Any]]:
    try:
        found = socket.getaddrinfo(listened_on(port.host), port.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):  # a name that stands for no address, or cannot
        return []
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _why(error: OSError, port: Port, earlier: Sequence[Port]) -> str:
    if error.errno != errno.EADDRINUSE:
        return f"cannot be listened on ({error.strerror})"
    if taken_by := next((other.flag for other in earlier if other.port == port.port), None):
        return f"is that of {taken_by} too"
    return f"is in use on {port.host:.80}"


def listening_sockets(host: str, port: int, *, shares_port: bool, backlog: int) -> list[socket.socket]:
    """Sockets that listen on every address of the host, all at one port; 0 takes a free one. Others of this user may
    share it, if they say so too. Raises SettingsError."""
    found: list[socket.socket] = []
    for family, (address, *others) in _addresses(Port("", host, port)):
        number = found[0].getsockname()[1] if found else port
        dualstack = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        options: dict[str, Any] = {"family": family, "backlog": backlog, "dualstack_ipv6": dualstack}
        try:
            found.append(socket.create_server((address, number, *others[1:]), reuse_port=shares_port, **options))
        except OSError as error:
            if error.errno not in _NOT_OURS:
                for each in found:
                    each.close()
                raise SettingsError(f"cannot listen on {before_port(host)}:{port}: port {port} is in use") from error
    if not found:
        raise SettingsError(f"cannot listen on {before_port(host)}:{port}: it is not an address of this machine")
    return found


class SharedPort:
    """A port that processes of one owner listen on together, each with SO_REUSEPORT. Its lock ends with the owner's
    process; no other owner gets the port meanwhile, even while none of the processes lives. Linux only."""

    def __init__(self, port: Port) -> None:
        """0 takes a free one. Raises SettingsError."""
        family, address = _addresses(port)[0]
        self._sockets: list[socket.socket] = [socket.socket(family)]
        holder = self._sockets[0]
        try:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            holder.bind(address)  # and does not listen: connections go to those who do
            self.number: int = holder.getsockname()[1]
            self._sockets.append(_lock(self.number))
        except OSError as error:
            self.close()
            raise SettingsError(f"{port.flag} {port.port} {_why(error, port, ())}") from error

    def close(self) -> None:
        """Gives it up."""
        for each in self._sockets:
            each.close()


def _lock(number: int) -> socket.socket:
    """A name that one process of this network namespace can have at a time. Raises OSError where another one has it."""
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind(f"\0splitserve/port/{number}")
    except OSError:
        lock.close()
        raise
    return lock


# ---- Who can reach an address, and what it takes to listen there: fail closed ----


def check_exposure(host: str, secret_name: str, secret: str) -> None:
    """Raises SettingsError for an address off loopback that no secret protects."""
    if not secret and not is_loopback(host):
        raise SettingsError(
            f"{host} is not a loopback address: serving there needs a secret, SPLITSERVE_{secret_name.upper()}"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address. Names other than localhost count as reachable."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def is_on_this_machine(host: str) -> bool:
    """Whether it is a loopback address, or one that an interface of this machine has."""
    if is_loopback(host):
        return True
    try:
        wanted = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    ours = (entry.address for entries in psutil.net_if_addrs().values() for entry in entries)
    return str(wanted) in ours
