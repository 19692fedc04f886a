"""Arrange the options of the commands that serve in groups, for their help and for the reference of settings."""

from collections.abc import Collection
from typing import Final

NUM_COMMON: Final = 12
COMMON: Final = (
    *("prefill", "decode", "mixed", "coordinator", "kv_bind", "engine", "tensor_parallel_size"),
    *("dtype", "quantization", "kv_cache_memory_bytes", "max_num_seqs", "max_model_len", "slo_class"),
    *("http_port", "grpc_port", "host", "http_host", "fleet_host", "fleet_port"),
    *("api_key", "fleet_secret", "served_model_name"),
)
GROUPS: Final = {
    "Model": (
        *("engine", "vllm_python", "vllm_flag"),
        *("dtype", "quantization", "max_model_len", "lora", "lora_root", "model_impl", "runner"),
        *("batch_invariant", "served_model_name", "generation_config", "max_logprobs"),
        *("chat_template", "chat_template_kwargs"),
        *("tool_call_parser", "reasoning_parser", "disable_additional_properties", "strict_fields"),
        *("speculation", "num_speculative_tokens", "speculative_model", "speculative_quantization"),
    ),
    "Parallelism": (
        *("prefill", "decode", "mixed", "prefill_tp", "decode_tp", "mixed_tp", "prefill_pp", "decode_pp", "mixed_pp"),
        *("tensor_parallel_size", "pipeline_parallel_size", "sequence_parallel_min_tokens", "api_server_count"),
        *("device", "cpus", "ray", "ray_cpus"),
    ),
    "Memory": (
        *("kv_cache_memory_bytes", "kv_cache_dtype", "gpu_memory_utilization", "block_size", "num_kv_blocks"),
        *("enable_prefix_caching", "kv_host_bytes", "kv_disk_bytes", "kv_disk_path", "kv_read_back", "distributed_kv"),
        *("weights_memory_bytes", "weights_disk_path", "speculative_kv_cache_memory_bytes"),
    ),
    "Scheduling and SLOs": (
        *("max_num_seqs", "max_num_batched_tokens", "slo_class", "admission", "policy", "roles"),
        *("max_num_queued_reqs", "max_num_queued_reqs_per_key", "max_queue_wait_s", "max_num_queued"),
        *("remote_prefix_fetch", "max_restarts", "stream_interval"),
    ),
    "Network": (
        *("host", "grpc_port", "http_host", "http_port", "fleet_host", "fleet_port", "coordinator", "name"),
        *("kv_bind", "kv_transport", "kv_shared_memory", "max_connections", "max_connections_per_peer"),
        *("standby", "standby_lease"),
    ),
    "Security": (
        *("api_key", "api_keys_file", "admin_key", "fleet_secret", "tls_cert", "tls_key", "tls_ca"),
        *("tls_verify_clients", "trusted_network", "allowed_origins"),
    ),
    "Observability": (
        *("ui", "log_dir", "log_level", "log_format", "otlp_endpoint"),
        *("metrics_host", "metrics_port", "health_host", "health_port"),
    ),
    "Expert": (
        *("start_timeout_s", "drain_s", "node_wait_s", "request_timeout_s", "heartbeat_s", "node_timeout_s"),
        *("step_timeout_s", "stuck_exit_s", "rank_timeout_s", "keep_after_s", "credit_timeout_s"),
        *("descriptor_timeout_s", "transfer_timeout_s", "reservation_ttl_s", "overlap_min_tokens"),
        *("verify_model", "enforce_eager", "instance_id", "api_server_number"),
    ),
}


def common_of(names: Collection[str]) -> list[str]:
    """Return the options that a command's short help shows, of those that the command has."""
    return [name for name in COMMON if name in names][:NUM_COMMON]


def group_of(name: str) -> str:
    """Return the title of an option's group; empty for an option without one."""
    return next((title for title, members in GROUPS.items() if name in members), "")
