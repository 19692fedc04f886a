"""What a role tells of itself, as families of Prometheus."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, cast

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from serving_core.histograms import Histogram

PREFIX: Final = "splitserve_"

Labels = Mapping[str, str]
Values = Sequence[tuple[Labels, float | Histogram]]


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of any kind: its values by their labels, whose names are always the same."""

    kind: Callable[..., Any]  # a class of metric families
    name: str  # without PREFIX, and without the _total of a counter
    help: str
    values: Values
    vllm: Sequence[str] = ()  # vLLM's names for the same, without their prefix


def counter(name: str, help: str, values: Values, *vllm: str) -> Figure:
    return Figure(CounterMetricFamily, name, help, values, vllm)


def gauge(name: str, help: str, values: Values, *vllm: str) -> Figure:
    return Figure(GaugeMetricFamily, name, help, values, vllm)


def histogram(name: str, help: str, values: Values, *vllm: str) -> Figure:
    return Figure(HistogramMetricFamily, name, help, values, vllm)


def families(figures: Iterable[Figure]) -> Iterator[Metric]:
    """The figures under our names."""
    for figure in figures:
        yield family(figure, PREFIX + figure.name)


def family(figure: Figure, name: str, relabel: Callable[[Labels], Labels] = lambda labels: labels) -> Metric:
    """The figure under this name, with labels made of its own."""
    values = [(relabel(labels), value) for labels, value in figure.values]
    made: Any = figure.kind(name, figure.help, labels=list(values[0][0]) if values else [])
    for labels, value in values:
        if isinstance(value, Histogram):
            bounds = [*map(floatToGoString, value.bounds), "+Inf"]
            made.add_metric([*labels.values()], list(zip(bounds, accumulate(value.counts), strict=True)), value.sum)
        else:
            made.add_metric([*labels.values()], value)
    return cast("Metric", made)
