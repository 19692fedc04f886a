"""Resume the outputs of a request over several calls.

The server keeps nothing of a broken call, so the next call sends what has come. Reads no clock; callers pass the time.
"""

import secrets
from dataclasses import dataclass, field, replace
from typing import Final

import grpc

from protos import inference_pb2
from protos.convert import MAX_TOKENS_HEADER, MODEL_HEADER
from serving_core import reasons
from splitserve.client.answers import Chunk, to_chunk
from splitserve.client.errors import ClientError, ServerFault, Unavailable

MAX_TRIES: Final = 10  # consecutive calls without a message
FIRST_PAUSE_S: Final = 0.2  # before the first retry; each pause is twice the previous
LONGEST_PAUSE_S: Final = 5.0  # with these values, a server may be down for about 30 s

# Reasons of a broken call; "" is a transport error. Lost nodes are not among them: the server has tried others.
_BREAKS: Final = ("", reasons.DRAINING)
# Reasons that may pass when a call resumes: gRPC has sent it twice, and the server takes the first for live (the next
# call replaces it); nodes, or nodes with enough room, are not back yet; or the queue is full.
_PASSING: Final = (
    *(reasons.DUPLICATE_REQUEST_ID, reasons.QUEUE_FULL),
    *(reasons.NO_PREFILL_WORKER, reasons.NO_DECODE_WORKER, reasons.PROMPT_TOO_LONG),
)


@dataclass(slots=True)
class _Progress:
    """Received part of one output."""

    token_ids: list[int] = field(default_factory=list)
    num_chars: int = 0
    first_s: float = 0.0
    has_ended: bool = False

    def to_wire(self, now: float) -> inference_pb2.OutputSoFar:
        if self.has_ended:
            return inference_pb2.OutputSoFar(has_ended=True)
        since_first_s = now - self.first_s if self.token_ids else 0.0
        return inference_pb2.OutputSoFar(
            token_ids=self.token_ids, num_chars=self.num_chars, since_first_s=since_first_s
        )


class Course:
    """Follow one request over all its calls, to the end of its outputs."""

    def __init__(self, request: inference_pb2.GenerateRequest, *, ends_s: float, resumes: bool) -> None:
        """Start the course of a request, which may make calls until `ends_s`, by the clock of `now` elsewhere.

        With `resumes`, a missing request id and seed are drawn and set in `request`: the server's own would be lost
        with it.
        """
        self._request = request
        self._ends_s = ends_s
        self._resumes = resumes
        params = request.sampling_params
        self._is_id_ours = resumes and not request.request_id  # the id is random, so no other client has it
        if resumes:
            request.request_id = request.request_id or secrets.token_hex(16)
            if not params.HasField("seed") and not (params.HasField("temperature") and params.temperature == 0):
                params.seed = secrets.randbits(63)
        self._num_sequences = max(1, params.n)
        self._answers: dict[int, _Progress] = {}  # outputs of which something has come
        self._was_taken = self._knows_terms = False  # whether a server has taken a call; whether its defaults are known
        self._num_calls = self._num_tries = 0  # in total; without a message in between
        self._num_resumes = 0
        self._is_going_on = False  # the call resumes, and no message has come yet

    def left_s(self, now: float) -> float:
        """Return the seconds that are left at `now` until the deadline."""
        return self._ends_s - now

    def question(self, now: float) -> inference_pb2.GenerateRequest:
        """Return the request of the next call: with the outputs so far, if anything has come."""
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(self._request)
        request.call_number = self._num_calls
        if self._answers:
            so_far = (self._answers.get(index, _Progress()) for index in range(self._num_sequences))
            request.so_far.extend(each.to_wire(now) for each in so_far)
        return request

    def take(self, response: inference_pb2.GenerateResponse, now: float) -> Chunk:
        """Record a message of a call, and return its chunk.

        Raises Unavailable when a message before it was lost, which a later call can repair, and ServerFault when a
        resumed call does not continue at the expected token.
        """
        chunk = to_chunk(response)
        self._was_taken, self._num_tries = True, 0
        self._num_resumes += self._is_going_on
        answer = self._answers.setdefault(chunk.index, _Progress())
        if chunk.token_ids and chunk.first_token_index != len(answer.token_ids):
            message = f"the server goes on at token {chunk.first_token_index} instead of {len(answer.token_ids)}"
            if self._is_going_on:
                raise ServerFault(f"{message}: is it of an older version?", code=grpc.StatusCode.INTERNAL)
            raise Unavailable(f"{message}: a message was lost on the way", code=grpc.StatusCode.UNAVAILABLE)
        self._is_going_on = False
        if chunk.token_ids and not answer.token_ids:
            answer.first_s = now
        answer.token_ids += chunk.token_ids
        answer.num_chars += len(chunk.text)
        answer.has_ended = chunk.completion is not None
        if chunk.completion is None or not self._num_resumes:
            return chunk
        return replace(chunk, completion=replace(chunk.completion, num_resumes=self._num_resumes))

    def check_end(self) -> None:
        """Raise Unavailable if a call has ended although an output has not: its end was lost."""
        if self._num_ended < self._num_sequences:
            message = "the stream ended before the answer: a message was lost on the way"
            raise Unavailable(message, code=grpc.StatusCode.UNAVAILABLE)

    @property
    def _num_ended(self) -> int:
        return sum(answer.has_ended for answer in self._answers.values())

    def pause_after(self, error: ClientError, now: float) -> float | None:
        """Return the seconds to wait before the next call after this error; None when every output has ended.

        Raises the error when there must be no other call.
        """
        if not self._resumes:
            raise error
        if self._num_ended == self._num_sequences:
            return None
        self._note_terms(error)
        is_break = isinstance(error, Unavailable) and error.reason in _BREAKS
        is_ours = self._is_id_ours and error.reason == reasons.DUPLICATE_REQUEST_ID
        is_passing = is_ours or (self._is_going_on and error.reason in _PASSING)
        pause_s = max(min(FIRST_PAUSE_S * 2.0**self._num_tries, LONGEST_PAUSE_S), error.retry_after_s or 0.0)
        is_last = self._num_tries == MAX_TRIES or pause_s >= self.left_s(now)
        self._was_taken |= is_ours
        if is_last or not (self._was_taken and (is_break or is_passing)):
            raise error
        self._num_calls += 1
        self._num_tries += 1
        self._is_going_on = True
        return pause_s

    def _note_terms(self, error: ClientError) -> None:
        """Keep the model and max_tokens that the first server has applied, since another server may have other
        defaults."""
        call = error.__cause__
        headers = dict(call.initial_metadata() or ()) if isinstance(call, grpc.RpcError) else {}  # type: ignore[attr-defined]
        if MODEL_HEADER in headers and not self._knows_terms:
            self._was_taken = self._knows_terms = True
            self._request.model = headers[MODEL_HEADER].decode()
            self._request.sampling_params.max_tokens = int(headers[MAX_TOKENS_HEADER])
