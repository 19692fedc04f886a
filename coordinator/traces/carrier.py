"""What a caller tells of the trace that its call belongs to: W3C's headers, at every API server."""

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Final

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"

Carrier = Mapping[str, list[str]]

NOTHING: Final[Carrier] = MappingProxyType({})
CARRIER: Final = ContextVar("carrier", default=NOTHING)  # of the call at hand


def carrier_of(headers: Iterable[tuple[str, str]]) -> Carrier:
    """Of these headers, whose names are in lower case, those that count: one traceparent, and what comes with it."""
    found: dict[str, list[str]] = {}
    for name, value in headers:
        if name in (TRACEPARENT, TRACESTATE):
            found.setdefault(name, []).append(value)
    return found if len(found.get(TRACEPARENT, ())) == 1 else NOTHING
