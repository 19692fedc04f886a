"""What the README and the pages of docs/ hold: fenced blocks, links, headings."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
README: Final = ROOT / "README.md"
DOCS: Final = tuple(sorted((ROOT / "docs").rglob("*.md")))
PAGES: Final = (README, ROOT / "CONTRIBUTING.md", *DOCS)
SHELL: Final = ("sh", "bash", "shell", "console")

_FENCE: Final = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK: Final = re.compile(r"\]\(([^)\s]+)\)")
_HEADING: Final = re.compile(r"^#+ (.+)$", re.MULTILINE)


class Block(NamedTuple):
    """A fenced block."""

    page: str
    language: str
    text: str


def blocks_of(page: Path) -> Iterator[Block]:
    """In their order."""
    for language, text in _FENCE.findall(page.read_text()):
        yield Block(page.name, language, text)


def links_of(page: Path) -> list[str]:
    """The targets of its links, but for the web's."""
    return [target for target in _LINK.findall(prose_of(page)) if not target.startswith(("http://", "https://"))]


def anchors_of(page: Path) -> set[str]:
    """What a link may name behind a #, as GitHub makes it of headings."""
    headings = _HEADING.findall(prose_of(page))
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def prose_of(page: Path) -> str:
    """The page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())
