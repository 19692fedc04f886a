"""A client of the simulated coordinator: the real course of a request over as many calls as it takes."""

import asyncio
from dataclasses import dataclass

import grpc
from grpc.aio import AioRpcError, Metadata

from coordinator.api.preprocess import read_so_far
from coordinator.api.statuses import to_status
from coordinator.api.validation import Limits, RequestPlan
from coordinator.control.instructions import FINISH_REASONS
from coordinator.control.request import SoFar
from coordinator.control.slo import Slo
from coordinator.text.answers import AnswerText, TextOptions
from protos import inference_pb2
from protos.convert import MAX_TOKENS_HEADER, MODEL_HEADER
from serving_core.requests import SamplingParams
from splitserve.client.errors import ClientError, from_rpc_error
from splitserve.client.resuming import Course
from tests.schedules.history import Asked, Ended, Told
from tests.schedules.model import VOCAB_SIZE

GONE = "UNAVAILABLE"  # what a client hears whose coordinator is gone
LONGEST = 10_000  # tokens of prompt and answer, of which nodes have less
LIMITS = Limits((), VOCAB_SIZE, LONGEST, 0, LONGEST, LONGEST)


class _Wordless:
    """In place of a detokenizer: the tokens are all there is."""

    def add(self, token_id):
        return ""

    def flush(self):
        return ""


@dataclass(eq=False)
class Call:
    """One call of a client; what comes of one that has broken off nobody hears."""

    task: "asyncio.Task[None] | None" = None  # at the coordinator, once it has come there
    is_taken: bool = False  # by the coordinator


class Client:
    """One request, and who waits for it."""

    def __init__(self, asked: Asked, slo: Slo, record, *, resumes):
        request = inference_pb2.GenerateRequest(request_id=asked.request, cache_salt=asked.salt)
        request.tokenized.input_ids.extend(asked.prompt)
        params = request.sampling_params
        params.max_tokens, params.temperature, params.ignore_eos = asked.max_tokens, 0.0, True
        self.asked, self.slo = asked, slo
        self.call = None
        self.listens = True  # to what comes; once it has heard the end, or has left, no more
        self._record = record
        self._course = Course(request, ends_s=asked.deadline_s, resumes=resumes)

    def left_s(self, now):
        return self._course.left_s(now)

    def plan(self, now):
        """The request as the API servers have it, and what its answer goes on with."""
        asked = self.asked
        sampling = SamplingParams(max_tokens=asked.max_tokens, temperature=0.0, ignore_eos=True)
        question = self._course.question(now)
        words = asked.request, list(asked.prompt), asked.salt, (sampling,), TextOptions()
        plan = RequestPlan(*words, call_number=question.call_number)
        (so_far,) = read_so_far(question, plan, LIMITS, ())
        return plan, so_far, _text_after(so_far, plan)

    def take(self, response, now):
        """Something of the answer has come."""
        self._course.take(response, now)
        if response.HasField("complete"):
            complete = response.complete
            self._end(now, FINISH_REASONS[complete.finish_reason], complete.completion_tokens)
        elif response.chunk.token_ids:
            token_ids = tuple(response.chunk.token_ids)
            self._record(Told(now, self.asked.request, response.chunk.first_token_index, token_ids))

    def fails(self, error, now):
        """The call has. How long to wait before the next one; None where that was the end."""
        is_taken, self.call = self.call is not None and self.call.is_taken, None
        terms = ((MODEL_HEADER, b"bytes"), (MAX_TOKENS_HEADER, str(self.asked.max_tokens))) if is_taken else ()
        heard = _as_heard(error, terms)
        try:
            return self._course.pause_after(heard, now)
        except ClientError:
            self._end(now, heard.reason or GONE)
            return None

    def _end(self, now, how, num_tokens=None):
        self.listens = False
        self._record(Ended(now, self.asked.request, how, num_tokens))


def _text_after(so_far: SoFar, plan):
    text = AnswerText(_Wordless(), plan.text)
    if so_far.token_ids and not so_far.has_ended:
        text.resume(so_far)
    return text


def _as_heard(error, terms):
    """As gRPC hands it over, and the client reads it, of a call with these headers. None: its connection is lost."""
    if error is None:
        call = AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(*terms), Metadata())
    else:
        status = to_status(error)
        call = AioRpcError(status.code, Metadata(*terms), Metadata(*status.trailing_metadata), status.details)
    heard = from_rpc_error(call, "coordinator")
    heard.__cause__ = call
    return heard
