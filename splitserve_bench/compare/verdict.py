"""Who wins, by how much, and what the others lose their requests to, in plain words. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from splitserve.commands.terminal import PHASE_NAMES
from splitserve_bench.compare.contenders import AUTO, COLOCATED, PEER, SPLIT
from splitserve_bench.compare.search import SearchResult
from splitserve_bench.serve.misses import Misses

MIXED: Final = "its decode includes the prompts that are computed between those tokens"


@dataclass(frozen=True, slots=True)
class Standing:
    """What one contender achieved. `misses` are those at its lowest failing rate, None when no rate failed."""

    name: str
    kind: str
    result: SearchResult
    misses: Misses | None


def verdict(standings: Sequence[Standing]) -> list[str]:
    """Sentences: the winner or that there is none; splitting against colocation; our best against each peer; then
    what each contender loses its requests to. A difference counts when the intervals of the knees do not overlap."""
    ranked = sorted(standings, key=lambda each: each.result.best_rate or 0.0, reverse=True)
    sentences = [_winner(ranked)] if len(ranked) > 1 else []
    best = {kind: each for each in reversed(ranked) for kind in [each.kind]}
    if COLOCATED in best and SPLIT in best:
        sentences.append(_disaggregation(best[SPLIT], best[COLOCATED], sentences))
    if AUTO in best and (SPLIT in best or COLOCATED in best):
        static = [best[kind] for kind in (SPLIT, COLOCATED) if kind in best]
        sentences.append(_duel(best[AUTO], max(static, key=lambda each: each.result.best_rate or 0.0)))
    ours = next((each for each in ranked if each.kind != PEER), None)
    if ours is not None:
        sentences += [_duel(ours, each) for each in ranked if each.kind == PEER]
    return list(dict.fromkeys(sentences + [_loses_to(each) for each in ranked]))


def plain(rate: float) -> str:
    """Three digits, without an exponent for large ones."""
    return f"{rate:.3g}" if rate < 1000 else f"{rate:.0f}"


def is_above(one: SearchResult, other: SearchResult) -> bool:
    """Whether the first knee surely lies above the second."""
    return one.knee_low is not None and other.knee_high is not None and one.knee_low > other.knee_high


def rate_of(result: SearchResult) -> str:
    """The rate with the interval of its knee."""
    interval = f"({_edge(result.knee_low, '0')} to {_edge(result.knee_high, '?')})"
    if result.best_rate is None:
        return f"no tested rate {interval}"
    above = "" if result.failing_rate is not None else "at least "
    return f"{above}{plain(result.best_rate)} req/s {interval}"


def main_cause(misses: Misses) -> str:
    """What most of the misses are due to, in words; "" without misses."""
    counts = {
        "TTFT": (misses.ttft, misses.ttft_phases),
        "TPOT": (misses.tpot, misses.tpot_phases),
        "E2EL": (misses.e2el, {}),
        "failures": (misses.failed, {}),
        "refusals": (misses.refused, {}),
    }
    name, (count, phases) = max(counts.items(), key=lambda item: item[1][0])
    if not count:
        return ""
    phase = max(phases, key=lambda each: phases[each], default="")
    return f"{name}: {PHASE_NAMES.get(phase, phase)}" if phase else name


def _winner(ranked: Sequence[Standing]) -> str:
    first, *others = ranked
    close = [each.name for each in others if not is_above(first.result, each.result)]
    if first.result.best_rate is None:
        return "No winner: no contender reaches the goal at any tested rate."
    if close:
        return (
            f"No winner: {first.name} reaches {rate_of(first.result)}, and so may {_listed(close)}: intervals overlap."
        )
    return f"{first.name} wins: {_against(first, others[0])}."


def _disaggregation(split: Standing, colocated: Standing, said: Sequence[str]) -> str:
    """Without the figures where they were said before."""
    if is_above(split.result, colocated.result):
        outcome, figures = "Disaggregation wins", _against(split, colocated)
    elif is_above(colocated.result, split.result):
        outcome, figures = "Disaggregation loses", _against(colocated, split)
    else:
        outcome, figures = "Disaggregation neither wins nor loses", f"{_against(split, colocated)}; intervals overlap"
    return f"{outcome}." if any(figures in sentence for sentence in said) else f"{outcome}: {figures}."


def _duel(one: Standing, other: Standing) -> str:
    if is_above(one.result, other.result):
        return f"{one.name} beats {other.name}: {_against(one, other)}."
    if is_above(other.result, one.result):
        return f"{one.name} loses to {other.name}: {_against(other, one)}."
    return f"{one.name} and {other.name} cannot be told apart: {_against(one, other)}; intervals overlap."


def _against(one: Standing, other: Standing) -> str:
    sentence = f"{one.name} {rate_of(one.result)}, {other.name} {rate_of(other.result)}"
    if one.result.best_rate and other.result.best_rate:
        sentence += f", {one.result.best_rate / other.result.best_rate:.2f}x"
        sentence += _ratio_interval(one.result, other.result)
    return sentence


def _ratio_interval(one: SearchResult, other: SearchResult) -> str:
    """The ratio at the worst and at the best, where both are known."""
    if not (one.knee_low and one.knee_high and other.knee_low and other.knee_high):
        return ""
    return f" ({one.knee_low / other.knee_high:.2f}x to {one.knee_high / other.knee_low:.2f}x)"


def _loses_to(standing: Standing) -> str:
    result, misses = standing.result, standing.misses
    if misses is None or result.failing_rate is None:
        return f"{standing.name} lost too few requests at every tested rate: its limit is not known."
    mixed = f"; {MIXED}" if standing.kind in (COLOCATED, AUTO) and "decode_s" in misses.tpot_phases else ""
    causes = _listed(_parts(misses))
    return f"{standing.name} loses its requests at {plain(result.failing_rate)} req/s to {causes}{mixed}."


def _parts(misses: Misses) -> list[str]:
    """The causes with their counts and phases, the most frequent first."""
    causes: list[tuple[int, str, Mapping[str, int]]] = [
        (misses.ttft, "TTFT", misses.ttft_phases),
        (misses.tpot, "TPOT", misses.tpot_phases),
        (misses.e2el, "E2EL", {}),
        (misses.failed, "failures", {}),
        (misses.refused, "refusals", {}),
    ]
    texts = []
    for count, name, phases in sorted(causes, key=lambda cause: cause[0], reverse=True):
        where = ", ".join(f"{PHASE_NAMES.get(phase, phase)} {number}" for phase, number in phases.items())
        texts += [f"{name} ({count}: {where})" if where else f"{name} ({count})"] if count else []
    return texts


def _listed(parts: Sequence[str]) -> str:
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def _edge(rate: float | None, unknown: str) -> str:
    return unknown if rate is None else plain(rate)
