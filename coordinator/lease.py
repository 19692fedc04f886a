"""Let one of several coordinators of a machine serve at a time."""

import asyncio
import contextlib
import logging
import socket
import sys
import time
from typing import Final, Self

from coordinator.settings import CoordinatorSettings
from serving_core.errors import SettingsError
from serving_core.net.ports import Port, check_ports

logger = logging.getLogger(__name__)

LOOK_S: Final = 0.1
PORTS_S: Final = 10.0  # for the ports of a process that has ended


class Lease:
    """The right to serve at a fleet port, which ends with the process that holds it.

    The lease is a name that one socket of the network namespace can have at a time. Platforms without such names have
    no lease, and a fleet port that the system chooses needs none. An asynchronous context manager.
    """

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._name = f"\0splitserve/coordinator/{settings.fleet_host}:{settings.fleet_port}"
        self._socket = socket.socket(socket.AF_UNIX)
        self._is_needed = sys.platform == "linux" and settings.fleet_port > 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._socket.close()

    def take(self) -> bool:
        """Try to take the lease at once; return False if another process has it. True where no lease is needed."""
        if self._is_needed:
            try:
                self._socket.bind(self._name)
            except OSError:
                return False
        return True

    async def taken(self, ports: list[Port]) -> None:
        """Wait until this process has the lease, without limit; then wait until `ports` are free, at most PORTS_S.

        If ports are still in use after that, returns nevertheless: the start of the server reports them.
        """
        if not self.take():
            logger.info("another coordinator serves: this one is its standby")
            while True:
                await asyncio.sleep(LOOK_S)
                if self.take():
                    break
            logger.warning("the other coordinator has ended: this one takes its place")
        until_s = time.monotonic() + PORTS_S
        while time.monotonic() < until_s:
            with contextlib.suppress(SettingsError):  # which the start of the server raises again
                check_ports(ports)
                return
            await asyncio.sleep(LOOK_S)
