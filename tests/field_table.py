"""The table of fields in docs/fields.md: `python -m tests.field_table` writes it anew."""

import json
from typing import Final

from coordinator.api.http.known_fields import ENDPOINTS, KNOWN, Fate, KnownField
from tests.doc_table import DOCS, page_with

PAGE: Final = DOCS / "fields.md"


def table() -> str:
    """The part of the page between the marks."""
    lines = ["| field | at | |", "|---|---|---|"]
    for known in sorted(KNOWN, key=lambda known: (known.name, known.endpoints)):
        places = [name for name in ENDPOINTS if name in known.endpoints]
        lines.append(f"| `{known.name}` | {', '.join(places)} | {_what_becomes_of(known)} |")
    return "\n".join(lines) + "\n"


def _what_becomes_of(known: KnownField) -> str:
    said = known.fate.value
    if known.fate is Fate.REFUSED:
        harmless = [f"`{json.dumps(value)}`" for value in known.harmless]
        harmless += [f"`{known.same_as}`"] if known.same_as else []
        said += f" unless {' or '.join(harmless)}" if harmless else ""
    return f"{said}: {known.about}" if known.about else said


def page() -> str:
    """The whole page, with the table as it ought to be."""
    return page_with(table(), PAGE, "tests.field_table")


if __name__ == "__main__":
    PAGE.write_text(page())
