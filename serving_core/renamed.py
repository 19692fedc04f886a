"""Map the names of flags, environment variables, YAML keys and metrics of an earlier version to the current ones.

An old name works until the next release. A flag, a variable or a key under its old name is accepted with a warning; a
metric is exposed under both names.
"""

from collections.abc import Callable, Iterable, MutableMapping
from typing import Final

import click

ENV_PREFIX: Final = "SPLITSERVE_"
FLAGS: Final = {
    "doors": "api_server_count",
    "kv_annexes": "distributed_kv",
    "kv_lending": "remote_prefix_fetch",
    "seats": "slots",
    "ticket_timeout_s": "descriptor_timeout_s",
    "ticket_ttl_s": "reservation_ttl_s",
}
METRICS: Final = {  # new: old
    "api_server_calls": "door_calls",
    "api_server_cpu_seconds": "door_cpu_seconds",
    "migration_pause_seconds": "move_pause_seconds",
    "migrations": "moves",
    "prefix_fetch_seconds": "loan_seconds",
    "prefix_fetches": "loans",
    "remote_kvs": "annexes",
    "remote_kvs_recalled": "annexes_recalled",
}

Warn = Callable[[str], object]


def rename_arguments(arguments: Iterable[str], warn: Warn) -> list[str]:
    """Return the command line's arguments with old flags, given as --flag or --flag=value, under their new names."""
    renamed = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        new = FLAGS.get(flag.removeprefix("--").replace("-", "_")) if flag.startswith("--") else None
        if new is None:
            renamed.append(argument)
            continue
        warn(f"Warning: {flag} is called {_flag(new)} now")
        renamed.append(f"{_flag(new)}{equals}{value}")
    return renamed


def rename_variables(environment: MutableMapping[str, str], warn: Warn) -> None:
    """Move the value of each old environment variable to the new name, unless that is set too."""
    for old, new in FLAGS.items():
        old_name, new_name = ENV_PREFIX + old.upper(), ENV_PREFIX + new.upper()
        if old_name in environment:
            warn(f"Warning: {old_name} is called {new_name} now")
            environment.setdefault(new_name, environment.pop(old_name))


def warn(line: str) -> None:
    """Print a warning on stderr."""
    click.echo(line, err=True)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
