"""What vLLM tells under names of its own and we tell otherwise, so that its dashboards fill."""

from collections.abc import Iterator, Sequence

from coordinator.control.metrics import Metrics
from coordinator.control.nodes import Node
from coordinator.control.outcomes import FINISH_REASONS
from coordinator.control.tracker import Tracker
from serving_core.figures import Figure, Labels, counter, gauge
from serving_core.reasons import QUEUE_FULL


def vllm_figures(metrics: Metrics, tracker: Tracker, nodes: Sequence[Node], *, is_path: bool) -> Iterator[Figure]:
    """Their names are vLLM's, without its prefix."""
    ends = {**dict.fromkeys(FINISH_REASONS.values(), 0), **metrics.finished, "error": metrics.failed.total()}
    help = "Answers that have ended, those that failed too."
    yield counter("request_success", help, [({"finished_reason": reason}, count) for reason, count in ends.items()])
    refused = [({"reason": "max_num_queued_reqs"}, metrics.refused[QUEUE_FULL])]
    yield counter("admission_rejections", "Requests that were refused as too many were in flight.", refused)
    cached = metrics.num_cached_tokens
    sources = {
        "local_compute": metrics.num_prompt_tokens - cached,
        "local_cache_hit": cached,
        "external_kv_transfer": 0,
    }
    help = "Of prompts that were read: every token is computed, or found, once."
    yield counter("prompt_tokens_by_source", help, [({"source": name}, count) for name, count in sources.items()])
    deferred = tracker.num_deferred
    reasons = {"capacity": tracker.num_waiting - deferred, "deferred": deferred}
    help = "Live answers that are not written yet; deferred: no node can take them now."
    yield gauge("num_requests_waiting_by_reason", help, [({"reason": name}, count) for name, count in reasons.items()])
    states = {"awake": is_path, "weights_offloaded": False, "discard_all": not is_path}
    help = "Awake while there are nodes for a request."
    yield gauge("engine_sleep_state", help, [({"sleep_state": name}, value) for name, value in states.items()])
    yield gauge("cache_config_info", "What each node's KV cache is like.", [(_cache(node), 1) for node in nodes])


def _cache(node: Node) -> Labels:
    hello = node.hello
    dtype = hello.node.fingerprint.get("kv_cache_dtype", "")
    return {
        "node": node.name,
        "block_size": str(hello.block_size),
        "num_gpu_blocks": str(hello.num_blocks),
        "cache_dtype": dtype,
    }
