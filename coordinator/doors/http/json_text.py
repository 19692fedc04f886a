"""JSON of a model, read so that it can be written again."""

import json
import math
from typing import Any, Final, NoReturn

MAX_DEPTH: Final = 256  # of what a model wrote: the stack has room for it wherever it is written again


def parsed(text: str) -> Any:
    """Parse JSON that can be written again as it is. Raises ValueError for all else: what is no JSON, numbers that a
    float does not hold (1e400) or JSON does not know (NaN), half surrogate pairs, and more than MAX_DEPTH levels."""
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not _is_shallow(value):
        raise ValueError(f"it has more than {MAX_DEPTH} levels")
    return value


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:80]} is beyond the range of a float")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _is_shallow(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        if not inner:
            return True
        level = [each for values in inner for each in values]
    return False
