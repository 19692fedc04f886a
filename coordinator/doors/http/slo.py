"""The limits of a call of OpenAI's endpoints: in the body, or in headers, which gateways can set without reading it."""

import math
from collections.abc import Mapping, Sequence
from typing import Final

from coordinator.doors.http.fields import Fields
from protos.inference_pb2 import GenerateRequest
from serving_core.errors import RequestError
from serving_core.reasons import BAD_PARAM

CLASS: Final = "slo_class"
HEADERS: Final = {"ttft_ms": "x-slo-ttft-ms", "tpot_ms": "x-slo-tpot-ms", CLASS: "x-slo-class"}


def set_limits(requests: Sequence[GenerateRequest], fields: Fields, headers: Mapping[str, str]) -> None:
    """Gives all requests of a call their limits and class; the body wins over headers. Raises RequestError."""
    for name, header in HEADERS.items():
        value = fields.text(name) if name == CLASS else fields.number(name)
        if value is None and header in headers:
            value = headers[header] if name == CLASS else _number(header, headers[header])
        for request in requests if value is not None else ():
            setattr(request, name, value)


def _number(header: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise RequestError(BAD_PARAM, f"{header} must be a finite number, not {text[:80]!r}", field=header)
    return value
