"""Compute the figures of sessions from the outcomes of their turns: by turn, and of whole sessions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from splitserve_bench.serve.metrics import Distribution, Judged, Summary, in_ms, tpot_s, ttft_s
from splitserve_bench.serve.records import Outcome, is_complete

MAX_TURNS_SHOWN: Final = 20


@dataclass(frozen=True, slots=True)
class TurnFigures:
    """The figures of one turn over all sessions, or of several. Latencies and tokens are those of complete requests.

    num_same_node of num_with_node requests were decoded on the node of the turn before, as far as the server tells
    nodes.
    """

    num: int
    num_good: int
    ttft_s: Distribution
    tpot_s: Distribution
    num_prompt_tokens: int
    num_cached_tokens: int | None  # None when the server does not tell
    num_with_node: int
    num_same_node: int

    @property
    def cached_share(self) -> float | None:
        """Return the share of prompt tokens that were cached; None when the server does not tell."""
        if self.num_cached_tokens is None or not self.num_prompt_tokens:
            return None
        return self.num_cached_tokens / self.num_prompt_tokens

    @property
    def same_node_share(self) -> float | None:
        """Return the share of requests decoded on the node of the turn before; None when the server tells no nodes."""
        return self.num_same_node / self.num_with_node if self.num_with_node else None

    def to_json(self) -> dict[str, Any]:
        """Return the figures as a JSON object."""
        figures: dict[str, Any] = {"num": self.num, "num_good": self.num_good}
        for name, values_s in (("ttft", self.ttft_s), ("tpot", self.tpot_s)):
            figures |= {f"p{percent}_{name}_ms": in_ms(values_s.percentile(percent)) for percent in (50, 95, 99)}
        return {**figures, "cached_share": self.cached_share, "same_node_share": self.same_node_share}


@dataclass(frozen=True, slots=True)
class SessionFigures:
    """The figures of sessions. A session is complete or good if all its turns are.

    `turns` are by number, `later` is all but the first. completion_s is from the first sending to the last token, of
    complete sessions.
    """

    num: int
    num_complete: int
    num_good: int
    goodput_per_s: float
    completion_s: Distribution
    turns: tuple[TurnFigures, ...]
    later: TurnFigures

    def to_json(self) -> dict[str, Any]:
        """Return the figures as a JSON object."""
        return {
            "num": self.num,
            "completed": self.num_complete,
            "good": self.num_good,
            "goodput": self.goodput_per_s,
            "median_completion_s": self.completion_s.median,
            "p99_completion_s": self.completion_s.percentile(99),
            "later_turns": self.later.to_json(),
            "turns": [turn.to_json() for turn in self.turns],
        }


def session_figures(summary: Summary) -> SessionFigures | None:
    """Return the figures of the sessions of a load; None for a load without sessions."""
    sessions: dict[int, list[Judged]] = {}
    for judged in summary.judged:
        if judged.outcome.session is not None:
            sessions.setdefault(judged.outcome.session, []).append(judged)
    if not sessions:
        return None
    complete = [turns for turns in sessions.values() if all(is_complete(each.outcome) for each in turns)]
    spans_s = tuple(
        max(each.outcome.ended_s for each in turns) - min(each.outcome.sent_s for each in turns) for turns in complete
    )
    nodes = {(number, turn): found for number, turns in sessions.items() for turn, found in _nodes(turns).items()}
    by_turn: dict[int, list[Judged]] = {}
    for turns in sessions.values():
        for each in turns:
            by_turn.setdefault(each.outcome.turn, []).append(each)
    num_good = sum(all(each.is_good for each in turns) for turns in complete)
    return SessionFigures(
        num=len(sessions),
        num_complete=len(complete),
        num_good=num_good,
        goodput_per_s=summary.per_s(num_good),
        completion_s=Distribution(spans_s),
        turns=tuple(_figures(by_turn[turn], nodes) for turn in sorted(by_turn)),
        later=_figures([each for turn, found in by_turn.items() if turn for each in found], nodes),
    )


def _nodes(turns: Iterable[Judged]) -> dict[int, set[str]]:
    """Return the decode nodes of one session by turn, as far as they are known."""
    nodes: dict[int, set[str]] = {}
    for judged in turns:
        if judged.outcome.decode_node:
            nodes.setdefault(judged.outcome.turn, set()).add(judged.outcome.decode_node)
    return nodes


def _figures(judged: Sequence[Judged], nodes: dict[tuple[int, int], set[str]]) -> TurnFigures:
    outcomes = [each.outcome for each in judged if is_complete(each.outcome)]
    cached = [each.num_cached_tokens for each in outcomes if each.num_cached_tokens is not None]
    with_node = [(each, before) for each in outcomes if each.decode_node and (before := _before(each, nodes))]
    return TurnFigures(
        num=len(judged),
        num_good=sum(each.is_good for each in judged),
        ttft_s=Distribution(tuple(value for each in outcomes if (value := ttft_s(each)) is not None)),
        tpot_s=Distribution(tuple(value for each in outcomes if (value := tpot_s(each)) is not None)),
        num_prompt_tokens=sum(each.num_prompt_tokens for each in outcomes if each.num_cached_tokens is not None),
        num_cached_tokens=sum(cached) if cached else None,
        num_with_node=len(with_node),
        num_same_node=sum(each.decode_node in before for each, before in with_node),
    )


def _before(outcome: Outcome, nodes: dict[tuple[int, int], set[str]]) -> set[str]:
    assert outcome.session is not None, "it is of a session"
    return nodes.get((outcome.session, outcome.turn - 1), set())
