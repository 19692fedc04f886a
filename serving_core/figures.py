"""Represent metrics of a process as Prometheus metric families, and histograms. Pure."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

# From a step of a GPU to a long output of a CPU; dense where SLOs on TTFT and TPOT lie.
SECONDS: Final = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5,
    0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0,
)  # fmt: skip
TOKENS: Final = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
ANSWERS: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)  # of one request
BATCH: Final = tuple(float(2**power) for power in range(15))  # load of one step


class Histogram:
    """The number of observations in each bucket, and their sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        """Create an empty histogram.

        `bounds` ascend; an observation belongs to the first bound that is not below it, or to the bucket beyond the
        last.
        """
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last counts those beyond the last bound
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += times * value


PREFIX: Final = "splitserve_"

Labels = Mapping[str, str]
Values = Sequence[tuple[Labels, float | Histogram]]


@dataclass(frozen=True, slots=True)
class Figure:
    """One metric of any kind: its values by their labels, whose names are always the same."""

    kind: Callable[..., Any]  # a metric family class
    name: str  # without PREFIX, and without the _total of a counter
    help: str
    values: Values
    vllm: Sequence[str] = ()  # vLLM's names for the same metric, without their prefix


def counter(name: str, help: str, values: Values, *vllm: str) -> Figure:
    return Figure(CounterMetricFamily, name, help, values, vllm)


def gauge(name: str, help: str, values: Values, *vllm: str) -> Figure:
    return Figure(GaugeMetricFamily, name, help, values, vllm)


def histogram(name: str, help: str, values: Values, *vllm: str) -> Figure:
    return Figure(HistogramMetricFamily, name, help, values, vllm)


def families(figures: Iterable[Figure]) -> Iterator[Metric]:
    """Yield the metrics under their names with PREFIX."""
    for figure in figures:
        yield family(figure, PREFIX + figure.name)


def family(figure: Figure, name: str, relabel: Callable[[Labels], Labels] = lambda labels: labels) -> Metric:
    """Return the metric under this full name, as one of prometheus_client's metric families.

    `relabel` maps the labels of each value.
    """
    values = [(relabel(labels), value) for labels, value in figure.values]
    made: Any = figure.kind(name, figure.help, labels=list(values[0][0]) if values else [])
    for labels, value in values:
        if isinstance(value, Histogram):
            bounds = [*map(floatToGoString, value.bounds), "+Inf"]
            made.add_metric([*labels.values()], list(zip(bounds, accumulate(value.counts), strict=True)), value.sum)
        else:
            made.add_metric([*labels.values()], value)
    return cast("Metric", made)
