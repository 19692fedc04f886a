"""Flags for the fields of `questions.Sampling`."""

from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import click

from splitserve.questions import Sampling

Command = Callable[..., None]


def sampling_options(command: Command) -> Command:
    """A flag for each field of Sampling."""
    for name, hint in reversed(get_type_hints(Sampling, include_extras=True).items()):
        command = _sampling_option(name, *get_args(hint))(command)
    return command


def _sampling_option(name: str, hint: Any, help: str) -> Callable[[Command], Command]:
    spelling = f"--{name.replace('_', '-')}"
    kinds = get_args(hint)
    if name == "logit_bias":
        return click.option(spelling, multiple=True, callback=_logit_bias, metavar="TOKEN_ID=BIAS", help=help)
    if name in ("stop", "stop_token_ids"):
        kind = str if name == "stop" else int
        return click.option(spelling, multiple=True, type=kind, help=help + " May be repeated.")
    if bool in kinds:
        return click.option(f"{spelling}/--no-{spelling[2:]}", default=None, help=help)
    return click.option(spelling, type=kinds[0], help=help)


def _logit_bias(_: click.Context, __: click.Parameter, pairs: tuple[str, ...]) -> dict[int, float] | None:
    try:
        return {int(token_id): float(bias) for token_id, bias in (pair.split("=") for pair in pairs)} or None
    except ValueError as error:
        raise click.BadParameter("expected TOKEN_ID=BIAS, such as 42=-1.5") from error
