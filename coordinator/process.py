"""Run a coordinator process until SIGTERM or SIGINT, then drain it; a second signal ends the drain.

SIGHUP makes the process reread its file of API keys; without such a file SIGHUP ends the process.
"""

import asyncio
import signal
from typing import TYPE_CHECKING

from coordinator.lease import Lease
from coordinator.server import CoordinatorServer
from coordinator.settings import CoordinatorSettings
from serving_core.flags import settings_command
from serving_core.net.descriptors import kept_spares
from serving_core.process.heap import collect_seldom
from serving_core.process.run import ending_signals, run_process
from serving_core.tasks import first_to_end

if TYPE_CHECKING:  # its imports take time
    from coordinator.kubernetes_lease import KubernetesLease


def run(settings: CoordinatorSettings) -> None:
    """Run a coordinator until it has been stopped by a signal and is drained.

    Exits with code 2 and a one-sentence message when the coordinator cannot start.
    """
    run_process("coordinator", "coordinator", settings.log, lambda: _serve(settings))


async def _serve(settings: CoordinatorSettings) -> None:
    async with kept_spares(), _lease(settings) as lease:
        await _serve_until_stopped(CoordinatorServer(settings), lease, settings)


def _lease(settings: CoordinatorSettings) -> "Lease | KubernetesLease":
    if not settings.standby_lease:
        return Lease(settings)
    from coordinator.kubernetes_lease import KubernetesLease, LeaseApi

    return KubernetesLease(LeaseApi.of_this_pod(settings.standby_lease))


async def _serve_until_stopped(
    server: CoordinatorServer, lease: "Lease | KubernetesLease", settings: CoordinatorSettings
) -> None:
    stopping, forced = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in ending_signals():  # handled before the start, since clients may be served at once
        loop.add_signal_handler(number, lambda: forced.set() if stopping.is_set() else stopping.set())
    if settings.api_keys_file:
        loop.add_signal_handler(signal.SIGHUP, server.reread_api_keys)
    if settings.standby:
        await first_to_end(stopping.wait(), lease.taken(server.ports))
        if stopping.is_set():
            return
    elif isinstance(lease, Lease):
        lease.take()  # whoever has it instead has the ports too, which the start reports
    await server.start()
    collect_seldom()
    try:
        await first_to_end(stopping.wait(), server.open())
        await first_to_end(stopping.wait(), server.wait())
        await first_to_end(server.drain(), forced.wait(), server.wait())
    finally:
        await server.stop()


main = settings_command(
    CoordinatorSettings, run, name="coordinator", help="The process that clients and nodes connect to."
)
