"""What is going on at a server, as frozen dataclasses whose fields are named as on the wire. Times are in seconds."""

from dataclasses import dataclass

from protos import inference_pb2
from splitserve.client.answers import Attainment, NodeLoad, attainment_of, record_of, to_node_load


@dataclass(frozen=True, slots=True)
class NodeOverview:
    """A node's load at its last heartbeat, and what the coordinator has given it since: tokens of prompts to compute,
    answers that it writes or is to write, those of them that other nodes still read, and tokens of its pool. Rates are
    those of the last seconds, tokens_per_s of answers, prompt_tokens_per_s of prompts that were computed."""

    load: NodeLoad
    num_tokens_to_compute: int
    num_answers: int
    num_to_come: int
    num_tokens_held: int
    num_pool_tokens: int
    prompt_tokens_per_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class PhaseCount:
    """Live answers in one phase, or with no_node those that wait for a node to come."""

    phase: str
    num_answers: int


@dataclass(frozen=True, slots=True)
class Rates:
    """Of the last seconds: tokens of answers, tokens of prompts, answers that have ended."""

    tokens_per_s: float
    prompt_tokens_per_s: float
    answers_per_s: float


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Each is one of the values: half, nine tenths, 99 of 100 are no greater."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class TimesOverview:
    """Times of the answers of a class, "" for all, that have ended lately; None where there are none. Of num_limited
    that had limits, num_met kept them. Answers that failed count, without times."""

    slo_class: str
    limits: str
    num_answers: int
    num_limited: int
    num_met: int
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None


@dataclass(frozen=True, slots=True)
class Span:
    """From begin_s to end_s behind its start an answer was in this phase, on these nodes: "" where none had it."""

    phase: str
    begin_s: float
    end_s: float
    prefill_node: str
    decode_node: str


@dataclass(frozen=True, slots=True)
class AnswerLife:
    """What one answer did or waited for, and how it ended: stop, length, abort, the reason of the error, or "" while it
    is live. number counts ends, start_s is a time of the server's clock. ttft_s is 0 before the first token, tpot_s
    without two."""

    number: int
    answer_id: str
    start_s: float
    spans: tuple[Span, ...]
    end: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_s: float
    tpot_s: float
    num_restarts: int
    num_moves: int
    move_pause_s: float
    kv_bytes: int
    attainment: Attainment | None


@dataclass(frozen=True, slots=True)
class Overview:
    """What is going on at now_s, a time of the server's clock: nodes by name, live answers by phase, rates, the tokens
    of each of the last seconds, times of the answers that have ended within window_s, and the latest lives."""

    now_s: float
    uptime_s: float
    served_model_name: str
    nodes: tuple[NodeOverview, ...]
    phases: tuple[PhaseCount, ...]
    rates: Rates
    recent_tokens_per_s: tuple[float, ...]
    window_s: float
    times: tuple[TimesOverview, ...]
    live: tuple[AnswerLife, ...]
    ended: tuple[AnswerLife, ...]


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


def _life(message: inference_pb2.AnswerLife) -> AnswerLife:
    return record_of(
        AnswerLife,
        message,
        spans=tuple(record_of(Span, span) for span in message.spans),
        attainment=attainment_of(message.attainment) if message.HasField("attainment") else None,
    )
