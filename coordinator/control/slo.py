"""Read the SLOs of requests and of SLO classes, and count how many requests attain theirs. Pure.

A limit of a class may be a multiple of what the request takes alone: its prompt at the prefill rate of the fastest
prefill node, and a decode step with one sequence on the fastest decode node. There is no limit until nodes have
measured those.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.control.nodes import Node
from protos import inference_pb2
from protos.inference_pb2 import GenerateRequest
from serving_core.errors import RequestError, SettingsError
from serving_core.reasons import BAD_PARAM

MS: Final = 1e3
MAX_MS: Final = 3_600_000.0
MAX_MULTIPLE: Final = 1000.0
MAX_PRIORITY: Final = 100  # and -100 is the least
MAX_CLASSES: Final = 32  # each is a label value of some metrics
UNNAMED: Final = "none"  # label of requests that name no class
DEFAULT: Final = "default"  # class, if configured, of requests that name none
_CLASS: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63})=(.+)")
_LIMIT: Final = re.compile(r"(ttft|tpot):([0-9]+(?:\.[0-9]+)?)(x?)")
_PRIORITY: Final = re.compile(r"priority:(-?[0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit in milliseconds, or a multiple of the time that the request takes alone."""

    value: float
    is_multiple: bool = False

    def seconds(self, alone_s: float) -> float | None:
        """Return the limit in seconds.

        A multiple is of `alone_s`, the seconds that the request takes alone; None while that is unknown (0).
        """
        return (self.value * alone_s or None) if self.is_multiple else self.value / MS


@dataclass(frozen=True, slots=True)
class SloClass:
    """An SLO class; None is no limit."""

    name: str
    limits: str  # as configured
    ttft: Limit | None = None
    tpot: Limit | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Slo:
    """The SLO of one request and its priority. None is no limit; a lower priority goes first."""

    slo_class: str = ""  # named by the request
    ttft_s: float | None = None
    tpot_s: float | None = None
    priority: int = 0

    @property
    def has_limits(self) -> bool:
        return self.ttft_s is not None or self.tpot_s is not None


class SloClasses:
    """Hold the SLO classes of the configuration."""

    def __init__(self, classes: Sequence[SloClass] = ()) -> None:
        self._classes = {each.name: each for each in classes}

    def slo_of(self, request: GenerateRequest, num_prompt_tokens: int, nodes: Iterable[Node]) -> Slo | None:
        """Return the SLO of a request: its own limits and priority, and those of its class where it has none.

        Its class is DEFAULT, if configured, where it names none. None if it has neither limits, nor a priority other
        than 0, nor a class. A multiple is of what the request takes alone on `nodes`, and no limit while they have not
        measured that. Raises RequestError for an unknown class, and for a limit or priority out of range.
        """
        own = [_own_limit(request, name) for name in ("ttft_ms", "tpot_ms")]
        own_priority = _own_priority(request)
        named = self._named(request.slo_class)
        if not named.name and own == [None, None] and not own_priority:
            return None
        priority = named.priority if own_priority is None else own_priority
        ttft, tpot = own[0] or named.ttft, own[1] or named.tpot
        ttft_s, tpot_s = alone(nodes, num_prompt_tokens)
        limits = (ttft.seconds(ttft_s) if ttft else None, tpot.seconds(tpot_s) if tpot else None)
        return Slo(named.name, *limits, priority)

    def _named(self, name: str) -> SloClass:
        if not name:
            return self._classes.get(DEFAULT, SloClass("", ""))
        if name not in self._classes:
            known = f"there are {', '.join(self._classes)}" if self._classes else "there are none"
            message = f"slo_class {name[:80]!r} is none of the server's: {known}"
            raise RequestError(BAD_PARAM, message, field="slo_class")
        return self._classes[name]


def alone(nodes: Iterable[Node], num_prompt_tokens: int) -> tuple[float, float]:
    """Return the TTFT and the TPOT, in seconds, of a request that has all nodes for itself; 0 while unknown."""
    nodes = list(nodes)
    rates = [node.load.prefill_tokens_per_s for node in nodes if node.prefills]
    steps_s = [node.load.lone_step_s for node in nodes if node.decodes and node.load.lone_step_s > 0]
    rate = max(rates, default=0.0)
    return num_prompt_tokens / rate if rate > 0 else 0.0, min(steps_s, default=0.0)


def parse_slo_classes(texts: Iterable[str]) -> list[SloClass]:
    """Parse the values of the slo_class setting, NAME=LIMITS each.

    Raises SettingsError for a malformed or repeated one.
    """
    classes = [_parse(text) for text in texts]
    names = [each.name for each in classes]
    if len(classes) > MAX_CLASSES:
        raise SettingsError(f"slo_class is given {len(classes)} times, the limit is {MAX_CLASSES}")
    if twice := [name for name in names if names.count(name) > 1 or name == UNNAMED]:
        why = "stands for requests without a class" if twice[0] == UNNAMED else "is given twice"
        raise SettingsError(f"slo_class {twice[0]!r} {why}")
    return classes


def _parse(text: str) -> SloClass:
    match = _CLASS.fullmatch(text.strip())
    parts = [part.strip() for part in match[2].split(",")] if match else []
    limits = {pair[1]: Limit(float(pair[2]), bool(pair[3])) for pair in map(_LIMIT.fullmatch, parts) if pair}
    priorities = [int(pair[1]) for pair in map(_PRIORITY.fullmatch, parts) if pair]
    if match is None or len(limits) + len(priorities[:1]) != len(parts):
        examples = "chat=ttft:500,tpot:40 (ms), tight=ttft:5x,tpot:1.5x or batch=priority:10"
        raise SettingsError(f"slo_class must be such as {examples}, not {text[:80]!r}")
    for name, limit in limits.items():
        most, unit = (MAX_MULTIPLE, "x") if limit.is_multiple else (MAX_MS, " ms")
        if not 0 < limit.value <= most:
            raise SettingsError(f"{name} of slo_class {match[1]!r} must be above 0{unit} and at most {most:.0f}{unit}")
    for priority in priorities:
        if abs(priority) > MAX_PRIORITY:
            raise SettingsError(f"priority of slo_class {match[1]!r} {_within(priority)}")
    return SloClass(match[1], match[2].strip(), limits.get("ttft"), limits.get("tpot"), *priorities)


def _own_limit(request: GenerateRequest, name: str) -> Limit | None:
    if not request.HasField(name):
        return None
    value: float = getattr(request, name)
    if not (math.isfinite(value) and 0 < value <= MAX_MS):
        raise RequestError(BAD_PARAM, f"{name} must be above 0 and at most {MAX_MS:.0f}, not {value:g}", field=name)
    return Limit(value)


def _own_priority(request: GenerateRequest) -> int | None:
    if not request.HasField("priority"):
        return None
    if abs(request.priority) > MAX_PRIORITY:
        raise RequestError(BAD_PARAM, f"priority {_within(request.priority)}", field="priority")
    return request.priority


def _within(priority: int) -> str:
    return f"must be within [{-MAX_PRIORITY}, {MAX_PRIORITY}], not {priority}"


_UNNAMED: Final = SloClass(UNNAMED, "")


@dataclass(slots=True)
class Attained:
    """Count attainment of one class. A request without a limit attains it."""

    num_sequences: int = 0
    num_ttft_met: int = 0
    num_tpot_met: int = 0
    num_met: int = 0  # both


class AttainmentCounts:
    """Count the attainment of requests with an SLO, by class, from the start of the coordinator."""

    def __init__(self, classes: Sequence[SloClass] = ()) -> None:
        self._classes = (*classes, _UNNAMED)
        self._counts = {each.name: Attained() for each in self._classes}

    @property
    def by_class(self) -> Mapping[str, Attained]:
        return self._counts

    def ended(self, slo: Slo, outcome: inference_pb2.Complete | RequestError) -> None:
        """Count whether a request that has ended attained its SLO.

        A failed request attains nothing; an aborted one does not count.
        """
        ttft_met = tpot_met = False
        if isinstance(outcome, inference_pb2.Complete):
            if outcome.finish_reason == inference_pb2.FINISH_REASON_ABORT:
                return
            attained = outcome.attainment
            ttft_met = attained.ttft_met or not attained.HasField("ttft_met")
            tpot_met = attained.tpot_met or not attained.HasField("tpot_met")
        counts = self._counts[slo.slo_class or UNNAMED]
        counts.num_sequences += 1
        counts.num_ttft_met += ttft_met
        counts.num_tpot_met += tpot_met
        counts.num_met += ttft_met and tpot_met

    def to_wire(self) -> list[inference_pb2.SloClassLoad]:
        """Return the counts of every class of the configuration, and last those without a class, if there were any."""
        loads = []
        for each in self._classes:
            counts = self._counts[each.name]
            if each is _UNNAMED and not counts.num_sequences:
                continue
            loads.append(
                inference_pb2.SloClassLoad(
                    slo_class=each.name,
                    limits=each.limits,
                    num_sequences=counts.num_sequences,
                    num_ttft_met=counts.num_ttft_met,
                    num_tpot_met=counts.num_tpot_met,
                    num_met=counts.num_met,
                )
            )
        return loads


@dataclass(frozen=True, slots=True)
class Expectation:
    """The predictions of the Timeline message, in seconds; 0 where nothing is known or there is no limit."""

    expected_ttft_s: float
    expected_prefill_s: float
    ttft_margin_s: float
    expected_tpot_s: float
    deferred_s: float
