"""What has run on a card, in docs/design/cuda.md: `python -m tests.device_table` writes it anew."""

from collections.abc import Mapping
from typing import Any, Final

from splitserve_bench.device_report import kept_report, verdict
from tests.doc_table import DOCS, page_with

PAGE: Final = DOCS / "design" / "cuda.md"


def table(report: Mapping[str, Any] | None) -> str:
    """The part of the page between the marks."""
    lines = [f"**CUDA: {verdict(report)}.**"]
    if report:
        lines += ["", "| step | state | last line |", "|---|---|---|"]
        for name, step in report["steps"].items():
            last = (step["output"].splitlines() or [""])[-1].replace("|", "/")
            lines.append(f"| {name} | {step['state']}, {step['seconds']} s | {last} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The whole page, with the table as it ought to be."""
    return page_with(table(kept_report()), PAGE, "tests.device_table")


if __name__ == "__main__":
    PAGE.write_text(page())
