"""Run a node until a signal ends it: attach, drain, stop. The same for every engine."""

import asyncio
import logging
from typing import Final, Protocol

from serving_core.process.run import ending_signals
from serving_node.link import FleetLink, Node
from serving_node.ranks.leading import end_at_once
from serving_node.watchdog import StuckForGood

logger = logging.getLogger(__name__)

IN_FLIGHT_S: Final = 0.3  # until the coordinator knows of a drain and its earlier commands are here
DETACH_S: Final = 2.0  # for the last events to be written
LAST_STEP_S: Final = 10.0  # for the running step, whose result is not reported any more


class ServedNode(Node, Protocol):
    """Define a node as its process sees it."""

    async def run(self) -> None:
        """Run steps until cancelled."""

    def drain(self) -> None:
        """Ask for no new attempts from the next heartbeat on."""

    async def idle(self) -> None:
        """Return when no attempt is left."""


async def serve(node: ServedNode, link: FleetLink, *, drain_s: float) -> None:
    """Run until SIGTERM, SIGINT or SIGHUP, then let running requests finish for at most `drain_s` seconds.

    A second signal ends the wait. Raises what the node or its link raises. A node whose step does not end exits the
    process, since its engine cannot be waited for.
    """
    stopping = asyncio.Event()
    drained = asyncio.create_task(_drain(node, link, stopping, drain_s))
    loop = asyncio.get_running_loop()
    for number in ending_signals():
        loop.add_signal_handler(number, lambda: drained.cancel() if stopping.is_set() else stopping.set())
    attached = asyncio.create_task(link.run(node))
    tasks = [asyncio.create_task(node.run()), attached, drained]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if not task.cancelled():  # a second signal cancels the drain
                task.result()
        link.stop()
        await asyncio.wait([attached], timeout=DETACH_S)
    except StuckForGood as error:
        end_at_once(f"this node ends: {error}")
    finally:
        for task in tasks:
            task.cancel()
        try:
            async with asyncio.timeout(LAST_STEP_S):
                await asyncio.gather(*tasks, return_exceptions=True)
        except TimeoutError:
            end_at_once(f"this node ends: its last step has not ended within {LAST_STEP_S:g} s")
    logger.info("stopped")


async def _drain(node: ServedNode, link: FleetLink, stopping: asyncio.Event, drain_s: float) -> None:
    """Wait for the signal, then for the requests."""
    await stopping.wait()
    logger.info("draining: requests have %g s to end here or to move to other nodes", drain_s)
    node.drain()
    link.send(heartbeat=node.heartbeat())
    await asyncio.sleep(IN_FLIGHT_S)
    try:
        async with asyncio.timeout(drain_s):
            await node.idle()
    except TimeoutError:
        logger.warning("requests still running after %.0f s: stopping all the same", drain_s)
