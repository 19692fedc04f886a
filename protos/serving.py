"""The life of a node process: start, serve, drain on a signal, stop."""

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

import click
import uvloop

from engine.cpus import divide_cpus, parse_cpus, pin
from engine.errors import ModelError, SettingsError
from engine.extras import require
from engine.settings import EngineSettings
from engine.telemetry import configure_logging
from protos.attach import FleetLink, LinkSettings, Node
from protos.rank_processes import check_world, start_followers, started_rank
from protos.rank_stream import RankLost
from protos.ranks import die

logger = logging.getLogger(__name__)

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
IN_FLIGHT_S: Final = 0.3  # until the coordinator has heard of a drain, and what it had sent before is here
DETACH_S: Final = 2.0  # for the last events to go out


class ServedNode(Node, Protocol):
    """A node as its process sees it."""

    async def run(self) -> None:
        """Steps until cancelled."""

    def drain(self) -> None:
        """Lets its heartbeats ask for no new attempts."""

    async def idle(self) -> None:
        """Returns when no attempt is left."""


class NodeSettings(Protocol):
    """What both roles can be told."""

    @property
    def engine(self) -> EngineSettings: ...
    @property
    def link(self) -> LinkSettings: ...


def run_node(role: str, settings: NodeSettings, main: Callable[[str], Coroutine[Any, Any, None]]) -> None:
    """run_process for main(name) of one rank of a node, pinned to its share of the CPUs. Rank 0 starts the others,
    unless all were started together, as torchrun does."""
    size, rank = settings.engine.tensor_parallel_size, started_rank() or 0
    node_name = settings.link.name_for(role)
    name = f"{node_name}.{rank}" if rank else node_name

    async def ranked() -> None:
        require("node")
        check_world(size)
        if started_rank() is None and size > 1:
            start_followers(f"{role}_node", settings, node_name)
        if cpus := settings.engine.cpus:
            pin(divide_cpus(parse_cpus(cpus), size)[rank])
        await main(name)

    run_process(role, name, settings.link.log_level, ranked)


def run_process(role: str, name: str, log_level: str, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs main on an event loop. Where the process cannot start or is refused, one sentence goes to stderr and it
    exits with code 2."""
    configure_logging(role, name, log_level)
    try:
        uvloop.run(main())
    except (SettingsError, ModelError) as error:
        click.echo(f"{name}: {error}", err=True)
        sys.exit(2)
    except RankLost as error:
        die(error)
    except KeyboardInterrupt:  # before `serve` takes the signal
        sys.exit(128 + signal.SIGINT)


async def serve(node: ServedNode, link: FleetLink, *, drain_s: float) -> None:
    """Runs until SIGTERM or SIGINT, then lets running requests finish for at most drain_s seconds.

    A second signal ends the wait. Raises what the node or its link raises.
    """
    stopping = asyncio.Event()
    drained = asyncio.create_task(_drain(node, link, stopping, drain_s))
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, lambda: drained.cancel() if stopping.is_set() else stopping.set())
    attached = asyncio.create_task(link.run(node))
    tasks = [asyncio.create_task(node.run()), attached, drained]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if not task.cancelled():  # as a second signal does to the drain
                task.result()
        link.stop()
        await asyncio.wait([attached], timeout=DETACH_S)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _drain(node: ServedNode, link: FleetLink, stopping: asyncio.Event, drain_s: float) -> None:
    """Waits for the signal, then for the requests."""
    await stopping.wait()
    logger.info("draining")
    node.drain()
    link.send(heartbeat=node.heartbeat())
    await asyncio.sleep(IN_FLIGHT_S)
    try:
        async with asyncio.timeout(drain_s):
            await node.idle()
    except TimeoutError:
        logger.warning("requests still running after %.0f s: stopping all the same", drain_s)
