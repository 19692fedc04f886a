"""What an overload did, and its JSON. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from splitserve_bench.overload.stages import Stage, overload_of
from splitserve_bench.overload.windows import Window, back_after_s, window_of, windows_of
from splitserve_bench.serve.metrics import Distribution, Limits, send_lag_s
from splitserve_bench.serve.records import Outcome
from splitserve_bench.serve.results import request_lines


@dataclass(frozen=True, slots=True)
class Findings:
    """`back_s` is from the end of the overload until goodput is back, None when it is not, or nothing followed."""

    limits: Limits
    attainment: float  # from which on goodput is back
    stages: tuple[Stage, ...]
    by_stage: tuple[Window, ...]
    windows: tuple[Window, ...]
    overload_s: tuple[float, float]  # its start and its end
    back_s: float | None
    outcomes: tuple[Outcome, ...]

    @property
    def is_sent_after(self) -> bool:
        """Whether anything was, after the overload."""
        return any(outcome.scheduled_s >= self.overload_s[1] for outcome in self.outcomes)

    @property
    def send_lag_s(self) -> Distribution:
        """How late requests were sent, of all."""
        return Distribution(tuple(map(send_lag_s, self.outcomes)))

    @property
    def seconds_after(self) -> float:
        """How long requests were sent after the overload."""
        return self.stages[-1].end_s - self.overload_s[1]


def findings_of(outcomes: Sequence[Outcome], stages: Sequence[Stage], limits: Limits, attainment: float) -> Findings:
    """Of a load of these stages."""
    start_s, end_s = overload_of(stages)
    last_s = stages[-1].end_s
    return Findings(
        limits=limits,
        attainment=attainment,
        stages=tuple(stages),
        by_stage=tuple(window_of(outcomes, limits, stage.start_s, stage.end_s) for stage in stages),
        windows=tuple(windows_of(outcomes, limits, 0.0, last_s)),
        overload_s=(start_s, end_s),
        back_s=back_after_s(windows_of(outcomes, limits, end_s, last_s), attainment),
        outcomes=tuple(outcomes),
    )


def findings_json(findings: Findings, about: Mapping[str, Any], *, detailed: bool = False) -> dict[str, Any]:
    """`detailed` adds every request."""
    limits_ms = {name: limit_s * 1e3 for name, limit_s in findings.limits.by_name().items()}
    stages = [
        {"rate": stage.rate, **window.to_json()}
        for stage, window in zip(findings.stages, findings.by_stage, strict=True)
    ]
    return {
        **about,
        "slo_limits_ms": limits_ms,
        "attainment": findings.attainment,
        "overload_start_s": findings.overload_s[0],
        "overload_end_s": findings.overload_s[1],
        "back_s": findings.back_s,
        "send_lag_p99_s": findings.send_lag_s.percentile(99),
        "stages": stages,
        "windows": [window.to_json() for window in findings.windows],
        **({"requests": list(request_lines(findings.outcomes))} if detailed else {}),
    }
