"""What the server answers, as frozen dataclasses whose fields are named as on the wire. Times are in seconds."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from protos import inference_pb2
from protos.convert import shape_from_wire
from serving_core.shapes import Shape

Record = TypeVar("Record")

_FLOAT_BYTES = 4
_FINISH_REASONS = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
    inference_pb2.FINISH_REASON_ABORT: "abort",
}


_LIMITS = ("ttft_ms", "tpot_ms", "ttft_met", "tpot_met")


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One of the most likely tokens at a position."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The logprob of a token of an answer, or of a prompt, and of the most likely ones at its position."""

    token_id: int
    logprob: float
    top: tuple[TopLogprob, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Where a request's time went: the six phases add up to e2e_s.

    num_restarts counts how often it began again on other nodes, num_moves how often its running answer went to another
    node with its KV, and move_pause_s the seconds that it stood still for that. loan_s are those of prefill_queue_s in
    which blocks of the prompt came from another node.

    Of a request with limits, expected_ttft_s (from its arrival; expected_prefill_s of it is the prefill itself) and
    expected_tpot_s are what was expected when it was first given to nodes, 0 where that is not known. The first token
    was planned to come ttft_margin_s before its limit. deferred_s are those of prefill_queue_s for which the request
    was held before nodes were given it. is_late: it went behind all others.
    """

    prefill_queue_s: float
    prefill_s: float
    credit_wait_s: float
    transfer_s: float
    decode_queue_s: float
    decode_s: float
    e2e_s: float
    ttft_s: float
    prefill_node: str
    decode_node: str
    num_restarts: int
    num_moves: int
    move_pause_s: float
    loan_s: float = 0.0
    expected_ttft_s: float = 0.0
    expected_prefill_s: float = 0.0
    ttft_margin_s: float = 0.0
    expected_tpot_s: float = 0.0
    deferred_s: float = 0.0
    is_late: bool = False


@dataclass(frozen=True, slots=True)
class Attainment:
    """The limits of an answer in milliseconds, and whether it kept them; None where there was no limit. slo_class is
    that of the request, "" for none.

    TTFT is from the arrival at the API server to the first token, TPOT the mean from each token to the next.
    """

    slo_class: str
    ttft_ms: float | None
    tpot_ms: float | None
    ttft_met: bool | None
    tpot_met: bool | None


@dataclass(frozen=True, slots=True)
class Completion:
    """How one answer ended. finish_reason is stop, length or abort; matched_stop the stop string or token id.

    cached_tokens are those of the prompt that did not have to be computed, kv_bytes the KV that travelled to the
    decode node, kv_bytes_saved the KV that it held already. An answer that was moved to other nodes, or began again
    there, counts the bytes of all its transfers, but the cached tokens of its first prefill alone. moved_kv_bytes are
    those of kv_bytes that travelled because it moved. lent_kv_bytes are KV of the prompt that another node lent to the
    one that read it. attainment is None where the request had neither limits nor a
    class. num_resumes counts the calls that went on with the answer after one had broken off; then timeline and bytes
    are of the last call alone, and resumed_tokens are those of completion_tokens that had come before it. Of candidates
    that speculation proposed, accepted_tokens became tokens of the answer. error says why one of several answers was
    cut short (abort) while the others went on.
    """

    finish_reason: str
    matched_stop: str | int | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    timeline: Timeline
    kv_bytes: int
    kv_bytes_saved: int
    moved_kv_bytes: int
    attainment: Attainment | None = None
    resumed_tokens: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    num_resumes: int = 0
    lent_kv_bytes: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next piece of answer number `index`. The last one of each index carries the completion; the first one, where
    they were asked for, the logprobs of the prompt's tokens behind its first.

    text may lag behind token_ids; it never holds half a character.
    """

    request_id: str
    index: int
    text: str
    first_token_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    completion: Completion | None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Embedding:
    """The vector that a model has made of a text."""

    vector: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class Aborted:
    """Which request ids were cancelled, and which were not live."""

    aborted: tuple[str, ...]
    unknown: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model. default_sampling_params are what a request gets where it leaves them open; adapters are what it
    may name as its model beside served_model_name. One that makes embeddings, of embedding_size numbers, writes no
    answers; of any other that is 0."""

    served_model_name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    default_sampling_params: Mapping[str, float]
    adapters: tuple[str, ...]
    embedding_size: int


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node that is attached: its role, what must be equal on all nodes, what may differ, and what may differ and the
    bits of answers with it."""

    name: str
    role: str
    incarnation: str
    fingerprint: Mapping[str, str]
    engine: Mapping[str, str]
    traits: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The coordinator and the nodes attached to it."""

    version: str
    protocol_version: str
    uptime_s: float
    instance_id: str
    nodes: tuple[NodeInfo, ...]


@dataclass(frozen=True, slots=True)
class RankLoad:
    """The memory of one process of a node."""

    rank: int
    rss_bytes: int
    kv_pool_bytes: int
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class TierLoad:
    """What the second tier of a node's KV cache holds, and what it has done since the node started: blocks read back,
    and full ones of prompts that were computed; reads that ended at a damaged block, or were given up, and blocks that
    could not be written in time; bytes and seconds of reading and writing, and the seconds that computing would have
    taken less what reading took."""

    host_bytes: int
    disk_bytes: int
    num_hits: int
    num_misses: int
    num_damaged: int
    num_late: int
    num_unwritten: int
    read_bytes: int
    read_s: float
    written_bytes: int
    write_s: float
    saved_s: float


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """A node's load at its last heartbeat. step_s is the median of its recent steps.

    num_blocks_cached are free blocks that still hold the KV of an earlier request. num_prompt_tokens and what follows
    count from the start of the node: num_cached_tokens of the prompt tokens had their KV there already, num_kv_bytes
    were sent or received. prefill_tokens_per_s is what the node computes when it does nothing else, 0 while that is not
    known. role is what its shape amounts to; state is ready, draining, or drained when a drain has finished.
    lone_step_s is what an answer's token takes when it is the only one, 0 while that is not known. step_weights are
    what a step takes, as the node has learnt it, in seconds: of a step, of each answer in it, of each token before
    those; of chunks of prompts, of each of their tokens, of each pair of a token and one before it; of several answers,
    beyond one. They are empty while no request has had limits. decode_margin is what the mean of steps without prompts
    rarely exceeds, by the expected one, 0 while that is not known.
    step_tokens are steps by how many tokens they computed, and num_step_tokens all of these; num_blocks_leaked,
    blocks in use by no request, are always 0. num_blocks_hosted are in use by requests of other nodes, num_annexes
    what requests of this one have had there. num_annexes_recalled were other nodes' here, and were taken back for older
    requests. num_losses are those of the last 10 minutes in which the coordinator lost the node without a stop, and
    longest_heartbeat_gap_s the longest of its last 64 gaps between two heartbeats.
    """

    name: str
    role: str
    state: str
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_blocks: int
    num_blocks_free: int
    num_steps: int
    step_s: float
    rss_bytes: int
    num_preemptions: int
    num_blocks_cached: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_kv_bytes: int
    num_transfers_failed: int
    prefill_tokens_per_s: float
    shape: Shape
    lone_step_s: float
    step_weights: tuple[float, ...]
    decode_margin: float
    step_tokens: tuple[int, ...]
    num_step_tokens: int
    num_blocks_leaked: int
    num_blocks_hosted: int
    num_annexes: int
    num_annexes_recalled: int
    num_losses: int
    longest_heartbeat_gap_s: float
    ranks: tuple[RankLoad, ...]
    tier: TierLoad | None = None  # None without a second tier


@dataclass(frozen=True, slots=True)
class SloClassLoad:
    """A class of the server's configuration, or "none", and how many of its answers with limits that have ended kept
    them; where there is no limit, it is kept."""

    slo_class: str
    limits: str
    num_answers: int
    num_ttft_met: int
    num_tpot_met: int
    num_met: int


@dataclass(frozen=True, slots=True)
class Loads:
    """The load of every attached node, and how limits are kept by class."""

    nodes: tuple[NodeLoad, ...]
    num_live_requests: int
    slo_classes: tuple[SloClassLoad, ...] = ()


def to_chunk(response: inference_pb2.GenerateResponse) -> Chunk:
    """One message of the stream; a Complete message becomes a chunk without text."""
    chunk = response.chunk
    return Chunk(
        request_id=response.request_id,
        index=response.index,
        text=chunk.text,
        first_token_index=chunk.first_token_index,
        token_ids=tuple(chunk.token_ids),
        logprobs=tuple(_token_logprob(item) for item in chunk.logprobs),
        completion=_completion(response.complete) if response.HasField("complete") else None,
        prompt_logprobs=tuple(_token_logprob(item) for item in chunk.prompt_logprobs),
    )


def to_aborted(message: inference_pb2.AbortResponse) -> Aborted:
    return Aborted(tuple(message.aborted), tuple(message.unknown))


def to_model_info(message: inference_pb2.GetModelInfoResponse) -> ModelInfo:
    defaults = {field.name: value for field, value in message.default_sampling_params.ListFields()}
    lists = {name: tuple(getattr(message, name)) for name in ("eos_token_ids", "adapters")}
    return record_of(ModelInfo, message, **lists, default_sampling_params=defaults)


def to_embedding(message: inference_pb2.EmbedResponse) -> Embedding:
    vector = struct.unpack(f"<{len(message.embedding) // _FLOAT_BYTES}f", message.embedding)
    return Embedding(vector, message.prompt_tokens, message.cached_tokens, record_of(Timeline, message.timeline))


def to_server_info(message: inference_pb2.GetServerInfoResponse) -> ServerInfo:
    return record_of(ServerInfo, message, nodes=tuple(_node_info(node) for node in message.nodes))


def to_loads(message: inference_pb2.GetLoadsResponse) -> Loads:
    nodes = tuple(to_node_load(node) for node in message.nodes)
    return Loads(nodes, message.num_live_requests, tuple(record_of(SloClassLoad, each) for each in message.slo_classes))


def to_node_load(message: inference_pb2.NodeLoad) -> NodeLoad:
    ranks = tuple(record_of(RankLoad, rank) for rank in message.ranks)
    lists = {"step_weights": tuple(message.step_weights), "step_tokens": tuple(message.step_tokens), "ranks": ranks}
    tier = record_of(TierLoad, message.tier) if message.HasField("tier") else None
    return record_of(NodeLoad, message, shape=shape_from_wire(message.shape), tier=tier, **lists)


def _node_info(message: inference_pb2.NodeInfo) -> NodeInfo:
    maps = {name: dict(getattr(message, name)) for name in ("fingerprint", "engine", "traits")}
    return record_of(NodeInfo, message, **maps)


def _token_logprob(item: inference_pb2.TokenLogprobs) -> TokenLogprob:
    return TokenLogprob(item.token_id, item.logprob, tuple(TopLogprob(top.token_id, top.logprob) for top in item.top))


def _completion(complete: inference_pb2.Complete) -> Completion:
    matched = complete.WhichOneof("matched_stop")
    return record_of(
        Completion,
        complete,
        finish_reason=_FINISH_REASONS.get(complete.finish_reason, "unspecified"),
        matched_stop=getattr(complete, matched) if matched else None,
        timeline=record_of(Timeline, complete.timeline),
        attainment=attainment_of(complete.attainment) if complete.HasField("attainment") else None,
        num_resumes=0,
    )


def attainment_of(message: inference_pb2.Attainment) -> Attainment:
    limits = {name: getattr(message, name) if message.HasField(name) else None for name in _LIMITS}
    return Attainment(message.slo_class, **limits)


def record_of(record_class: type[Record], message: Any, **others: Any) -> Record:
    """The dataclass with the message's fields of the same names; `others` are those that need more than a copy."""
    names = (field.name for field in fields(record_class) if field.name not in others)  # type: ignore[arg-type]
    return record_class(**{name: getattr(message, name) for name in names}, **others)
