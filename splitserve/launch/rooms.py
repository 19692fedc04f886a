"""The processes of a cluster as the command line starts them: `python -m ROOM MODEL --flag value ...`."""

import dataclasses
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from coordinator.settings import CoordinatorSettings
from serving_core.flags import build, to_argv
from serving_node.settings import PACKAGES, NodeSettings

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
