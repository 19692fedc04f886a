"""Warn of SPLITSERVE_* environment variables that nothing reads, such as a mistyped one."""

import difflib
from collections.abc import Mapping
from typing import Any, Final

from serving_core.flags import ENV_PREFIX, FILE, NO_FLAGS, fields_of, secrets_of

SERVER: Final = "SPLITSERVE_SERVER"  # for commands that call a server; all other variables belong to flags


def unknown_variables(environment: Mapping[str, str]) -> str:
    """Return a warning with the unknown SPLITSERVE_ variables, each with the likely name; empty without any."""
    ours = [name for name in environment if name.startswith(ENV_PREFIX)]
    known = known_variables() if ours else frozenset()
    unknown = sorted(set(ours) - known)
    if not unknown:
        return ""
    return f"Warning: nothing reads {', '.join(_with_hint(name, known) for name in unknown)}"


def known_variables() -> frozenset[str]:
    """Return the names of all environment variables that some command or process reads."""
    from splitserve.launch.cluster import (
        API_SERVER,
        ROOMS,
        ClusterSettings,  # imported here, since the import is slow and seldom needed
    )

    settings_classes: list[type[Any]] = [ClusterSettings, *(room.settings_class for room in (*ROOMS, API_SERVER))]
    flags = {field.name for settings_class in settings_classes for field, _ in fields_of(settings_class)}
    flags |= {secret + FILE for settings_class in settings_classes for secret in secrets_of(settings_class)}
    return frozenset({SERVER, *NO_FLAGS, *(ENV_PREFIX + name.upper() for name in flags)})


def _with_hint(name: str, known: frozenset[str]) -> str:
    endings = sorted(other.removeprefix(ENV_PREFIX) for other in known)
    nearest = difflib.get_close_matches(name.removeprefix(ENV_PREFIX), endings, n=1)
    return f"{name} (did you mean {ENV_PREFIX}{nearest[0]}?)" if nearest else name
