"""What the code says to people: its texts, with ... for what is filled in."""

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from tests.docs.pages import ROOT

PACKAGES: Final = (
    *("coordinator", "decode_node", "engine", "kv_transfer", "prefill_node"),
    *("serving_core", "serving_node", "splitserve"),
)
GAP: Final = "..."
FILLED_BY_LOGGING: Final = ("%s", "%d", "%g", "%r", "%.0f")


@functools.cache
def sentences() -> tuple[str, ...]:
    """Every text of the packages but docstrings."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return tuple(sentence for path in files for sentence in _sentences_of(path))


def _sentences_of(path: Path) -> Iterator[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    within = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    alone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if id(node) in within | alone:
            continue
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else GAP for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            for placeholder in FILLED_BY_LOGGING:
                text = text.replace(placeholder, GAP)
            yield text


def is_said(quoted: str, said: Iterable[str]) -> bool:
    """Whether some sentence has the parts of what is quoted, in their order."""
    parts = [part.strip() for part in quoted.split(GAP) if part.strip()]
    return any(_has(sentence, parts) for sentence in said)


def _has(sentence: str, parts: list[str]) -> bool:
    position = 0
    for part in parts:
        found = sentence.find(part, position)
        if found < 0:
            return False
        position = found + len(part)
    return True
