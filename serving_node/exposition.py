"""Expose a node's metrics to Prometheus on its own port.

The coordinator's metrics of nodes, taken from heartbeats, have names that begin with node_; no name here does, so that
sums count nothing twice.
"""

from collections.abc import Iterator
from typing import Protocol

from decode_node.speculation import SpeculationCounts
from engine.stepper import StepClock
from kv_transfer.ends.receiver import KVReceiver
from kv_transfer.ends.sender import KVSender
from protos import inference_pb2
from serving_core.figures import Figure, Values, counter, gauge, histogram
from serving_core.node.requests import NodeRequests, RequestState
from serving_node.outputs import StepCounts


class Observed(Protocol):
    """Define a node as the metrics see it. No call changes the node."""

    @property
    def name(self) -> str: ...
    @property
    def steps(self) -> StepCounts: ...
    @property
    def speculation(self) -> SpeculationCounts: ...
    @property
    def step_age_s(self) -> float: ...
    @property
    def clock(self) -> StepClock: ...
    @property
    def num_divided_passes(self) -> int: ...
    @property
    def node_requests(self) -> NodeRequests: ...
    def load(self) -> inference_pb2.NodeLoad: ...


class NodeExposition:
    """Return the current metrics of one node. Belongs to the node's event loop."""

    def __init__(self, node: Observed, sender: KVSender, receiver: KVReceiver) -> None:
        self._node = node
        self._sender = sender
        self._receiver = receiver

    def figures(self) -> Iterator[Figure]:
        load = self._node.load()
        yield from self._requests(load)
        yield from self._steps(load)
        yield from self._blocks(load)
        yield from self._transfers()

    def _one(self, value: float) -> Values:
        return [({"node": self._node.name}, value)]

    def _by(self, label: str, values: dict[str, float]) -> Values:
        return [({"node": self._node.name, label: key}, value) for key, value in values.items()]

    def _requests(self, load: inference_pb2.NodeLoad) -> Iterator[Figure]:
        node_requests = self._node.node_requests
        stages: dict[str, float] = {stage.name.lower(): node_requests.count(stage) for stage in RequestState}
        yield gauge("stage_requests", "Requests on the node, by what they wait for or do.", self._by("stage", stages))
        yield gauge("waiting_tokens", "Tokens that wait to be computed.", self._one(load.num_waiting_tokens))
        yield gauge("draining", "1 while the node takes no more requests.", self._one(load.state == "draining"))
        yield counter("preemptions", "Answers put back for want of blocks.", self._one(load.num_preemptions))
        looked_up, found = load.num_prompt_tokens, load.num_cached_tokens
        yield counter("prefix_cache_queries", "Tokens of prompts that began here.", self._one(looked_up))
        yield counter("prefix_cache_hits", "Of those, the ones whose KV was there.", self._one(found))

    def _steps(self, load: inference_pb2.NodeLoad) -> Iterator[Figure]:
        steps, name = self._node.steps, self._node.name
        seconds = [({"node": name, "phase": phase}, each) for phase, each in steps.seconds.items()]
        yield histogram("step_seconds", "Seconds of a step, by what it held.", seconds)
        yield histogram("step_tokens", "Tokens that one step computed.", [({"node": name}, steps.tokens)])
        yield histogram("step_answers", "Answers that one step wrote.", [({"node": name}, steps.answers)])
        computed: dict[str, float] = {"prefill": steps.num_prompt_tokens, "decode": steps.num_answer_tokens}
        yield counter("computed_tokens", "Tokens computed, of prompts and of answers.", self._by("phase", computed))
        help = "Seconds of steps by part: plan, build, compute, sample, draft, after, send, threads, and idle."
        yield counter("step_part_seconds", help, self._by("part", self._node.clock.seconds))
        help = "Passes through the layers that the ranks divided by tokens (sequence parallelism)."
        yield counter("sequence_parallel_passes", help, self._one(self._node.num_divided_passes))
        yield from self._draft_tokens()
        yield gauge("step_age_seconds", "Of the step that runs; 0 when idle.", self._one(self._node.step_age_s))
        memory: dict[str, float] = {str(rank.rank): rank.rss_bytes for rank in load.ranks}
        yield gauge("rank_resident_memory_bytes", "Memory of each of its processes.", self._by("rank", memory))

    def _draft_tokens(self) -> Iterator[Figure]:
        """Yield the metrics of speculative decoding under vLLM's names with the project's prefix."""
        counts = self._node.speculation
        drafts, proposed, accepted = map(self._one, (counts.num_drafts, counts.num_proposed, counts.num_accepted))
        yield counter("spec_decode_num_drafts", "Shares of steps in which an answer had draft tokens.", drafts)
        yield counter("spec_decode_num_draft_tokens", "Candidates that steps computed.", proposed)
        yield counter("spec_decode_num_accepted_tokens", "Of those, the ones that became tokens.", accepted)

    def _blocks(self, load: inference_pb2.NodeLoad) -> Iterator[Figure]:
        num_free, num_cached = load.num_blocks_free - load.num_blocks_cached, load.num_blocks_cached
        states: dict[str, float] = {"used": load.num_blocks - load.num_blocks_free, "cached": num_cached}
        yield gauge("kv_blocks", "KV blocks, by state.", self._by("state", {**states, "free": num_free}))
        yield gauge("kv_blocks_leaked", "In use, but by no request: always 0.", self._one(load.num_blocks_leaked))
        yield gauge("kv_blocks_hosted", "In use by other nodes' requests.", self._one(load.num_blocks_hosted))
        yield counter(
            "remote_kvs", "Runs of blocks that requests have had on other nodes.", self._one(load.num_annexes)
        )
        help = "Runs of blocks of other nodes' requests that were taken back for older ones."
        yield counter("remote_kvs_recalled", help, self._one(load.num_annexes_recalled))
        if load.HasField("tier"):
            yield from self._second_tier(load.tier)

    def _second_tier(self, tier: inference_pb2.TierLoad) -> Iterator[Figure]:
        held: dict[str, float] = {"host": tier.host_bytes, "disk": tier.disk_bytes}
        yield gauge("kv_tier_bytes", "KV that the second tier holds.", self._by("place", held))
        found: dict[str, float] = {"hit": tier.num_hits, "miss": tier.num_misses}
        help = "Full blocks of prompts that the pool did not hold: read back, or computed."
        yield counter("kv_tier_blocks", help, self._by("result", found))
        lost: dict[str, float] = {"damaged": tier.num_damaged, "late": tier.num_late, "unwritten": tier.num_unwritten}
        help = "Reads that ended at a damaged block, or were given up, and blocks that could not be written in time."
        yield counter("kv_tier_failures", help, self._by("kind", lost))
        migrated: dict[str, float] = {"read": tier.read_bytes, "write": tier.written_bytes}
        yield counter("kv_tier_transfer_bytes", "KV that was read back, and written.", self._by("direction", migrated))
        seconds: dict[str, float] = {"read": tier.read_s, "write": tier.write_s}
        help = "Seconds that prompts waited for it, and that the first process wrote."
        yield counter("kv_tier_transfer_seconds", help, self._by("direction", seconds))
        help = "Seconds that computing would have taken, less what reading took."
        yield gauge("kv_tier_saved_seconds", help, self._one(tier.saved_s))

    def _transfers(self) -> Iterator[Figure]:
        ends: dict[str, KVSender | KVReceiver] = {"out": self._sender, "in": self._receiver}
        num_bytes: dict[str, float] = {direction: end.num_bytes for direction, end in ends.items()}
        num_failed: dict[str, float] = {direction: end.num_failed for direction, end in ends.items()}
        seconds = [({"node": self._node.name, "direction": key}, end.seconds) for key, end in ends.items()]
        help = "KV that the first process sent, repeats included, or received."
        yield counter("transfer_bytes", help, self._by("direction", num_bytes))
        num_shared: dict[str, float] = {key: end.transport.num_shared_bytes for key, end in ends.items()}
        help = "Of them, through memory shared with a process of the same machine."
        yield counter("transfer_shared_bytes", help, self._by("direction", num_shared))
        help = "From the descriptor, or the first message, to the commit; steps go on meanwhile."
        yield histogram("transfer_seconds", help, seconds)
        yield counter("transfer_failures", "Transfers that failed or were given up.", self._by("direction", num_failed))
