"""Define types of flag values, and flags, that several benchmark commands have."""

import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

import click

from serving_core.units import parse_size

Command = Callable[..., Any]

PAIR: Final = re.compile(r"(ttft|tpot|e2el):\S*", re.ASCII)  # one limit of several after one flag


class RepeatingCommand(click.Command):
    """A command some flags of which take several words, as in vLLM's command: `--goodput ttft:500 tpot:30`.

    `lists` are these flags, each with a pattern that its further words match; the words after a flag of `joined` become
    one value, separated by spaces, others a value each.
    """

    lists: ClassVar[Mapping[str, re.Pattern[str]]] = {}
    joined: ClassVar[frozenset[str]] = frozenset()

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, repeat_flags(args, self.lists, self.joined))


class ListOf(click.ParamType[tuple[Any, ...]]):
    """Parse values with commas or spaces between them, each by `parse`, into a tuple; equal values count once.

    Refuses an empty list, and a value for which `parse` raises ValueError.
    """

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
    """Parse a number of a range, and refuse nan, which click's FloatRange takes."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is no number", param, ctx)
        return number


class NewFile(click.Path):
    """Parse the path of a file that is to be written, and refuse one in a folder that does not exist or takes no files.

    So a path that cannot be written is known before anything is measured.
    """

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(value)
        super().convert(path, param, ctx)
        if not path.exists() and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
            self.fail(f"{path} cannot be written: {path.parent} is no folder that takes files", param, ctx)
        return path


class Size(click.ParamType[int]):
    """Parse a number of bytes, such as 80GiB, into an int."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def repeat_flags(words: Sequence[str], lists: Mapping[str, re.Pattern[str]], joined: Collection[str] = ()) -> list[str]:
    """Return the words of a command line with each flag of `lists` repeated before each of its further words.

    `--goodput a:1 b:2 model` becomes `--goodput a:1 --goodput b:2 model`, or `--goodput "a:1 b:2" model` for a flag of
    `joined`. A word belongs to a flag when it is the first after it or matches the flag's pattern.
    """
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
    """Return one decorator that adds these options to a command, in the order in which its help shows them."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def option(*names: str, help: str = "", default: Any = None, **more: Any) -> Callable[[Command], Command]:
    """Return the decorator of a click option whose help shows its default, unless it has none or the default is ""."""
    if default is not None:
        more = {"default": default, "show_default": default != "", **more}
    return click.option(*names, help=help, **more)


json_option: Final = option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
