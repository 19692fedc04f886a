"""Read the results of other engines, or of ours with other settings, on the same machine, and compare ours with them.

A result is a JSON object: "peer" is the engine's name, "load_s" the seconds to load a model after all imports,
"prefill" maps COUNTxLENGTH to tokens per second, "decode" maps bBATCH_ctxCONTEXT to milliseconds per step. All but the
name may be missing. `bench engine --json` prints one as "result", so that its output can be read too. Torch-free.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from serving_core.errors import SettingsError

if TYPE_CHECKING:
    from splitserve_bench.engine.measure import EngineFigures  # imports torch

MARK: Final = "RESULT "  # begins the line of a script's output that holds its result
OURS: Final = "splitserve"
LOAD, PREFILL, DECODE = "load", "prefill", "decode"
UNITS: Final = {LOAD: "s", PREFILL: "tokens/s", DECODE: "ms"}


@dataclass(frozen=True, slots=True)
class PeerResult:
    """One engine's figures by kind and key: load in s, prefill in tokens per s, decode in ms per step."""

    peer: str
    figures: Mapping[tuple[str, str], float]


@dataclass(frozen=True, slots=True)
class Ratio:
    """Our figure `ours` divided by `theirs`, the best of the peers'.

    Of prefill (tokens per second) more is better; of load and decode (times) less is.
    """

    kind: str
    key: str
    unit: str
    ours: float
    theirs: float
    peer: str
    ratio: float
    is_ahead: bool


def read_peers(path: Path) -> list[PeerResult]:
    """Return the results in a file: one JSON object, or the output of a script with lines that begin with "RESULT ".

    A result of our own command is named after the file. Raises SettingsError when the file cannot be read, or a result
    has not the form that the module describes.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from error
    marked = [line.removeprefix(MARK) for line in text.splitlines() if line.startswith(MARK)]
    return [_parse(each, path) for each in marked or [text]]


def our_result(figures: "EngineFigures") -> PeerResult:
    """Return our figures as a result to compare with peers'.

    They are medians, and as load the time to load and to do the first steps.
    """
    ours = {(LOAD, ""): figures.start.load_s + figures.start.warm_up_s}
    ours |= {(PREFILL, str(each.prompts)): each.tokens_per_s for each in figures.prefill}
    ours |= {(DECODE, decode_key(each.batch, each.context_tokens)): each.step_s * 1e3 for each in figures.decode}
    return PeerResult(OURS, ours)


def result_json(result: PeerResult) -> dict[str, Any]:
    """Return a result as the JSON object that `read_peers` reads."""
    of_kind = {kind: {key: value for (k, key), value in result.figures.items() if k == kind} for kind in UNITS}
    return {"peer": result.peer, "load_s": of_kind[LOAD][""], PREFILL: of_kind[PREFILL], DECODE: of_kind[DECODE]}


def decode_key(batch: int, context_tokens: int) -> str:
    """Return the key of a decode figure: `b8_ctx512` for a batch of 8 requests with 512 tokens of context each."""
    return f"b{batch}_ctx{context_tokens}"


def ratios(ours: PeerResult, peers: Sequence[PeerResult]) -> list[Ratio]:
    """Return our figure divided by the best peer's, in our order, for each figure that at least one peer has too."""
    rows = []
    for (kind, key), value in ours.figures.items():
        known = [(peer.figures[kind, key], peer.peer) for peer in peers if (kind, key) in peer.figures]
        if not known:
            continue
        more_is_better = kind == PREFILL
        theirs, name = max(known) if more_is_better else min(known)
        ratio = value / theirs
        is_ahead = ratio >= 1 if more_is_better else ratio <= 1
        rows.append(Ratio(kind, key, UNITS[kind], value, theirs, name, ratio, is_ahead))
    return rows


def _parse(text: str, path: Path) -> PeerResult:
    try:
        result = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{path} holds neither a JSON object nor a line that begins with RESULT") from error
    if isinstance(result, dict) and isinstance(result.get("result"), dict):
        result = {**result["result"], "peer": path.stem}
    if not isinstance(result, dict) or not isinstance(result.get("peer"), str):
        raise SettingsError(f"{path}: a result must be a JSON object with the name of the peer")
    figures: dict[tuple[str, str], float] = {}
    if "load_s" in result:
        figures[LOAD, ""] = _positive(result["load_s"], "load_s", path)
    for kind in (PREFILL, DECODE):
        of_kind = result.get(kind, {})
        if not isinstance(of_kind, dict):
            raise SettingsError(f"{path}: {kind} must be a JSON object")
        figures |= {(kind, key): _positive(value, key, path) for key, value in of_kind.items()}
    return PeerResult(result["peer"], figures)


def _positive(value: Any, key: str, path: Path) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= 0:
        raise SettingsError(f"{path}: {key} must be a number above 0, not {value!r:.80}")
    return float(value)
