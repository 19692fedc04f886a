"""How many answers kept their limits, by class. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.control.slo import UNNAMED, Slo, SloClass
from protos import inference_pb2
from serving_core.errors import RequestError

_UNNAMED: Final = SloClass(UNNAMED, "")


@dataclass(slots=True)
class Attained:
    """Of the answers of one class. A limit that there is not is kept."""

    num_answers: int = 0
    num_ttft_met: int = 0
    num_tpot_met: int = 0
    num_met: int = 0  # both


class AttainmentCounts:
    """Of the answers that had limits, from the coordinator's start. Their classes are those of the configuration."""

    def __init__(self, classes: Sequence[SloClass] = ()) -> None:
        self._classes = (*classes, _UNNAMED)
        self._counts = {each.name: Attained() for each in self._classes}

    @property
    def by_class(self) -> Mapping[str, Attained]:
        return self._counts

    def ended(self, slo: Slo, outcome: inference_pb2.Complete | RequestError) -> None:
        """An answer has ended. One that failed kept no limit; one that its client ended says nothing."""
        ttft_met = tpot_met = False
        if isinstance(outcome, inference_pb2.Complete):
            if outcome.finish_reason == inference_pb2.FINISH_REASON_ABORT:
                return
            told = outcome.attainment
            ttft_met = told.ttft_met or not told.HasField("ttft_met")
            tpot_met = told.tpot_met or not told.HasField("tpot_met")
        counts = self._counts[slo.slo_class or UNNAMED]
        counts.num_answers += 1
        counts.num_ttft_met += ttft_met
        counts.num_tpot_met += tpot_met
        counts.num_met += ttft_met and tpot_met

    def to_wire(self) -> list[inference_pb2.SloClassLoad]:
        """Every class of the configuration, and last the requests without one, if there were any."""
        loads = []
        for each in self._classes:
            counts = self._counts[each.name]
            if each is _UNNAMED and not counts.num_answers:
                continue
            loads.append(
                inference_pb2.SloClassLoad(
                    slo_class=each.name,
                    limits=each.limits,
                    num_answers=counts.num_answers,
                    num_ttft_met=counts.num_ttft_met,
                    num_tpot_met=counts.num_tpot_met,
                    num_met=counts.num_met,
                )
            )
        return loads
