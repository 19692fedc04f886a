"""`splitserve doctor --check-bits`: whether the answers of a model, with these settings and on this machine, have the
same bits whatever happened to them. Three clusters, one after the other, play the histories."""

import os
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from serving_core.cpus import confined
from serving_core.flags import build
from serving_core.layout import QUANTIZED_DTYPES
from serving_core.needs import MOST_INVARIANT_RANKS
from splitserve.client.answers import NodeInfo
from splitserve.client.clients import AsyncClient
from splitserve.launch.cluster import NO_HTTP, ClusterSettings
from splitserve.launch.launcher import Cluster, free_port
from splitserve.launch.models import LocalModel, Report
from splitserve_bench.bits.histories import ANSWER_S, Histories, Played, SmallPool
from splitserve_bench.bits.questions import BitsBench, draw_questions

BLOCK_SIZE: Final = 8  # small, so that answers grow by several
WHOLE_PROMPT_TOKENS: Final = 1024  # of one step, so that `alone` reads each prompt in one
HEARTBEAT_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class BitsFigures:
    """What was promised for these settings, and what came of each history."""

    model: str
    engine: Mapping[str, str]
    promise: str
    histories: tuple[Played, ...]

    @property
    def differs(self) -> bool:
        return any(played.difference for played in self.histories)


async def check_bits(
    model: LocalModel, flags: Mapping[str, Any], sizes: BitsBench, cpus: Sequence[int], report: Report
) -> BitsFigures:
    """Asks clusters with these flags on these CPUs. Raises BenchError when the model's context is too short,
    LaunchError, and SettingsError for what a node cannot use."""
    tp_size = sizes.tp_size
    cores = tp_size * min(sizes.cores, max(1, len(cpus) // (3 * tp_size)))  # of a node: there are three at once
    clusters = _Clusters(model, {**flags, **dict.fromkeys(("prefill_tp", "decode_tp", "both_tp"), tp_size)}, report)
    async with clusters.serving(cpus[:cores], both=1) as (_, client):
        info = await client.model_info()
        [node] = (await client.server_info()).nodes
        questions = draw_questions(sizes, info.vocab_size, info.max_model_len)
        histories = Histories(questions, info.vocab_size, report)
        await histories.on_one_node(client)
    async with clusters.serving(cpus[: 3 * cores], prefill=1, decode=2) as (cluster, client):
        await histories.on_split_nodes(client, lambda name: os.kill(cluster.pid(name), signal.SIGKILL))
    pool = SmallPool.of(questions, BLOCK_SIZE)
    async with clusters.serving(cpus[: cores + tp_size], both=1, num_kv_blocks=pool.num_blocks) as (_, client):
        await histories.on_a_small_node(client, pool)  # which has one more core for each rank
    return BitsFigures(model.name, node.engine, promise_of(node), tuple(histories.played))


def promise_of(node: NodeInfo) -> str:
    """What is promised for a node as it describes itself, in words."""
    if node.traits["history_free"] == "yes":
        threads = " (with equal numbers of threads)" if "threads" in node.traits else ""
        return f"promised: the same bits whatever happened to an answer{threads}"
    if node.fingerprint["kv_cache_dtype"] in QUANTIZED_DTYPES:
        return "not promised: keys and values in 8 bits are rounded by what else comes to their block"
    if int(node.engine["tp_size"]) > MOST_INVARIANT_RANKS:
        return f"not promised: the order in which {node.engine['tp_size']} ranks are added up depends on the batch"
    if node.engine["batch_invariant"] == "yes":
        return "not promised: histories that the node tried out at its start differ in bits; its log names them"
    return "not promised without --batch-invariant: PyTorch computes some of it, one row unlike many"


class _Clusters:
    """Clusters with the same flags."""

    def __init__(self, model: LocalModel, flags: Mapping[str, Any], report: Report) -> None:
        self._model = model
        self._flags = flags
        self._report = report

    @asynccontextmanager
    async def serving(self, cpus: Sequence[int], **own: int) -> AsyncIterator[tuple[Cluster, AsyncClient]]:
        """A cluster on these CPUs, ready to be asked."""
        patience = dict.fromkeys(
            ("request_timeout_s", "credit_timeout_s", "ticket_timeout_s", "keep_after_s"), ANSWER_S
        )
        with tempfile.TemporaryDirectory(prefix="splitserve-bits-") as log_dir:
            values = {
                "block_size": BLOCK_SIZE,
                "max_num_batched_tokens": WHOLE_PROMPT_TOKENS,
                "heartbeat_s": HEARTBEAT_S,
                "log_dir": log_dir,
                "grpc_port": free_port(),
                "http_port": NO_HTTP,
                **patience,
                **self._flags,
                **own,
            }
            with confined(cpus):  # a cluster shares out the CPUs that this process may use
                cluster = Cluster(build(ClusterSettings, values), values, self._model, report=self._report)
            async with cluster, cluster.client() as client:
                await cluster.start(lambda missing: None)
                yield cluster, client
