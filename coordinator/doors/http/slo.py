"""The limits and the priority of a call of OpenAI's endpoints: in the body, or in headers, which gateways can set
without reading it."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from coordinator.control.slo import MAX_PRIORITY
from coordinator.doors.http.fields import Fields
from protos.inference_pb2 import GenerateRequest
from serving_core.errors import RequestError
from serving_core.reasons import BAD_PARAM

PRIORITIES: Final = (-MAX_PRIORITY, MAX_PRIORITY)
_INTEGER: Final = re.compile(r"-?[0-9]{1,9}")


def set_limits(requests: Sequence[GenerateRequest], fields: Fields, headers: Mapping[str, str]) -> None:
    """Gives all requests of a call their limits, class and priority; the body wins over headers. Raises
    RequestError."""
    asked = {
        "ttft_ms": _either(fields.number("ttft_ms"), headers, "x-slo-ttft-ms", _number),
        "tpot_ms": _either(fields.number("tpot_ms"), headers, "x-slo-tpot-ms", _number),
        "slo_class": _either(fields.text("slo_class"), headers, "x-slo-class", lambda _, text: text),
        "priority": _either(fields.integer("priority", PRIORITIES), headers, "x-slo-priority", _integer),
    }
    for name, value in asked.items():
        for request in requests if value is not None else ():
            setattr(request, name, value)


def _either(value: Any, headers: Mapping[str, str], header: str, read: Callable[[str, str], Any]) -> Any:
    """What the body says, or else the header."""
    return read(header, headers[header]) if value is None and header in headers else value


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
