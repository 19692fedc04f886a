"""Check a cluster before its processes start, and measure how long this process has run."""

import ctypes
import functools
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from glob import glob
from pathlib import Path
from typing import Any, Final

import psutil

from coordinator.settings import CoordinatorSettings, check_settings
from coordinator.text.tokenizer import read_tokenizer
from engine.native.library import native_library, wanted_variants
from serving_core.errors import SettingsError
from serving_core.model_files.config import ModelConfig, read_model_config
from serving_core.net.ports import Port, check_ports
from serving_core.net.tls import CLIENT, check_purpose, hosts_of
from serving_core.process.extras import require
from serving_core.process.memory import available_bytes
from serving_core.process.run import check_threads
from serving_core.settings import EngineSettings
from serving_core.units import size_of
from splitserve.launch.cluster import LOOPBACK, PREFILL, ClusterSettings, Process


def process_age_s() -> float:
    """Return the seconds since this process was started, start-up of the interpreter included.

    On Linux the kernel's own clock is used: psutil's start time is off by up to a second, since the boot time is
    rounded.
    """
    if sys.platform != "linux":
        return time.time() - psutil.Process().create_time()
    fields_after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start_ticks = int(fields_after_name[19])  # proc(5): starttime is field 22
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")


CUDA_DRIVER: Final = "libcuda.so.1"
CUDA_DEVICES: Final = "/proc/driver/nvidia/gpus/*", "/dev/nvidia[0-9]*"  # some containers have the second alone
NO_KERNELS: Final = (
    "There are no compiled kernels (set-up makes them where it finds a C compiler): PyTorch computes everything, "
    "and a token of a single sequence takes about 3 times as long"  # docs/results/measurements.md
)


def check_public_ports(settings: ClusterSettings, passed: Mapping[str, Any]) -> None:
    """Raise SettingsError, with the flag, when the gRPC or the HTTP port is not free on this machine.

    `passed` has the values of flags by field name. Only http_host is read, by default LOOPBACK.
    """
    http_host = passed.get("http_host") or LOOPBACK
    check_ports(
        [Port("--grpc-port", settings.host, settings.grpc_port), Port("--http-port", http_host, settings.http_port)]
    )


def check_processes(processes: Sequence[Process], *, are_here: bool = True) -> None:
    """Raise SettingsError or ModelError if a planned process would not start, as far as known without loading weights.

    The coordinator is the first of `processes`. With `are_here`, also checks that this machine has the memory and
    threads for all nodes together.
    """
    from serving_core.node.needs import check_settings as check_engine  # imports packages of the extra `node`
    from serving_node.draft_model import check_draft_model

    coordinator, *nodes = (process.settings for process in processes)
    roles = [process.role for process in processes[1:]]
    folder, config = check_coordinator(coordinator)
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


def check_coordinator(coordinator: CoordinatorSettings) -> tuple[Path, ModelConfig]:
    """Return the model's folder and its configuration.

    Raises SettingsError or ModelError if the coordinator would not start with them, or no node could reach it.
    """
    check_settings(coordinator)
    _check_fleet_tls(coordinator)
    folder = Path(coordinator.model)
    config = read_model_config(folder, coordinator.model_impl, coordinator.runner)
    read_tokenizer(folder, chat_template=coordinator.chat_template)
    return folder, config


def _check_fleet_tls(coordinator: CoordinatorSettings) -> None:
    """Raise SettingsError if the nodes could not use the coordinator's certificate to reach it and as their own."""
    tls = coordinator.tls
    if not tls.tls_ca:
        return
    if coordinator.fleet_host not in hosts_of(tls.files):
        raise SettingsError(
            f"--tls-cert {tls.tls_cert} is not for {coordinator.fleet_host}, where the nodes dial with --tls-ca"
        )
    check_purpose(tls.files, CLIENT)


def missing_kernels(settings: EngineSettings) -> str:
    """Return a sentence on the cost of missing compiled kernels; empty if they exist or would not be used."""
    return NO_KERNELS if on_cpu(settings) and wanted_variants() and native_library() is None else ""


def _check_memory(num_nodes: int, engines: Sequence[tuple[EngineSettings, ModelConfig]], tier_bytes: int) -> None:
    """Check the memory for `num_nodes` nodes with `tier_bytes` of host memory each for KV offload.

    Raises ModelError when weights are incomplete, and SettingsError when the memory is too small for nodes on CPUs. A
    node on a GPU checks its memory itself.
    """
    from serving_core.node.needs import needs_of

    alike = [(replace(settings, cpus=""), config) for settings, config in engines]
    needs = {settings: needs_of(settings, config) for settings, config in dict(alike).items()}
    each = [needs[settings] for settings, _ in alike]
    weight_bytes, pool_bytes = sum(need.weight_bytes for need in each), sum(need.pool_bytes for need in each)
    available = available_bytes()
    needed = weight_bytes + pool_bytes + tier_bytes
    if on_cpu(engines[0][0]) and needed > available:
        tiers = f", --kv-host-bytes {size_of(tier_bytes)}" if tier_bytes else ""
        raise SettingsError(
            f"{num_nodes} nodes need {size_of(needed)} of memory (weights {size_of(weight_bytes)}, "
            f"KV pools {size_of(pool_bytes)}{tiers}), and {size_of(available)} are free; "
            "--kv-cache-memory-bytes and --quantization make it less"
        )


def on_cpu(settings: EngineSettings) -> bool:
    """Return whether a node will compute on CPUs; for --device auto, as far as known without torch."""
    return settings.device == "cpu" or (settings.device == "auto" and not _has_cuda_driver())


def cuda_devices(environment: Mapping[str, str], listed: Sequence[str] = CUDA_DEVICES) -> tuple[str, ...]:
    """Return the CUDA devices that processes with this environment see, as CUDA_VISIBLE_DEVICES names them.

    Without that variable, the first of the patterns `listed` that matches any path matches one for each device; empty
    if none does.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(name.strip() for name in visible.split(",") if name.strip())
    num_devices = next(filter(None, (len(glob(pattern)) for pattern in listed)), 0)
    return tuple(map(str, range(num_devices)))


@functools.cache
def _has_cuda_driver() -> bool:
    try:
        ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        return False
    return True
