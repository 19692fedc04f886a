"""Answers that go on where an earlier call of their client broke off: what may be asked of them. Nothing is kept of
an earlier call, which another run of the server may have had: its client tells what it has."""

from collections.abc import Sequence
from typing import Final

from coordinator.control.request import NOTHING, SoFar
from coordinator.doors.validation import AnswerPlan, Limits, bad, check_count, check_prompt_length, check_token_ids
from protos import inference_pb2
from protos.convert import FINISH_REASONS
from serving_core.requests import Request, SamplingParams, finish_reason

MAX_SINCE_FIRST_S: Final = 86_400.0


def check_counts(request: inference_pb2.GenerateRequest, limits: Limits) -> None:
    """Checks what can be told before the prompt is tokenized. Raises RequestError."""
    for each in request.so_far:
        check_count("so_far.token_ids", len(each.token_ids), limits.max_model_len)


def read_so_far(
    request: inference_pb2.GenerateRequest, plan: AnswerPlan, limits: Limits, eos_token_ids: Sequence[int]
) -> tuple[SoFar, ...]:
    """What the client has of each answer of the plan. Raises RequestError."""
    if not request.so_far:
        return (NOTHING,) * len(plan.samplings)
    if len(request.so_far) != len(plan.samplings):
        raise bad("so_far", f"must have one entry for each of n ({len(plan.samplings)}), not {len(request.so_far)}")
    if plan.samplings[0].temperature and not request.sampling_params.HasField("seed"):
        raise bad("seed", "is missing: an answer goes on with the seed that it began with")
    found = []
    for each, sampling in zip(request.so_far, plan.samplings, strict=True):
        _check(each, sampling, limits)
        ending = _finish_reason(plan.prompt, each.token_ids, sampling, eos_token_ids)
        if not each.has_ended and not ending:
            check_prompt_length(len(plan.prompt) + len(each.token_ids), limits)
        found.append(SoFar(tuple(each.token_ids), each.num_chars, ending, each.since_first_s, each.has_ended))
    return tuple(found)


def _check(each: inference_pb2.AnswerSoFar, sampling: SamplingParams, limits: Limits) -> None:
    if len(each.token_ids) > sampling.max_tokens:
        problem = f"has {len(each.token_ids)} tokens of an answer, over max_tokens ({sampling.max_tokens})"
        raise bad("so_far", problem)
    check_token_ids("so_far", each.token_ids, limits)
    if not 0 <= each.since_first_s <= MAX_SINCE_FIRST_S:  # NaN is not
        problem = f"has since_first_s of {each.since_first_s:g}, which must be within [0, {MAX_SINCE_FIRST_S:g}]"
        raise bad("so_far", problem)


def _finish_reason(
    prompt: Sequence[int], token_ids: Sequence[int], sampling: SamplingParams, eos_token_ids: Sequence[int]
) -> inference_pb2.FinishReason:
    """How the last token ends the answer, as a node would say."""
    if not token_ids:
        return inference_pb2.FINISH_REASON_UNSPECIFIED
    so_far = Request("", 0, [*prompt, *token_ids], len(prompt), sampling)
    reason = finish_reason(so_far, eos_token_ids)
    return FINISH_REASONS[reason] if reason is not None else inference_pb2.FINISH_REASON_UNSPECIFIED
