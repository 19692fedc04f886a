"""What /metrics says of the nodes that are attached, out of their heartbeats."""

from collections.abc import Callable, Iterator, Sequence

from coordinator.control.nodes import DRAINED, Node, num_kinds
from coordinator.control.tracker import Tracker
from protos.inference_pb2 import NodeLoad, TierLoad
from serving_core.figures import Figure, Labels, counter, gauge, histogram
from serving_core.histograms import BATCH, Histogram
from serving_core.shapes import ROLES


def node_figures(nodes: Sequence[Node], tracker: Tracker, *, is_path: bool) -> Iterator[Figure]:
    """Counters of a node begin with its process, and are told once it has told them: a node that has just attached
    again would seem to begin anew."""
    yield gauge("nodes", "Attached nodes.", [({"role": role}, sum(n.role == role for n in nodes)) for role in ROLES])
    yield gauge("ready", "1 while there are nodes for a request.", [({}, is_path)])
    help = "Kinds of attached nodes: with more than one, answers may differ in bits between nodes."
    yield gauge("node_kinds", help, [({}, num_kinds(nodes))])
    drained = [(_labels(node), tracker.load_of(node).state == DRAINED) for node in nodes]
    yield gauge("node_drained", "1 once a drain of the node has finished.", drained)
    yield from _gauges(nodes)
    yield from _totals([node for node in nodes if node.has_told])


def _gauges(nodes: Sequence[Node]) -> Iterator[Figure]:
    def one(name: str, help: str, value: Callable[[Node], float], *vllm: str) -> Figure:
        return gauge(f"node_{name}", help, [(_labels(node), value(node)) for node in nodes], *vllm)

    yield one("ready", "1 while the node takes requests, 0 while it drains.", lambda node: node.is_ready)
    yield one("requests_running", "Requests in the node's steps.", lambda node: node.load.num_running)
    yield one("requests_waiting", "Requests that wait on the node.", lambda node: node.load.num_waiting)
    yield one("waiting_tokens", "Tokens that wait to be computed.", lambda node: node.load.num_waiting_tokens)
    yield one("kv_cache_usage_ratio", "Part of the KV blocks in use.", _kv_usage, "kv_cache_usage_perc")
    yield one("kv_blocks", "KV blocks.", lambda node: node.hello.num_blocks)
    yield one(
        "kv_blocks_cached", "Of those, free ones with the KV of prompts.", lambda node: node.load.num_blocks_cached
    )
    yield one("kv_blocks_leaked", "In use, but by no request: always 0.", lambda node: node.load.num_blocks_leaked)
    yield one("resident_memory_bytes", "Memory of the first process.", lambda node: node.load.rss_bytes)
    yield one("step_seconds", "Median of the recent steps.", lambda node: node.load.step_s)
    help = "Longest of the last 64 gaps between two heartbeats: a node that is slow to tell is waited for longer."
    yield one("longest_heartbeat_gap_seconds", help, lambda node: node.load.longest_heartbeat_gap_s)
    help = "Times that it was lost in the last 10 minutes; 3 and more: it flaps."
    yield one("recent_losses", help, lambda node: node.load.num_losses)
    yield one("step_age_seconds", "Of the step that runs; 0 when idle.", lambda node: node.step_age_s)
    help = "Prompt tokens a second in steps that do nothing else."
    yield one("prefill_tokens_per_second", help, lambda node: node.load.prefill_tokens_per_s)


def _totals(nodes: Sequence[Node]) -> Iterator[Figure]:
    def one(name: str, help: str, value: Callable[[NodeLoad], float], *vllm: str) -> Figure:
        return counter(f"node_{name}", help, [(_name(node), value(node.load)) for node in nodes], *vllm)

    yield one("steps", "Steps.", lambda load: load.num_steps)
    yield one("preemptions", "Answers put back.", lambda load: load.num_preemptions, "num_preemptions")
    yield one("prompt_tokens", "Tokens of prompts that began on the node.", lambda load: load.num_prompt_tokens)
    yield one("prompt_tokens_cached", "Of those, the ones whose KV was there.", lambda load: load.num_cached_tokens)
    yield one("transferred_bytes", "KV that the node has sent and received.", lambda load: load.num_kv_bytes)
    yield one(
        "transfers_failed",
        "Its transfers that failed, but for those of answers that were cancelled.",
        lambda load: load.num_transfers_failed,
    )
    yield from _second_tiers([node for node in nodes if node.load.HasField("tier")])
    steps = [(_name(node), observed) for node in nodes if (observed := _step_tokens(node.load)) is not None]
    yield histogram("node_step_tokens", "Tokens that one step computed.", steps, "iteration_tokens_total")


def _second_tiers(nodes: Sequence[Node]) -> Iterator[Figure]:
    def values(value: Callable[[TierLoad], float]) -> list[tuple[Labels, float]]:
        return [(_name(node), value(node.load.tier)) for node in nodes]

    if not nodes:
        return
    help = "KV that the second tier holds, in host memory and in its file."
    yield gauge("node_kv_tier_bytes", help, values(lambda tier: tier.host_bytes + tier.disk_bytes))
    yield counter("node_kv_tier_hits", "Blocks read back.", values(lambda tier: tier.num_hits))
    help = "Full blocks of prompts that were computed instead."
    yield counter("node_kv_tier_misses", help, values(lambda tier: tier.num_misses))
    help = "Reads and writes of it that failed or came too late."
    lost = values(lambda tier: tier.num_damaged + tier.num_late + tier.num_unwritten)
    yield counter("node_kv_tier_failures", help, lost)
    help = "Seconds that computing would have taken, less what reading took."
    yield gauge("node_kv_tier_saved_seconds", help, values(lambda tier: tier.saved_s))


def _labels(node: Node) -> Labels:
    return {"node": node.name, "role": node.role}


def _name(node: Node) -> Labels:
    """Of what is counted: a role changes, and a rate would count twice what was counted in between."""
    return {"node": node.name}


def _kv_usage(node: Node) -> float:
    num_blocks = node.hello.num_blocks
    return 1 - min(node.load.num_blocks_free, num_blocks) / num_blocks


def _step_tokens(load: NodeLoad) -> Histogram | None:
    """As the node has counted them; None where it does not."""
    observed = Histogram(BATCH)
    if len(load.step_tokens) != len(observed.counts):
        return None
    observed.counts[:] = load.step_tokens
    observed.sum = load.num_step_tokens
    return observed
