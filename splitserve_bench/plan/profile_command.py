"""`splitserve plan profile`. What it works with is imported when it runs, so that help is quick."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from serving_core.errors import SettingsError
from splitserve.commands.terminal import plain_table, report, stdout
from splitserve_bench.options import ListOf, NewFile
from splitserve_bench.plan.options import (
    NAMES,
    asked_nodes_of,
    link_option,
    memory_option,
    model_option,
    node_options,
    parse_tp,
    table_model_option,
)

if TYPE_CHECKING:
    from splitserve_bench.plan.asked import AskedNodes
    from splitserve_bench.plan.checking import Beside
    from splitserve_bench.plan.nodes import Machines, NodeKind
    from splitserve_bench.plan.tables import Check

# Of a node alone, which has no price and nobody to send to.
ALONE: Any = {
    "prefill_hardware": None, "decode_hardware": None, "price": None, "watts": None, "host_link": "ib",
    "gpus_per_host": 64,
}  # fmt: skip


TP_SIZES: Final = (1, 2, 3, 4, 8)


@click.command("profile")
@click.argument("profile", required=False, type=click.Path(exists=True, path_type=Path))
@model_option
@table_model_option
@click.option("--hardware", type=NAMES, help="Of the node; of a table, all that it has.")
@click.option(
    "--tp",
    "tp_sizes",
    type=ListOf("N,...", parse_tp),
    help="Default: 1,2,3,4,8, of which --save takes the smallest that the model fits on.",
)
@link_option
@memory_option
@node_options
@click.option("--check", is_flag=True, help="Tell how well the table says what was held out of it.")
@click.option(
    "--requests",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="LLMServingSim's vllm/requests.jsonl: simulate them, and show both.",
)
@click.option(
    "--save",
    "save_path",
    type=NewFile(),
    help="Write one node's profile for `splitserve simulate --profile`.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
def profile_command(
    check: bool,
    requests: Path | None,
    save_path: Path | None,
    as_json: bool,
    tp_sizes: tuple[int, ...] | None,
    **flags: Any,
) -> None:
    """Check a table of step times (DistServe's JSON, splitwise-sim's perf_model.csv, a folder of LLMServingSim's), or
    make a profile of one, or of hardware's data sheet."""
    asked = asked_nodes_of({**ALONE, **flags, "tp_sizes": tp_sizes or TP_SIZES})
    if not (check or requests or save_path):
        raise SettingsError("nothing is to be done: --check, --requests FILE or --save FILE")
    checks = _checks(asked) if check else {}
    pairs = _replayed(asked, requests) if requests is not None else []
    if save_path is not None:
        _save(asked, save_path, takes_least=tp_sizes is None)
    if as_json:
        shown = {name: [asdict(each) for each in own] for name, own in checks.items()}
        click.echo(json.dumps({"checks": shown, "requests": [asdict(each) for each in pairs]}))
        return
    if checks:
        stdout.print(_checks_table(checks))
    if pairs:
        stdout.print(_requests_table(pairs))


def _checks(asked: "AskedNodes") -> dict[str, list["Check"]]:
    """By entry of the table. With the model's folder the roofline is checked too, where the device is known."""
    from splitserve_bench.plan.checking import against
    from splitserve_bench.plan.devices import device_of, link_of
    from splitserve_bench.plan.model_sizes import read_model_sizes
    from splitserve_bench.plan.roofline import Roofline
    from splitserve_bench.plan.tables import read_table

    if not asked.profile:
        raise SettingsError("--check is of a table: give its file or folder")
    table = read_table(Path(asked.profile))
    model = read_model_sizes(Path(asked.model)) if asked.model else None
    all_hardware = {entry.hardware.lower() for entry in table.entries()}
    found: dict[str, list[Check]] = {}
    for entry in table.entries():
        is_asked = asked.table_model in ("", entry.model) and entry.tp in asked.tp_sizes
        if not is_asked or (entry.hardware and entry.hardware.lower() not in (asked.both_hardware or all_hardware)):
            continue
        found[str(entry)] = table.checks(entry, model)
        name = entry.hardware or next(iter(asked.both_hardware), "")
        if model is not None and (device := device_of(name)) is not None:
            link = link_of(asked.link or device.link, device)
            found[str(entry)] += against(table.steps(entry, model, link), Roofline(model, device, link, entry.tp))
    report(f"{table.kind}: {len(found)} of {len(table.entries())} parts")
    return found


def _replayed(asked: "AskedNodes", requests: Path) -> list["Beside"]:
    from splitserve_bench.plan.checking import read_served, replayed
    from splitserve_bench.plan.nodes import machines_of

    machines = machines_of(asked)
    return replayed(_only(machines, "--requests are"), read_served(requests), machines.door_s)


def _save(asked: "AskedNodes", path: Path, *, takes_least: bool) -> None:
    from splitserve_bench.plan.nodes import machines_of, profile_of

    machines = machines_of(asked)
    kind = _only(machines, "a profile is", takes_least=takes_least)
    profile_of(machines, kind).save(path)
    report(f"written: {path}, of {kind.hardware} TP {kind.tp}")


def _only(machines: "Machines", what: str, *, takes_least: bool = False) -> "NodeKind":
    """The one kind of node, with `takes_least` that of the smallest TP. Raises SettingsError for `what` is of one node,
    where there are several."""
    kinds = machines.kinds
    if takes_least:
        least = min(kind.tp for kind in kinds)
        kinds = tuple(kind for kind in kinds if kind.tp == least)
    if len(kinds) != 1:
        names = ", ".join(f"{kind.hardware} TP {kind.tp}" for kind in kinds)
        raise SettingsError(f"{what} of one node, not of {names}: --hardware and --tp choose")
    return kinds[0]


def _checks_table(checks: dict[str, list["Check"]]) -> Any:
    table = plain_table("part", "check", numbers=("held out", "MAPE", "worst"))
    for name, own in checks.items():
        for check in own:
            table.add_row(name, check.what, str(check.num_held_out), f"{check.mape:.1%}", f"{check.worst:.1%}")
        if not own:
            table.add_row(name, "nothing to hold out", "", "", "")
    return table


def _requests_table(pairs: list["Beside"]) -> Any:
    table = plain_table("figure", numbers=("vLLM, ms", "simulated, ms", "difference"))
    for pair in pairs:
        difference = f"{pair.simulated_s / pair.served_s - 1:+.1%}" if pair.served_s else ""
        table.add_row(pair.what, f"{pair.served_s * 1e3:.1f}", f"{pair.simulated_s * 1e3:.1f}", difference)
    return table
