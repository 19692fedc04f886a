"""Check a cluster before its processes start, and tell how long this process has run."""

import ctypes
import functools
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import psutil

from coordinator.settings import check_settings
from coordinator.text.tokenizer import read_tokenizer
from engine.native.library import native_library, wanted_variants
from serving_core.errors import SettingsError
from serving_core.extras import require
from serving_core.memory import available_bytes
from serving_core.model_config import ModelConfig, read_model_config
from serving_core.ports import Port, check_ports
from serving_core.process import check_threads
from serving_core.settings import EngineSettings
from serving_core.tls import CLIENT, check_purpose, hosts_of
from serving_core.units import size_of
from splitserve.launch.cluster import LOOPBACK, PREFILL, ClusterSettings, Process


def process_age_s() -> float:
    """Seconds since this process was started, interpreter start-up included.

    On Linux from the kernel's own clock: psutil's start time is off by up to a second, the boot time's rounding.
    """
    if sys.platform != "linux":
        return time.time() - psutil.Process().create_time()
    fields_after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start_ticks = int(fields_after_name[19])  # proc(5): starttime is field 22
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")


CUDA_DRIVER: Final = "libcuda.so.1"
CUDA_DEVICES: Final = Path("/proc/driver/nvidia/gpus")  # an entry for each
NO_KERNELS: Final = (
    "There are no compiled kernels (set-up makes them where it finds a C compiler): PyTorch computes everything, "
    "and a token of a single answer takes about 3 times as long"  # docs/benchmarks.md
)


def check_public_ports(settings: ClusterSettings, passed: Mapping[str, Any]) -> None:
    """Raises SettingsError, with the flag, when a port that clients are to dial is not free."""
    http_host = passed.get("http_host") or LOOPBACK
    check_ports(
        [Port("--grpc-port", settings.host, settings.grpc_port), Port("--http-port", http_host, settings.http_port)]
    )


def check_processes(processes: Sequence[Process], *, are_here: bool = True) -> None:
    """Raises SettingsError or ModelError where a process of a plan would not start, as far as that can be known
    without loading the weights, or where the nodes are here and need more memory or threads together than there are."""
    from serving_core.needs import check_settings as check_engine  # here, as it reads what the extra `node` brings
    from serving_node.draft_model import check_draft_model

    coordinator, *nodes = (process.settings for process in processes)
    roles = [process.role for process in processes[1:]]
    check_settings(coordinator)
    if coordinator.tls.tls_ca and coordinator.fleet_host not in hosts_of(coordinator.tls.files):
        raise SettingsError(
            f"--tls-cert {coordinator.tls.tls_cert} is not for {coordinator.fleet_host}, where the nodes dial with "
            "--tls-ca"
        )
    if coordinator.tls.tls_ca:  # then nodes show it to the coordinator
        check_purpose(coordinator.tls.files, CLIENT)
    folder = Path(coordinator.model)
    config = read_model_config(folder, coordinator.model_impl, coordinator.runner)
    read_tokenizer(folder, chat_template=coordinator.chat_template)
    wanted_variants()
    for node in nodes:
        node.check()
        computed = read_model_config(folder, node.engine.model_impl, node.engine.runner)
        if computed.is_transformers:
            require("transformers")
        check_engine(node.engine, computed, node.engine.tensor_parallel_size)
    checked = [(role, check_draft_model(node)) for role, node in zip(roles, nodes, strict=True)]
    drafts = [draft for role, draft in checked if draft is not None and role != PREFILL.role]
    if are_here:
        api_servers = coordinator.api_server_count if coordinator.api_server_count > 1 else 0
        check_threads(
            3 + api_servers + sum(node.engine.num_ranks for node in nodes)
        )  # this, fork server, coordinator, ...
        tier_bytes = sum(node.tier.kv_host_bytes * node.engine.num_ranks for node in nodes)
        _check_memory(len(nodes), [*((node.engine, config) for node in nodes), *drafts], tier_bytes)


def missing_kernels(settings: EngineSettings) -> str:
    """What it costs that the kernels of a node were not compiled; empty where they were, or do not compute."""
    return NO_KERNELS if _on_cpu(settings) and wanted_variants() and native_library() is None else ""


def _check_memory(num_nodes: int, engines: Sequence[tuple[EngineSettings, ModelConfig]], tier_bytes: int) -> None:
    """Of all engines of so many nodes, whose second tiers are to have so many bytes of host memory. Raises ModelError
    where the weights are not whole, and SettingsError where CPUs compute and their memory is too small. What a GPU
    holds its node tells."""
    from serving_core.needs import needs_of

    alike = [(replace(settings, cpus=""), config) for settings, config in engines]
    needs = {settings: needs_of(settings, config) for settings, config in dict(alike).items()}
    each = [needs[settings] for settings, _ in alike]
    weight_bytes, pool_bytes = sum(need.weight_bytes for need in each), sum(need.pool_bytes for need in each)
    available = available_bytes()
    needed = weight_bytes + pool_bytes + tier_bytes
    if _on_cpu(engines[0][0]) and needed > available:
        tiers = f", --kv-host-bytes {size_of(tier_bytes)}" if tier_bytes else ""
        raise SettingsError(
            f"{num_nodes} nodes need {size_of(needed)} of memory (weights {size_of(weight_bytes)}, "
            f"KV pools {size_of(pool_bytes)}{tiers}), and {size_of(available)} are free; "
            "--kv-cache-memory-bytes and --quantization make it less"
        )


def _on_cpu(settings: EngineSettings) -> bool:
    """Whether the node will compute on CPUs; with --device auto as far as that shows without torch."""
    return settings.device == "cpu" or (settings.device == "auto" and not _has_cuda_driver())


def cuda_devices(environment: Mapping[str, str], listed: Path = CUDA_DEVICES) -> tuple[str, ...]:
    """The CUDA devices that processes of this environment may use, as CUDA_VISIBLE_DEVICES names them; none where the
    driver does not list any."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(name.strip() for name in visible.split(",") if name.strip())
    return tuple(map(str, range(len(list(listed.iterdir()))))) if listed.is_dir() else ()


@functools.cache
def _has_cuda_driver() -> bool:
    try:
        ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        return False
    return True
