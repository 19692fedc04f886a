"""Check addresses and ports, and make folders for local sockets.

The folder of a killed process is removed when the next process creates its own.
"""

import errno
import fcntl
import ipaddress
import os
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import psutil

from serving_core.errors import SettingsError

ANY, ANY_OF_IPV4 = "::", "0.0.0.0"
EVERY_ADDRESS: Final = (ANY, ANY_OF_IPV4)

# Errors of bind for an address that this machine does not have.
_NOT_OURS: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def before_port(host: str) -> str:
    """Return a host in the form that stands before `:PORT`: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def listened_on(host: str) -> str:
    """Return a host in the form that sockets take to listen on: without brackets.

    `::` stands for every address of this machine, IPv4 included, or IPv4 alone where the kernel lacks IPv6.
    """
    host = host.strip("[]")
    return ANY_OF_IPV4 if host == ANY and not _has_ipv6() else host


def _has_ipv6() -> bool:
    try:
        socket.socket(socket.AF_INET6).close()
    except OSError as error:
        return error.errno != errno.EAFNOSUPPORT
    return True


class Port(NamedTuple):
    """A port to listen on and the flag that names it; 0 is any free port, and a negative one none."""

    flag: str
    host: str
    port: int


def check_ports(ports: Sequence[Port]) -> None:
    """Raise SettingsError, with the flag and the value, for the first port that cannot be listened on.

    The ports are not held afterwards: listening may still fail.
    """
    with ExitStack() as held:
        for index, port in enumerate(ports):
            if port.port > 0:
                _hold(port, ports[:index], held)


def _hold(port: Port, earlier: Sequence[Port], held: ExitStack) -> None:
    """Listen on every address of the host, as gRPC does; one address of this machine suffices."""
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
    except (OSError, UnicodeError):  # a name without an address, or an invalid one
        return []
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _why(error: OSError, port: Port, earlier: Sequence[Port]) -> str:
    if error.errno != errno.EADDRINUSE:
        return f"cannot be listened on ({error.strerror})"
    if taken_by := next((other.flag for other in earlier if other.port == port.port), None):
        return f"is that of {taken_by} too"
    return f"is in use on {port.host:.80}"


def listening_sockets(host: str, port: int, *, shares_port: bool, backlog: int) -> list[socket.socket]:
    """Return sockets that listen on every address of the host, all at one port; port 0 takes a free one.

    `backlog` is the number of connections that may wait to be accepted. With `shares_port`, other processes of this
    user may share the port if they set it too. Raises SettingsError when the port is in use, or the host no address
    of this machine.
    """
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
    """A port on which processes of one owner listen together, each with SO_REUSEPORT. Linux only.

    The lock ends with the owner's process; until then no other owner gets the port, even while none of the processes
    lives.
    """

    def __init__(self, port: Port) -> None:
        """Lock the port, without listening; port 0 takes a free one. Raises SettingsError if it is in use."""
        family, address = _addresses(port)[0]
        self._sockets: list[socket.socket] = [socket.socket(family)]
        holder = self._sockets[0]
        try:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            holder.bind(address)  # does not listen: connections go to the processes that do
            self.number: int = holder.getsockname()[1]
            self._sockets.append(_lock(self.number))
        except OSError as error:
            self.close()
            raise SettingsError(f"{port.flag} {port.port} {_why(error, port, ())}") from error

    def close(self) -> None:
        """Release the port."""
        for each in self._sockets:
            each.close()


def _lock(number: int) -> socket.socket:
    """Bind a name that only one process of this network namespace can have at a time. Raises OSError if another process
    has it.
    """
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind(f"\0splitserve/port/{number}")
    except OSError:
        lock.close()
        raise
    return lock


# ---- Who can reach an address, and the conditions for listening there: fail closed ----


def check_exposure(host: str, secret_name: str, secret: str) -> None:
    """Raise SettingsError if `host` is not a loopback address and `secret` is empty.

    `secret_name` is the name of its setting, for the message.
    """
    if not secret and not is_loopback(host):
        raise SettingsError(
            f"{host} is not a loopback address: serving there needs a secret, SPLITSERVE_{secret_name.upper()}"
        )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address. Names other than localhost count as reachable."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def is_on_this_machine(host: str) -> bool:
    """Return whether the host is localhost, a loopback address, or an address of an interface of this machine.

    Other names are not resolved and give False.
    """
    if is_loopback(host):
        return True
    try:
        wanted = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    ours = (entry.address for entries in psutil.net_if_addrs().values() for entry in entries)
    return str(wanted) in ours


LONGEST_PATH: Final = 107 if sys.platform == "linux" else 103  # of a socket
PREFIX: Final = "splitserve-sockets-"


def fits(path: Path) -> bool:
    """Return whether a socket can have this path."""
    return len(os.fsencode(path)) <= LONGEST_PATH


class SocketFolder:
    """A private folder for sockets, locked while its process lives. As a context manager, it exists within the context.

    It is locked before it gets its name, so that no process takes it for an abandoned one.
    """

    def __init__(self) -> None:
        """Choose the path; nothing is created. Raises SettingsError if no folder for temporary files is writable."""
        try:
            self._root = Path(tempfile.gettempdir())
        except FileNotFoundError as error:
            raise SettingsError(
                f"{error.strerror}: set TMPDIR to one that can be written to, or give a container --tmpfs /tmp"
            ) from error
        self.path: Final = self._root / f"{PREFIX}{secrets.token_hex(4)}"
        self._lock: int | None = None

    def make(self) -> None:
        """Create the folder, readable by this user alone, and remove abandoned ones of killed processes."""
        _sweep(self._root)
        nameless = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=self._root))
        self._lock = os.open(nameless, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):  # without locks in the file system, no process takes it for an abandoned one either
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        nameless.rename(self.path)

    def __enter__(self) -> Self:
        self.make()
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the folder, if it was created and still exists."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def _sweep(root: Path) -> None:
    for folder in root.glob(f"{PREFIX}*"):
        with suppress(OSError):  # it belongs to another user, or is gone
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
