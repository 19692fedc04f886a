"""The clients of a simulation: they send a load when it is due, and note what comes."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from coordinator.control.live import TokenRow
from coordinator.control.load import Prompt
from coordinator.control.slo import MS, Slo
from coordinator.doors.statuses import retry_after_s
from protos import fleet_pb2, inference_pb2
from serving_core.errors import RequestError
from serving_core.requests import SamplingParams
from splitserve_bench.serve.grpc_backend import REFUSALS
from splitserve_bench.serve.records import Outcome, PlannedRequest, returns_at_s
from splitserve_bench.serve.reply import Reply
from splitserve_bench.serve.timelines import KEPT, times_of
from splitserve_bench.simulate.agenda import Agenda
from splitserve_bench.simulate.noise import NO_DRAWS, Draws
from splitserve_bench.simulate.toy_model import ToyModel


class Server(Protocol):
    """Who is asked."""

    def submit(
        self, request_id: str, prompt: Prompt, sampling: SamplingParams, *, deadline_s: float, slo: Slo | None = None
    ) -> None: ...


class LoadClients:
    """Every request of a load, each with a client of its own."""

    def __init__(
        self,
        agenda: Agenda,
        planned: Sequence[PlannedRequest],
        *,
        model: ToyModel,
        door_s: float,
        max_concurrency: int | None,
        request_timeout_s: float,
        obey_retry_after: int = 0,
        noise: Draws = NO_DRAWS,
    ) -> None:
        """`door_s`: from a client to the coordinator and back, times a factor of the `noise` for each request. Every
        answer is checked. Requests are sent again after a refusal as `run_load` does."""
        self._agenda, self._planned = agenda, planned
        self._model = model
        self._half_s, self._noise = door_s / 2, noise
        self._num_free = max_concurrency or len(planned)
        self._timeout_s, self._most_repeats = request_timeout_s, obey_retry_after
        self._waiting: deque[PlannedRequest] = deque()
        self._answers: dict[str, _Answer] = {}
        self._outcomes: dict[int, list[Outcome]] = {each.index: [] for each in planned}
        self._num_left = len(planned)

    @property
    def outcomes(self) -> list[Outcome]:
        """In the order of the load, when all is over; those of the sendings of a request follow each other."""
        return [outcome for each in self._outcomes.values() for outcome in each]

    @property
    def is_over(self) -> bool:
        """Whether nothing is under way, and nothing comes back."""
        return not self._num_left

    def start(self, server: Server) -> None:
        """Sends everything when it is due."""
        self._server = server
        for planned in self._planned:
            self._agenda.at(planned.send_at_s, lambda planned=planned: self._due(planned))  # type: ignore[misc]

    def _due(self, planned: PlannedRequest) -> None:
        self._waiting.append(planned)
        self._send_waiting()

    def _send_waiting(self) -> None:
        while self._waiting and self._num_free:
            self._num_free -= 1
            self._send(self._waiting.popleft())

    def _send(self, planned: PlannedRequest) -> None:
        request_id = f"{planned.index}/{planned.num_refusals_before}"
        half_s = self._half_s * self._noise.factor(planned.index)
        self._answers[request_id] = _Answer(planned, Reply(planned, lambda: self._agenda.now), half_s)
        sampling = SamplingParams(max_tokens=planned.output_tokens, temperature=0.0, ignore_eos=True)
        prompt, deadline_s, slo = Prompt(planned.prompt), self._agenda.now + self._timeout_s, slo_of(planned)
        self._agenda.after(
            half_s,
            lambda: self._server.submit(request_id, prompt, sampling, deadline_s=deadline_s, slo=slo),
        )

    # ---- what comes ----

    def arrived(self, request_id: str, tokens: list[fleet_pb2.SampledToken], moment_s: float) -> None:
        """The next tokens of an answer left the coordinator at this moment."""
        answer = self._answers[request_id]
        for token in tokens:
            answer.token_ids.append(token.token_id)
        assert tokens[-1].index == len(answer.token_ids) - 1, "a token came twice, or out of order"
        answer.reply.arrived(moment_s + answer.half_s, len(tokens))

    def row_arrived(self, row: TokenRow, moments_s: Sequence[float]) -> None:
        """The next tokens of an answer left the coordinator one by one, at these moments."""
        answer = self._answers[row.attempt.request_id]
        assert row.first_index == len(answer.token_ids), "a token came twice, or out of order"
        answer.token_ids += row.token_ids
        for moment_s in moments_s:
            answer.reply.arrived(moment_s + answer.half_s, 1)

    def ended(self, request_id: str, outcome: inference_pb2.Complete | RequestError) -> None:
        """The end of an answer has left the coordinator."""
        self._agenda.after(self._answers[request_id].half_s, lambda: self._end(request_id, outcome))

    def _end(self, request_id: str, outcome: inference_pb2.Complete | RequestError) -> None:
        answer = self._answers.pop(request_id)
        self._model.check_answer(answer.planned.prompt, answer.token_ids)
        if isinstance(outcome, RequestError):
            is_refused = outcome.reason in REFUSALS
            wait_s = retry_after_s(outcome) if is_refused else None
            answer.reply.timeline = times_of(outcome.metadata) or None
            result = answer.reply.outcome(str(outcome), is_refused=is_refused, retry_after_s=wait_s)
        else:
            answer.reply.num_output_tokens = outcome.completion_tokens
            answer.reply.timeline = times_of({name: getattr(outcome.timeline, name) for name in KEPT})
            answer.reply.num_cached_tokens = outcome.cached_tokens
            result = answer.reply.outcome()
        self._outcomes[result.index].append(result)
        again_s = returns_at_s(result, self._most_repeats, self._timeout_s)
        if again_s is None:
            self._num_left -= 1
        else:
            num_before = result.num_refusals_before + 1
            again = replace(answer.planned, send_at_s=again_s, num_refusals_before=num_before)
            self._agenda.at(again_s, lambda: self._due(again))
        self._num_free += 1
        self._send_waiting()


@dataclass(slots=True)
class _Answer:
    """One answer under way."""

    planned: PlannedRequest
    reply: Reply
    half_s: float  # from its client to the coordinator, or back
    token_ids: list[int] = field(default_factory=list)


def slo_of(planned: PlannedRequest) -> Slo | None:
    """The limits that the server is told."""
    ttft_s, tpot_s = (each_ms and each_ms / MS for each_ms in (planned.ttft_ms, planned.tpot_ms))
    slo = Slo("", ttft_s, tpot_s)
    return slo if slo.has_limits else None
