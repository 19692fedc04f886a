"""The figures of all steps as rows, with what they are of the device's rates and what we want them to be.
Torch-free."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from splitserve_bench.device.steps import ATTENTION, DEVICE, DRAWING, ENGINE, SPLIT, TESTS, TRANSFER
from splitserve_bench.engine.peers import DECODE, PREFILL

DECODE_AIM: Final = 0.70  # of the memory bandwidth, one request
PREFILL_AIM: Final = 0.65  # of the rate of products
PREFILL_AIM_TOKENS: Final = 1024
PEER_AIM: Final = 1.0  # times vLLM's rate
PEER_AIM_BATCH: Final = "b64_"
MAIN_STEP: Final = "engine"  # whose figures the aims are about

Steps = Mapping[str, Mapping[str, Any]]
"""As a report has them, by name."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. Shares are of rates measured here, and of those of the data sheet; None: of nothing, or not known."""

    step: str
    figure: str
    value: float
    unit: str
    of_measured: float | None = None
    of_nominal: float | None = None
    aim: str = ""
    is_met: bool | None = None


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device does at best."""

    flops_per_s: float
    bytes_per_s: float


def rows_of(steps: Steps) -> list[Row]:
    """Those of the steps that have a result."""
    device = steps.get("device", {}).get("result") or {}
    nominal = Rates(**device["nominal"]) if device.get("nominal") else None
    rows: list[Row] = []
    for name, step in steps.items():
        if step["result"] is not None and step["kind"] in _READERS:
            rows += _READERS[step["kind"]](name, step["result"], nominal)
    return rows


def _device(name: str, facts: Mapping[str, Any], nominal: Rates | None) -> Iterator[Row]:
    machine = facts["machine"]
    rates = (
        (f"products of {machine['gemm_dtype']}", machine["gemm_flops_per_s"], nominal and nominal.flops_per_s),
        ("reading memory", machine["read_bytes_per_s"], nominal and nominal.bytes_per_s),
        ("copying within memory, read and written", facts["copy_bytes_per_s"], nominal and nominal.bytes_per_s),
    )
    for figure, rate, best in rates:
        unit = "TFLOP/s" if figure.startswith("products") else "GB/s"
        yield Row(
            name, figure, rate / (1e12 if unit == "TFLOP/s" else 1e9), unit, of_nominal=rate / best if best else None
        )
    for figure in ("host_to_device", "device_to_host"):
        if facts[f"{figure}_bytes_per_s"]:
            yield Row(name, f"copying {figure.replace('_', ' ')}, pinned", facts[f"{figure}_bytes_per_s"] / 1e9, "GB/s")


def _engine(name: str, figures: Mapping[str, Any], nominal: Rates | None) -> Iterator[Row]:
    is_main = name == MAIN_STEP
    for row in figures["prefill"]:
        size = row["prompts"]
        flops_per_s = row["flops"] * row["tokens_per_s"] / (size["count"] * size["num_tokens"])
        of_nominal = flops_per_s / nominal.flops_per_s if nominal else None
        has_aim = is_main and (size["count"], size["num_tokens"]) == (1, PREFILL_AIM_TOKENS)
        yield _aimed(
            Row(name, f"prefill, {size['count']}x{size['num_tokens']}", row["tokens_per_s"], "tokens/s"),
            (row["gemm_share"], of_nominal),
            PREFILL_AIM if has_aim else None,
        )
    for row in figures["decode"]:
        bytes_per_s = (row["weight_bytes"] + row["kv_bytes"]) / row["step_s"]
        of_nominal = bytes_per_s / nominal.bytes_per_s if nominal else None
        yield _aimed(
            Row(name, f"decode step, batch {row['batch']}, context {row['context_tokens']}", row["step_s"] * 1e3, "ms"),
            (row["bandwidth_share"], of_nominal),
            DECODE_AIM if is_main and row["batch"] == 1 else None,
        )
    if offload := figures.get("offload"):
        rate, alone = offload["bytes_per_s"], offload["alone_bytes_per_s"]
        yield Row(name, f"weights {offload['where']}, read by decode steps", rate / 1e9, "GB/s", rate / alone)
    yield from _ratios(name, figures)


def _aimed(row: Row, shares: tuple[float, float | None], aim: float | None) -> Row:
    """With shares. The aim is of the data sheet's rate; without one there is none."""
    of_measured, of_nominal = shares
    row = replace(row, of_measured=of_measured, of_nominal=of_nominal)
    if aim is None or of_nominal is None:
        return row
    return replace(row, aim=f"≥ {aim:.0%} of the data sheet's", is_met=of_nominal >= aim)


def _ratios(name: str, figures: Mapping[str, Any]) -> Iterator[Row]:
    for ratio in figures["ratios"]:
        if ratio["kind"] not in (PREFILL, DECODE):
            continue
        rate = ratio["ratio"] if ratio["kind"] == PREFILL else 1 / ratio["ratio"]
        has_aim = ratio["kind"] == DECODE and ratio["key"].startswith(PEER_AIM_BATCH)
        aim, is_met = (f"≥ {PEER_AIM:.1f}", rate >= PEER_AIM) if has_aim else ("", None)
        figure = f"{ratio['kind']} {ratio['key']}, rate over that of {ratio['peer']}"
        yield Row(name, figure, rate, "times", aim=aim, is_met=is_met)


def _tests(name: str, counts: Mapping[str, Any], nominal: Rates | None) -> Iterator[Row]:
    num_bad = counts["failures"] + counts["errors"]
    is_met = None if counts["skipped"] == counts["tests"] else num_bad == 0  # nothing was tried
    yield Row(name, "tests that failed", num_bad, f"of {counts['tests']}", aim="0", is_met=is_met)
    yield Row(name, "tests that were skipped", counts["skipped"], f"of {counts['tests']}")


def _split(name: str, figures: Mapping[str, Any], nominal: Rates | None) -> Iterator[Row]:
    num_answers = figures["num_answers"]
    is_equal = figures["num_equal"] == num_answers
    yield Row(
        name,
        "answers equal to those of one node",
        figures["num_equal"],
        f"of {num_answers}",
        aim="all",
        is_met=is_equal,
    )
    for kind in ("one_node", "split"):
        what = kind.replace("_", " ")
        yield Row(name, f"TTFT, {what}", figures[kind]["ttft_s"] * 1e3, "ms")
        yield Row(name, f"TPOT, {what}", figures[kind]["tpot_s"] * 1e3, "ms")
    yield Row(name, "hand-over, from the first token to the second step", figures["split"]["handoff_s"] * 1e3, "ms")


def _transfer(name: str, reports: list[Mapping[str, Any]], nominal: Rates | None) -> Iterator[Row]:
    for report in reports:
        for each in report["transfers"]:
            figure = f"corridor, {each['transport']}, {each['prompt_tokens']} tokens"
            yield Row(name, figure, each["bytes_per_s"] / 1e9, "GB/s")


def _attention(name: str, figures: list[Mapping[str, Any]], nominal: Rates | None) -> Iterator[Row]:
    for each in figures:
        figure = f"{each['backend']}, batch {each['batch']}, context {each['context_tokens']}"
        if each["chunk_tokens"]:
            yield Row(name, f"{figure}, beside {each['chunk_tokens']} of a prompt", each["seconds"] * 1e3, "ms")
            continue
        of_nominal = each["bytes_per_s"] / nominal.bytes_per_s if nominal else None
        yield Row(name, figure, each["bytes_per_s"] / 1e9, "GB/s", of_nominal=of_nominal)


def _drawing(name: str, figures: list[Mapping[str, Any]], nominal: Rates | None) -> Iterator[Row]:
    for each in figures:
        yield Row(name, f"tokens drawn by {each['backend']}, batch {each['batch']}", each["seconds"] * 1e3, "ms")


_READERS: Final[Mapping[str, Callable[[str, Any, Rates | None], Iterator[Row]]]] = {
    DEVICE: _device,
    ENGINE: _engine,
    TESTS: _tests,
    SPLIT: _split,
    TRANSFER: _transfer,
    ATTENTION: _attention,
    DRAWING: _drawing,
}
