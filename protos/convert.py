"""Between wire messages and the engine's own types."""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Final

from google.protobuf.message import DecodeError

from protos import fleet_pb2, inference_pb2
from serving_core.node.prefix import NUMERICS_ID_BYTES
from serving_core.requests import FinishReason, Pooling, Request, SampledToken, SamplingParams
from serving_core.shapes import Shape
from serving_core.slo import Due

PROTOCOL_VERSION = "24"
# In the headers of an answer's stream, which come when the request is taken.
MODEL_HEADER: Final = "x-splitserve-model-bin"
MAX_TOKENS_HEADER: Final = "x-splitserve-max-tokens"
MAX_NUMERICS_RUNS: Final = 64  # runs of blocks of one numerics id that a tail tells: of a chat, some 32 answers

FINISH_REASONS: Final = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}


def sampling_to_wire(sampling: SamplingParams) -> inference_pb2.SamplingParams:
    """Return the message of the sampling parameters with every field set, so that a node needs no defaults."""
    return inference_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
        logprob_token_ids=sampling.logprob_token_ids,
        prompt_logprobs=sampling.prompt_logprobs,
        seed=sampling.seed,
        logit_bias=dict(sampling.logit_bias),
        allowed_token_ids=sampling.allowed_token_ids,
        bad_tokens=[inference_pb2.TokenizedInput(input_ids=run) for run in sampling.bad_tokens],
    )


def sampling_from_wire(wire: inference_pb2.SamplingParams, grammar: str = "") -> SamplingParams:
    """Return the sampling parameters of a message of the coordinator; the inverse of sampling_to_wire. Messages of
    clients are not accepted."""
    return SamplingParams(
        temperature=wire.temperature,
        top_p=wire.top_p,
        top_k=wire.top_k,
        min_p=wire.min_p,
        frequency_penalty=wire.frequency_penalty,
        presence_penalty=wire.presence_penalty,
        repetition_penalty=wire.repetition_penalty,
        max_tokens=wire.max_tokens,
        min_tokens=wire.min_tokens,
        stop_token_ids=tuple(wire.stop_token_ids),
        ignore_eos=wire.ignore_eos,
        logprobs=wire.logprobs if wire.HasField("logprobs") else None,
        logprob_token_ids=tuple(wire.logprob_token_ids),
        prompt_logprobs=wire.prompt_logprobs if wire.HasField("prompt_logprobs") else None,
        seed=wire.seed,
        logit_bias=tuple(sorted(wire.logit_bias.items())),
        allowed_token_ids=tuple(wire.allowed_token_ids),
        bad_tokens=tuple(tuple(run.input_ids) for run in wire.bad_tokens),
        grammar=grammar,
    )


def job_to_wire(
    request: Request,
    age: int = 0,
    due: fleet_pb2.Due | None = None,
    priority: int = 0,
    *,
    is_suspect: bool = False,
    asker: str = "",
) -> fleet_pb2.Job:
    """Return the message that describes an attempt to both of its nodes."""
    return fleet_pb2.Job(
        attempt=attempt_of(request),
        token_ids=request.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        sampling_params=sampling_to_wire(request.sampling),
        cache_salt=request.cache_salt,
        age=age,
        due=due,
        priority=priority,
        adapter=request.adapter,
        grammar=request.sampling.grammar,
        is_suspect=is_suspect,
        asker=asker,
        pooling=None if request.pooling is None else pooling_to_wire(request.pooling),
    )


def request_from_wire(job: fleet_pb2.Job) -> Request:
    """Return the request that a job describes; the inverse of job_to_wire."""
    return Request(
        request_id=job.attempt.request_id,
        epoch=job.attempt.epoch,
        token_ids=list(job.token_ids),
        num_prompt_tokens=job.num_prompt_tokens,
        sampling=sampling_from_wire(job.sampling_params, job.grammar),
        cache_salt=job.cache_salt,
        adapter=job.adapter,
        pooling=pooling_from_wire(job.pooling) if job.HasField("pooling") else None,
    )


def pooling_to_wire(pooling: Pooling) -> fleet_pb2.Pooling:
    return fleet_pb2.Pooling(kind=pooling.kind, normalizes=pooling.normalizes, num_dimensions=pooling.num_dimensions)


def pooling_from_wire(wire: fleet_pb2.Pooling) -> Pooling:
    """Return the pooling of a message; the inverse of pooling_to_wire."""
    return Pooling(wire.kind, wire.normalizes, wire.num_dimensions)


def due_to_wire(due: Due, now: float) -> fleet_pb2.Due:
    """Return the message with the times left at `now` until the deadlines."""
    return fleet_pb2.Due(
        ttft_left_s=due.first_s - now if due.began_s is None and math.isfinite(due.first_s) else None,
        tpot_s=due.tpot_s if math.isfinite(due.tpot_s) else None,
        since_first_s=None if due.began_s is None else now - due.began_s,
        refuses_late=due.refuses_late,
    )


def due_from_wire(wire: fleet_pb2.Due, now: float) -> Due:
    """Return the deadlines of a message by this machine's clock; the inverse of due_to_wire. They are later than the
    sender's by the time that the message took, and never earlier."""
    return Due(
        now + wire.ttft_left_s if wire.HasField("ttft_left_s") else math.inf,
        wire.tpot_s if wire.HasField("tpot_s") else math.inf,
        now - wire.since_first_s if wire.HasField("since_first_s") else None,
        wire.refuses_late,
    )


def attempt_of(request: Request) -> fleet_pb2.Attempt:
    return fleet_pb2.Attempt(request_id=request.request_id, epoch=request.epoch)


def add_token(
    wire: fleet_pb2.StepTokens, request: Request, token: SampledToken, finish_reason: FinishReason | None
) -> None:
    """Add the token that was just appended to the request."""
    if finish_reason is None and token.logprob is None:
        wire.epochs.append(request.epoch)
        wire.indexes.append(len(request.token_ids) - request.num_prompt_tokens - 1)
        wire.token_ids.append(token.token_id)
    else:
        fill_token(wire.tokens.add(), request, token, finish_reason)


def fill_token(
    wire: fleet_pb2.SampledToken, request: Request, token: SampledToken, finish_reason: FinishReason | None
) -> None:
    """Fill in the message of the token that was just appended to the request. Fields are set one by one, since each
    sequence of each step has such a message."""
    attempt = wire.attempt
    attempt.request_id, attempt.epoch = request.request_id, request.epoch
    wire.index = len(request.token_ids) - request.num_prompt_tokens - 1
    wire.token_id = token.token_id
    if finish_reason is not None:
        wire.finish_reason = FINISH_REASONS[finish_reason]
    if token.logprob is not None:
        wire.logprob = token.logprob
    for token_id, logprob in token.top_logprobs:
        wire.top.add(token_id=token_id, logprob=logprob)


def fill_prompt_logprobs(wire: fleet_pb2.SampledToken, scores: Sequence[SampledToken]) -> None:
    """Add the logprobs of prompt tokens to the message of the first output token."""
    for score in scores:
        top = [inference_pb2.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in score.top_logprobs]
        wire.prompt_logprobs.add(token_id=score.token_id, logprob=score.logprob, top=top)


def shape_to_wire(shape: Shape) -> inference_pb2.Shape:
    return inference_pb2.Shape(
        prompt_tokens=shape.prompt_tokens, slots=shape.slots, accepts_transfers=shape.accepts_transfers
    )


def shape_from_wire(wire: inference_pb2.Shape) -> Shape:
    """Return the shape of a message; the inverse of shape_to_wire. Does not check whether a node supports the shape."""
    return Shape(wire.prompt_tokens, wire.slots, wire.accepts_transfers)


def to_tail(token_ids: Sequence[int], numerics_ids: Sequence[bytes]) -> bytes:
    """Return the end of a KV transfer: tokens, and the numerics ids of all blocks, left out if they have more than
    MAX_NUMERICS_RUNS runs."""
    runs = [
        fleet_pb2.NumericsRun(numerics_id=numerics_id, num_blocks=len(list(blocks)))
        for numerics_id, blocks in groupby(numerics_ids)
    ]
    return fleet_pb2.Tail(
        token_ids=token_ids, numerics=runs if len(runs) <= MAX_NUMERICS_RUNS else []
    ).SerializeToString()


def from_tail(packed: bytes) -> tuple[list[int], list[tuple[bytes, int]]]:
    """Return the tokens of a tail, and its runs of blocks: each numerics id with its number of consecutive blocks. The
    inverse of to_tail. Raises ValueError for anything else."""
    tail = fleet_pb2.Tail()
    try:
        tail.ParseFromString(packed)
    except DecodeError as error:
        raise ValueError(f"a tail of {len(packed)} bytes cannot be read") from error
    if any(len(each.numerics_id) != NUMERICS_ID_BYTES for each in tail.numerics):
        raise ValueError(f"a tail names a numerics id that is not of {NUMERICS_ID_BYTES} bytes")
    return list(tail.token_ids), [(each.numerics_id, each.num_blocks) for each in tail.numerics]
