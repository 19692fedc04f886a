"""Start, load and stop contenders: a cluster of ours for each load; another server runs already.

Only one cluster exists at a time. Keeping all alive would save the start of a few seconds, but idle clusters hold
memory and caches too, and chance properties of a process, such as its place in memory, would stay with one contender
for the whole comparison. This way they are drawn anew for each load, and no load finds KV that another left.

Nodes are pinned to the given cores, evenly. The coordinator and the load generator may use every core of the machine.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from serving_core.flags import build
from serving_core.process.cpus import confined
from splitserve.launch.cluster import NO_HTTP, ClusterSettings
from splitserve.launch.launcher import Cluster, free_port
from splitserve.launch.models import LocalModel, Report
from splitserve_bench.compare.contenders import ClusterContender, Contender, PeerContender
from splitserve_bench.errors import BenchError
from splitserve_bench.serve.generator import Order, describe, run_load
from splitserve_bench.serve.records import (
    OPENAI,
    SPLITSERVE,
    Outcome,
    PlannedRequest,
    Progress,
    Target,
)

WARM_UP_CONCURRENCY: Final = 4


class Arena:
    """Start, warm up, load and stop contenders, one at a time."""

    def __init__(
        self, model: LocalModel, cores: Sequence[int], flags: Mapping[str, Any], log_dir: Path, report: Report
    ) -> None:
        """`flags` of `splitserve up` are for every cluster of ours.

        Each cluster's logs get a new folder in `log_dir`.
        """
        self._model = model
        self._cores = cores
        self._flags = flags
        self._log_dir = log_dir
        self._report = report
        self._num_started = sum(1 for _ in log_dir.glob("*"))

    async def run(
        self,
        contender: Contender,
        warm_up: Sequence[PlannedRequest],
        planned: Sequence[PlannedRequest],
        *,
        max_concurrency: int | None,
        request_timeout_s: float,
        on_progress: Callable[[Progress], None],
    ) -> list[Outcome]:
        """Start the contender's cluster (a peer runs already), send the warm-up, then the load, and stop the cluster.

        Returns the outcome of each request of the load, of failed ones too. At most `max_concurrency` of them run at
        once (None: any number); one that takes longer than `request_timeout_s` fails; `on_progress` is called while
        they run. Raises BenchError when the warm-up fails, a node is lost or a peer no longer replies, and LaunchError
        when the cluster does not start.
        """
        async with self._serving(contender) as (target, check):
            order = Order(target, WARM_UP_CONCURRENCY, request_timeout_s)
            warmed = await run_load(order, warm_up, lambda progress: None)
            if error := warm_up_error(warmed):
                raise BenchError(f"{contender.name} cannot answer: {error}")
            outcomes = await run_load(Order(target, max_concurrency, request_timeout_s), planned, on_progress)
            await check()
        return outcomes

    @asynccontextmanager
    async def _serving(self, contender: Contender) -> AsyncIterator[tuple[Target, Callable[[], Awaitable[object]]]]:
        """Return an async context manager that yields the contender's server, and a function that checks it.

        The check raises BenchError when the cluster lost a node, or a peer no longer replies.
        """
        if isinstance(contender, PeerContender):
            target = Target(OPENAI, contender.address)
            target = replace(target, model=(await describe(target)).model)
            yield target, lambda: describe(target)
            return
        self._num_started += 1
        async with self._cluster(contender) as cluster:
            await cluster.start(lambda missing: None)
            yield Target(SPLITSERVE, cluster.target), lambda: _check_nodes(cluster)

    def _cluster(self, contender: ClusterContender) -> Cluster:
        log_dir = self._log_dir / f"{self._num_started:03d}-{contender.name.replace(' ', '-')}"
        own = {
            "prefill": contender.prefill,
            "decode": contender.decode,
            "mixed": contender.mixed,
            "log_dir": str(log_dir),
        }
        values = {**self._flags, **dict(contender.flags), **own}
        return cluster_on(self._cores, self._model, values, self._report)


def cluster_on(cpus: Collection[int], model: LocalModel, flags: Mapping[str, Any], report: Report) -> Cluster:
    """Return a cluster on these CPUs, not started, with these flags of `splitserve up`, a free gRPC port and no HTTP.

    Each node gets an even share of the CPUs. Raises SettingsError for flags that a cluster cannot have.
    """
    values = {"grpc_port": free_port(), "http_port": NO_HTTP, **flags}
    with confined(cpus):  # a cluster shares out the CPUs that this process may use
        return Cluster(build(ClusterSettings, values), values, model, report=report)


async def _check_nodes(cluster: Cluster) -> None:
    async with cluster.client() as client:
        attached = {node.name for node in (await client.loads()).nodes}
    if missing := [name for name in cluster.nodes if name not in attached]:
        raise BenchError(f"lost during the load: {', '.join(missing)}; logs: {cluster.log_dir}")


def warm_up_error(outcomes: Sequence[Outcome]) -> str:
    """Return why a warm-up failed, or "".

    Its requests come all at once, so the server may refuse some of them, but not all.
    """
    failed = [outcome for outcome in outcomes if outcome.error]
    is_none_served = len(failed) == len(outcomes)
    return next((outcome.error for outcome in failed if is_none_served or not outcome.is_refused), "")
