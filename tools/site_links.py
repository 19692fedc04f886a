"""A hook of MkDocs: a link from a page to a file outside docs/ becomes its text, since the site has no such file.

A link to a file that is not there ends the build.
"""

import posixpath
import re
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
LINK: Final = re.compile(r"\[([^][]+)\]\(((?:\.\./)+[^)\s#]+)(#[^)\s]*)?\)")


def without_outside_links(markdown: str, page: str) -> str:
    """Return a page's text without links that leave docs/. `page` is its path below docs/.

    Raises FileNotFoundError for a link to a file that is not in the repository.
    """

    def replaced(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), match[2]))
        if target.startswith("docs/"):
            return match[0]
        if not (ROOT / target).exists():
            raise FileNotFoundError(f"docs/{page} links to {target}, which is not there")
        return match[1]

    return LINK.sub(replaced, markdown)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the text that MkDocs renders for a page."""
    return without_outside_links(markdown, page.file.src_uri)
