"""What has run on a card, in docs/design/cuda.md: `python -m tests.device_table` writes it anew."""

from typing import Final

from splitserve_bench.device_report import kept_report, step_rows, verdict
from tests.doc_table import DOCS, page_with

PAGE: Final = DOCS / "design" / "cuda.md"


def table() -> str:
    """The part of the page between the marks."""
    report = kept_report()
    lines = [f"**CUDA: {verdict(report)}.**"]
    if rows := step_rows(report):
        lines += ["", "| step | state | last line |", "|---|---|---|"]
        lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def page() -> str:
    """The whole page, with the table as it ought to be."""
    return page_with(table(), PAGE, "tests.device_table")


if __name__ == "__main__":
    PAGE.write_text(page())
