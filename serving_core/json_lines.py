"""JSON in one line, whatever its reader takes for the end of a line."""

import json
import re
from typing import Any, Final

# U+0085, U+2028 and U+2029 end lines for `str.splitlines` and httpx, and half of a surrogate pair is no UTF-8. Within
# JSON they stand in strings alone, where each may be an escape. The control characters below U+0020 always are.
_ESCAPED: Final = re.compile("[\x85\u2028\u2029\ud800-\udfff]")


def json_line(value: Any) -> str:
    """Return JSON without blanks that can be encoded and has no end of a line in it. Raises ValueError for a number
    that JSON does not know."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    if text.isascii():
        return text
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
