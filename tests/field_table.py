"""The table of fields in docs/reference/fields.md: `python -m tests.field_table` writes it anew."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from coordinator.api.http.openapi import ENDPOINTS, field_rows
from tests.doc_table import DOCS, page_with

PAGE: Final = DOCS / "reference" / "fields.md"
REFUSED: Final = "Not supported"
IGNORED: Final = "No effect"
ANY: Final = "any value"
SHORT: Final = {"/v1/chat/completions": "chat"}


def table() -> str:
    """The part of the page between the marks: what is supported, what is refused, what has no effect."""
    places = defaultdict[tuple[str, str, str], list[str]](list)
    for path, model in ENDPOINTS.items():
        for row in field_rows(model.model_json_schema()):
            places[row].append(SHORT.get(path, path.rpartition("/")[2]))
    rows = sorted(places, key=lambda row: (row[0], places[row]))
    lines = ["## Supported", "", "| field | at | type | |", "|---|---|---|---|"]
    for name, kind, about in rows:
        if not about.startswith((REFUSED, IGNORED)):
            cells = (f"`{name}`", ", ".join(places[name, kind, about]), kind.replace("#/$defs/", ""), about)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", "## Not supported", "", "| at | fields, and values that may be sent |", "|---|---|"]
    for place, fields in _by_places(
        (name, kind, places[name, kind, about]) for name, kind, about in rows if about.startswith(REFUSED)
    ):
        lines.append(f"| {place} | {', '.join(fields)} |".replace("null or ", ""))
    lines += ["", "## Without effect", "", "| at | fields |", "|---|---|"]
    for place, fields in _by_places(
        (name, "", places[name, kind, about]) for name, kind, about in rows if about.startswith(IGNORED)
    ):
        lines.append(f"| {place} | {', '.join(fields)} |")
    return "\n".join(lines) + "\n"


def _by_places(rows: Iterable[tuple[str, str, list[str]]]) -> Iterable[tuple[str, list[str]]]:
    """Each endpoint or set of endpoints, with its fields."""
    found = defaultdict[str, list[str]](list)
    for name, kind, places in rows:
        may_be = "" if kind in ("", "null", ANY) else f" ({kind})"
        found[", ".join(places)].append(f"`{name}`{may_be}")
    return sorted(found.items())


def page() -> str:
    """The whole page, with the table as it ought to be."""
    return page_with(table(), PAGE, "tests.field_table")


if __name__ == "__main__":
    PAGE.write_text(page())
