"""Run nodes on the hosts of a Ray cluster, for `splitserve up --ray`. Imports ray, from the extra `ray`.

The coordinator is a child of `up`, as on one machine. Each rank of a node is the child of its own actor. The actors of
a node share one bundle of a placement group, hence one host, and the bundles are spread over the hosts.

- A rank that ends ends the other ranks of its node, and the launcher starts the node again.
- An actor that ends ends its rank. Ray restarts the actor, on another host if its own is gone.
- When `up` ends in any way, Ray ends its actors.
"""

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from serving_core.errors import SettingsError
from splitserve.launch.cluster import COORDINATOR, LOCAL_RAY, LOOPBACK, ClusterSettings, Process, full_path, in_full
from splitserve.launch.models import Report
from splitserve.launch.ray_rank import RankActor
from splitserve.launch.supervisor import Death, Supervisor

ADDRESS: Final = re.compile(r"[\w.-]+:\d{1,5}", re.ASCII)
NEWS_S: Final = 5.0  # one poll for the end of a rank waits this long
SILENCE_S: Final = 30.0  # without a response of an actor beyond that, before it counts as lost
ROOM_S: Final = 10.0  # without room on the hosts, before that is reported
CALLS: Final = 8  # simultaneous calls of an actor
SAFE_PATH: Final = "PYTHONSAFEPATH"  # set by the command `splitserve` for all its children
REFUSED: Final = 2  # exit code of a process that refuses to start
FAILED: Final = 1

OF_NO_ACTOR_ANEW: Final = {"max_task_retries": 0}  # calls that fail with an actor and are not repeated on the next one


@contextlib.contextmanager
def connected(address: str) -> Iterator[str]:
    """Connect this process to the Ray cluster as a driver within the context; yield the address of this host.

    Raises SettingsError if `address` is malformed, or no cluster is there.
    """
    if address != LOCAL_RAY and not ADDRESS.fullmatch(address):
        raise SettingsError(f"--ray takes HOST:PORT, or nothing, not {address!r}: give MODEL before it")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (RayError, OSError, RuntimeError, ValueError) as error:
        why = str(error).strip().splitlines()[0]
        raise SettingsError(f"--ray {address}: no Ray cluster that this machine is part of ({why})") from error
    try:
        yield str(ray.util.get_node_ip_address())
    finally:
        ray.shutdown()


class RaySupervisor(Supervisor):
    """Supervise the coordinator here, and the ranks of nodes by actors on the hosts."""

    def __init__(self, log_dir: Path, report: Report, settings: ClusterSettings, nodes: Sequence[Process]) -> None:
        super().__init__(log_dir, report)
        self._nodes = nodes
        self._model = full_path(settings.model)
        self._timeout_s = settings.start_timeout_s
        self._of_a_rank: dict[str, float] = {"CPU": settings.ray_cpus}
        if any(_takes_gpus(node.settings.engine.device) for node in nodes):
            self._of_a_rank["GPU"] = 1
        self._actors: dict[str, list[Any]] = {}  # by node and rank
        self._lives: dict[str, asyncio.Task[None]] = {}

    async def start(self, process: Process) -> None:
        """Start a process: the coordinator here, a node's ranks on a host, in the background.

        Raises SettingsError when the hosts have no room for all nodes together.
        """
        if process.role == COORDINATOR.role:
            await super().start(process)
            return
        if not self._actors:
            await self._place()
        self._lives[process.name] = asyncio.create_task(self._live(process))

    async def stop(self, names: Iterable[str], *, deadline_s: float) -> None:
        names = list(names)
        await super().stop(names, deadline_s=deadline_s)
        actors = [actor for name in names for actor in self._actors.pop(name, [])]
        for name in self._lives.keys() & set(names):
            self._lives[name].cancel()
        try:
            await _ended(actors, deadline_s)
        finally:
            for actor in actors:
                ray.kill(actor)

    async def _place(self) -> None:
        """Create the actors of all nodes on their hosts."""
        sizes = [node.settings.engine.num_ranks for node in self._nodes]
        bundles = [{kind: size * number for kind, number in self._of_a_rank.items()} for size in sizes]
        group = ray.util.placement_group(bundles, strategy="SPREAD")
        await self._has_room(group, bundles)
        options = {
            "num_cpus": self._of_a_rank["CPU"],
            "num_gpus": self._of_a_rank.get("GPU", 0),
            "max_restarts": -1,
            "max_task_retries": -1,  # a call waits for an actor that restarts
            "max_concurrency": CALLS,
        }
        for index, (node, size) in enumerate(zip(self._nodes, sizes, strict=True)):
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            there = ray.remote(RankActor).options(**options, scheduling_strategy=where)
            self._actors[node.name] = [there.remote("", str(self._log_dir)) for _ in range(size)]

    async def _has_room(self, group: Any, bundles: list[dict[str, float]]) -> None:
        ready = asyncio.ensure_future(group.ready())
        first_s = min(ROOM_S, self._timeout_s)
        for wait_s in (first_s, self._timeout_s - first_s):
            done, _ = await asyncio.wait([ready], timeout=wait_s)
            if done:
                ready.result()
                return
            resources = ray.cluster_resources()
            has = ", ".join(f"{resources.get(kind, 0):g} {kind}" for kind in self._of_a_rank)
            lacks = f"Ray's hosts have no room for {bundles}: together they have {has}, some of it in use"
            self._report(f"{lacks}; waiting")
        ready.cancel()
        ray.util.remove_placement_group(group)
        raise SettingsError(f"{lacks}, and had none for {self._timeout_s:g} s")

    async def _live(self, process: Process) -> None:
        """Run a node until the first of its ranks ends, and end its other ranks."""
        actors = self._actors[process.name]
        try:
            death = await self._start_ranks(process, actors) or await self._first_death(process, actors)
        except TimeoutError:
            death = Death(process, FAILED, failure="Ray's actors do not answer")
        except RayError as error:
            death = Death(process, FAILED, failure=f"Ray: {str(error).strip().splitlines()[0]}")
        await _ended(actors, 0.0)
        self._deaths.put_nowait(death)

    async def _start_ranks(self, process: Process, actors: list[Any]) -> Death | None:
        """Start the ranks. Returns a death when one refuses to start. Raises TimeoutError, or RayError of an actor."""
        values = in_full(process.settings) | {"model": self._model}
        async with asyncio.timeout(self._timeout_s):
            # Asks all actors, so that each has finished its earlier calls.
            (host, port), *_ = await asyncio.gather(*[actor.place.remote() for actor in actors])
            self._report(f"{process.name} starts on {host}, where its log is")
            starts = [
                actor.start.remote(process.name, process.role, values, self._environment(rank, len(actors), port))
                for rank, actor in enumerate(actors)
            ]
            refusals = await asyncio.gather(*starts)
        refusal = next(filter(None, refusals), None)
        return Death(process, REFUSED, refusal=refusal) if refusal else None

    def _environment(self, rank: int, num_ranks: int, port: int) -> dict[str, str]:
        """Return the environment of a rank. Ray shows each actor only its own GPUs."""
        told = {name: os.environ[name] for name in (SAFE_PATH,) if name in os.environ}
        told["OMP_NUM_THREADS"] = f"{self._of_a_rank['CPU']:g}"
        if num_ranks == 1:
            return told
        local_rank = 0 if "GPU" in self._of_a_rank else rank
        return told | {
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
        }

    async def _first_death(self, process: Process, actors: list[Any]) -> Death:
        watches = [asyncio.create_task(self._watch_rank(process, actor)) for actor in actors]
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def _watch_rank(self, process: Process, actor: Any) -> Death:
        while True:
            async with asyncio.timeout(NEWS_S + SILENCE_S):
                lines, ended = await actor.news.options(**OF_NO_ACTOR_ANEW).remote(NEWS_S)
            for line in lines:
                self._report(line)
            if ended:
                return Death(process, *ended)


async def _ended(actors: list[Any], deadline_s: float) -> None:
    """End the ranks of these actors. An actor that does not respond is lost, and its rank with it."""
    stops = [actor.stop.options(**OF_NO_ACTOR_ANEW).remote(deadline_s) for actor in actors]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(deadline_s + NEWS_S):
            await asyncio.gather(*stops, return_exceptions=True)


def _takes_gpus(device: str) -> bool:
    return device == "cuda" or (device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)
