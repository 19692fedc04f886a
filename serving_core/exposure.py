"""Who can reach an address, and what it takes to listen there: fail closed."""

import ipaddress

import psutil

from serving_core.errors import SettingsError


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
