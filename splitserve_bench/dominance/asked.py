"""The grid that flags ask for."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from coordinator.control.slo import Limit
from serving_core.errors import SettingsError
from splitserve_bench.dominance.contenders import AUTO, BESIDE, OTHERS, WHOLE, Contender, parse_fleet
from splitserve_bench.dominance.grid import Cell, CellLimits, Grid
from splitserve_bench.dominance.simulator import alone_s
from splitserve_bench.plan.asked import AskedLoad
from splitserve_bench.plan.loads import Loads
from splitserve_bench.simulate.profile import read_profile

_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LIMIT: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(x?)")


def grid_of(flags: Mapping[str, Any], report: Callable[[str], None]) -> Grid:
    """`report` is told what is clipped. Raises SettingsError and BenchError."""
    profile = read_profile(flags["profile_path"])
    pairs = {text: _parse_limits(text) for text in flags["limits"]}
    cells: list[Cell] = []
    for name, load, rates in _loads(flags):
        if clipped := Loads(load, profile.node.vocab_size, profile.node.max_model_len).clipped():
            report(f"{name}: {clipped}")
        ttft_s, tpot_s = alone_s(profile, load)
        for text, (ttft, tpot) in pairs.items():
            limits = CellLimits(text, ttft.seconds(ttft_s) or 0.0, tpot.seconds(tpot_s) or 0.0)
            cells += [Cell(name, load, rate, limits) for rate in rates]
    contenders = tuple(_contenders(flags))
    return Grid(tuple(cells), contenders, flags["seeds"], flags["num_prompts"], flags["request_timeout_s"])


def _contenders(flags: Mapping[str, Any]) -> list[Contender]:
    profile, whole = str(flags["profile_path"]), flags["whole_profile"]
    first = parse_fleet(flags["contender"] or AUTO)
    others = {each: None for each in map(parse_fleet, flags["others"] or OTHERS) if each != first}
    if not others:
        raise SettingsError(f"--other names no fleet but {first}: there is nothing to hold it against")
    beside = {each: None for each in map(parse_fleet, flags["beside"] or BESIDE) if each not in (first, *others)}
    contenders = [Contender(str(each), each, profile) for each in (first, *others)]
    contenders += [Contender(f"{each} (beside)", each, profile, is_beside=True) for each in beside]
    if whole is not None:
        name = "one node on all cores (beside)"
        contenders.append(Contender(name, parse_fleet(WHOLE), str(whole), is_beside=True))
    return contenders


def _loads(flags: Mapping[str, Any]) -> list[tuple[str, AskedLoad, list[float]]]:
    """Name, load and rates of each trace."""
    paths = dict(_named(each) for each in flags["traces"])
    for name, path in paths.items():
        if not _NAME.fullmatch(name) or not Path(path).is_file():
            raise SettingsError(f"--trace is NAME=FILE, and the file has to be there: {name}={path}")
    scales = _by_trace("--length-scale", ("1", *flags["length_scales"]), paths)
    rates = _by_trace("--rates", flags["rates"], paths)
    loads = []
    for name, path in paths.items():
        own = sorted({_above_0("--rates", each) for each in rates.get(name, "").replace(",", " ").split()})
        if not own:
            raise SettingsError(f"--rates says nothing of the trace {name}")
        scale = _above_0("--length-scale", scales[name])
        loads.append((name, AskedLoad(flags["dataset_name"], path, scale, 1, 1, 0.0, 1.0, 0), own))
    return loads


def _by_trace(flag: str, words: Sequence[str], traces: Mapping[str, str]) -> dict[str, str]:
    """What is said of each trace by its name, or else of all."""
    named = dict(map(_named, words))
    if unknown := sorted(named.keys() - traces.keys() - {""}):
        raise SettingsError(f"{flag} has the trace {unknown[0]}, and --trace has {', '.join(traces)}")
    return {name: named[key] for name in traces for key in (name if name in named else "",) if key in named}


def _named(text: str) -> tuple[str, str]:
    """NAME=VALUE, or a value of no name."""
    name, separator, value = text.partition("=")
    return (name, value) if separator else ("", name)


def _above_0(flag: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise SettingsError(f"{flag} takes numbers above 0, not {text!r}")
    return value


def _parse_limits(text: str) -> tuple[Limit, Limit]:
    matched = [each for part in text.split(":") if (each := _LIMIT.fullmatch(part)) and float(each[1]) > 0]
    if len(matched) != 2 or text.count(":") != 1:
        raise SettingsError(
            f"--limits is TTFT:TPOT above 0, in ms like 900:40 or as multiples like 6x:2.5x, not {text!r}"
        )
    ttft, tpot = (Limit(float(each[1]), bool(each[2])) for each in matched)
    return ttft, tpot
