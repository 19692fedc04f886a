"""JSON as responses and events have it: as it is, without blanks, and with no number that JSON does not know."""

import json
from typing import Any


def dumped(value: Any) -> str:
    """Raises ValueError for a number that JSON does not know."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
