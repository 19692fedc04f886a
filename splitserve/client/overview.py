"""Define the overview of a server as frozen dataclasses, with field names as in protobuf. Times are in seconds."""

from dataclasses import dataclass

from protos import inference_pb2
from splitserve.client.answers import Attainment, NodeLoad, attainment_of, record_of, to_node_load


@dataclass(frozen=True, slots=True)
class NodeOverview:
    """Load of a node at its last heartbeat, and what the coordinator has assigned to it.

    Assigned are prompt tokens to compute, sequences to decode, those of them that other nodes still prefill
    (num_incoming), and tokens of its pool. Rates cover the last seconds: tokens_per_s are generation tokens,
    prompt_tokens_per_s computed prompt tokens.
    """

    load: NodeLoad
    num_tokens_to_compute: int
    num_sequences: int
    num_incoming: int
    num_tokens_used: int
    num_pool_tokens: int
    prompt_tokens_per_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class PhaseCount:
    """Number of live requests in one phase; no_node: waiting for a node to attach."""

    phase: str
    num_sequences: int


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of the last seconds: generation tokens, prompt tokens, ended outputs."""

    tokens_per_s: float
    prompt_tokens_per_s: float
    requests_per_s: float


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles, each of which is one of the values."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class TimesOverview:
    """Times of the recently ended outputs of an SLO class, "" for all; None without any.

    num_met of the num_limited outputs with an SLO met it. Failed outputs are counted, without times.
    """

    slo_class: str
    limits: str
    num_sequences: int
    num_limited: int
    num_met: int
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None


@dataclass(frozen=True, slots=True)
class Span:
    """A phase of an output from begin_s to end_s after its start, and its nodes; "" without a node."""

    phase: str
    begin_s: float
    end_s: float
    prefill_node: str
    decode_node: str


@dataclass(frozen=True, slots=True)
class SequenceHistory:
    """History of one output: its phases and how it ended.

    end is stop, length, abort, an error reason, or "" while live. number counts ended outputs; start_s is a time of the
    server's clock. ttft_s is 0 before the first token, tpot_s before the second.
    """

    number: int
    sequence_id: str
    start_s: float
    spans: tuple[Span, ...]
    end: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_s: float
    tpot_s: float
    num_restarts: int
    num_migrations: int
    migration_pause_s: float
    kv_bytes: int
    attainment: Attainment | None


@dataclass(frozen=True, slots=True)
class Overview:
    """State of a server at now_s, a time of its clock.

    Has the nodes by name, live requests by phase, rates, generation tokens of each of the last seconds, times of the
    outputs that ended within window_s, and the latest request histories.
    """

    now_s: float
    uptime_s: float
    served_model_name: str
    nodes: tuple[NodeOverview, ...]
    phases: tuple[PhaseCount, ...]
    rates: Rates
    recent_tokens_per_s: tuple[float, ...]
    window_s: float
    times: tuple[TimesOverview, ...]
    live: tuple[SequenceHistory, ...]
    ended: tuple[SequenceHistory, ...]


def to_overview(message: inference_pb2.Overview) -> Overview:
    return record_of(
        Overview,
        message,
        nodes=tuple(record_of(NodeOverview, node, load=to_node_load(node.load)) for node in message.nodes),
        phases=tuple(record_of(PhaseCount, each) for each in message.phases),
        rates=record_of(Rates, message.rates),
        recent_tokens_per_s=tuple(message.recent_tokens_per_s),
        times=tuple(_times(each) for each in message.times),
        live=tuple(_life(each) for each in message.live),
        ended=tuple(_life(each) for each in message.ended),
    )


def _times(message: inference_pb2.TimesOverview) -> TimesOverview:
    percentiles = {
        name: record_of(Percentiles, getattr(message, name)) if message.HasField(name) else None
        for name in ("ttft_s", "tpot_s")
    }
    return record_of(TimesOverview, message, **percentiles)


def _life(message: inference_pb2.SequenceHistory) -> SequenceHistory:
    return record_of(
        SequenceHistory,
        message,
        spans=tuple(record_of(Span, span) for span in message.spans),
        attainment=attainment_of(message.attainment) if message.HasField("attainment") else None,
    )
