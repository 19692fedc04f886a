"""The commands of the pages: the shell blocks line by line, and whether what they name is there.

A command is what stands in one line, or in several with a backslash at their ends. Of `[--flag VALUE]` the brackets are
left out, of `[VALUE]` all, and `...` stands for what is said elsewhere.
"""

import copy
import importlib.util
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Final, NamedTuple

import click
from starlette.routing import Match

from splitserve.cli import main
from splitserve.commands.variables import known_variables
from tests.api_table import routes
from tests.docs.pages import DOCS, README, ROOT, SHELL, blocks_of

PROMPT: Final = "$ "
GAP: Final = "..."
ROLE_OF_PACKAGE: Final = {
    "coordinator": "coordinator",
    "prefill_node": "prefill",
    "decode_node": "decode",
    "serving_node": "mixed",
}
_BRACKETS: Final = re.compile(r"\[([^][]*)\]")
_ASSIGNMENT: Final = re.compile(r"([A-Za-z_]\w*)=.*", re.DOTALL)


class Command(NamedTuple):
    """One command of a page."""

    page: str
    text: str  # as bash takes it

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"

    @property
    def plain(self) -> str:
        """In one form for all spellings: no comment, no assignment before it, no folder of its program."""
        words = shlex.split(self.text, comments=True)
        while words and _ASSIGNMENT.fullmatch(words[0]):
            words = words[1:]
        return " ".join(words).replace(".venv/bin/", "")


def commands() -> list[Command]:
    """All, in the order of the pages."""
    pages = (README, *DOCS)
    return [Command(b.page, text) for page in pages for b in blocks_of(page) for text in _lines(b.language, b.text)]


def _lines(language: str, text: str) -> Iterator[str]:
    """The commands of a block: of a shell's all lines, of what a terminal shows those behind a prompt."""
    joined = re.sub(r"\\\n\s*", "", text).splitlines()
    if language in SHELL:
        yield from (_without_brackets(line) for line in joined if line.strip() and not line.lstrip().startswith("#"))
    else:
        yield from (_without_brackets(line[len(PROMPT) :]) for line in joined if line.startswith(PROMPT))


def _without_brackets(line: str) -> str:
    if "splitserve " not in line or "pip install" in line:
        return line
    while True:
        shorter = _BRACKETS.sub(lambda match: match[1] if match[1].startswith("-") else "", line)
        if shorter == line:
            return line
        line = shorter


def wrong_with(command: Command) -> list[str]:
    """What the command names that is not there, in sentences."""
    found = []
    for words in _simple_commands(command.text):
        while words and (match := _ASSIGNMENT.fullmatch(words[0])):
            found += _unknown_variable(match[1])
            words = words[1:]
        if words:
            found += _CHECKS.get(words[0].removeprefix(".venv/bin/"), _unchecked)(words[1:])
    return found


def _simple_commands(text: str) -> Iterator[list[str]]:
    """The commands of pipes, lists and groups, each as its words. Redirections are left out."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    is_target = False
    for word in lexer:
        if set(word) <= set("();|&"):
            yield words
            words = []
        elif set(word) <= set("<>"):
            is_target = True
        elif is_target:
            is_target = False
        else:
            words.append(word)
    yield words


def _unchecked(_: list[str]) -> list[str]:
    return []


def _unknown_variable(name: str) -> list[str]:
    return [f"nothing reads {name}"] if name.startswith("SPLITSERVE_") and name not in known_variables() else []


def _export(words: list[str]) -> list[str]:
    return [line for word in words for line in _unknown_variable(word.partition("=")[0])]


def _usage(words: list[str]) -> list[str]:
    """Parses the flags of a command of ours and converts their values; runs nothing. Files need not be here."""
    is_whole, words = GAP not in words, [word for word in words if word != GAP]
    command: click.Command = main
    context = click.Context(main, info_name="splitserve")
    try:
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            name, found, words = command.resolve_command(context, words)
            assert found is not None, name
            command, context = found, click.Context(found, parent=context, info_name=name)
        parsed = copy.copy(command)
        parsed.params = [_without_files(param, is_whole=is_whole) for param in command.params]
        parsed.no_args_is_help = False
        parsed.parse_args(context, list(words))
    except click.UsageError as error:
        return [error.format_message()]
    return []


def _without_files(param: click.Parameter, *, is_whole: bool) -> click.Parameter:
    param = copy.copy(param)
    param.required = param.required and is_whole
    if isinstance(param.type, click.Path | click.File):
        param.type = click.STRING
    if param.is_eager or param.type is click.STRING:  # such as --version, and what reads a file
        param.callback = None
    return param


def _python(words: list[str]) -> list[str]:
    if words[:1] != ["-m"] or words[1] == "pip":
        return []
    if importlib.util.find_spec(words[1]) is None:
        return [f"there is no module {words[1]}"]
    return _usage([ROLE_OF_PACKAGE[words[1]], *words[2:]]) if words[1] in ROLE_OF_PACKAGE else []


def _torchrun(words: list[str]) -> list[str]:
    return _python(words[words.index("-m") :])


def _make(words: list[str]) -> list[str]:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    return [f"make has no {word}" for word in words if "=" not in word and word[0] != "-" and word not in targets]


def _curl(words: list[str]) -> list[str]:
    [url] = [word for word in words if word.startswith("http")]
    path = "/" + url.split("/", 3)[3].partition("?")[0]
    if url.split("/")[2].endswith(":9464"):  # of a node's --metrics-port
        return [] if path == "/metrics" else [f"a node has no {path}"]
    method = "POST" if "-d" in words else "GET"
    scope = {"type": "http", "path": path, "method": method, "root_path": ""}
    return [] if any(route.matches(scope)[0] is Match.FULL for route in routes()) else [f"there is no {method} {path}"]


def _pip(words: list[str]) -> list[str]:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [extra for word in words for match in _BRACKETS.findall(word) for extra in match.split(",")]
    return [f"there is no extra {extra}" for extra in named if extra not in extras]


def _docker(words: list[str]) -> list[str]:
    """The file, stages and arguments of a build; the services of compose."""
    if words[0] == "build":
        file = (ROOT / words[words.index("-f") + 1]).read_text()
        wanted = [rf"^ARG {v.partition('=')[0]}\b" for n, v in pairwise(words) if n == "--build-arg"]
        wanted += [rf"^FROM .* AS {v}$" for n, v in pairwise(words) if n == "--target"]
        return [f"no line like {each}" for each in wanted if not re.search(each, file, re.MULTILINE | re.IGNORECASE)]
    if words[:2] == ["compose", "exec"]:
        service, *inner = [word for word in words[2:] if word != "-T"]
        services = (ROOT / "deploy" / "docker-compose.yml").read_text()
        missing = [] if re.search(rf"^  {service}:", services, re.MULTILINE) else [f"there is no service {service}"]
        return missing + (_usage(inner[1:]) if inner[0] == "splitserve" else [])
    return _usage(words[words.index("splitserve") + 1 :]) if words[0] == "run" else []


def _helm(words: list[str]) -> list[str]:
    """The folder of the chart."""
    return [] if (ROOT / words[2] / "Chart.yaml").exists() else [f"there is no chart {words[2]}"]


_CHECKS: Final[dict[str, Callable[[list[str]], list[str]]]] = {
    "splitserve": _usage,
    "python": _python,
    "torchrun": _torchrun,
    "make": _make,
    "curl": _curl,
    "pip": _pip,
    "docker": _docker,
    "helm": _helm,
    "export": _export,
}
