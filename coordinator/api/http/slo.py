"""Read the SLO and priority of a call from its body or from headers, which gateways can set without parsing the
body."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from coordinator.api.http.fields import Fields
from coordinator.control.slo import MAX_PRIORITY
from protos.inference_pb2 import GenerateRequest
from serving_core.errors import RequestError
from serving_core.reasons import BAD_PARAM

PRIORITIES: Final = (-MAX_PRIORITY, MAX_PRIORITY)
_HEADERS: Final = {
    "ttft_ms": "x-slo-ttft-ms",
    "tpot_ms": "x-slo-tpot-ms",
    "slo_class": "x-slo-class",
    "priority": "x-slo-priority",
}
_INTEGER: Final = re.compile(r"-?[0-9]{1,9}")


def set_limits(requests: Sequence[GenerateRequest], fields: Fields, headers: Mapping[str, str]) -> dict[str, str]:
    """Set SLO, class and priority in all requests of a call; the body overrides headers.

    Returns the headers that were used, by field. Raises RequestError.
    """
    in_body = {
        "ttft_ms": fields.number("ttft_ms"),
        "tpot_ms": fields.number("tpot_ms"),
        "slo_class": fields.text("slo_class"),
        "priority": fields.integer("priority", PRIORITIES),
    }
    taken = {name: _HEADERS[name] for name, value in in_body.items() if value is None and _HEADERS[name] in headers}
    in_headers = {name: _read(name, header, headers[header]) for name, header in taken.items()}
    for name, value in {**in_body, **in_headers}.items():
        for request in requests if value is not None else ():
            setattr(request, name, value)
    return taken


def _read(name: str, header: str, text: str) -> Any:
    if name == "slo_class":
        return text
    return _integer(header, text) if name == "priority" else _number(header, text)


def _number(header: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise RequestError(BAD_PARAM, f"{header} must be a finite number, not {text[:80]!r}", field=header)
    return value


def _integer(header: str, text: str) -> int:
    low, high = PRIORITIES
    if not (_INTEGER.fullmatch(text) and low <= int(text) <= high):
        message = f"{header} must be an integer within [{low}, {high}], not {text[:80]!r}"
        raise RequestError(BAD_PARAM, message, field=header)
    return int(text)
