"""What the dashboards in vLLM's repository ask for, by the names and labels of their queries: `grafana.json`,
performance and query statistics, the overview and the service status. Left out is what has no counterpart here: caches
of other instances and of images."""

from typing import Final

_BY_REQUEST: Final = (
    "e2e_request_latency_seconds",
    "inter_token_latency_seconds",
    "iteration_tokens_total",
    "request_decode_time_seconds",
    "request_generation_tokens",
    "request_prefill_time_seconds",
    "request_prompt_tokens",
    "request_queue_time_seconds",
    "request_time_per_output_token_seconds",
    "time_to_first_token_seconds",
)
_QUERIES: Final = (
    *(f'histogram_quantile(0.95, sum by (le, model_name) (rate(vllm:{name}_bucket{{model_name="MODEL"}}[1m])))'
      for name in _BY_REQUEST),
    *(f'rate(vllm:{name}_sum{{model_name="MODEL"}}[1m]) / rate(vllm:{name}_count{{model_name="MODEL"}}[1m])'
      for name in _BY_REQUEST),
    'rate(vllm:request_max_num_generation_tokens_sum{model_name="MODEL"}[1m])',
    *(f'sum by (model_name, engine) (rate(vllm:{name}_total{{model_name="MODEL"}}[1m]))'
      for name in ("generation_tokens", "num_preemptions", "prefix_cache_hits", "prefix_cache_queries",
                   "prompt_tokens", "prompt_tokens_cached", "request_success")),
    *(f'sum by (finished_reason) (increase(vllm:request_success_total{{finished_reason="{reason}"}}[1m]))'
      for reason in ("stop", "length", "abort", "error")),
    *(f'sum(rate(vllm:prompt_tokens_by_source_total{{source="{source}"}}[1m]))'
      for source in ("local_compute", "local_cache_hit", "external_kv_transfer")),
    *(f'max by (instance, engine) (vllm:{name}{{model_name="MODEL"}})'
      for name in ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")),
    *(f'sum(vllm:num_requests_waiting_by_reason{{reason="{reason}"}})' for reason in ("capacity", "deferred")),
    'max(vllm:engine_sleep_state{sleep_state="awake"}) == bool 0',
    # Shares within a limit: at these bounds.
    *(f'sum(rate(vllm:time_to_first_token_seconds_bucket{{le="{bound}"}}[1m]))'
      for bound in ("0.1", "0.25", "0.5", "0.75", "1.0", "2.5", "5.0", "10.0")),
    *(f'sum(rate(vllm:request_time_per_output_token_seconds_bucket{{le="{bound}"}}[1m]))'
      for bound in ("0.025", "0.05", "0.075", "0.1", "0.15", "0.2", "0.3", "0.5")),
    'sum by (status, handler) (rate(http_requests_total{status=~"2xx"}[1m]))',
    "sum by (handler) (rate(http_request_duration_seconds_sum[1m]))",
    "sum by (handler) (rate(http_request_duration_seconds_count[1m]))",
    "process_start_time_seconds",
)  # fmt: skip


def queries(model_name: str) -> list[str]:
    """The expressions, for this model."""
    return [query.replace("MODEL", model_name) for query in _QUERIES]
