"""The tables of docs/reference/configuration.md and commands.md: `python -m tests.settings_table` writes both anew.

The first page has what the processes that serve can be told, out of their settings; the second the flags of all other
commands, as click has them.
"""

import dataclasses
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import click

from coordinator.api_server_settings import ApiServerSettings
from coordinator.settings import CoordinatorSettings
from serving_core.flag_groups import GROUPS
from serving_core.flags import BYTES
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
NODES: Final = "nodes"  # prefill, decode and mixed
MOST_CHOICES: Final = 8  # that a row lists; the help lists all
UP: Final = "up"
SHARED: Final = {  # two commands that have these options
    "Which server": ("status", "drain"),
    "How outputs are sampled": ("generate", "chat"),
    "The load and its result": ("simulate", "bench serve"),
    "The nodes of a plan": ("plan", "plan profile"),
}
LEAST_SHARED: Final = 2


def settings_tables() -> str:
    """The part of configuration.md between the marks: a table for each group of options."""
    roots = {ClusterSettings: UP, CoordinatorSettings: COORDINATOR, ApiServerSettings: API_SERVER, NodeSettings: NODES}
    takers: dict[tuple[str, str, str], list[str]] = {}  # by name, default and what is said
    for root, command in roots.items():
        for settings_class in _classes(root):
            for field, hint in _own_fields(settings_class):
                if not field.metadata["positional"]:
                    takers.setdefault(_setting(field, hint), []).append(command)
    passed_on = {param.name for param in _command(UP).params}
    lines = []
    for title, members in GROUPS.items():
        lines += ["", f"### {title}", "", "| option | of | default | |", "|---|---|---|---|"]
        for (name, default, about), commands in sorted(takers.items(), key=lambda row: _place(members, row[0][0])):
            if name in members:
                names = [*dict.fromkeys(commands)]
                if UP not in names and name in passed_on and UP not in takers_of(takers, name):
                    names.insert(0, UP)
                spelling = f"`--{name.replace('_', '-')}`"
                lines.append(_row(spelling, ", ".join(names), default, about))
    return "\n".join(lines) + "\n\n"


def takers_of(takers: Mapping[tuple[str, str, str], list[str]], name: str) -> set[str]:
    """The commands that have their own option of this name."""
    return {command for (each, _, _), commands in takers.items() if each == name for command in commands}


def _place(members: Sequence[str], name: str) -> int:
    return members.index(name) if name in members else len(members)


def _setting(field: "dataclasses.Field[Any]", hint: Any) -> tuple[str, str, str]:
    meta = field.metadata
    about, kinds = meta["help"], set(typing.get_args(hint)) or {hint}
    if meta["choices"]:
        about += _one_of(meta["choices"])
    elif kinds & {int, float} and bool not in kinds and meta["maximum"] is not None:
        about += f" From {meta['minimum']:.10g} to {meta['maximum']:.10g}."
    return field.name, _default(field.name, field.default), about


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
    shared: dict[str, dict[str, click.Option]] = {}
    for title, commands in SHARED.items():
        earlier = {name for options in shared.values() for name in options}
        shared[title] = {name: option for name, option in _shared_by(*commands).items() if name not in earlier}
    lines = []
    for title, options in shared.items():
        lines += ["", f"## {title}", "", *_option_rows(options.values())]
    for name, command in all_commands():
        if not any(param.name == "config" for param in command.params):
            lines += ["", f"## splitserve {name}", "", *_command_part(name, command, shared)]
    return "\n".join(lines) + "\n\n"


def _command_part(name: str, command: click.Command, shared: Mapping[str, Mapping[str, click.Option]]) -> list[str]:
    lines, options = [f"`{_usage(name, command)}`", "", _help(command)], _options(command)
    had: dict[str, list[click.Option]] = {}
    for title, common in shared.items():
        same = [option for option in options if _is_same(option, common.get(str(option.name)))]
        if len(same) >= LEAST_SHARED:
            had[title] = same
            options = [option for option in options if option not in same]
    for title, same in had.items():
        link, is_all = f"[{title}](#{title.lower().replace(' ', '-')})", len(same) == len(shared[title])
        which = "the options of" if is_all else f"{', '.join(f'`{option.opts[0]}`' for option in same)} of"
        lines += ["", f"Also takes {which} {link}."]
    return [*lines, "", *_option_rows(options)] if options else lines


def _shared_by(one: str, other: str) -> dict[str, click.Option]:
    commands = dict(all_commands())
    others = {option.name: option for option in _options(commands[other])}
    return {str(each.name): each for each in _options(commands[one]) if _is_same(each, others.get(each.name))}


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
    return ["| option | |", "|---|---|", *(_row(_spelling(option), _about(option)) for option in options)]


def _spelling(option: click.Option) -> str:
    names = [f"--[no-]{name[2:]}" if f"--no-{name[2:]}" in option.secondary_opts else name for name in option.opts]
    others = [name for name in option.secondary_opts if not name.startswith("--no-")]
    return ", ".join(f"`{name}`" for name in (*names, *others))


def _about(param: click.Parameter) -> str:
    said = str(getattr(param, "help", None) or "")
    variables = [param.envvar] if isinstance(param.envvar, str) else param.envvar or ()
    default = "" if param.type is click.BOOL else _default(str(param.name), param.default)
    return "".join(
        [said, _values(param), f" Default: {default}." if default else "", *(f" (`{name}`)" for name in variables)]
    ).strip()


def _values(param: click.Parameter) -> str:
    """What the values of an option may be, if a choice or a range says so."""
    match param.type:
        case click.Choice():
            return _one_of(param.type.choices)
        case click.IntRange() | click.FloatRange() if param.type.min is not None and param.type.max is not None:
            return f" From {param.type.min:.10g} to {param.type.max:.10g}."
    return ""


def _one_of(choices: Sequence[str]) -> str:
    listed = ", ".join(f"`{choice}`" for choice in choices)
    return f" One of {listed}." if len(choices) <= MOST_CHOICES else ""


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def pages() -> Mapping[Any, str]:
    """The whole pages, with the tables as they ought to be."""
    tables = {SETTINGS_PAGE: settings_tables(), COMMANDS_PAGE: commands_tables()}
    return {page: page_with(table, page, MODULE) for page, table in tables.items()}


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)
