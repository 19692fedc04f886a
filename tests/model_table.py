"""The table of architectures in docs/reference/models.md: `python -m tests.model_table` writes it anew.

Its rows are those that tests try: answers against transformers' `generate` on one rank, on two and in two stages, and
through a split cluster; and refusals word for word.
"""

from collections import defaultdict
from typing import Final

from serving_core.model_files.config import MODEL_TYPES
from tests.doc_table import DOCS, page_with
from tests.transformers_models import (
    FAMILIES,
    HEAD_ALONE,
    REFUSED,
    SEQUENCES,
    WHOLE_SEQUENCES,
    WITHOUT_PLAN,
    architecture_of,
)

PAGE: Final = DOCS / "reference" / "models.md"


def table() -> str:
    """The part of the page between the marks."""
    rows = defaultdict[tuple[str, str, str], list[str]](list)
    for architecture, family in sorted((architecture_of(family), family) for family in FAMILIES):
        code = "SplitServe or transformers" if architecture in MODEL_TYPES else "transformers"
        weights = "each rank holds all" if family in (*WITHOUT_PLAN, *HEAD_ALONE) else "divided"
        kept = "a latent" if "kv_lora_rank" in FAMILIES[family][1] else "keys, values"
        rows[code, weights, kept].append(f"`{architecture}`")
    for architecture, family in sorted((architecture_of(family), family) for family in SEQUENCES):
        weights = "one rank" if family in WHOLE_SEQUENCES else "divided"
        rows["transformers, sequence by sequence", weights, "its cache"].append(f"`{architecture}`")
    lines = ["| computed by | weights over ranks | kept of a token | architectures |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} | {', '.join(names)} |" for row, names in sorted(rows.items())]
    lines += ["", "| refused | with the sentence |", "|---|---|"]
    lines += [f"| `{architecture}` | {refused.sentence} |" for architecture, refused in sorted(REFUSED.items())]
    return "\n".join(lines) + "\n"


def page() -> str:
    """The whole page, with the table as it ought to be."""
    return page_with(table(), PAGE, "tests.model_table")


if __name__ == "__main__":
    PAGE.write_text(page())
