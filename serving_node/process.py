"""Run a node process: start, serve, drain on a signal, stop."""

import asyncio
import gc
import logging
from functools import partial
from typing import Final, Protocol

import click

from serving_core.errors import RankLost, SettingsError
from serving_core.flags import settings_command
from serving_core.process.cpus import divide_cpus, parse_cpus, pin
from serving_core.process.extras import require
from serving_core.process.run import ending_signals, run_process
from serving_node.exposure import check_network
from serving_node.link import FleetLink, Node
from serving_node.ranks.leading import die, end_at_once
from serving_node.ranks.processes import check_world, start_followers, started_rank
from serving_node.settings import PACKAGES, NodeSettings
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


def node_command(role: str) -> click.Command:
    """Return the command line of a node that begins in this role."""
    help = f"Run one node that begins as {role}."
    return settings_command(NodeSettings, partial(run_node, role), name=role, help=help)


def run_node(role: str, settings: NodeSettings) -> None:
    """Run one rank of a node until SIGTERM, pinned to its share of the CPUs.

    Rank 0 starts the other ranks, unless all were started together, as torchrun does.
    """
    try:
        size, rank = settings.engine.num_ranks, started_rank() or 0
    except SettingsError as error:
        raise click.UsageError(str(error)) from error
    node_name = settings.link.name_for(role)
    name = f"{node_name}.{rank}" if rank else node_name

    async def ranked() -> None:
        require("node")
        check_world(settings.engine)
        check_network(settings)
        from serving_core.node.needs import check_model  # needs packages of the extra `node`
        from serving_node.draft_model import check_draft_model

        check_model(settings.engine)
        check_draft_model(settings)
        if started_rank() is None and size > 1:
            start_followers(PACKAGES[role], settings, node_name)
        if cpus := settings.engine.cpus:
            pin(divide_cpus(parse_cpus(cpus), size)[rank])
        gc.disable()
        from serving_node.serve import serve_node  # imports torch, which counts the allowed cores

        gc.freeze()  # imported modules stay: no need to scan them in each collection
        gc.enable()
        try:
            await serve_node(settings, role, name)
        except RankLost as error:
            die(error)

    run_process(role, name, settings.link.log, ranked)


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
