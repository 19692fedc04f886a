"""Simulation beside reality, as a table for people and as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group

from splitserve.commands.terminal import PHASE_NAMES, plain_table
from splitserve_bench.serve.misses import FIRST_TOKEN_PHASES, LATER_PHASES
from splitserve_bench.simulate.reality import ATTAINMENT_TARGET, MEDIAN_TARGET, Pair

COLUMNS = ("req/s", "attainment", "simulated", "TTFT ms", "simulated", "", "TPOT ms", "simulated", "")


def reality_view(pairs: Sequence[Pair]) -> Group:
    """All loads, then whether they are close, and where not, what makes the difference."""
    table = plain_table("fleet", numbers=COLUMNS)
    for pair in pairs:
        real, simulated = pair.real, pair.simulated
        table.add_row(
            pair.fleet,
            f"{pair.request_rate:g}",
            f"{real.attainment:.1%}",
            f"{simulated.attainment:.1%}",
            _ms(real.ttft_s),
            _ms(simulated.ttft_s),
            _percent(pair.ttft_difference),
            _ms(real.tpot_s),
            _ms(simulated.tpot_s),
            _percent(pair.tpot_difference),
        )
    num_close = sum(pair.is_close for pair in pairs)
    target = f"within {ATTAINMENT_TARGET * 100:g} points of attainment and {MEDIAN_TARGET:.0%} of both medians"
    lines = [line for pair in pairs if not pair.is_close for line in _reasons(pair)]
    return Group(table, f"{num_close} of {len(pairs)} {target}; medians of complete answers", *lines)


def reality_json(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """The figures of all pairs in seconds and shares, with the differences."""
    return [
        {
            **asdict(pair),
            "attainment_difference": pair.attainment_difference,
            "ttft_difference": pair.ttft_difference,
            "tpot_difference": pair.tpot_difference,
            "is_close": pair.is_close,
        }
        for pair in pairs
    ]


def _reasons(pair: Pair) -> list[str]:
    first, first_s = pair.largest_phase(FIRST_TOKEN_PHASES)
    later, later_s = pair.largest_phase(LATER_PHASES)
    return [
        f"{pair.fleet} at {pair.request_rate:g} req/s: the simulation differs most in {PHASE_NAMES[first]} "
        f"({first_s * 1e3:+.1f} ms a request) before the first token, in {PHASE_NAMES[later]} "
        f"({later_s * 1e3:+.2f} ms a token) after it"
    ]


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:+.0%}"
