"""The processes of a cluster as the command line starts them: `python -m ROOM MODEL --flag value ...`."""

import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from coordinator.settings import CoordinatorSettings
from serving_core.flags import build, to_argv
from serving_node.settings import PACKAGES, NodeSettings

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
