"""Return a load's figures as JSON with vLLM's keys, for programs that read its results, and write files."""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from splitserve_bench.errors import BenchError
from splitserve_bench.serve.arrivals import Stage
from splitserve_bench.serve.command import ServeOptions
from splitserve_bench.serve.metrics import (
    LATENCIES,
    Summary,
    e2el_s,
    in_ms,
    itls_s,
    send_lag_s,
    tpot_s,
    ttft_s,
    ttst_s,
)
from splitserve_bench.serve.records import Outcome, TierUse
from splitserve_bench.serve.session_figures import session_figures
from splitserve_bench.serve.stages import StageFindings


@dataclass(frozen=True, slots=True)
class Run:
    """What was run. An infinite request rate is all requests at once, a trace at its own times.

    `stages` are multiples of the request rate. `num_clipped` requests were cut to what the model takes; `tier` is what
    the KV offload of a simulated fleet did, None where it has none. `digest` is that of a simulation's arguments, which
    names its file instead of the time.
    """

    started_at: datetime
    options: ServeOptions
    model_id: str
    request_rate_per_s: float
    stages: tuple[Stage, ...] = ()
    num_clipped: int = 0
    tier: TierUse | None = None
    digest: str = ""

    @property
    def date(self) -> str:
        """Return the time of the start as YYYYMMDD-HHMMSS."""
        return self.started_at.strftime("%Y%m%d-%H%M%S")


def parse_metrics(text: str) -> tuple[str, ...]:
    """Return the names of LATENCIES in a text such as `ttft,tpot`. Raises BenchError for another name."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    unknown = [name for name in names if name not in LATENCIES]
    if unknown:
        raise BenchError(f"a metric is one of {', '.join(LATENCIES)}, not {unknown[0]!r}")
    return names


def parse_percentiles(text: str) -> tuple[float, ...]:
    """Return the percentiles in a text such as `50,99.9`. Raises BenchError for anything but numbers from 0 to 100."""
    try:
        percentiles = tuple(dict.fromkeys(float(word) for word in text.split(",")))
    except ValueError as error:
        raise BenchError(f"percentiles are numbers separated by commas, not {text!r}") from error
    if not all(0 <= each <= 100 for each in percentiles):
        raise BenchError(f"a percentile is from 0 to 100, not {text!r}")
    return percentiles


def file_name(run: Run) -> str:
    """Return the name of the result's file as vLLM has it: label, rate, concurrency, model, and date or digest.

    Without --label the backend is named; the concurrency only where it is limited; of the model the last part of its
    name.
    """
    limit = run.options.max_concurrency
    concurrency = "" if limit is None else f"-concurrency{limit}"
    label = (run.options.label or run.options.backend_name).replace("/", "-")
    model = run.model_id.rstrip("/").rsplit("/", 1)[-1]
    rate = f"{run.request_rate_per_s}qps"
    if run.stages:
        rate = f"stages-{run.request_rate_per_s:.4g}qps"
    return f"{label}-{rate}{concurrency}-{model}-{run.digest or run.date}.json"


def result_json(summary: Summary, run: Run, findings: StageFindings | None = None) -> dict[str, Any]:
    """Return one JSON object: vLLM's keys with vLLM's meaning, then ours. `findings` are those of a load in stages.

    Where nothing was measured there is null; ttst is always there. --save-detailed adds lists with a value for each
    request in the order of the load, with 0 for the latencies of those without tokens, as in vLLM.
    """
    options = run.options
    metrics, percentiles = parse_metrics(options.percentile_metrics), parse_percentiles(options.metric_percentiles)
    result = _setup(run, summary) | _figures(summary)
    for name in dict.fromkeys((*metrics, "ttst")):
        values_s = summary.latencies_s[name]
        statistics = {"mean": values_s.mean, "median": values_s.median, "std": values_s.std}
        statistics |= {f"p{percent:g}": values_s.percentile(percent) for percent in percentiles}
        result |= {f"{statistic}_{name}_ms": in_ms(value) for statistic, value in statistics.items()}
    result |= _attainments(summary, run)
    if (sessions := session_figures(summary)) is not None:
        result["sessions"] = sessions.to_json()
    if findings is not None:
        result["stages"] = findings.to_json()
    if options.save_detailed:
        result |= _details(summary.outcomes)
    return result


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is complete or not there, whenever this process is killed.

    Raises BenchError when it cannot be written.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise BenchError(f"{path} cannot be written: {error.strerror}") from error


def read_share(tier: TierUse, summary: Summary) -> float:
    """Return the share of prompt tokens of complete requests that were loaded from the KV offload.

    Those loaded for preempted requests count too.
    """
    return tier.num_hits * tier.block_tokens / max(1, summary.total_input_tokens)


def request_lines(outcomes: Sequence[Outcome]) -> Iterator[dict[str, Any]]:
    """Yield one JSON object for each outcome: its fields, and its latencies in seconds, null where it has none."""
    for outcome in outcomes:
        line: dict[str, Any] = {each.name: getattr(outcome, each.name) for each in fields(outcome)}
        line["timeline"] = None if outcome.timeline is None else dict(outcome.timeline)
        line["ttft_s"], line["tpot_s"] = ttft_s(outcome), tpot_s(outcome)
        line["ttst_s"], line["e2el_s"] = ttst_s(outcome), e2el_s(outcome)
        line["send_lag_s"] = send_lag_s(outcome)
        yield line


def _setup(run: Run, summary: Summary) -> dict[str, Any]:
    options = run.options
    return {
        "date": run.date,
        "backend": options.backend_name,
        "label": options.label,
        "model_id": run.model_id,
        "tokenizer_id": str(options.tokenizer) if options.tokenizer else None,
        "num_prompts": summary.num_offered,
        **options.metadata_pairs(),
        "request_rate": "inf" if math.isinf(run.request_rate_per_s) else run.request_rate_per_s,
        "burstiness": options.burstiness if math.isfinite(options.burstiness) else "inf",
        "max_concurrency": options.max_concurrency,
    }


def _figures(summary: Summary) -> dict[str, Any]:
    total_tokens = summary.total_input_tokens + summary.total_output_tokens
    return {
        "duration": summary.duration_s,
        "completed": summary.num_completed,
        "failed": summary.num_failed,
        "total_input_tokens": summary.total_input_tokens,
        "total_output_tokens": summary.total_output_tokens,
        "request_throughput": summary.per_s(summary.num_completed),
        "request_goodput": summary.request_goodput_per_s if summary.limits.by_name() else None,
        "output_throughput": summary.per_s(summary.total_output_tokens),
        "total_token_throughput": summary.per_s(total_tokens),
        "max_output_tokens_per_s": summary.max_output_tokens_per_s,
        "max_concurrent_requests": summary.max_concurrent_requests,
    }


def _attainments(summary: Summary, run: Run) -> dict[str, Any]:
    """Return the fields that vLLM does not have."""
    limits = summary.limits.by_name()
    goodput, num_gpus = summary.request_goodput_per_s, run.options.num_gpus
    return {
        "slo_limits_ms": {name: in_ms(limit) for name, limit in limits.items()},
        "slo_attainment": summary.attainment if limits else None,
        "slo_attainment_interval": list(summary.attainment_interval) if limits else None,
        "slo_attainment_ttft": summary.attainment_of("ttft"),
        "slo_attainment_tpot": summary.attainment_of("tpot"),
        "num_gpus": num_gpus,
        "goodput_per_gpu": goodput / num_gpus if limits and num_gpus else None,
        "rejected": summary.num_refused,
        "clipped": run.num_clipped,
        "misses": asdict(summary.misses),
        "returned": asdict(summary.returned),
        "frequent_errors": dict(summary.frequent_errors),
        "cached_share": summary.cached_share,
        "tier": None if run.tier is None else _tier(run.tier, summary),
        "phases": {name.removesuffix("_s") + "_ms": in_ms(seconds) for name, seconds in summary.phases_s.items()},
        "send_lag_p50_ms": in_ms(summary.send_lag_s.median),
        "send_lag_p99_ms": in_ms(summary.send_lag_s.percentile(99)),
        "send_lag_max_ms": in_ms(summary.send_lag_s.max),
    }


def _tier(tier: TierUse, summary: Summary) -> dict[str, Any]:
    shares = {"read_share": read_share(tier, summary), "hit_rate": tier.hit_rate}
    return {**shares, **{name: getattr(tier, name) for name in ("num_hits", "num_misses", "read_s", "saved_s")}}


def _details(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "input_lens": [outcome.num_prompt_tokens for outcome in outcomes],
        "output_lens": [outcome.num_output_tokens for outcome in outcomes],
        "ttfts": [ttft_s(outcome) or 0.0 for outcome in outcomes],
        "itls": [itls_s(outcome) for outcome in outcomes],
        "latencies": [e2el_s(outcome) for outcome in outcomes],
        "queue_times": [send_lag_s(outcome) for outcome in outcomes],
        "start_times": [outcome.sent_s for outcome in outcomes],
        "errors": [outcome.error for outcome in outcomes],
    }
