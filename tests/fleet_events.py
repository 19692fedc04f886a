"""Events as nodes send them, for tests of the coordinator."""

from protos import fleet_pb2, inference_pb2
from protos.convert import PROTOCOL_VERSION

STOP, LENGTH = inference_pb2.FINISH_REASON_STOP, inference_pb2.FINISH_REASON_LENGTH

MODEL = {"architecture": "FakeForCausalLM", "vocab_size": "260"}


def hello(name, role, *, incarnation="1", num_blocks=100, max_model_len=1000, **fingerprint):
    info = inference_pb2.NodeInfo(
        name=name,
        role=role,
        incarnation=incarnation,
        fingerprint={"protocol_version": PROTOCOL_VERSION, **MODEL, **fingerprint},
    )
    return fleet_pb2.NodeEvent(
        hello=fleet_pb2.Hello(node=info, num_blocks=num_blocks, block_size=16, max_model_len=max_model_len)
    )


def heartbeat(state="ready", step_age_s=0.0):
    load = inference_pb2.NodeLoad(state=state)
    return fleet_pb2.NodeEvent(heartbeat=fleet_pb2.Heartbeat(load=load, step_age_s=step_age_s))


def sampled(attempt, index, token_id, finish_reason=0, **logprobs):
    return fleet_pb2.SampledToken(
        attempt=attempt, index=index, token_id=token_id, finish_reason=finish_reason, **logprobs
    )


def first_token(token, prefill_s=0.0):
    event = fleet_pb2.FirstToken(attempt=token.attempt, token=token, prefill_s=prefill_s)
    return fleet_pb2.NodeEvent(first_token=event)


def step_tokens(*tokens, step_s=0.0):
    return fleet_pb2.NodeEvent(step_tokens=fleet_pb2.StepTokens(tokens=tokens, step_s=step_s))


def reserved(attempt, ticket=b"ticket"):
    return fleet_pb2.NodeEvent(reserved=fleet_pb2.Reserved(attempt=attempt, ticket=ticket))


def committed(attempt):
    return fleet_pb2.NodeEvent(committed=fleet_pb2.Committed(attempt=attempt))


def transferred(attempt):
    return fleet_pb2.NodeEvent(transferred=fleet_pb2.Transferred(attempt=attempt))


def failed(attempt, reason, message="what happened"):
    return fleet_pb2.NodeEvent(failed=fleet_pb2.Failed(attempt=attempt, reason=reason, message=message))


def cancelled(attempt):
    return fleet_pb2.NodeEvent(cancelled=fleet_pb2.Cancelled(attempt=attempt))
