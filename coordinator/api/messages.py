"""Convert between own types and the messages of protos/api_servers.proto, and frame those messages on a socket."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from coordinator.api.validation import AnswerPlan
from coordinator.control.nodes import Capacity
from coordinator.control.request import NOTHING, SoFar
from coordinator.control.request_log import CallRecord
from coordinator.text.answers import TextOptions
from coordinator.traces.carrier import TRACEPARENT, TRACESTATE, Carrier
from protos import api_servers_pb2, inference_pb2
from protos.convert import pooling_from_wire, pooling_to_wire, sampling_from_wire, sampling_to_wire
from serving_core.errors import RequestError

ASKED: Final = ".asked"  # suffix of control's socket path: the socket of its unary gRPC calls


def error_to_wire(error: RequestError) -> api_servers_pb2.ApiServerError:
    return api_servers_pb2.ApiServerError(reason=error.reason, message=str(error), metadata=error.metadata)


def error_from_wire(wire: api_servers_pb2.ApiServerError) -> RequestError:
    return RequestError(wire.reason, wire.message, **wire.metadata)


def info_to_wire(record: CallRecord, carrier: Carrier) -> api_servers_pb2.CallInfo:
    return api_servers_pb2.CallInfo(
        request_id=record.request_id,
        asker=record.asker,
        operation=record.operation,
        model=record.model,
        arrived_s=record.arrived_s,
        traceparent=carrier.get(TRACEPARENT, ()),
        tracestate=carrier.get(TRACESTATE, ()),
    )


def info_from_wire(wire: api_servers_pb2.CallInfo) -> tuple[CallRecord, Carrier]:
    record = CallRecord(
        wire.request_id, wire.asker, operation=wire.operation, model=wire.model, arrived_s=wire.arrived_s
    )
    lists = {TRACEPARENT: list(wire.traceparent), TRACESTATE: list(wire.tracestate)}
    return record, {name: values for name, values in lists.items() if values}


def call_to_wire(
    info: api_servers_pb2.CallInfo,
    plan: AnswerPlan,
    so_fars: Sequence[SoFar],
    asked: inference_pb2.GenerateRequest,
    *,
    number: int,
    begun_s: float,
    deadline_s: float,
) -> api_servers_pb2.NewCall:
    """Return the message that announces a call to control. Text and stop strings stay at the API server."""
    call = api_servers_pb2.NewCall(
        number=number,
        info=info,
        prompt=plan.prompt,
        cache_salt=plan.cache_salt,
        adapter=plan.adapter,
        pooling=None if plan.pooling is None else pooling_to_wire(plan.pooling),
        sampling_params=sampling_to_wire(plan.samplings[0]),
        grammar=plan.samplings[0].grammar,
        seeds=[sampling.seed for sampling in plan.samplings],
        begun_s=begun_s,
        deadline_s=deadline_s,
        num_behind=plan.num_behind,
        call_number=plan.call_number,
    )
    for name in ("ttft_ms", "tpot_ms", "priority"):
        if asked.HasField(name):
            setattr(call.limits, name, getattr(asked, name))
    call.limits.slo_class = asked.slo_class
    if any(so_far is not NOTHING for so_far in so_fars):
        call.so_far.extend(
            api_servers_pb2.AnswerBegun(
                token_ids=each.token_ids,
                finish_reason=each.finish_reason,
                since_first_s=each.since_first_s,
                has_ended=each.has_ended,
            )
            for each in so_fars
        )
    return call


def plan_from_wire(wire: api_servers_pb2.NewCall) -> tuple[AnswerPlan, list[SoFar]]:
    """Return the plan of a call, and what each output already has: NOTHING for each unless resumed.

    Inverse of call_to_wire for the fields that control uses; the others have their defaults.
    """
    sampling = sampling_from_wire(wire.sampling_params, wire.grammar)
    plan = AnswerPlan(
        wire.info.request_id,
        list(wire.prompt),
        wire.cache_salt,
        tuple(replace(sampling, seed=seed) for seed in wire.seeds),
        TextOptions(),
        wire.adapter,
        pooling_from_wire(wire.pooling) if wire.HasField("pooling") else None,
        wire.num_behind,
        wire.call_number,
    )
    so_fars = [
        SoFar(tuple(each.token_ids), 0, each.finish_reason, each.since_first_s, each.has_ended) for each in wire.so_far
    ]
    return plan, so_fars or [NOTHING] * len(plan.samplings)


@dataclass(frozen=True, slots=True)
class Situation:
    """State of the fleet as an API server knows it."""

    capacity: Capacity = field(default_factory=lambda: Capacity(None, None, None, None))
    is_serving: bool = False
    why_not_ready: str = "the server starts"
    ready_nodes: frozenset[str] = frozenset()
    num_live: int = 0


def situation_to_wire(situation: Situation) -> api_servers_pb2.FleetState:
    capacity = situation.capacity
    return api_servers_pb2.FleetState(
        is_serving=situation.is_serving,
        why_not_ready=situation.why_not_ready,
        max_model_len=capacity.max_model_len,
        prefill_pool_tokens=capacity.prefill_pool_tokens,
        decode_pool_tokens=capacity.decode_pool_tokens,
        own_pool_tokens=capacity.own_pool_tokens,
        knows_adapters=capacity.adapters is not None,
        adapters=capacity.adapters or (),
        ready_nodes=sorted(situation.ready_nodes),
        num_live=situation.num_live,
    )


def situation_from_wire(wire: api_servers_pb2.FleetState) -> Situation:
    def given(name: str) -> int | None:
        return getattr(wire, name) if wire.HasField(name) else None

    capacity = Capacity(
        given("max_model_len"),
        given("prefill_pool_tokens"),
        given("decode_pool_tokens"),
        tuple(wire.adapters) if wire.knows_adapters else None,
        given("own_pool_tokens"),
    )
    return Situation(capacity, wire.is_serving, wire.why_not_ready, frozenset(wire.ready_nodes), wire.num_live)


# Framing of messages on the byte stream between an API server and control: a length of 4 bytes, then the message. This
# costs a fraction of a gRPC message, and each step of a node takes two messages.

MAX_FRAME_BYTES: Final = 2**28
HEAD_BYTES: Final = 4


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """Return the next message, or None at the end of the stream.

    Raises ConnectionError when the stream ends within a message or the length exceeds MAX_FRAME_BYTES.
    """
    head = b""
    try:
        head = await reader.readexactly(HEAD_BYTES)
        num_bytes = int.from_bytes(head)
        if num_bytes > MAX_FRAME_BYTES:
            raise ConnectionError(f"a message of {num_bytes} bytes, the limit is {MAX_FRAME_BYTES}")
        return await reader.readexactly(num_bytes)
    except asyncio.IncompleteReadError as error:
        if not head and not error.partial:
            return None
        raise ConnectionError("a message broke off") from error


def framed(message: bytes) -> bytes:
    """Return the message with its length prefix."""
    return len(message).to_bytes(HEAD_BYTES) + message
