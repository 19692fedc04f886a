"""The table of fields in docs/reference/fields.md: `python -m tests.field_table` writes it anew."""

from collections import defaultdict
from typing import Final

from coordinator.api.http.openapi import field_rows
from coordinator.api.http.request_models import ENDPOINTS
from tests.doc_table import DOCS, page_with

PAGE: Final = DOCS / "reference" / "fields.md"
SHORT: Final = {"/v1/chat/completions": "chat"}


def table() -> str:
    """The part of the page between the marks."""
    places = defaultdict[tuple[str, str, str], list[str]](list)
    for path, model in ENDPOINTS.items():
        for row in field_rows(model.model_json_schema()):
            places[row].append(SHORT.get(path, path.rpartition("/")[2]))
    lines = ["| field | at | type | |", "|---|---|---|---|"]
    for name, kind, about in sorted(places, key=lambda row: (row[0], places[row])):
        cells = (f"`{name}`", ", ".join(places[name, kind, about]), kind.replace("#/$defs/", ""), about)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The whole page, with the table as it ought to be."""
    return page_with(table(), PAGE, "tests.field_table")


if __name__ == "__main__":
    PAGE.write_text(page())
