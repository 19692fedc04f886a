"""What goes between the process of a command and that of its load generator.

To the generator: one msgpack map with the order, then one msgpack array for each request. From it: one JSON object a
line, with the one key `outcome`, `progress` or `failure`.
"""

import json
import sys
from array import array
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import msgpack

from serving_core.tls import TlsFiles
from splitserve_bench.serve.records import Outcome, PlannedRequest
from splitserve_bench.serve.target import Progress, Target

TOKEN_TYPE: Final = "I"  # 4 bytes
MOST_BYTES: Final = 2**30  # of the requests that wait to be decoded
MOST_LINE_BYTES: Final = 2**26  # an outcome of a million tokens
DIGITS: Final = 9  # of arrivals: nanoseconds
OUTCOME, PROGRESS, FAILURE = "outcome", "progress", "failure"


@dataclass(frozen=True, slots=True)
class Order:
    """What the generator is told before the requests."""

    target: Target
    num_requests: int
    max_concurrency: int | None
    request_timeout_s: float
    obey_retry_after: int = 0  # how often at most a refused request is sent again


@dataclass(frozen=True, slots=True)
class OrderedRequest:
    """A PlannedRequest as the generator holds it: four bytes a token."""

    index: int
    send_at_s: float
    prompt: "array[int]"
    output_tokens: int
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    text: str = ""
    ignore_eos: bool = True
    num_refusals_before: int = 0


def pack_order(order: Order) -> bytes:
    packed = msgpack.packb(asdict(order))
    assert isinstance(packed, bytes)
    return packed


def unpack_order(message: Any) -> Order:
    target = message["target"]
    return Order(**{**message, "target": Target(**{**target, "tls": TlsFiles(**target["tls"])})})


def pack_request(request: PlannedRequest) -> bytes:
    """Token ids must be 0 to 2**32 - 1."""
    prompt = array(TOKEN_TYPE, request.prompt)
    if sys.byteorder == "big":
        prompt.byteswap()
    limits = (request.ttft_ms, request.tpot_ms)
    others = (request.output_tokens, *limits, request.text, request.ignore_eos, request.num_refusals_before)
    packed = msgpack.packb([request.index, request.send_at_s, prompt.tobytes(), *others])
    assert isinstance(packed, bytes)
    return packed


def unpack_request(message: Any) -> OrderedRequest:
    index, send_at_s, tokens, *others = message
    prompt = array(TOKEN_TYPE)
    prompt.frombytes(tokens)
    if sys.byteorder == "big":
        prompt.byteswap()
    return OrderedRequest(index, send_at_s, prompt, *others)


def outcome_line(outcome: Outcome) -> bytes:
    """A line with its end."""
    fields = asdict(outcome)
    fields["arrivals_s"] = [round(moment_s, DIGITS) for moment_s in outcome.arrivals_s]
    return _line(OUTCOME, fields)


def progress_line(progress: Progress) -> bytes:
    """A line with its end."""
    return _line(PROGRESS, asdict(progress))


def failure_line(message: str) -> bytes:
    """A line with its end."""
    return _line(FAILURE, message)


def read_line(line: bytes) -> Outcome | Progress | str:
    """What a line says; a failure is its message."""
    ((kind, value),) = json.loads(line).items()
    if kind == OUTCOME:
        return to_outcome(value)
    return Progress(**value) if kind == PROGRESS else str(value)


def to_outcome(fields: Mapping[str, Any]) -> Outcome:
    """From its fields, as JSON has them."""
    sequences = {name: tuple(fields[name]) for name in ("arrivals_s", "arrival_tokens")}
    return Outcome(**{**fields, **sequences})


def _line(kind: str, value: Any) -> bytes:
    return json.dumps({kind: value}, separators=(",", ":")).encode() + b"\n"
