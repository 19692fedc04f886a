"""The tables of docs/reference/configuration.md and commands.md: `python -m tests.settings_table` writes both anew.

The first page has what the processes that serve can be told, out of their settings; the second the flags of all other
commands, as click has them.
"""

import dataclasses
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import click

from coordinator.api_server_settings import ApiServerSettings
from coordinator.settings import CoordinatorSettings
from serving_core.flags import BYTES, ENV_PREFIX, FILE
from serving_core.units import size_of
from serving_node.settings import NodeSettings
from splitserve.cli import COMMANDS, main
from splitserve.launch.cluster import ClusterSettings
from tests.doc_table import DOCS, page_with

SETTINGS_PAGE: Final = DOCS / "reference" / "configuration.md"
COMMANDS_PAGE: Final = DOCS / "reference" / "commands.md"
MODULE: Final = "tests.settings_table"
COORDINATOR: Final = "coordinator"
API_SERVER: Final = "api-server"
NODES: Final = "prefill, decode, mixed"
UP: Final = "up"
UNITS: Final = {"_s": "seconds", "_ms": "milliseconds", "_tokens": "tokens", BYTES: "bytes, or 512MiB"}
SHARED: Final = {  # two commands that have these flags, and those whose flags are not among them
    "Which server": ("status", "drain"),
    "How answers are written": ("generate", "chat", "status"),
}


def settings_tables() -> str:
    """The part of configuration.md between the marks: a table for each settings class, outer ones first."""
    roots = {ClusterSettings: UP, CoordinatorSettings: COORDINATOR, ApiServerSettings: API_SERVER, NodeSettings: NODES}
    takers: dict[type[Any], list[str]] = {}
    for root, command in roots.items():
        for settings_class in _classes(root):
            takers.setdefault(settings_class, []).append(command)
    passed_on = {param.name for param in _command(UP).params} - {f.name for f in dataclasses.fields(ClusterSettings)}
    lines = []
    for settings_class, commands in takers.items():
        lines += ["", f"### {(settings_class.__doc__ or '').strip().splitlines()[0].partition(';')[0].rstrip('.')}", ""]
        lines += [f"Of `splitserve {'`, `'.join(', '.join(commands).split(', '))}`.", ""]
        lines += ["| flag | environment | value | default | |", "|---|---|---|---|---|"]
        lines += [_setting_row(*each, with_up=each[0].name in passed_on) for each in _own_fields(settings_class)]
    return "\n".join(lines) + "\n\n"


def _classes(settings_class: type[Any]) -> Iterator[type[Any]]:
    yield settings_class
    for hint in typing.get_type_hints(settings_class).values():
        if dataclasses.is_dataclass(hint):
            yield from _classes(typing.cast("type[Any]", hint))


def _own_fields(settings_class: type[Any]) -> Iterator[tuple["dataclasses.Field[Any]", Any]]:
    hints = typing.get_type_hints(settings_class)
    return (
        (f, hints[f.name]) for f in dataclasses.fields(settings_class) if not dataclasses.is_dataclass(hints[f.name])
    )


def _setting_row(field: "dataclasses.Field[Any]", hint: Any, *, with_up: bool) -> str:
    meta, name = field.metadata, field.name.replace("_", "-")
    spelling = f"`{name.upper()}`, no flag" if meta["positional"] else f"`--{name}`"
    variables = [f"`{ENV_PREFIX}{field.name.upper()}`"]
    if meta["secret"]:
        spelling += f", `--{name}{FILE.replace('_', '-')}`"
        variables.append(f"`{ENV_PREFIX}{(field.name + FILE).upper()}`")
    about = meta["help"] + (" *(`up` too)*" if with_up and not meta["positional"] else "")
    return _row(spelling, ", ".join(variables), _setting_value(field, hint), _default(field.name, field.default), about)


def _setting_value(field: "dataclasses.Field[Any]", hint: Any) -> str:
    meta = field.metadata
    if meta["choices"]:
        return ", ".join(f"`{choice}`" for choice in meta["choices"])
    if meta["secret"]:
        return "secret"
    kinds = set(typing.get_args(hint)) or {hint}
    if bool in kinds:
        return "on, or off by `--no-...`"
    if kinds & {int, float}:
        return _number(field.name, meta["minimum"], meta["maximum"])
    return "texts" if typing.get_origin(hint) is tuple else "text"


def _number(name: str, low: float | None, high: float | None) -> str:
    unit = next((unit for ending, unit in UNITS.items() if name.endswith(ending)), "number")
    if low is None or high is None:
        return unit if low is None else f"{unit}, from {low:.10g}"
    return f"{unit}, {low:.10g} to {high:.10g}"


def _default(name: str, default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, str):
        return f"`{default}`" if default else ""
    if isinstance(default, int) and name.endswith(BYTES):
        return size_of(default)
    return f"{default:g}" if isinstance(default, int | float) else ""  # others are words of click's for none


def commands_tables() -> str:
    """The part of commands.md between the marks: the flags of every command whose settings are not in the other page.
    Those that several commands share stand once."""
    shared = {title: _shared_by(*commands) for title, commands in SHARED.items()}
    lines = []
    for title, options in shared.items():
        lines += ["", f"## {title}", "", *_option_rows(options.values())]
    for name, command in all_commands():
        if not any(param.name == "config" for param in command.params):
            lines += ["", f"## splitserve {name}", "", *_command_part(name, command, shared)]
    return "\n".join(lines) + "\n\n"


def _command_part(name: str, command: click.Command, shared: Mapping[str, Mapping[str, click.Option]]) -> list[str]:
    lines, options = [f"`{_usage(name, command)}`", "", _help(command)], _options(command)
    had = {title: common for title, common in shared.items() if _has(command, common)}
    if had:
        links = (f"[{title}](#{title.lower().replace(' ', '-')})" for title in had)
        lines += ["", f"Also takes the flags of {', '.join(links)}."]
    common_names = {name for common in had.values() for name in common}
    options = [option for option in options if option.name not in common_names]
    return [*lines, "", *_option_rows(options)] if options else lines


def _shared_by(one: str, other: str, *without: str) -> dict[str, click.Option]:
    others = {option.name: option for option in _options(_command(other))}
    left_out = {option.name for name in without for option in _options(_command(name))}
    same = [o for o in _options(_command(one)) if _is_same(o, others.get(o.name)) and o.name not in left_out]
    return {str(option.name): option for option in same}


def _has(command: click.Command, options: Mapping[str, click.Option]) -> bool:
    own = {option.name: option for option in _options(command)}
    return all(_is_same(option, own.get(name)) for name, option in options.items())


def _is_same(option: click.Option, other: click.Option | None) -> bool:
    return other is not None and (option.name, _about(option), option.default) == (
        other.name,
        _about(other),
        other.default,
    )


def all_commands() -> Iterator[tuple[str, click.Command]]:
    """Every command with its whole name, those of groups behind their group."""
    for name in COMMANDS:
        yield from _with_subcommands(name, _command(name))


def _command(name: str) -> click.Command:
    command = main.get_command(click.Context(main), name)
    assert command is not None, name
    return command


def _with_subcommands(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        for each in sorted(command.commands):
            yield from _with_subcommands(f"{name} {each}", command.commands[each])


def _usage(name: str, command: click.Command) -> str:
    pieces = command.collect_usage_pieces(click.Context(command))
    return " ".join(["splitserve", name, *(piece for piece in pieces if piece)])


def _help(command: click.Command) -> str:
    paragraphs = (command.help or "").replace("\b", "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _options(command: click.Command) -> list[click.Option]:
    return [param for param in command.params if isinstance(param, click.Option) and not param.hidden]


def _option_rows(options: Iterable[click.Option]) -> list[str]:
    rows = [_row(_spelling(o), _option_value(o), _default(str(o.name), o.default), _about(o)) for o in options]
    return ["| flag | value | default | |", "|---|---|---|---|", *rows]


def _spelling(option: click.Option) -> str:
    return ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))


def _option_value(option: click.Option) -> str:
    kind = option.type
    if option.is_flag:
        return "on" + (" or off" if option.secondary_opts else "")
    if isinstance(kind, click.Choice):
        return ", ".join(f"`{choice}`" for choice in kind.choices)
    if isinstance(kind, click.IntRange | click.FloatRange):
        number = _number(str(option.name), kind.min, kind.max)
        return number.replace("from", "above") if kind.min_open else number
    metavar = option.make_metavar(click.Context(click.Command("any")))
    return "`" + metavar + "`" if option.metavar else kind.name.replace("integer", "number").replace("float", "number")


def _about(param: click.Parameter) -> str:
    said = str(getattr(param, "help", None) or "")
    variables = [param.envvar] if isinstance(param.envvar, str) else param.envvar or ()
    return " ".join([said, *(f"(`{name}`)" for name in variables)]).strip()


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def pages() -> Mapping[Any, str]:
    """The whole pages, with the tables as they ought to be."""
    tables = {SETTINGS_PAGE: settings_tables(), COMMANDS_PAGE: commands_tables()}
    return {page: page_with(table, page, MODULE) for page, table in tables.items()}


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)
