"""Addresses of the torch.distributed transport: dist://HOST:PORT to bind, dist://IP:PORT/TOKEN to dial.

The token is a random secret of one Listener. It travels in tickets, so that only those who hold one get past the
handshake.
"""

import ipaddress
import re
import secrets
import socket
from dataclasses import dataclass

from kv_transfer.endpoints import MAX_PORT, address_of_interface
from kv_transfer.errors import TransferError
from serving_core.errors import SettingsError
from serving_core.ports import before_port

TOKEN_BYTES = 16

_BIND = re.compile(r"dist://(?:\[(?P<v6>[^\[\]/]+)\]|(?P<host>[^\[\]/:]+)):(?P<port>\*|\d{1,5})")
_DIAL = re.compile(r"dist://(?:\[(?P<v6>[^\[\]/]+)\]|(?P<host>[^\[\]/:]+)):(?P<port>\d{1,5})/(?P<token>[0-9a-f]{32})")


@dataclass(frozen=True, slots=True)
class DistAddress:
    """Where one Listener is found."""

    ip: str
    port: int
    token: bytes

    def __str__(self) -> str:
        return f"dist://{before_port(self.ip)}:{self.port}/{self.token.hex()}"

    @classmethod
    def parse(cls, text: str) -> "DistAddress":
        """The inverse of str(). Raises TransferError on anything else."""
        match = _DIAL.fullmatch(text)
        if match is None or not 1 <= int(match["port"]) <= MAX_PORT:
            raise TransferError("the ticket's address cannot be dialled")
        ip = match["v6"] or match["host"]
        try:
            ipaddress.ip_address(ip)
        except ValueError as error:
            raise TransferError("the ticket's address cannot be dialled") from error
        return cls(ip, int(match["port"]), bytes.fromhex(match["token"]))


def listen(bind: str) -> tuple[socket.socket, DistAddress]:
    """A listening socket on dist://HOST:PORT, where HOST is an address, a name or an interface, and PORT may be * for
    any free one. Raises SettingsError when it cannot be used."""
    match = _BIND.fullmatch(bind)
    if match is None:
        raise SettingsError(f"cannot listen for KV blocks on {bind}: it must be dist://HOST:PORT")
    try:
        family, ip = _resolve(match["v6"] or match["host"])
        if ipaddress.ip_address(ip).is_unspecified:
            raise SettingsError(f"{bind} names no host that senders could dial: give an address or an interface")
        return _listen(family, ip, 0 if match["port"] == "*" else int(match["port"]))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SettingsError(f"cannot listen for KV blocks on {bind}: {reason}") from error


def _listen(family: socket.AddressFamily, ip: str, port: int) -> tuple[socket.socket, DistAddress]:
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((ip, port))
        listening.listen()
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    return listening, DistAddress(ip, listening.getsockname()[1], secrets.token_bytes(TOKEN_BYTES))


def _resolve(host: str) -> tuple[socket.AddressFamily, str]:
    if host == "*":
        return socket.AF_INET, "0.0.0.0"
    families = (socket.AF_INET, socket.AF_INET6)
    found = socket.getaddrinfo(address_of_interface(host) or host, None, type=socket.SOCK_STREAM)
    by_family = {family: str(place[0]) for family, _, _, _, place in reversed(found)}
    family = next(family for family in families if family in by_family)
    return family, by_family[family]
