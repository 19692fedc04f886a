"""Derive flags, environment variables and YAML keys from frozen settings dataclasses.

A default is written once, in the dataclass. Precedence: flag > environment (SPLITSERVE_NAME) > YAML file (`--config`) >
default. Unknown flags and unknown YAML keys are refused. A secret may also be given by the file that holds it:
`--name-file`, SPLITSERVE_NAME_FILE.
"""

import dataclasses
import os
import types
import typing
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import yaml

from serving_core.flag_groups import GROUPS, common_of, group_of
from serving_core.process.failpoints import ENVIRONMENT as FAILPOINTS
from serving_core.units import parse_size, size_of

ENV_PREFIX = "SPLITSERVE_"
NATIVE = "SPLITSERVE_NATIVE"  # names the kernel variant, or off
NO_FLAGS = frozenset({NATIVE, FAILPOINTS})
BYTES = "_bytes"  # suffix of flags that are sizes
GUESSED = ("tag:yaml.org,2002:null", "tag:yaml.org,2002:merge")  # YAML tags of words that are resolved
CONFIG = "config"  # the flag of a YAML file
FILE = "_file"  # suffix of the flag that names a secret's file
MAX_SECRET_BYTES = 4096
EPILOG = (
    "Each option is also an environment variable, SPLITSERVE_ and its name, and a key of the YAML file of --config."
)
HELP_ALL = "splitserve.help_all"  # in a click context's meta: the help of all options is wanted


def flag(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] = (),
    positional: bool = False,
    secret: bool = False,
    bare: str | None = None,
) -> Any:
    """Define a dataclass field that is also a flag with this default and help text.

    `minimum` and `maximum` bound a number, `choices` lists the allowed texts. A `positional` value has no flag name. A
    `secret` comes from the environment or a file, never from argv. `bare` is the value of a flag that is given without
    a value.
    """
    metadata = {
        "help": help,
        "minimum": minimum,
        "maximum": maximum,
        "choices": choices,
        "positional": positional,
        "secret": secret,
        "bare": bare,
    }
    return dataclasses.field(default=default, metadata=metadata)


def settings_command(settings_class: type[Any], run: Callable[[Any], None], *, name: str, help: str) -> click.Command:
    """Return a click command that calls `run` with a settings object, whose fields are the command's options.

    Nested dataclasses are flattened. The command exits with code 2 and a message for a wrong option.
    """

    secrets = secrets_of(settings_class)

    def callback(**values: Any) -> None:
        values.pop("config")
        for secret in secrets:
            values[secret] = secret_from(secret, values[secret], values.pop(secret + FILE))
        run(build(settings_class, values))

    params = [_parameter(field, hint) for field, hint in fields_of(settings_class)]
    params += [secret_file_option(secret) for secret in secrets]
    params.append(_config_option())
    return _Command(name, params=params, callback=callback, help=help, epilog=EPILOG)


class _Command(click.Command):
    """A command whose options are in groups, of which `--help` shows the common ones and `--help-all` all."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), _help_all_option()]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, each below the title of its group."""
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        rows = {str(option.name): row for option in options if (row := option.get_help_record(ctx))}
        names = list(rows)
        if ctx.meta.get(HELP_ALL):
            sections = {title: [name for name in names if _group_of(name) == title] for title in GROUPS}
        else:
            sections = {"Common options": common_of(names)}
        sections["Other options"] = [name for name in names if not _group_of(name)]
        for title, members in sections.items():
            if members:
                with formatter.section(title):
                    formatter.write_dl([rows[name] for name in members])


def _group_of(name: str) -> str:
    """Return the group of an option; the option for a secret's file is in the group of the secret."""
    return group_of(name) or group_of(name.removesuffix(FILE))


def _help_all_option() -> click.Option:
    def show(context: click.Context, _: click.Parameter, is_asked: bool) -> None:
        if is_asked:
            context.meta[HELP_ALL] = True
            click.echo(context.get_help(), color=context.color)
            context.exit()

    return click.Option(
        ["--help-all"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Show all options, in groups, and exit.",
    )


def build(settings_class: type[Any], values: dict[str, Any]) -> Any:
    """Return the settings object with these flat values by field name; missing ones keep their defaults.

    Values of nested dataclasses are found by the names of their fields; unknown names are ignored.
    """
    hints = typing.get_type_hints(settings_class)
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(settings_class):
        if dataclasses.is_dataclass(hints[field.name]):
            arguments[field.name] = build(typing.cast("type[Any]", hints[field.name]), values)
        elif field.name in values:
            arguments[field.name] = values[field.name]
    return settings_class(**arguments)


def fields_of(settings_class: type[Any]) -> Iterator[tuple["dataclasses.Field[Any]", Any]]:
    """Yield the fields of a settings class that are flags, each with its type; nested dataclasses are flattened."""
    hints = typing.get_type_hints(settings_class)
    for field in dataclasses.fields(settings_class):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from fields_of(typing.cast("type[Any]", hint))
        else:
            yield field, hint


def secrets_of(settings_class: type[Any]) -> list[str]:
    """Return the names of the flags of a settings class that are secrets."""
    return [field.name for field, _ in fields_of(settings_class) if field.metadata["secret"]]


def secret_file_option(secret: str) -> click.Option:
    """Return the click option --NAME-file, the file that holds the secret with this flag name."""
    return click.Option(
        [f"--{_kebab(secret + FILE)}", secret + FILE],
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        envvar=ENV_PREFIX + (secret + FILE).upper(),
        show_envvar=True,
        help=f"Read --{_kebab(secret)} from this file.",
    )


def secret_from(secret: str, given: str | None, file: Path | None) -> str | None:
    """Return a secret as given, or read from its file; None if neither is given.

    `secret` is the flag name, for errors. Raises click.UsageError if both are given, if the file cannot be read or does
    not hold one line of printable ASCII.
    """
    if given and not is_secret(given):
        raise click.UsageError(f"--{_kebab(secret)} must be of printable ASCII alone")
    if file is None:
        return given
    if given:
        raise click.UsageError(f"--{_kebab(secret)} and --{_kebab(secret + FILE)} are both given: one is enough")
    flag_name = f"--{_kebab(secret + FILE)} {file}"
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_SECRET_BYTES + 1)
        text = content.decode().rstrip("\r\n")
    except OSError as error:
        raise click.UsageError(f"{flag_name} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{flag_name} is not UTF-8 text") from error
    if len(content) > MAX_SECRET_BYTES:
        raise click.UsageError(f"{flag_name} has more than {MAX_SECRET_BYTES} bytes, the most of a secret")
    if not text or not is_secret(text):
        raise click.UsageError(f"{flag_name} must hold one line of ASCII, with the secret alone")
    return text


def is_secret(text: str) -> bool:
    """Return whether a text can be sent as a secret: gRPC metadata and HTTP headers accept only printable ASCII."""
    return text.isascii() and text.isprintable()


def to_argv(settings: Any) -> list[str]:
    """Return the flags that rebuild these settings in another process, without secrets and values at their default.

    A repeatable flag occurs once for each value.
    """
    argv: list[str] = []
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            argv += to_argv(value)
        elif value == field.default or field.metadata["secret"]:
            continue
        elif field.metadata["positional"]:
            argv.append(str(value))
        elif isinstance(value, tuple):
            argv += [part for each in value for part in (f"--{_kebab(field.name)}", each)]
        elif isinstance(value, bool):
            argv.append(f"--{'' if value else 'no-'}{_kebab(field.name)}")
        else:
            argv += [f"--{_kebab(field.name)}", str(value)]
    return argv


def environment_of(settings: Any) -> dict[str, str]:
    """Return the environment for a process that gets the flags of `to_argv`: this process's, with the secrets added.

    A secret that came from a file is passed by its file variable. Variables of other flags are left out.
    """
    return without_flags() | dict(_secret_variable(name, value) for name, value in _secrets(settings))


def without_flags() -> dict[str, str]:
    """Return this process's environment without the variables of flags, and so without SplitServe's secrets."""
    return {name: value for name, value in os.environ.items() if name in NO_FLAGS or not name.startswith(ENV_PREFIX)}


def _secret_variable(name: str, secret: str) -> tuple[str, str]:
    """Return the variable that passes a secret on: the variable of its file, if there is one that holds this secret."""
    of_file = ENV_PREFIX + (name + FILE).upper()
    with suppress(click.UsageError):  # it may be for another process
        if of_file in os.environ and secret_from(name, None, Path(os.environ[of_file])) == secret:
            return of_file, os.environ[of_file]
    return ENV_PREFIX + name.upper(), secret


def _secrets(settings: Any) -> Iterator[tuple[str, str]]:
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield from _secrets(value)
        elif field.metadata["secret"] and value:
            yield field.name, value


def _parameter(field: "dataclasses.Field[Any]", hint: Any) -> click.Parameter:
    kind = _click_type(field, hint)
    default = None if field.default is dataclasses.MISSING else field.default
    envvar = ENV_PREFIX + field.name.upper()
    if field.metadata["positional"]:
        return click.Argument([field.name], type=kind, default=default, envvar=envvar, required=default is None)
    spelling = f"--{_kebab(field.name)}"
    if kind is click.BOOL:
        spelling += f"/--no-{_kebab(field.name)}"
    bare = field.metadata["bare"]
    return click.Option(
        [spelling, field.name],
        type=kind,
        default=default,
        multiple=isinstance(default, tuple),
        envvar=envvar,
        show_default=_shown_default(field, default),
        show_envvar=field.metadata["secret"],
        help=field.metadata["help"],
        **({} if bare is None else {"is_flag": False, "flag_value": bare}),
    )


def _shown_default(field: "dataclasses.Field[Any]", default: Any) -> bool | str:
    """Return a default as help shows it: click's own text, nothing, or a size with its unit."""
    if default in (None, "", ()) or field.metadata["secret"]:
        return False
    return size_of(default) if field.name.endswith(BYTES) else True


class WholeRange(click.IntRange):
    """click's IntRange, with a readable name in help and in "'32k' is not a valid integer"."""

    name = "integer"


class RealRange(click.FloatRange):
    """click's FloatRange, with a readable name."""

    name = "number"


class SizeRange(click.IntRange):
    """Bytes within a range, given as a number or with a unit."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            num_bytes = parse_size(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return int(super().convert(num_bytes, param, ctx))


def _click_type(field: "dataclasses.Field[Any]", hint: Any) -> "click.ParamType[Any]":
    if typing.get_origin(hint) is tuple:  # of strings, one for each time that the flag is given
        return click.STRING
    if isinstance(hint, types.UnionType):  # X | None
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    low, high = field.metadata["minimum"], field.metadata["maximum"]
    if field.metadata["choices"]:
        return click.Choice(field.metadata["choices"])
    if hint is int:
        return SizeRange(low, high) if field.name.endswith(BYTES) else WholeRange(low, high)
    if hint is float:
        return RealRange(low, high)
    return {bool: click.BOOL, str: click.STRING}[hint]


def _config_option() -> click.Option:
    def load(context: click.Context, _: click.Parameter, path: Path | None) -> Path | None:
        if path is not None:
            context.default_map = read_yaml(path, context.command)
        return path

    return click.Option(
        [f"--{CONFIG}"],
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        callback=load,
        is_eager=True,
        help="Read options from this YAML file; flags and environment variables win over it.",
    )


def read_yaml(path: Path, command: click.Command) -> dict[str, str | list[str]]:
    """Read a flat YAML mapping of a command's flags (with - or _) to texts, or to lists of texts for repeatable flags.

    Returns the values by parameter name. Raises click.BadParameter for unknown keys and anything else.
    """
    try:
        content = yaml.load(path.read_text(), Loader=_Spelled)  # a SafeLoader
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise click.BadParameter(f"{path} is not YAML: {error}") from error
    if not isinstance(content, dict):
        raise click.BadParameter(f"{path} must hold a mapping of flag names to values")
    values = {str(key).replace("-", "_"): value for key, value in content.items()}
    repeated = {str(param.name): param.multiple for param in command.params if param.name != CONFIG}
    if unknown := sorted(set(values) - set(repeated)):
        raise click.BadParameter(f"{path} has unknown keys: {', '.join(unknown)}")
    if empty := [key for key, value in values.items() if value is None]:
        raise click.BadParameter(f"{path} has keys without a value: {', '.join(empty)}")
    values = {key: [value] if repeated[key] and isinstance(value, str) else value for key, value in values.items()}
    if wrong := [key for key, value in values.items() if not _fits(value, is_repeated=repeated[key])]:
        raise click.BadParameter(
            f"{path} has values that are neither a text nor, of a flag that may be repeated, a list of texts: "
            f"{', '.join(wrong)}"
        )
    return values


def _fits(value: Any, *, is_repeated: bool) -> bool:
    texts = value if is_repeated and isinstance(value, list) else [value]
    return all(isinstance(text, str) for text in texts)


class _Spelled(yaml.SafeLoader):
    """Loads scalars as texts as written, like flags: 0123 is a valid key, and `off` a word. Only null and << are
    resolved.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012  # as PyYAML has them
        first: [(tag, pattern) for tag, pattern in resolvers if tag in GUESSED]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def _kebab(name: str) -> str:
    return name.replace("_", "-")
