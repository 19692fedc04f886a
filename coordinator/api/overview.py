"""Report the state of the cluster: nodes, requests in flight by phase, rates, times against SLOs, the latest requests.

Pure: the time comes in. `splitserve top` and the page at /ui both read this report. What is kept is bounded; the report
grows with the number of nodes and not with that of requests, which are counted by phase.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from coordinator.control.load import Ledger
from coordinator.control.metrics import Metrics
from coordinator.control.nodes import Node, Registry
from coordinator.control.request import Phase
from coordinator.control.request_log import WINDOW_S, Times, history_of
from coordinator.control.scheduler import Scheduler
from coordinator.control.slo import UNNAMED
from protos import inference_pb2

SAMPLE_S: Final = 1.0
MAX_SAMPLES: Final = 121  # two minutes
RATE_SAMPLES: Final = 6  # samples that rates are computed over
MAX_IN_FLIGHT: Final = 20  # requests in flight whose history is reported
NO_NODE: Final = "no_node"  # stands for the phase of requests that wait for nodes
PHASES: Final = (*Phase, None)


class Sample(NamedTuple):
    """Cumulative counts at one time."""

    at_s: float
    num_tokens: int
    num_prompt_tokens: int
    num_ended: int = 0


class Overview:
    """Build the report from the registry, ledger, scheduler and metrics, and keep samples of the last minutes."""

    def __init__(
        self,
        registry: Registry,
        ledger: Ledger,
        scheduler: Scheduler,
        metrics: Metrics,
        *,
        model_name: str,
        start_s: float,
        limits: Mapping[str, str],
    ) -> None:
        """Create the report over the coordinator's state, which it reads and never changes.

        `start_s` is the time at which the coordinator started, on the clock of `now` elsewhere. `limits` has the limits
        of each SLO class by name, as configured.
        """
        self._registry = registry
        self._ledger = ledger
        self._scheduler = scheduler
        self._metrics = metrics
        self._model_name = model_name
        self._start_s = start_s
        self._limits = limits
        self._samples: deque[Sample] = deque([self._sample(start_s)], maxlen=MAX_SAMPLES)
        self._node_samples: dict[Node, deque[Sample]] = {}

    def tick(self, now: float) -> None:
        """Sample the counts, if SAMPLE_S has passed since the last sample; rates are computed from the samples.

        Call it at least once each SAMPLE_S.
        """
        if now - self._samples[-1].at_s < SAMPLE_S:
            return
        self._samples.append(self._sample(now))
        before = self._node_samples
        self._node_samples = {node: before.get(node, deque(maxlen=RATE_SAMPLES)) for node in self._registry.nodes}
        for node, samples in self._node_samples.items():
            samples.append(_sample_of(node, now))

    def to_wire(self, now: float, *, after: int | None = None) -> inference_pb2.Overview:
        """Return the report at the time `now`, in seconds; without `after` the report has no history of requests.

        With `after`, the report has the history of the newest MAX_IN_FLIGHT requests in flight, and of the ended
        requests whose SequenceHistory.number is above `after`, as far as the coordinator has kept them; 0: all that are
        kept.
        """
        scheduler, times = self._scheduler, self._scheduler.history.times(now)
        first = self._samples[max(0, len(self._samples) - RATE_SAMPLES)]
        latest = self._sample(now)
        phases = scheduler.phases()
        return inference_pb2.Overview(
            now_s=now,
            uptime_s=now - self._start_s,
            served_model_name=self._model_name,
            nodes=[self._node(node, now) for node in self._registry.nodes],
            phases=[
                inference_pb2.PhaseCount(phase=phase.value if phase else NO_NODE, num_sequences=phases[phase])
                for phase in PHASES
            ],
            rates=inference_pb2.Rates(
                tokens_per_s=_rate(first, latest, latest.num_tokens - first.num_tokens),
                prompt_tokens_per_s=_rate(first, latest, latest.num_prompt_tokens - first.num_prompt_tokens),
                requests_per_s=_rate(first, latest, latest.num_ended - first.num_ended),
            ),
            recent_tokens_per_s=[_rate(a, b, b.num_tokens - a.num_tokens) for a, b in pairwise(self._samples)],
            window_s=WINDOW_S,
            times=self._times(times),
            live=[] if after is None else [history_of(each, now) for each in reversed(scheduler.newest(MAX_IN_FLIGHT))],
            ended=[] if after is None else scheduler.history.after(after),
        )

    def _sample(self, now: float) -> Sample:
        metrics = self._metrics
        num_ended = metrics.finished.total() + metrics.failed.total()
        return Sample(now, metrics.num_generated_tokens, metrics.num_prompt_tokens, num_ended)

    def _node(self, node: Node, now: float) -> inference_pb2.NodeOverview:
        account, latest = self._ledger.of(node), _sample_of(node, now)
        first = self._node_samples.get(node, [latest])[0]
        return inference_pb2.NodeOverview(
            load=self._scheduler.load_of(node),
            num_tokens_to_compute=account.tokens_to_compute,
            num_sequences=account.num_sequences,
            num_incoming=account.num_arriving,
            num_tokens_used=self._ledger.tokens_taken(node),
            num_pool_tokens=node.pool_tokens,
            prompt_tokens_per_s=_rate(first, latest, latest.num_prompt_tokens - first.num_prompt_tokens),
            tokens_per_s=_rate(first, latest, latest.num_tokens - first.num_tokens),
        )

    def _times(self, times: Sequence[Times]) -> Iterator[inference_pb2.TimesOverview]:
        if not times:
            return
        yield _times_overview("", "", times)
        for slo_class in (*self._limits, UNNAMED):
            if of_class := [each for each in times if each.slo_class == slo_class]:
                yield _times_overview(slo_class, self._limits.get(slo_class, ""), of_class)


def _sample_of(node: Node, now: float) -> Sample:
    return Sample(now, node.num_generated_tokens, node.load.num_prefill_tokens)


def _rate(first: Sample, latest: Sample, number: int) -> float:
    seconds = latest.at_s - first.at_s
    return max(0, number) / seconds if seconds > 0 else 0.0


def _times_overview(slo_class: str, limits: str, times: Sequence[Times]) -> inference_pb2.TimesOverview:
    return inference_pb2.TimesOverview(
        slo_class=slo_class,
        limits=limits,
        num_sequences=len(times),
        num_limited=sum(each.is_met is not None for each in times),
        num_met=sum(each.is_met is True for each in times),
        ttft_s=_percentiles([each.ttft_s for each in times if each.ttft_s is not None]),
        tpot_s=_percentiles([each.tpot_s for each in times if each.tpot_s is not None]),
    )


def _percentiles(seconds: Sequence[float]) -> inference_pb2.Percentiles | None:
    """Return percentiles by nearest rank: each is one of the values. None without values."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    p50, p90, p99 = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.9, 0.99))
    return inference_pb2.Percentiles(p50=p50, p90=p90, p99=p99)
