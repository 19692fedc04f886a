"""A cluster as a plan: which processes, with which settings and command lines. Pure; the launcher carries it out."""

import dataclasses
import itertools
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

from coordinator.settings import CoordinatorSettings
from serving_core.cpus import divide_cpus
from serving_core.errors import SettingsError
from serving_core.flags import build, environment_of, fields_of, flag, to_argv
from serving_core.settings import EngineSettings
from serving_core.socket_folder import fits
from serving_node.settings import PACKAGES, NodeSettings
from splitserve.launch.models import LocalModel

# Flags of nodes whose values are paths, beside MODEL and those of adapters.
PATHS: Final = {"speculative_model", "tls_cert", "tls_key", "tls_ca", "kv_disk_path", "weights_disk_path"}

Settings = CoordinatorSettings | NodeSettings


@dataclass(frozen=True, slots=True)
class Room:
    """A role: its package and what a process of it can be told."""

    role: str
    package: str
    settings_class: type[Any]


COORDINATOR: Final = Room("coordinator", "coordinator", CoordinatorSettings)
PREFILL, DECODE, BOTH = (Room(role, package, NodeSettings) for role, package in PACKAGES.items())
ROOMS: Final = (COORDINATOR, PREFILL, DECODE, BOTH)


def command_of(room: Room, settings: Any) -> list[str]:
    """The argv that starts a process of this room with these settings."""
    return [sys.executable, "-m", room.package, *to_argv(settings)]


def flat(settings: Any) -> dict[str, Any]:
    """Every flag's value by name, nested settings flattened."""
    return dict(_flat_items(settings))


def in_full(settings: Any) -> dict[str, Any]:
    """The same for a node that runs in another folder, be it on another host with the same files."""
    values = flat(settings)
    adapters = (each.partition("=") for each in values["lora"])
    values["lora"] = tuple(f"{name}{sign}{full_path(folder)}" for name, sign, folder in adapters)
    return values | {name: full_path(values[name]) for name in PATHS}


def full_path(text: str) -> str:
    """A path of this machine in full; all else as it was given."""
    path = Path(text).expanduser()
    return str(path.resolve()) if text and path.exists() else text


def replaced(settings: Any, **changes: Any) -> Any:
    """The same settings with other values for these flags."""
    return build(type(settings), {**flat(settings), **changes})


def _flat_items(settings: Any) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield from _flat_items(value)
        else:
            yield field.name, value


LOOPBACK: Final = "127.0.0.1"
FOR_THE_FLEET: Final = ("tls_cert", "tls_key")  # with a CA alone: else nodes speak to the coordinator as without TLS
NO_HTTP: Final = -1  # as an http_port
LONGEST_NAME: Final = "prefill-63.4095"  # of a socket: of the last rank of the last node
LOCAL_RAY: Final = "auto"  # as the address of a Ray cluster: the one that this machine is part of


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """What `splitserve up` decides itself; everything else it passes on to the processes."""

    model: str = flag(
        "", "Folder, GGUF file or hub id of the model; without one the demo model serves.", positional=True
    )
    prefill: int | None = flag(None, "Number of prefill nodes: 1, or none beside --both.", minimum=0, maximum=64)
    decode: int | None = flag(
        None, "Number of decode nodes: 1, or none beside --both or for embeddings.", minimum=0, maximum=64
    )
    both: int = flag(0, "Number of nodes that read prompts and write answers.", minimum=0, maximum=64)
    prefill_tp: int = flag(1, "Ranks that compute each layer of a prefill node together.", minimum=1, maximum=64)
    decode_tp: int = flag(1, "Ranks that compute each layer of a decode node together.", minimum=1, maximum=64)
    both_tp: int = flag(1, "Ranks that compute each layer of a node that does both together.", minimum=1, maximum=64)
    prefill_pp: int = flag(1, "Stages of each prefill node, of --prefill-tp ranks.", minimum=1, maximum=64)
    decode_pp: int = flag(1, "Stages of each decode node, of --decode-tp ranks.", minimum=1, maximum=64)
    both_pp: int = flag(1, "Stages of each node that does both, of --both-tp ranks.", minimum=1, maximum=64)
    host: str = flag(LOOPBACK, "Address of the public gRPC port.")
    grpc_port: int = flag(50051, "Public gRPC port.", minimum=1, maximum=65535)
    http_port: int = flag(8000, "OpenAI-compatible HTTP port; 0 takes a free one, -1 none.", minimum=-1, maximum=65535)
    log_dir: str = flag(
        "",
        "Folder for the processes' logs; empty makes one below that for temporary files, where the latest runs' stay.",
    )
    start_timeout_s: float = flag(300.0, "Seconds until every node must be ready.", minimum=1.0)
    drain_s: float = flag(10.0, "Seconds running requests get to finish when the cluster stops.", minimum=0.0)
    node_wait_s: float = flag(
        60.0,
        "Seconds a request waits for a node that can take it, while there is none, as until one that died has started "
        "again; 0 refuses it.",
        minimum=0.0,
    )
    ray: str = flag(
        "", "Ray cluster whose hosts run the nodes: HOST:PORT, or nothing for the one of this machine.", bare=LOCAL_RAY
    )
    ray_cpus: int = flag(1, "CPUs that each rank takes on Ray.", minimum=1, maximum=1024)


def num_nodes(settings: ClusterSettings, *, embeds: bool = False) -> dict[str, int]:
    """How many nodes begin in each role; for a model that `embeds`, none has to write answers. Raises SettingsError
    when nobody would read prompts, or write answers."""
    unless_given = 0 if settings.both else 1
    num_prefill = unless_given if settings.prefill is None else settings.prefill
    num_decode = (0 if embeds else unless_given) if settings.decode is None else settings.decode
    for flag_name, num, work in (("--prefill", num_prefill, "read prompts"), ("--decode", num_decode, "write answers")):
        if not num and not settings.both and not (embeds and flag_name == "--decode"):
            raise SettingsError(f"nobody would {work}: {flag_name} or --both must be above 0")
    return {PREFILL.role: num_prefill, DECODE.role: num_decode, BOTH.role: settings.both}


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the cluster."""

    name: str
    role: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    settings: Any = None  # what argv and environment say


@dataclass(frozen=True, slots=True)
class Place:
    """What the machine gives a cluster: a free port, a folder for sockets, a secret, an id that no other cluster has,
    the CPUs it may use, and the address at which nodes find the coordinator. Without a folder, or with one whose path
    is too long for sockets, the host of each node says where KV arrives. Of several CUDA devices, by the names that
    CUDA_VISIBLE_DEVICES takes, each rank gets one in turn; those that share one divide its memory."""

    fleet_port: int
    socket_dir: str
    fleet_secret: str
    instance_id: str
    cpus: tuple[int, ...]
    fleet_host: str = LOOPBACK
    cuda_devices: tuple[str, ...] = ()


# Flags of the processes that the plan sets itself.
PLANNED: Final = frozenset(
    {"model", "host", "fleet_host", "fleet_port", "fleet_secret", "coordinator", "name", "kv_bind", "cpus"}
    | {"tensor_parallel_size", "pipeline_parallel_size", "instance_id"}
    | {"health_host", "health_port", "metrics_host", "metrics_port"}
) | {field.name for field in dataclasses.fields(ClusterSettings)}


def up_settings_class() -> type[Any]:
    """ClusterSettings and every flag that can be passed on. One whose defaults differ by role stays unset: None."""
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
    """The processes in starting order, the coordinator first. `passed` are flags for whichever room knows them; None
    leaves a flag unset, and what the plan sets itself is not overruled. `embeds`: whether the model makes embeddings.
    Raises SettingsError."""
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
    sizes = {
        PREFILL: (settings.prefill_tp, settings.prefill_pp),
        DECODE: (settings.decode_tp, settings.decode_pp),
        BOTH: (settings.both_tp, settings.both_pp),
    }
    counts = num_nodes(settings, embeds=embeds)
    nodes = [(room, f"{room.role}-{i}", *sizes[room]) for room in sizes for i in range(counts[room.role])]
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
        own = {
            "name": name,
            "coordinator": f"{place.fleet_host}:{place.fleet_port}",
            "kv_bind": f"ipc://{place.socket_dir}/{name}" if over_ipc else "",
            "tensor_parallel_size": tp_size,
            "pipeline_parallel_size": pp_size,
            "cpus": ",".join(filter(None, (next(rank_cpus) for _ in range(tp_size * pp_size)))),
        }
        process = _process(room, name, {**given_nodes, **shared, **own})
        if 1 < len(place.cuda_devices) >= tp_size * pp_size:
            visible = {"CUDA_VISIBLE_DEVICES": ",".join(itertools.islice(rank_devices, tp_size * pp_size))}
            process = dataclasses.replace(process, environment={**process.environment, **visible})
        processes.append(process)
    return processes


def _process(room: Room, name: str, values: Mapping[str, Any]) -> Process:
    settings = build(room.settings_class, dict(values))
    return Process(name, room.role, tuple(command_of(room, settings)), environment_of(settings), settings)


def _copied(field: "dataclasses.Field[Any]", **changes: Any) -> Any:
    return dataclasses.field(**{"default": field.default, "metadata": field.metadata, **changes})
