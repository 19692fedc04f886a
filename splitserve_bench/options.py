"""What the flags of the load commands have in common."""

import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import click

from serving_core.units import parse_size

Command = Callable[..., Any]

json_option: Final = click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")

PAIR: Final = re.compile(r"(ttft|tpot|e2el):\S*", re.ASCII)  # one limit of several after one flag


class RepeatingCommand(click.Command):
    """Takes several words after one flag, as vLLM's command does: `--goodput ttft:500 tpot:30`.

    `lists` are such flags, each with what its further words look like; the words of one of `joined` are one value.
    """

    lists: ClassVar[Mapping[str, re.Pattern[str]]] = {}
    joined: ClassVar[frozenset[str]] = frozenset()

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, repeat_flags(args, self.lists, self.joined))


class ListOf(click.ParamType[tuple[Any, ...]]):
    """Values with commas or spaces between them."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        try:
            values = tuple(dict.fromkeys(map(self._parse, value.replace(",", " ").split())))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if not values:
            self.fail("there must be one at least", param, ctx)
        return values


class NumberRange(click.FloatRange):
    """A number of a range, in which nan, which is none, would be for click."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is no number", param, ctx)
        return number


class NewFile(click.Path):
    """A file to be written, in a folder that takes one: what nobody can write is refused before anything is
    measured."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(value)
        super().convert(path, param, ctx)
        if not path.exists() and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
            self.fail(f"{path} cannot be written: {path.parent} is no folder that takes files", param, ctx)
        return path


class Size(click.ParamType[int]):
    """Bytes, such as 80GiB."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def repeat_flags(words: Sequence[str], lists: Mapping[str, re.Pattern[str]], joined: Collection[str] = ()) -> list[str]:
    """`--goodput a:1 b:2 model` becomes `--goodput a:1 --goodput b:2 model`, or `--goodput "a:1 b:2" model` where it is
    one of `joined`."""
    repeated: list[str] = []
    flag, is_first = "", False
    for word in words:
        if word in lists:
            flag, is_first = word, True
        elif is_first:
            is_first = False
        elif flag and lists[flag].fullmatch(word):
            if flag in joined:
                repeated[-1] += f" {word}"
                continue
            repeated.append(flag)
        else:
            flag = ""
        repeated.append(word)
    return repeated


def options_of(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Return one decorator that adds several options, in the order in which help shows them."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def option(*names: str, help: str = "", default: Any = None, **more: Any) -> Callable[[Command], Command]:
    """Return a click option whose help shows the default, if there is one."""
    if default is not None:
        more |= {"default": default, "show_default": default != ""}
    return click.option(*names, help=help, **more)
