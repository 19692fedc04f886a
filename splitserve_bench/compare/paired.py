"""The same requests at two contenders: what the one keeps and the other does not. Pure.

What a stretch of a load demands it demands of everybody, so shares of the same requests go up and down together, and
their difference is known better than either. Requests of one run are not independent: the differences, request by
request in the order of sending, count as fewer independent ones, as spread.py says.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, Final, TypeAlias

from splitserve_bench.compare.search import Probe
from splitserve_bench.compare.verdict import plain
from splitserve_bench.serve.spread import effective_size, paired_interval

POINTS: Final = 100

Kept: TypeAlias = Mapping[Probe, Sequence[bool]]  # which requests of a probe were good


@dataclass(frozen=True, slots=True)
class Paired:
    """Two contenders at one rate, over the requests that both have had. num_effective independent pairs would say as
    much."""

    one: str
    other: str
    rate: float
    num_total: int
    num_one_alone: int  # good with `one` and not with `other`
    num_other_alone: int
    num_effective: float

    @property
    def difference(self) -> float:
        """Of the shares of good requests."""
        return (self.num_one_alone - self.num_other_alone) / self.num_total

    @property
    def interval(self) -> tuple[float, float]:
        """Of the difference, at 95 %."""
        return paired_interval(
            self.num_one_alone / self.num_total, self.num_other_alone / self.num_total, self.num_effective
        )

    @property
    def reversed(self) -> "Paired":
        """The same, seen from the other one."""
        return Paired(
            self.other,
            self.one,
            self.rate,
            self.num_total,
            self.num_other_alone,
            self.num_one_alone,
            self.num_effective,
        )

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "difference": self.difference, "interval": list(self.interval)}


def pairs_of(everybody: Mapping[str, Kept]) -> list[Paired]:
    """Every two contenders at every rate at which they have had the same probes, ascending by rate."""
    pairs = [
        _paired(one, other, rate, everybody)
        for one, other in combinations(everybody, 2)
        for rate in {probe.rate for probe in everybody[one].keys() & everybody[other].keys()}
    ]
    return sorted(pairs, key=lambda pair: pair.rate)


def paired_sentences(pairs: Sequence[Paired]) -> Iterator[str]:
    """For each rate the best contender beside each other one."""
    for rate in dict.fromkeys(pair.rate for pair in pairs):
        here = [pair for pair in pairs if pair.rate == rate]
        names = dict.fromkeys(name for pair in here for name in (pair.one, pair.other))
        best = max(names, key=lambda name: sum(_seen_from(name, pair) for pair in here))
        seen = [pair if pair.one == best else pair.reversed for pair in here if best in (pair.one, pair.other)]
        parts = ", ".join(_against(pair) for pair in sorted(seen, key=lambda pair: pair.difference))
        sizes = sorted({pair.num_total for pair in seen})
        count = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        yield f"At {plain(rate)} req/s, of the same {count} requests, {best} keeps {parts}."


def _paired(one: str, other: str, rate: float, everybody: Mapping[str, Kept]) -> Paired:
    probes = sorted(
        (probe for probe in everybody[one].keys() & everybody[other].keys() if probe.rate == rate),
        key=lambda probe: probe.seed,
    )
    series = [
        [first - second for first, second in zip(everybody[one][probe], everybody[other][probe], strict=True)]
        for probe in probes
    ]
    return Paired(
        one=one,
        other=other,
        rate=rate,
        num_total=sum(map(len, series)),
        num_one_alone=sum(each.count(1) for each in series),
        num_other_alone=sum(each.count(-1) for each in series),
        num_effective=sum(map(effective_size, series)),
    )


def _seen_from(name: str, pair: Paired) -> float:
    if name not in (pair.one, pair.other):
        return 0.0
    return pair.difference if name == pair.one else -pair.difference


def _against(pair: Paired) -> str:
    low, high = (end * POINTS for end in pair.interval)
    surely = "" if low > 0 else "not surely "
    return f"{surely}more than {pair.other} by {pair.difference * POINTS:.1f} points ({low:+.1f} to {high:+.1f})"
