"""Convert between own types and the messages of protos/api_servers.proto. Times of two machines differ: ages travel."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from coordinator.api.validation import RequestPlan, sequence_seeds
from coordinator.control.nodes import Capacity
from coordinator.control.request import NOTHING, SoFar
from coordinator.control.request_log import CallRecord
from coordinator.text.answers import TextOptions
from coordinator.traces.carrier import TRACEPARENT, TRACESTATE, Carrier
from protos import api_servers_pb2, inference_pb2
from protos.convert import pooling_from_wire, pooling_to_wire, sampling_from_wire, sampling_to_wire
from serving_core.errors import RequestError


def error_to_wire(error: RequestError) -> api_servers_pb2.CallError:
    return api_servers_pb2.CallError(reason=error.reason, message=str(error), metadata=error.metadata)


def error_from_wire(wire: api_servers_pb2.CallError) -> RequestError:
    return RequestError(wire.reason, wire.message, **wire.metadata)


def info_to_wire(record: CallRecord, carrier: Carrier, now: float) -> api_servers_pb2.CallInfo:
    return api_servers_pb2.CallInfo(
        request_id=record.request_id,
        asker=record.asker,
        operation=record.operation,
        model=record.model,
        age_s=now - record.arrived_s,
        traceparent=carrier.get(TRACEPARENT, ()),
        tracestate=carrier.get(TRACESTATE, ()),
    )


def info_from_wire(wire: api_servers_pb2.CallInfo, now: float) -> tuple[CallRecord, Carrier]:
    record = CallRecord(
        wire.request_id, wire.asker, operation=wire.operation, model=wire.model, arrived_s=now - wire.age_s
    )
    lists = {TRACEPARENT: list(wire.traceparent), TRACESTATE: list(wire.tracestate)}
    return record, {name: values for name, values in lists.items() if values}


def call_to_wire(
    call_id: str, plan: RequestPlan, asked: inference_pb2.GenerateRequest, so_fars: Sequence[SoFar]
) -> api_servers_pb2.ForwardedCall:
    """Return the call without its info and times. Text and stop strings stay at the API server."""
    sampling = plan.samplings[0]
    call = api_servers_pb2.ForwardedCall(
        id=call_id,
        grammar=sampling.grammar,
        pooling=None if plan.pooling is None else pooling_to_wire(plan.pooling),
        num_behind=plan.num_behind,
    )
    request = call.request
    request.request_id, request.model, request.cache_salt = plan.request_id, plan.adapter, plan.cache_salt
    request.slo_class, request.call_number = asked.slo_class, plan.call_number
    for name in ("ttft_ms", "tpot_ms", "priority"):
        if asked.HasField(name):
            setattr(request, name, getattr(asked, name))
    request.tokenized.input_ids.extend(plan.prompt)
    request.sampling_params.CopyFrom(sampling_to_wire(sampling))
    request.sampling_params.n = len(plan.samplings)
    for ending, each in zip(plan.endings, plan.samplings, strict=False):
        call.endings.add(token_ids=ending, logprob_token_ids=each.logprob_token_ids)
    if any(so_far is not NOTHING for so_far in so_fars):
        request.so_far.extend(map(so_far_to_wire, so_fars))
    return call


def so_far_to_wire(so_far: SoFar) -> inference_pb2.OutputSoFar:
    """Return the message of the part of an output that the client already has; the character count is left out."""
    return inference_pb2.OutputSoFar(
        token_ids=so_far.token_ids,
        finish_reason=so_far.finish_reason,
        since_first_s=so_far.since_first_s,
        has_ended=so_far.has_ended,
    )


def plan_from_wire(wire: api_servers_pb2.ForwardedCall) -> tuple[RequestPlan, list[SoFar]]:
    """Return the plan of a call that its API server has validated, and what the client already has of each output.

    Inverse of call_to_wire for the fields that the coordinator uses. A call without `so_far` has NOTHING for each
    output.
    """
    request = wire.request
    sampling = sampling_from_wire(request.sampling_params, wire.grammar)
    if wire.endings:
        samplings = [replace(sampling, logprob_token_ids=tuple(each.logprob_token_ids)) for each in wire.endings]
    else:
        samplings = [replace(sampling, seed=seed) for seed in sequence_seeds(sampling.seed, request.sampling_params.n)]
    plan = RequestPlan(
        request_id=request.request_id,
        prompt=list(request.tokenized.input_ids),
        cache_salt=request.cache_salt,
        samplings=tuple(samplings),
        text=TextOptions(),
        adapter=request.model,
        pooling=pooling_from_wire(wire.pooling) if wire.HasField("pooling") else None,
        endings=tuple(tuple(each.token_ids) for each in wire.endings),
        num_behind=wire.num_behind,
        call_number=request.call_number,
    )
    so_fars = [
        SoFar(tuple(each.token_ids), 0, each.finish_reason, each.since_first_s, each.has_ended)
        for each in request.so_far
    ]
    return plan, so_fars or [NOTHING] * len(samplings)


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
