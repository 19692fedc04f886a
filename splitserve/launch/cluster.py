"""Plan a cluster: its processes, their settings and command lines. Performs no I/O; the launcher executes the plan."""

import dataclasses
import importlib
import itertools
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

from coordinator.api_server_settings import ApiServerSettings
from coordinator.settings import CoordinatorSettings
from serving_core.errors import SettingsError
from serving_core.flags import build, environment_of, fields_of, flag, to_argv
from serving_core.net.ports import fits
from serving_core.process.cpus import divide_cpus
from serving_core.settings import EngineSettings
from serving_node.settings import PACKAGES, NodeSettings
from splitserve.launch.models import LocalModel

# Flags of nodes whose values are paths, besides MODEL and adapters.
PATHS: Final = {"speculative_model", "tls_cert", "tls_key", "tls_ca", "kv_disk_path", "weights_disk_path", "lora_root"}

Settings = CoordinatorSettings | NodeSettings


@dataclass(frozen=True, slots=True)
class Room:
    """A kind of process: its role, its package and the class of its settings."""

    role: str
    package: str
    settings_class: type[Any]


COORDINATOR: Final = Room("coordinator", "coordinator", CoordinatorSettings)
API_SERVER: Final = Room("api-server", "coordinator.api", ApiServerSettings)
PREFILL, DECODE, MIXED = (Room(role, package, NodeSettings) for role, package in PACKAGES.items())
ROOMS: Final = (COORDINATOR, PREFILL, DECODE, MIXED)
OWN: Final = "splitserve"
VLLM: Final = "vllm"
"""Engines of nodes."""
VLLM_PACKAGE: Final = "splitserve_vllm"
VLLM_CPUS: Final = "VLLM_CPU_OMP_THREADS_BIND"  # vLLM's own variable: the CPUs of a worker
MEMORY_FLAGS: Final = ("--gpu-memory-utilization", "--kv-cache-memory-bytes")  # vLLM's, on CPUs too


def command_of(room: Room, settings: Any) -> list[str]:
    """Return the command line that starts a process of this kind with these settings; secrets are not in it."""
    return [sys.executable, "-m", room.package, *to_argv(settings)]


def node_rooms(engine: str) -> tuple[Room, Room, Room]:
    """Return the kinds of nodes with this engine: prefill, decode, mixed. Imports nothing of vLLM."""
    if engine == OWN:
        return PREFILL, DECODE, MIXED
    settings_class = importlib.import_module(f"{VLLM_PACKAGE}.settings").VllmSettings
    prefill, decode, mixed = (Room(role, VLLM_PACKAGE, settings_class) for role in PACKAGES)
    return prefill, decode, mixed


def flat(settings: Any) -> dict[str, Any]:
    """Return the value of every flag of the settings by name, with nested settings flattened."""
    return dict(_flat_items(settings))


def in_full(settings: Any) -> dict[str, Any]:
    """Return the values of a node's flags by name, with absolute paths.

    The node may then run in another folder, or on another host with the same files.
    """
    values = flat(settings)
    adapters = (each.partition("=") for each in values["lora"])
    values["lora"] = tuple(f"{name}{sign}{full_path(folder)}" for name, sign, folder in adapters)
    return values | {name: full_path(values[name]) for name in PATHS}


def full_path(text: str) -> str:
    """Return the absolute form of the path of an existing file or folder; any other text unchanged."""
    path = Path(text).expanduser()
    return str(path.resolve()) if text and path.exists() else text


def replaced(settings: Any, **changes: Any) -> Any:
    """Return new settings with other values for these flags, by name."""
    return build(type(settings), {**flat(settings), **changes})


def _flat_items(settings: Any) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield from _flat_items(value)
        else:
            yield field.name, value


LOOPBACK: Final = "127.0.0.1"
FOR_THE_FLEET: Final = ("tls_cert", "tls_key")  # only with a CA: else nodes connect without TLS
NO_HTTP: Final = -1  # as an http_port
LONGEST_NAME: Final = "prefill-63.4095"  # of a socket: the last rank of the last node
LOCAL_RAY: Final = "auto"  # address of a Ray cluster: the cluster that this machine is part of


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """Settings of `splitserve up` itself; all other flags are passed to the processes."""

    model: str = flag("", "Serve this folder, GGUF file or hub id; without one, the demo model.", positional=True)
    prefill: int | None = flag(
        None, "Start this many prefill nodes; default: 1, or none beside --mixed.", minimum=0, maximum=64
    )
    decode: int | None = flag(
        None,
        "Start this many decode nodes; default: 1, or none beside --mixed or for embeddings.",
        minimum=0,
        maximum=64,
    )
    mixed: int = flag(0, "Start this many nodes that prefill and decode.", minimum=0, maximum=64)
    engine: str = flag(OWN, "Engine of the nodes. With vllm, flags of vLLM follow --.", choices=(OWN, VLLM))
    vllm_python: str = flag(
        "", "Start nodes with vLLM by this Python, which has vLLM and SplitServe; default: the one of this command."
    )
    vllm_flag: tuple[str, ...] = flag(
        (), "Give vLLM this flag, as in --vllm-flag=--enforce-eager, like those that follow --. May be repeated."
    )
    prefill_tp: int = flag(
        1, "Divide each layer of a prefill node over this many tensor-parallel ranks.", minimum=1, maximum=64
    )
    decode_tp: int = flag(
        1, "Divide each layer of a decode node over this many tensor-parallel ranks.", minimum=1, maximum=64
    )
    mixed_tp: int = flag(
        1, "Divide each layer of a mixed node over this many tensor-parallel ranks.", minimum=1, maximum=64
    )
    prefill_pp: int = flag(
        1,
        "Divide the layers of a prefill node over this many pipeline stages, of --prefill-tp ranks each.",
        minimum=1,
        maximum=64,
    )
    decode_pp: int = flag(
        1,
        "Divide the layers of a decode node over this many pipeline stages, of --decode-tp ranks each.",
        minimum=1,
        maximum=64,
    )
    mixed_pp: int = flag(
        1,
        "Divide the layers of a mixed node over this many pipeline stages, of --mixed-tp ranks each.",
        minimum=1,
        maximum=64,
    )
    host: str = flag(LOOPBACK, "Listen for gRPC clients at this address.")
    grpc_port: int = flag(50051, "Listen for gRPC clients at this port.", minimum=1, maximum=65535)
    http_port: int = flag(
        8000,
        "Listen for HTTP clients, of OpenAI's and Anthropic's APIs, at this port; 0 takes a free one, -1 none.",
        minimum=-1,
        maximum=65535,
    )
    log_dir: str = flag(
        "",
        "Write the processes' logs to this folder; default: a new one among the temporary files, where "
        "those of the latest runs stay.",
    )
    start_timeout_s: float = flag(300.0, "Give up after this many seconds if not every node is ready.", minimum=1.0)
    drain_s: float = flag(
        10.0, "Let running requests finish for this many seconds when the cluster stops.", minimum=0.0
    )
    node_wait_s: float = flag(
        60.0,
        "Let a request wait this many seconds for a node that can take it, as until a dead node has "
        "restarted; 0 refuses it.",
        minimum=0.0,
    )
    ray: str = flag(
        "",
        "Run the nodes on the hosts of this Ray cluster: HOST:PORT, or no value for this machine's cluster.",
        bare=LOCAL_RAY,
    )
    ray_cpus: int = flag(1, "Reserve this many CPUs of Ray for each rank.", minimum=1, maximum=1024)


def num_nodes(settings: ClusterSettings, *, embeds: bool = False) -> dict[str, int]:
    """Return the number of nodes by role; with `embeds`, the model makes embeddings and needs no decode node.

    Raises SettingsError when no node would prefill, or decode.
    """
    unless_given = 0 if settings.mixed else 1
    num_prefill = unless_given if settings.prefill is None else settings.prefill
    num_decode = (0 if embeds else unless_given) if settings.decode is None else settings.decode
    for flag_name, num, work in (("--prefill", num_prefill, "prefill"), ("--decode", num_decode, "decode")):
        if not num and not settings.mixed and not (embeds and flag_name == "--decode"):
            raise SettingsError(f"nobody would {work}: {flag_name} or --mixed must be above 0")
    return {PREFILL.role: num_prefill, DECODE.role: num_decode, MIXED.role: settings.mixed}


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the cluster."""

    name: str
    role: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    settings: Any = None  # the settings behind argv and environment


@dataclass(frozen=True, slots=True)
class Place:
    """Resources of a cluster: fleet port, socket folder, secret, unique id, CPUs, and the coordinator's address for
    nodes.

    Without a folder, or with a path too long for sockets, each node's host determines where it receives KV.
    `cuda_devices` has names as in CUDA_VISIBLE_DEVICES: ranks get them in turn, and ranks on one device divide its
    memory.
    """

    fleet_port: int
    socket_dir: str
    fleet_secret: str
    instance_id: str
    cpus: tuple[int, ...]
    fleet_host: str = LOOPBACK
    cuda_devices: tuple[str, ...] = ()


# Flags of the processes that the plan sets.
PLANNED: Final = frozenset(
    {"model", "host", "fleet_host", "fleet_port", "fleet_secret", "coordinator", "name", "kv_bind", "cpus"}
    | {"tensor_parallel_size", "pipeline_parallel_size", "instance_id", "standby", "standby_lease"}
    | {"health_host", "health_port", "metrics_host", "metrics_port", "kv_order"}
) | {field.name for field in dataclasses.fields(ClusterSettings)}


def up_settings_class() -> type[Any]:
    """Return the dataclass of all flags of `splitserve up`: ClusterSettings, and every flag that can be passed on.

    A flag whose default differs by role is None by default.
    """
    own = [(field.name, hint, _copied(field)) for field, hint in fields_of(ClusterSettings)]
    passed: dict[str, tuple[str, Any, Any]] = {}
    for field, hint in chain.from_iterable(fields_of(room.settings_class) for room in ROOMS):
        if field.name in passed and passed[field.name][2].default != field.default:
            passed[field.name] = (field.name, hint | None, _copied(field, default=None))
        elif field.name not in passed and field.name not in PLANNED:
            passed[field.name] = (field.name, hint, _copied(field))
    return dataclasses.make_dataclass("UpSettings", [*own, *passed.values()], frozen=True)


def plan_cluster(
    settings: ClusterSettings,
    passed: Mapping[str, Any],
    model: LocalModel,
    place: Place,
    *,
    embeds: bool = False,
) -> list[Process]:
    """Return the processes of a cluster in starting order, the coordinator first.

    `passed` are values of flags, for each kind of process that has the flag; None leaves a flag unset, and flags that
    the plan sets are ignored. `embeds`: the model makes embeddings. Raises SettingsError for numbers of nodes with
    which no request could be served, and for flags that nodes with vLLM do not have.
    """
    given = {name: value for name, value in passed.items() if value is not None and name not in PLANNED}
    shared = {"model": str(model.folder), "drain_s": settings.drain_s, "fleet_secret": place.fleet_secret}
    front = {
        "host": settings.host,
        "grpc_port": settings.grpc_port,
        "node_wait_s": settings.node_wait_s,
        "http_port": settings.http_port,
        "fleet_host": place.fleet_host,
        "fleet_port": place.fleet_port,
        "instance_id": place.instance_id,
        "served_model_name": passed.get("served_model_name") or model.name,
    }
    processes = [_process(COORDINATOR, "coordinator", {**given, **shared, **front})]
    prefill, decode, mixed = rooms = node_rooms(settings.engine)
    sizes = {
        prefill: (settings.prefill_tp, settings.prefill_pp),
        decode: (settings.decode_tp, settings.decode_pp),
        mixed: (settings.mixed_tp, settings.mixed_pp),
    }
    counts = num_nodes(settings, embeds=embeds)
    nodes = [(room, f"{room.role}-{i}", *sizes[room]) for room in rooms for i in range(counts[room.role])]
    has_sockets = place.socket_dir and fits(Path(place.socket_dir, LONGEST_NAME))
    over_ipc = has_sockets and given.get("kv_transport", "zmq") == "zmq"
    num_ranks = sum(tp_size * pp_size for _, _, tp_size, pp_size in nodes)
    rank_cpus = iter(divide_cpus(place.cpus, num_ranks))
    rank_devices = itertools.cycle(place.cuda_devices)
    given_nodes = {name: value for name, value in given.items() if given.get("tls_ca") or name not in FOR_THE_FLEET}
    if place.cuda_devices and "gpu_memory_utilization" not in given:
        ranks_each = math.ceil(num_ranks / len(place.cuda_devices))
        given_nodes["gpu_memory_utilization"] = round(EngineSettings().gpu_memory_utilization / ranks_each, 4)
    for room, name, tp_size, pp_size in nodes:
        own: dict[str, Any] = {
            "name": name,
            "coordinator": f"{place.fleet_host}:{place.fleet_port}",
            "kv_bind": f"ipc://{place.socket_dir}/{name}" if over_ipc else "",
            "tensor_parallel_size": tp_size,
            "pipeline_parallel_size": pp_size,
            "cpus": ",".join(filter(None, (next(rank_cpus) for _ in range(tp_size * pp_size)))),
        }
        process = _process(room, name, {**given_nodes, **shared, **own})
        if settings.engine == VLLM:
            num_sharing = math.ceil(len(nodes) / max(1, len(place.cuda_devices)))
            process = _with_vllm(process, settings, "" if place.cuda_devices else own["cpus"], num_sharing)
        if 1 < len(place.cuda_devices) >= tp_size * pp_size:
            visible = {"CUDA_VISIBLE_DEVICES": ",".join(itertools.islice(rank_devices, tp_size * pp_size))}
            process = dataclasses.replace(process, environment={**process.environment, **visible})
        processes.append(process)
    return processes


def _process(room: Room, name: str, values: Mapping[str, Any]) -> Process:
    settings = build(room.settings_class, dict(values))
    return Process(name, room.role, tuple(command_of(room, settings)), environment_of(settings), settings)


def _with_vllm(process: Process, settings: ClusterSettings, cpus: str, num_sharing: int) -> Process:
    """Return a node's process as vLLM's environment runs it, on these CPUs (empty: not on CPUs).

    `num_sharing` nodes divide the memory of one device, or of this machine, unless vLLM's flags say otherwise.
    """
    flags = list(settings.vllm_flag)
    if num_sharing > 1 and not any(each.replace("_", "-").startswith(MEMORY_FLAGS) for each in flags):
        flags.append(f"{MEMORY_FLAGS[0]}={round(EngineSettings().gpu_memory_utilization / num_sharing, 4)}")
    python = settings.vllm_python or sys.executable
    argv = (python, "-m", VLLM_PACKAGE, process.role, *to_argv(process.settings), "--", *flags)
    environment = {VLLM_CPUS: cpus, **process.environment} if cpus else process.environment
    return dataclasses.replace(process, argv=argv, environment=environment)


def _copied(field: "dataclasses.Field[Any]", **changes: Any) -> Any:
    return dataclasses.field(**{"default": field.default, "metadata": field.metadata, **changes})
