"""Build the spans of a call from its record. Pure.

    chat MODEL                the whole call, to the end of its last sequence
        accept                validated, tokenized and admitted
        wait for a node       while a sequence had no node
        attempt               one try at a sequence on a pair of nodes; another one follows where a node was lost
            prefill queue, prefill, KV alloc, KV transfer, decode queue, decode
            move              migration of a running sequence to another node

Attributes have the names of OpenTelemetry's conventions for generative AI where these define one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from coordinator.control.instructions import FINISH_REASONS, MigrationEnded, MigrationOutcome
from coordinator.control.request import Mark, Phase
from coordinator.control.request_log import CallRecord, SequenceRecord, sequence_index
from protos import inference_pb2
from serving_core.errors import RequestError

Attribute = str | int | float | Sequence[str]

PROVIDER: Final = "splitserve"
MAX_NAME_CHARS: Final = 128  # of a model's name, which a client may have invented
NAMES: Final = {phase: phase.value.replace("_", " ").replace("kv", "KV") for phase in Phase}
PREFILL_PHASES: Final = (Phase.PREFILL_QUEUE, Phase.PREFILL)
TRANSFER_PHASES: Final = (Phase.KV_ALLOC, Phase.KV_TRANSFER)


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """One span with its children. Times are seconds of the coordinator's monotonic clock."""

    name: str
    start_s: float
    end_s: float
    attributes: Mapping[str, Attribute]
    failure: str = ""  # reason of the error; empty for a good end
    children: tuple["SpanRecord", ...] = ()

    def everyone(self) -> Iterator["SpanRecord"]:
        """Yield the span and all spans below it, each parent before its children."""
        yield self
        for child in self.children:
            yield from child.everyone()


def call_span(call: CallRecord, ended_s: float) -> SpanRecord:
    """Return the span of a call that has ended, with the spans of its sequences below it."""
    begun_s = ended_s if call.begun_s is None else call.begun_s
    children = [SpanRecord("accept", call.arrived_s, begun_s, {})]
    for answer in sorted(call.answers, key=lambda each: each.index):
        children += _sequence_spans(call, answer, begun_s)
    attributes = {**_request_attributes(call), **_response_attributes(call)}
    return SpanRecord(call_name(call), call.arrived_s, ended_s, attributes, _failure(call), tuple(children))


def call_name(call: CallRecord) -> str:
    """Return the name of a call's span: the operation and the model's name, shortened to MAX_NAME_CHARS."""
    return f"{call.operation} {call.model[:MAX_NAME_CHARS]}"


# ---- one sequence ----

PhaseSpan = tuple[Mark, float]
"""A phase: its mark, and the time of its end in seconds."""


def _sequence_spans(call: CallRecord, answer: SequenceRecord, begun_s: float) -> Iterator[SpanRecord]:
    """Yield the waits and attempts of a sequence, in order. The span "accept" covers the time before `begun_s`."""
    phases = [
        (mark._replace(at_s=max(mark.at_s, begun_s)), end_s)
        for mark, end_s in answer.timeline.spans(answer.ended_s)
        if end_s > begun_s
    ]
    about = {"splitserve.sequence": answer.index}
    for (number, has_nodes), group in groupby(
        phases, key=lambda phase: (phase[0].attempt, bool(phase[0].prefill_node))
    ):
        found = list(group)
        if has_nodes:
            yield _attempt_span(call, answer, number, found)
        else:
            yield SpanRecord("wait for a node", found[0][0].at_s, found[-1][1], about)


def _attempt_span(call: CallRecord, answer: SequenceRecord, number: int, phases: Sequence[PhaseSpan]) -> SpanRecord:
    first, start_s, end_s = phases[0][0], phases[0][0].at_s, phases[-1][1]
    migrations = [
        _migration_span(migration)
        for migration in call.migrations
        if sequence_index(migration.request_id)[1] == answer.index and start_s <= migration.started_s <= end_s
    ]
    attributes: dict[str, Attribute] = {
        "splitserve.sequence": answer.index,
        "splitserve.attempt": number,
        "splitserve.prefill_node": first.prefill_node,
        "splitserve.decode_node": first.decode_node,
    }
    children = (*(_phase_span(*phase) for phase in phases), *migrations)
    return SpanRecord("attempt", start_s, end_s, attributes, answer.timeline.failures.get(number, ""), children)


def _phase_span(mark: Mark, end_s: float) -> SpanRecord:
    if mark.phase in TRANSFER_PHASES:
        attributes = {"splitserve.from_node": mark.prefill_node, "splitserve.to_node": mark.decode_node}
    else:
        attributes = {"splitserve.node": mark.prefill_node if mark.phase in PREFILL_PHASES else mark.decode_node}
    return SpanRecord(NAMES[mark.phase], mark.at_s, end_s, attributes)


def _migration_span(migration: MigrationEnded) -> SpanRecord:
    attributes = {
        "splitserve.from_node": migration.source.name,
        "splitserve.to_node": migration.target.name,
        "splitserve.outcome": migration.outcome.value,
        "splitserve.kv_bytes": migration.num_kv_bytes,
    }
    failure = migration.outcome.value if migration.outcome is MigrationOutcome.FAILED else ""
    return SpanRecord("migration", migration.started_s, migration.ended_s, attributes, failure)


# ---- the call ----


def _request_attributes(call: CallRecord) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {
        "gen_ai.operation.name": call.operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": call.model[:MAX_NAME_CHARS],
        "splitserve.request_id": call.request_id,
    }
    if call.sampling is not None:
        attributes |= {
            "gen_ai.request.max_tokens": call.sampling.max_tokens,
            "gen_ai.request.temperature": call.sampling.temperature,
            "gen_ai.request.top_p": call.sampling.top_p,
            "gen_ai.request.top_k": call.sampling.top_k,
        }
    if call.num_sequences != 1:
        attributes["gen_ai.request.choice.count"] = call.num_sequences
    return attributes


def _response_attributes(call: CallRecord) -> dict[str, Attribute]:
    if not call.answers:
        return {}
    told: dict[str, Attribute] = {"gen_ai.usage.input_tokens": call.num_prompt_tokens}
    answers = sorted(call.answers, key=lambda each: each.index)
    completes = [each.outcome for each in answers if isinstance(each.outcome, inference_pb2.Complete)]
    told["gen_ai.usage.output_tokens"] = sum(_num_tokens(each) for each in answers)
    told["gen_ai.response.finish_reasons"] = [_finish_reason(each) for each in answers]
    first_s = [each.timeline.ttft_s for each in answers if each.timeline.ttft_s]
    if first_s:
        told["gen_ai.response.time_to_first_chunk"] = min(first_s)
    if completes:
        told |= {
            "gen_ai.usage.cache_read.input_tokens": max(each.cached_tokens for each in completes),
            "splitserve.restarts": sum(each.timeline.num_restarts for each in completes),
            "splitserve.migrations": sum(each.timeline.num_migrations for each in completes),
            "splitserve.kv_bytes": sum(each.kv_bytes for each in completes),
        }
    return told


def _failure(call: CallRecord) -> str:
    """Return the reason of failure, empty for none. A stream may report a failure in its body and still end well."""
    failures = (each.outcome.reason for each in call.answers if isinstance(each.outcome, RequestError))
    return call.failure or next(failures, "")


def _num_tokens(answer: SequenceRecord) -> int:
    if isinstance(answer.outcome, RequestError):
        return int(answer.outcome.metadata.get("tokens_emitted", 0))
    return answer.outcome.completion_tokens


def _finish_reason(answer: SequenceRecord) -> str:
    if isinstance(answer.outcome, RequestError):
        return "error"
    return FINISH_REASONS.get(answer.outcome.finish_reason, "unknown")
