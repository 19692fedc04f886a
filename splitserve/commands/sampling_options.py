"""Flags for the fields of `questions.Sampling`."""

from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import click

from splitserve.client.questions import Sampling

Command = Callable[..., None]


def sampling_options(default_max_tokens: int) -> Callable[[Command], Command]:
    """A flag for each field of Sampling. None has a default of click's, but help tells the command's own limit."""

    def add(command: Command) -> Command:
        for name, hint in reversed(get_type_hints(Sampling, include_extras=True).items()):
            kind, help = get_args(hint)
            if name == "max_tokens":
                help = f"Most tokens of the answer; default: {default_max_tokens}, or what the context still holds."
            command = _sampling_option(name, kind, help)(command)
        return command

    return add


def _sampling_option(name: str, hint: Any, help: str) -> Callable[[Command], Command]:
    spelling = f"--{name.replace('_', '-')}"
    kinds = get_args(hint)
    if name == "logit_bias":
        return click.option(spelling, multiple=True, callback=_logit_bias, metavar="TOKEN_ID=BIAS", help=help)
    if name == "bad_tokens":
        help += " May be repeated."
        return click.option(spelling, multiple=True, callback=_token_runs, metavar="TOKEN_ID,...", help=help)
    if name in ("stop", "bad_words", "stop_token_ids", "allowed_token_ids", "logprob_token_ids", "choice"):
        kind = int if name.endswith("_ids") else str
        return click.option(spelling, multiple=True, type=kind, callback=_if_any, help=help + " May be repeated.")
    if bool in kinds:
        return click.option(f"{spelling}/--no-{spelling[2:]}", default=None, help=help)
    return click.option(spelling, type=kinds[0], help=help)


def _if_any(_: click.Context, __: click.Parameter, values: tuple[Any, ...]) -> tuple[Any, ...] | None:
    return values or None


def _token_runs(_: click.Context, __: click.Parameter, runs: tuple[str, ...]) -> list[list[int]] | None:
    try:
        return [[int(token_id) for token_id in run.split(",")] for run in runs] or None
    except ValueError as error:
        raise click.BadParameter("expected TOKEN_ID,..., such as 42,17") from error


def _logit_bias(_: click.Context, __: click.Parameter, pairs: tuple[str, ...]) -> dict[int, float] | None:
    try:
        return {int(token_id): float(bias) for token_id, bias in (pair.split("=") for pair in pairs)} or None
    except ValueError as error:
        raise click.BadParameter("expected TOKEN_ID=BIAS, such as 42=-1.5") from error
