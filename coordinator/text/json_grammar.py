"""JSON of a schema as a grammar of llguidance, and what it lets come. Pure."""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from llguidance import LLMatcher, LLTokenizer

from serving_core.grammars import LIMITS

ESCAPES: Final = 'nrbtf"\\'  # and no \uXXXX, which would spell a property's name so that its schema does not see it


def of_schema(schema: Mapping[str, Any], whitespace: str | None) -> dict[str, Any]:
    """One of the grammars of an answer: JSON of this schema, with our options whatever it says itself, which could make
    the library lenient. `whitespace` is a regex for what may stand between the tokens of JSON, None for nothing."""
    options = {
        "whitespace_flexible": whitespace is not None,
        "whitespace_pattern": whitespace,
        "json_allowed_escapes": ESCAPES,
    }
    return {"json_schema": {**schema, "x-guidance": options}}


def bytes_behind(schema: Mapping[str, Any], begun: str) -> frozenset[int] | None:
    """Return the bytes that may follow this beginning of a JSON text of a schema: none where it leads nowhere. None
    stands for a schema that the library does not take."""
    matcher = LLMatcher(_bytes(), json.dumps({"grammars": [of_schema(schema, None)]}), log_level=0, limits=LIMITS)
    if matcher.is_error():
        return None
    if not matcher.consume_tokens([*begun.encode()]):
        return frozenset()
    mask = matcher.compute_bitmask()
    return frozenset(byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1) if mask else frozenset()


@cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")
