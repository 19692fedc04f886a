"""Pages of docs/ with a table that the code knows: a module of tests makes it, and writes it anew when it is run."""

from pathlib import Path
from typing import Final

DOCS: Final = Path(__file__).parent.parent / "docs"
END: Final = "<!-- end -->\n"


def page_with(table: str, page: Path, module: str) -> str:
    """The whole page, with the table as it ought to be."""
    return text_with(table, page.read_text(), module)


def text_with(table: str, text: str, module: str) -> str:
    begin = f"<!-- begin: python -m {module} -->\n"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(END)
    return before + begin + table + END + after
