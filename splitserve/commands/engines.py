"""Choose the engine of a node: our own, or one whose package has a node command of its own."""

import importlib
from collections.abc import Sequence
from typing import Final

import click

OWN: Final = "splitserve"
PACKAGES: Final = {"vllm": "splitserve_vllm.process"}
"""Modules with `node_command(role)`, by engine. One is imported when its engine is chosen."""
ROLES: Final = ("prefill", "decode", "mixed")
UP: Final = "up"


def engine_option() -> click.Option:
    """Return the option that names the engine, for the help of a node's command."""
    return click.Option(
        ["--engine"],
        type=click.Choice([OWN, *PACKAGES]),
        default=OWN,
        show_default=True,
        expose_value=False,
        callback=_check_own,
        help="Engine of the node. With vllm, flags of vLLM follow --, and --help shows the node's own.",
    )


def _check_own(context: click.Context, option: click.Parameter, engine: str) -> None:
    """Refuse another engine here: `with_engine` finds those of the command line before the command is parsed."""
    if engine != OWN:
        raise click.BadParameter(f"{engine} must be given on the command line", context, option)


def with_engine(name: str, command: click.Command, args: Sequence[str]) -> tuple[click.Command, list[str]]:
    """Return the command of the engine that `--engine` names, and the other arguments. What follows `--` is vLLM's.

    `up` keeps its own command, whose --vllm-flag gets what follows `--`.
    """
    rest = list(args)
    if name == UP:
        return command, _with_vllm_flags(rest)
    if name not in ROLES:
        return command, rest
    for index, each in enumerate(rest[: rest.index("--") if "--" in rest else len(rest)]):
        flag, is_joined, value = each.partition("=")
        if flag != "--engine":
            continue
        engine = value if is_joined else "".join(rest[index + 1 : index + 2])
        if engine in PACKAGES:
            del rest[index : index + (1 if is_joined else 2)]
            made: click.Command = importlib.import_module(PACKAGES[engine]).node_command(name)
            return made, rest
    return command, rest


def _with_vllm_flags(args: list[str]) -> list[str]:
    own = args[: args.index("--")] if "--" in args else args
    return [*own, *(f"--vllm-flag={each}" for each in args[len(own) + 1 :])]
