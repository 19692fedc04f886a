"""Define the server's responses as frozen dataclasses, with field names as in protobuf. Times are in seconds."""

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
    """Logprob of a token of an output or a prompt, and of the most likely tokens at its position."""

    token_id: int
    logprob: float
    top: tuple[TopLogprob, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Phases of a request in seconds; the six phases add up to e2e_s.

    num_restarts counts how often the request started again on other nodes, num_migrations how often it migrated with
    its KV, and migration_pause_s the seconds that it was stopped for migrations. prefix_fetch_s is the part of
    prefill_queue_s for remote prefix fetch.

    For a request with an SLO, expected_ttft_s (from arrival; expected_prefill_s of it is the prefill itself) and
    expected_tpot_s are the predictions when the request was first placed, or 0 if unknown. ttft_margin_s is the planned
    slack of the first token. deferred_s is the part of prefill_queue_s before the deferred request was admitted.
    is_late: the request was queued behind all others.
    """

    prefill_queue_s: float
    prefill_s: float
    kv_alloc_s: float
    kv_transfer_s: float
    decode_queue_s: float
    decode_s: float
    e2e_s: float
    ttft_s: float
    prefill_node: str
    decode_node: str
    num_restarts: int
    num_migrations: int
    migration_pause_s: float
    prefix_fetch_s: float = 0.0
    expected_ttft_s: float = 0.0
    expected_prefill_s: float = 0.0
    ttft_margin_s: float = 0.0
    expected_tpot_s: float = 0.0
    deferred_s: float = 0.0
    is_late: bool = False


@dataclass(frozen=True, slots=True)
class Attainment:
    """SLO of an output in milliseconds, and its attainment; None without a limit.

    slo_class is the request's SLO class, or "". TTFT is the time from arrival at the API server to the first token,
    TPOT the mean time between tokens.
    """

    slo_class: str
    ttft_ms: float | None
    tpot_ms: float | None
    ttft_met: bool | None
    tpot_met: bool | None


@dataclass(frozen=True, slots=True)
class Completion:
    """End of one output, with its usage.

    finish_reason is stop, length or abort; matched_stop is the stop string or token id. error says why one of several
    outputs was cut short (abort) while the others went on.

    cached_tokens are the prompt tokens that were not computed; with a restart or migration, those of the first prefill.
    kv_bytes is the KV that was sent over all KV transfers, of which migrated_kv_bytes for migrations; kv_bytes_saved is
    the KV that the decode node already had. fetched_kv_bytes is prompt KV that the prefill node got by remote prefix
    fetch.

    attainment is None for a request without SLO and class. num_resumes counts the calls that continued the output after
    a broken call; then timeline and bytes are those of the last call, and resumed_tokens of completion_tokens came
    before it. proposed_tokens are the draft tokens of speculation, of which accepted_tokens became output.
    """

    finish_reason: str
    matched_stop: str | int | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    timeline: Timeline
    kv_bytes: int
    kv_bytes_saved: int
    migrated_kv_bytes: int
    attainment: Attainment | None = None
    resumed_tokens: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    num_resumes: int = 0
    fetched_kv_bytes: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next piece of output `index`.

    The last chunk of each index has the completion. The first has the logprobs of the prompt's tokens after the first,
    if requested. text may lag behind token_ids, and never ends within a character.
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
    """The embedding of an input."""

    vector: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class Scores:
    """The logprobs of the labels of each item, both in the order of the call."""

    logprobs: tuple[tuple[float, ...], ...]
    prompt_tokens: int
    cached_tokens: int
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class Aborted:
    """The request ids that were aborted, and those that were not live."""

    aborted: tuple[str, ...]
    unknown: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The served model.

    default_sampling_params apply where a request sets none. adapters may be named as a request's model besides
    served_model_name. embedding_size is the dimension of a model that makes embeddings and generates no text, else 0.
    """

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
    """An attached node.

    fingerprint must be equal on all nodes, engine may differ, and numerics may differ and change the bits of outputs.
    version is at most one minor from the coordinator's.
    """

    name: str
    role: str
    incarnation: str
    fingerprint: Mapping[str, str]
    engine: Mapping[str, str]
    numerics: Mapping[str, str]
    version: str


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The coordinator and its attached nodes."""

    version: str
    protocol_version: str
    uptime_s: float
    instance_id: str
    nodes: tuple[NodeInfo, ...]


@dataclass(frozen=True, slots=True)
class RankLoad:
    """Memory of one process of a node."""

    rank: int
    rss_bytes: int
    kv_pool_bytes: int
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class TierLoad:
    """KV offload of a node, counted since the node started.

    num_hits are blocks loaded, num_misses full prompt blocks computed instead. num_damaged loads ended at a damaged
    block, num_late loads were given up, and num_unwritten blocks could not be written in time. saved_s is the time to
    compute the loaded blocks, less the time to load them.
    """

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
    """Load of a node at its last heartbeat. Counters start with the node.

    role is the preset that fits the shape; state is ready, draining, or drained after a drain. step_s is the median
    time of recent steps. num_blocks_cached are free blocks that hold KV of earlier requests. num_cached_tokens of
    num_prompt_tokens were found in the prefix cache; num_prefill_tokens prompt tokens were computed. num_kv_bytes were
    sent or received. prefill_tokens_per_s is the rate of a node that only prefills, 0 if unknown.

    lone_step_s is the time per output token of a single sequence, 0 if unknown. step_weights are the learned costs in
    seconds: of a step, of each sequence in it, of each of their earlier tokens; of having prompt chunks, of each chunk
    token, of each pair of a chunk token and an earlier token; of having several sequences. Empty while no request has
    an SLO. decode_margin is a bound, rarely exceeded, on the mean time of decode steps relative to the prediction, 0 if
    unknown.

    step_tokens is a histogram of steps by their tokens, num_step_tokens the total. num_blocks_leaked, blocks in use by
    no request, is always 0. num_remote_kv_blocks blocks are distributed KV of other nodes' requests; num_remote_kvs
    counts the parts of this node's requests on other nodes, num_remote_kvs_revoked the parts of other nodes' requests
    that this node took back for older requests. num_losses counts how often the coordinator lost the node in the last
    10 minutes without a stop, and longest_heartbeat_gap_s is the longest of the last 64 heartbeat gaps."""

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
    num_prefill_tokens: int
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
    num_remote_kv_blocks: int
    num_remote_kvs: int
    num_remote_kvs_revoked: int
    num_losses: int
    longest_heartbeat_gap_s: float
    ranks: tuple[RankLoad, ...]
    tier: TierLoad | None = None  # None without KV offload


@dataclass(frozen=True, slots=True)
class SloClassLoad:
    """SLO attainment of a class of the server's configuration, or of "none".

    Counts the ended outputs with an SLO. A missing limit counts as met.
    """

    slo_class: str
    limits: str
    num_sequences: int
    num_ttft_met: int
    num_tpot_met: int
    num_met: int


@dataclass(frozen=True, slots=True)
class Loads:
    """Load of every attached node, and SLO attainment by class."""

    nodes: tuple[NodeLoad, ...]
    num_live_requests: int
    slo_classes: tuple[SloClassLoad, ...] = ()


def to_chunk(response: inference_pb2.GenerateResponse) -> Chunk:
    """Convert one message of the stream; a Complete message becomes a chunk without text."""
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


def to_scores(message: inference_pb2.ScoreResponse) -> Scores:
    logprobs = tuple(tuple(item.logprobs) for item in message.items)
    return record_of(Scores, message, logprobs=logprobs, timeline=record_of(Timeline, message.timeline))


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
    maps = {name: dict(getattr(message, name)) for name in ("fingerprint", "engine", "numerics")}
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
    """Return a dataclass with the values of the message's fields of the same names.

    `others` are the values of fields that need a conversion.
    """
    names = (field.name for field in fields(record_class) if field.name not in others)  # type: ignore[arg-type]
    return record_class(**{name: getattr(message, name) for name in names}, **others)
