"""The clients of a plan's simulation: they send a load, and judge each request that counts as soon as its limits do."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from coordinator.control.live import TokenRow
from coordinator.control.prompts import Prompt
from protos import fleet_pb2, inference_pb2
from serving_core.errors import RequestError
from serving_core.requests import SamplingParams
from splitserve_bench.serve.metrics import Limits
from splitserve_bench.serve.records import PlannedRequest
from splitserve_bench.simulate.agenda import Agenda
from splitserve_bench.simulate.clients import Server, slo_of

TIMEOUT_S: Final = 600.0


@dataclass(slots=True, eq=False)
class Judged:
    """One request. Its times are those of its client; is_good is None until its limits have decided."""

    planned: PlannedRequest
    first_s: float = math.inf
    last_s: float = math.inf  # of all its tokens
    num_tokens: int = 0
    is_good: bool | None = None
    missed: str = ""

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.planned.send_at_s

    @property
    def tpot_s(self) -> float | None:
        """None for an answer of one token; infinite while tokens are missing."""
        if self.planned.output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.planned.output_tokens - 1) if self.last_s < math.inf else math.inf


@dataclass(slots=True)
class JudgingClients:
    """The requests from num_before on count, num_counted of them; those before fill the fleet, those after keep it
    full.

    It is over when all that count have begun to be answered and all but most_open are decided, or more than most_missed
    are missed. Who is not decided by then is judged as if it went on like that.
    """

    agenda: Agenda
    planned: Sequence[PlannedRequest]
    limits: Limits
    door_s: float
    num_before: int
    num_counted: int
    most_missed: int
    most_open: int = 0
    is_over: bool = False
    num_decided: int = 0
    num_missed: int = 0
    judged: list[Judged] = field(default_factory=list)  # that count, in the order of sending
    _live: dict[str, Judged] = field(default_factory=dict)

    def start(self, server: Server) -> None:
        """Sends everything when it is due."""
        for index, planned in enumerate(self.planned):
            judged = Judged(planned)
            if self.num_before <= index < self.num_before + self.num_counted:
                self.judged.append(judged)
                self._watch(judged)
            else:
                judged.is_good = True  # whatever comes
            self._live[str(index)] = judged
            self._send(server, str(index), judged)

    def _send(self, server: Server, request_id: str, judged: Judged) -> None:
        planned = judged.planned
        sampling = SamplingParams(max_tokens=planned.output_tokens, temperature=0.0, ignore_eos=True)
        arrives_s = planned.send_at_s + self.door_s / 2
        slo = slo_of(planned)

        def submit() -> None:
            deadline_s = arrives_s + TIMEOUT_S
            server.submit(request_id, Prompt(planned.prompt), sampling, deadline_s=deadline_s, slo=slo)

        self.agenda.at(arrives_s, submit)

    def _watch(self, judged: Judged) -> None:
        """Whoever has no first token by its limit has missed it."""
        if (limit_s := self.limits.ttft_s) is not None:
            self.agenda.at(
                judged.planned.send_at_s + limit_s,
                lambda: self._late(judged, "TTFT") if not judged.num_tokens else None,
            )

    # ---- what comes ----

    def arrived(self, request_id: str, tokens: Sequence[fleet_pb2.SampledToken], moment_s: float) -> None:
        """The next tokens of an answer left the coordinator at this moment."""
        judged = self._live[request_id]
        is_first, now = not judged.num_tokens, moment_s + self.door_s / 2
        judged.num_tokens += len(tokens)
        if is_first:
            self._first(judged, now)
        if judged.num_tokens >= judged.planned.output_tokens:
            judged.last_s = now

    def row_arrived(self, row: TokenRow, moments_s: Sequence[float]) -> None:
        """The next tokens of an answer left the coordinator, of which none is its first or its last."""
        self._live[row.attempt.request_id].num_tokens += len(moments_s)

    def _first(self, judged: Judged, now: float) -> None:
        judged.first_s = now
        self._see()
        limits, more = self.limits, judged.planned.output_tokens - 1
        if limits.ttft_s is not None and judged.ttft_s > limits.ttft_s:
            self._late(judged, "TTFT")
        elif limits.tpot_s is not None and more and judged.is_good is None:
            last_s = now + limits.tpot_s * more
            self.agenda.at(last_s, lambda: self._late(judged, "TPOT") if judged.last_s > last_s else None)

    def ended(self, request_id: str, outcome: inference_pb2.Complete | RequestError) -> None:
        """The end of an answer has left the coordinator."""
        judged = self._live.pop(request_id)
        if isinstance(outcome, RequestError):
            self._late(judged, "refused or failed")
            return
        limits, tpot_s = self.limits, judged.tpot_s
        if limits.tpot_s is not None and tpot_s is not None and tpot_s > limits.tpot_s:
            self._late(judged, "TPOT")
        elif limits.e2el_s is not None and judged.last_s - judged.planned.send_at_s > limits.e2el_s:
            self._late(judged, "E2EL")
        elif judged.is_good is None:
            judged.is_good = True
            self._decided()

    def _late(self, judged: Judged, missed: str) -> None:
        if judged.is_good is None:
            judged.is_good, judged.missed = False, missed
            self.num_missed += 1
            self._decided()

    def _decided(self) -> None:
        self.num_decided += 1
        self._see()

    def _see(self) -> None:
        """Whether it is over."""
        num_open = self.num_counted - self.num_decided
        is_known = num_open <= self.most_open and all(
            judged.num_tokens or judged.is_good is not None for judged in self.judged
        )
        self.is_over = is_known or self.num_missed > self.most_missed

    def close(self) -> None:
        """Judges the rest, by the tokens that have come; the next one of each counts as if it came now, as some of the
        time is its own."""
        now, limit_s, whole_s = self.agenda.now + self.door_s / 2, self.limits.tpot_s, self.limits.e2el_s
        for judged in self.judged:
            if judged.last_s == math.inf and judged.num_tokens:
                gap_s = (now - judged.first_s) / judged.num_tokens
                judged.last_s = judged.first_s + gap_s * (judged.planned.output_tokens - 1)
            if limit_s is not None and (judged.tpot_s or 0.0) > limit_s:
                self._late(judged, "TPOT")
            elif whole_s is not None and judged.last_s - judged.planned.send_at_s > whole_s:
                self._late(judged, "E2EL")
