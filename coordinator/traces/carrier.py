"""Read the trace context of a caller: the headers of W3C Trace Context, at every API server."""

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Final

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"

Carrier = Mapping[str, list[str]]

NOTHING: Final[Carrier] = MappingProxyType({})
CARRIER: Final = ContextVar("carrier", default=NOTHING)  # headers of the current call


def carrier_of(headers: Iterable[tuple[str, str]]) -> Carrier:
    """Return the trace headers among `headers`, names in lower case.

    NOTHING unless there is exactly one traceparent.
    """
    found: dict[str, list[str]] = {}
    for name, value in headers:
        if name in (TRACEPARENT, TRACESTATE):
            found.setdefault(name, []).append(value)
    return found if len(found.get(TRACEPARENT, ())) == 1 else NOTHING
