"""Where a node's ranks receive, as the flags tell it. Torch-free."""

import socket
from typing import Final

import psutil

from kv_transfer.ticket import MAX_TP
from serving_core.errors import SettingsError
from serving_core.ports import before_port

KV_TRANSPORTS = ("zmq", "torch_dist")
MAX_PORT: Final = 65535
_SCHEMES = {"zmq": ("tcp", "ipc"), "torch_dist": ("dist",)}


def endpoint_of(kv_transport: str, kv_bind: str, rank: int) -> str:
    """The endpoint of one rank: a free port of the loopback where kv_bind is empty. A port or a path of its own for
    each rank: HOST:PORT + rank, PATH.rank. An IPv6 address gets its brackets, an interface's name becomes its address.
    Raises SettingsError for an endpoint of another transport."""
    schemes = _SCHEMES[kv_transport]
    if not kv_bind:
        return f"{schemes[0]}://127.0.0.1:*"
    scheme, _, place = kv_bind.partition("://")
    if scheme not in schemes or not place:
        known = " or ".join(f"{each}://..." for each in schemes)
        raise SettingsError(f"--kv-bind {kv_bind} is no endpoint of {kv_transport}: {known}")
    if scheme == "ipc":
        return f"{kv_bind}.{rank}" if rank else kv_bind
    host, _, port = place.rpartition(":")
    host = before_port(address_of_interface(host) or host)
    if port == "*":
        return f"{scheme}://{host}:*"
    if not port.isdecimal():
        raise SettingsError(f"--kv-bind {kv_bind} has no port: a number, or * for any free one")
    number = int(port) + rank if int(port) else 0
    if number > MAX_PORT:
        raise SettingsError(f"--kv-bind {kv_bind}: rank {rank} has the port {number}, over {MAX_PORT}")
    return f"{scheme}://{host}:{number}"


def address_of_interface(name: str) -> str | None:
    """That of IPv4 where it has one, else one of IPv6 that others than its own link can dial; None where there is
    neither."""
    entries = [entry for entry in psutil.net_if_addrs().get(name, ()) if "%" not in entry.address]
    of_family = {entry.family: entry.address for entry in reversed(entries)}
    return of_family.get(socket.AF_INET) or of_family.get(socket.AF_INET6)


def host_of(endpoint: str) -> str | None:
    """The host that an endpoint listens on, None where only this machine can reach it."""
    scheme, _, place = endpoint.partition("://")
    return None if scheme == "ipc" else place.rpartition(":")[0]


def annex_address_of(kv_transport: str, kv_bind: str) -> tuple[str, int]:
    """Host and port at which a node holds annexes: the port behind those that as many ranks as a node can have would
    take, and 0, any free one, where kv_bind has no port. Raises SettingsError as endpoint_of does, and where that is
    no port."""
    endpoint = endpoint_of(kv_transport, kv_bind, 0)
    host, port = host_of(endpoint), endpoint.rpartition(":")[2]
    if host is None or port in ("*", "0"):
        return host or "127.0.0.1", 0
    if (number := int(port) + MAX_TP) > MAX_PORT:
        raise SettingsError(f"--kv-bind {kv_bind}: annexes take the port {MAX_TP} above, {number}, over {MAX_PORT}")
    return host, number
