"""Simulate a plan under a load: nodes on hosts, links within and between them, and clients that judge their requests.

Each request that counts is judged as soon as its limits have decided, so that a simulation can end early.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from coordinator.control.load import Prompt
from coordinator.settings import CoordinatorSettings
from protos import inference_pb2
from serving_core.errors import RequestError
from serving_core.requests import SamplingParams
from serving_core.shapes import DECODE, MIXED, PREFILL
from splitserve_bench.compare.search import MOST_SEEDS
from splitserve_bench.plan.candidates import Plan
from splitserve_bench.serve.metrics import Limits, effective_size
from splitserve_bench.serve.records import PlannedRequest
from splitserve_bench.simulate.events import Agenda, ToyModel
from splitserve_bench.simulate.fleet import Fleet, Server, slo_of, start_nodes
from splitserve_bench.simulate.transfer import End, Transfers

TIMEOUT_S: Final = 600.0


@dataclass(slots=True, eq=False)
class Judged:
    """One request and its times as its client sees them. `is_good` is None until its limits have decided.

    `is_seen`: its times are known, or nearly.
    """

    index: int
    planned: PlannedRequest
    first_s: float = math.inf
    last_s: float = math.inf  # of all its tokens
    num_tokens: int = 0
    is_good: bool | None = None
    missed: str = ""
    is_seen: bool = False  # so much of it that its times are known, or nearly

    @property
    def ttft_s(self) -> float:
        """Return the seconds from sending to the first token; infinite when none has come."""
        return self.first_s - self.planned.send_at_s

    @property
    def tpot_s(self) -> float | None:
        """Return the mean seconds between tokens; None for an output of one token, infinite while some are missing."""
        if self.planned.output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.planned.output_tokens - 1) if self.last_s < math.inf else math.inf


@dataclass(slots=True)
class JudgingClients:
    """Send all planned requests, and judge the `num_counted` of them that follow the first `num_before`.

    Those before fill the fleet with work, those after keep it full. `is_over` is set when each that counts is decided
    or has `enough_tokens` tokens. It is set early, with `is_early`, when of num_counted requests in a row more than
    `most_missed` have missed a limit. These may be ones that fill the fleet: no request meets a fleet with less work
    than the first, so those that count would fare no better. `judged` are the requests that the figures are of, in the
    order of sending.
    """

    agenda: Agenda
    planned: Sequence[PlannedRequest]
    limits: Limits
    api_server_s: float
    num_before: int
    num_counted: int
    most_missed: int
    enough_tokens: float = math.inf
    is_over: bool = False
    is_early: bool = False
    judged: list[Judged] = field(default_factory=list)  # that the figures are of, in the order of sending
    _all: list[Judged] = field(default_factory=list)  # that are judged
    _missed: bytearray = field(default_factory=bytearray)  # 1 for each of them that is missed
    _num_seen: int = 0
    _live: dict[str, Judged] = field(default_factory=dict)

    def start(self, server: Server) -> None:
        """Plan the sending of each request to this coordinator, at its time."""
        num_judged = self.num_before + self.num_counted
        for index, planned in enumerate(self.planned):
            judged = Judged(index, planned)
            if index < num_judged:
                self._all.append(judged)
                self._watch(judged)
            else:
                judged.is_good = True  # whatever comes
            self._live[str(index)] = judged
            self._send(server, str(index), judged)
        self._missed, self.judged = bytearray(num_judged), self._all[self.num_before :]

    def _send(self, server: Server, request_id: str, judged: Judged) -> None:
        planned = judged.planned
        sampling = SamplingParams(max_tokens=planned.output_tokens, temperature=0.0, ignore_eos=True)
        arrives_s = planned.send_at_s + self.api_server_s / 2
        slo = slo_of(planned)

        def submit() -> None:
            deadline_s = arrives_s + TIMEOUT_S
            server.submit(request_id, Prompt(planned.prompt), sampling, deadline_s=deadline_s, slo=slo)

        self.agenda.at(arrives_s, submit)

    def _watch(self, judged: Judged) -> None:
        """Plan to count a request as missed when it has no first token by its limit."""
        if (limit_s := self.limits.ttft_s) is not None:
            self.agenda.at(
                judged.planned.send_at_s + limit_s,
                lambda: self._late(judged, "TTFT") if not judged.num_tokens else None,
            )

    # ---- what comes ----

    def arrived(self, request_id: str, token_ids: Sequence[int], moment_s: float) -> None:
        """Record tokens of an output, which left the coordinator at this moment."""
        judged = self._live[request_id]
        is_first, now = not judged.num_tokens, moment_s + self.api_server_s / 2
        judged.num_tokens += len(token_ids)
        if is_first:
            self._first(judged, now)
        if judged.num_tokens >= judged.planned.output_tokens:
            judged.last_s = now
        if judged.num_tokens >= self.enough_tokens:
            self._see(judged)

    def _first(self, judged: Judged, now: float) -> None:
        judged.first_s = now
        limits, more = self.limits, judged.planned.output_tokens - 1
        if limits.ttft_s is not None and judged.ttft_s > limits.ttft_s:
            self._late(judged, "TTFT")
        elif limits.tpot_s is not None and more and judged.is_good is None:
            last_s = now + limits.tpot_s * more
            self.agenda.at(last_s, lambda: self._late(judged, "TPOT") if judged.last_s > last_s else None)

    def ended(self, request_id: str, outcome: inference_pb2.Complete | RequestError) -> None:
        """Record the end of a request: complete, or refused or failed for a RequestError."""
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
            self._see(judged)

    def _late(self, judged: Judged, missed: str) -> None:
        if judged.is_good is not None:
            return
        judged.is_good, judged.missed = False, missed
        self._missed[judged.index] = 1
        self._see(judged)
        for first in (max(0, judged.index + 1 - self.num_counted), judged.index):
            if sum(self._missed[first : first + self.num_counted]) > self.most_missed:
                first = min(first, self.num_before)
                self.is_over = self.is_early = True
                self.judged = self._all[first : first + self.num_counted]

    def _see(self, judged: Judged) -> None:
        """Note that enough is known of a request, and end when that is so of all that count."""
        if not judged.is_seen:
            judged.is_seen = True
            self._num_seen += self.num_before <= judged.index < self.num_before + self.num_counted
            self.is_over = self.is_over or self._num_seen == self.num_counted

    def close(self) -> None:
        """Judge the requests that are still undecided, as if each went on at the pace of its tokens so far.

        Each one's next token counts as if it came now, as some of the time has passed for it already.
        """
        now, limit_s, whole_s = self.agenda.now + self.api_server_s / 2, self.limits.tpot_s, self.limits.e2el_s
        for judged in self.judged:
            if judged.last_s == math.inf and judged.num_tokens:
                gap_s = (now - judged.first_s) / judged.num_tokens
                judged.last_s = judged.first_s + gap_s * (judged.planned.output_tokens - 1)
            if limit_s is not None and (judged.tpot_s or 0.0) > limit_s:
                self._late(judged, "TPOT")
            elif whole_s is not None and judged.last_s - judged.planned.send_at_s > whole_s:
                self._late(judged, "E2EL")


MOST_IN_FLIGHT: Final = 65_536  # answers at once, as far as the coordinator goes
ENOUGH_TOKENS: Final = 64  # of an answer, which tell its pace
PERCENTILE: Final = 0.9
DIGITS: Final = 6  # of seconds
ROLES: Final = (PREFILL, DECODE, MIXED)


@dataclass(frozen=True, slots=True)
class Played:
    """What became of the requests that count, at one rate.

    When the simulation ended early (`is_early`), num_good is an upper bound. Times are infinite for requests that had
    none by the end. `missed` counts requests by the limit that they missed.
    """

    rate: float
    num_good: int
    num_counted: int
    num_effective: float
    ttfts_s: Sequence[float]
    tpots_s: Sequence[float]  # of answers of more than one token
    missed: dict[str, int]  # by limit
    is_early: bool


class LinkedTransfers(Transfers):
    """KV transfers between nodes on hosts, each as fast as the slower of its nodes sends within or between hosts."""

    def __init__(self, agenda: Agenda, plan: Plan) -> None:
        super().__init__(agenda, plan.pools[0].kind.sizes)
        self._placed = {placed.name: placed for placed in plan.placed()}

    def bytes_s(self, sender: End, receiver: End, num_bytes: int) -> float:
        """Return the seconds that so many bytes take from one node to the other."""
        ends = self._placed[sender.name], self._placed[receiver.name]
        is_near = ends[0].host == ends[1].host
        kinds = [end.kind for end in ends]
        rates = [kind.profile.kv_transfer.bytes_per_s if is_near else kind.host_bytes_per_s for kind in kinds]
        return num_bytes / min(rates)


def play(
    plan: Plan,
    planned: Sequence[PlannedRequest],
    limits: Limits,
    *,
    rate: float,
    num_before: int,
    num_counted: int,
    api_server_s: float,
    attainment: float,
) -> Played:
    """Simulate the plan under these requests until those that count are judged, and return what became of them.

    `num_before` requests come first and do not count, then `num_counted` that do. `rate` is for the result alone;
    `api_server_s` are the seconds from a client to the coordinator and back together. It ends early when so many have
    missed their limits that the share of good requests over MOST_SEEDS probes must be below `attainment`. The same
    arguments give the same result.
    """
    most_missed = round(MOST_SEEDS * (1 - attainment) * num_counted)
    clients = JudgingClients(
        Agenda(), planned, limits, api_server_s, num_before, num_counted, most_missed, ENOUGH_TOKENS
    )
    run_clients(plan, clients)
    if not clients.is_early:
        clients.close()
    return _played(clients, rate)


def run_clients(plan: Plan, clients: JudgingClients) -> None:
    """Simulate the plan until the clients are over."""
    agenda, sizes = clients.agenda, plan.pools[0].kind.sizes
    settings = CoordinatorSettings(max_num_queued_reqs=MOST_IN_FLIGHT)
    transfers = LinkedTransfers(agenda, plan)
    fleet = Fleet(agenda, clients, sizes, ToyModel(sizes.vocab_size), settings, transfers=transfers)
    placed = sorted(plan.placed(), key=lambda each: ROLES.index(each.role))
    start_nodes(fleet, [(each.name, each.role, each.kind.profile) for each in placed])
    clients.start(fleet.coordinator)
    agenda.run(lambda: clients.is_over)


def _played(clients: JudgingClients, rate: float) -> Played:
    are_good = [judged.is_good is not False for judged in clients.judged]
    tpots_s = [tpot_s for judged in clients.judged if (tpot_s := judged.tpot_s) is not None]
    return Played(
        rate=rate,
        num_good=sum(are_good),
        num_counted=len(are_good),
        num_effective=effective_size(are_good),
        ttfts_s=[round(judged.ttft_s, DIGITS) for judged in clients.judged],
        tpots_s=[round(tpot_s, DIGITS) for tpot_s in tpots_s],
        missed=dict(Counter(judged.missed for judged in clients.judged if judged.missed)),
        is_early=clients.is_early,
    )


def percentile(values: Sequence[float]) -> float:
    """Return the least value that nine in ten do not exceed: infinite when fewer are finite, 0 without values."""
    return sorted(values)[math.ceil(PERCENTILE * len(values)) - 1] if values else 0.0
