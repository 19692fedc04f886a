"""Map the names of flags, environment variables, YAML keys, JSON keys, roles and metrics of an earlier version to the
current ones.

An old name works until the next release. A flag, a variable or a key under its old name is accepted with a warning; a
metric is exposed under both names.
"""

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from functools import cache
from typing import Any, Final

import click

ENV_PREFIX: Final = "SPLITSERVE_"
FLAGS: Final = {
    "both": "mixed",
    "both_pp": "mixed_pp",
    "both_tp": "mixed_tp",
    "doors": "api_server_count",
    "kv_annexes": "distributed_kv",
    "kv_lending": "remote_prefix_fetch",
    "no_takes_handovers": "no_accepts_transfers",
    "seats": "slots",
    "takes_handovers": "accepts_transfers",
    "ticket_timeout_s": "descriptor_timeout_s",
    "ticket_ttl_s": "reservation_ttl_s",
}
ROLES: Final = {"both": "mixed"}
JSON_KEYS: Final = {  # of timelines, results of benchmarks and profiles
    "corridor": "kv_transfer",
    "credit_wait_s": "kv_alloc_s",
    "door_s": "api_server_s",
    "loan_s": "prefix_fetch_s",
    "move_pause_s": "migration_pause_s",
    "transfer_s": "kv_transfer_s",
}
METRICS: Final = {  # new: old
    "api_server_calls": "door_calls",
    "api_server_cpu_seconds": "door_cpu_seconds",
    "fetched_blocks": "blocks_lent",
    "fetched_kv_bytes": "lent_kv_bytes",
    "local_decodes": "answers_kept",
    "migrated_kv_bytes": "moved_kv_bytes",
    "migration_pause_seconds": "move_pause_seconds",
    "migrations": "moves",
    "prefix_fetch_seconds": "loan_seconds",
    "prefix_fetches": "loans",
    "remote_kv_blocks": "kv_blocks_hosted",
    "remote_kvs": "annexes",
    "remote_kvs_revoked": "annexes_recalled",
    "request_kv_alloc_seconds": "request_credit_wait_seconds",
    "request_kv_transfer_seconds": "request_transfer_seconds",
    "requests_deferred": "requests_held",
    "slo_requests": "slo_answers",
    "step_sequences": "step_answers",
}

Warn = Callable[[str], object]


def rename_arguments(arguments: Iterable[str], warn: Warn) -> list[str]:
    """Return the arguments of a command line with old flags, as --flag or --flag=value, under their new names.

    Calls `warn` with a line for each.
    """
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
    """Rename the old variables in `environment`, in place, and call `warn` with a line for each.

    If the new name is set too, its value stays, and the old variable is removed.
    """
    for old, new in FLAGS.items():
        old_name, new_name = ENV_PREFIX + old.upper(), ENV_PREFIX + new.upper()
        if old_name in environment:
            warn(f"Warning: {old_name} is called {new_name} now")
            environment.setdefault(new_name, environment.pop(old_name))


def rename_role(role: str) -> str:
    """Return a role, or the command of a role, under its new name; prints a warning on stderr for an old one."""
    if role in ROLES:
        warn(f"Warning: {role} is called {ROLES[role]} now")
    return ROLES.get(role, role)


def rename_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON object with its old keys renamed.

    Prints one warning on stderr for each old key, once in a process.
    """
    return {_new_key(key) if key in JSON_KEYS else key: value for key, value in values.items()}


@cache
def _new_key(key: str) -> str:
    warn(f"Warning: the key {key} is called {JSON_KEYS[key]} now")
    return JSON_KEYS[key]


def warn(line: str) -> None:
    """Print a line on stderr."""
    click.echo(line, err=True)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
