"""Limits that the server is told, so that it knows what it is judged by. Pure."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from coordinator.control.slo import MAX_MS, MS
from splitserve_bench.serve.metrics import Limits
from splitserve_bench.serve.records import PlannedRequest


def told(planned: Iterable[PlannedRequest], limits_of: Callable[[PlannedRequest], Limits]) -> list[PlannedRequest]:
    """The same requests with their limits on TTFT and TPOT. What a server would not take for one, 0 or more than
    MAX_MS, is not told; nor is a limit on E2EL, which no server knows."""
    return [_told(each, limits_of(each)) for each in planned]


def _told(planned: PlannedRequest, limits: Limits) -> PlannedRequest:
    return replace(planned, ttft_ms=_ms(limits.ttft_s), tpot_ms=_ms(limits.tpot_s))


def _ms(limit_s: float | None) -> float | None:
    return limit_s * MS if limit_s is not None and 0 < limit_s * MS <= MAX_MS else None
