"""`splitserve doctor`: what it fits to times, what it simulates and concludes from given figures; and the command on a
tiny model."""

import asyncio
import dataclasses
import importlib.metadata
import json
import re
import socket
import sys
from dataclasses import replace

import psutil
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from serving_core.errors import SettingsError
from serving_core.settings import EngineSettings
from splitserve.cli import main
from splitserve_bench.doctor import measure as measuring
from splitserve_bench.doctor.costs import PrefillCost, fit_prefill, fit_transfers
from splitserve_bench.doctor.environment import command_for, find_environment
from splitserve_bench.doctor.measure import DoctorBench, Measured, batches_of, conclude, measured, node_cpus
from splitserve_bench.doctor.report import conclusions
from splitserve_bench.doctor.steps import PROMPTS, StepFigures, StepTask
from splitserve_bench.doctor.topologies import (
    COLOCATED,
    EVEN,
    ONE_NODE,
    RATE_SHARE,
    SPLIT,
    Topologies,
    compare_topologies,
)
from splitserve_bench.models import Shape, write_random_model
from splitserve_bench.transfer import peer
from tests.effort import few
from tests.tiny_models import write_fake_model
from tests.unit.splitserve_bench.simulate_kit import SIZES
from tests.unit.splitserve_bench.stand_ins import worker_here


@given(st.floats(0, 1), st.floats(1e-6, 1), st.floats(0, 1e-3))
def test_a_prompts_costs_are_found_again(base_s, token_s, pair_s):
    cost = PrefillCost(base_s, token_s, pair_s)
    lengths = (64, 256, 512, 1024, 2048)
    found = fit_prefill([(length, cost.prefill_s(length)) for length in lengths])
    for length in (100, 1500):
        assert found.prefill_s(length) == pytest.approx(cost.prefill_s(length), rel=1e-3)
    assert min(found.base_s, found.token_s, found.pair_s) >= 0


def test_costs_are_never_below_zero():
    found = fit_prefill([(100, 0.1), (200, 0.15), (400, 0.2)])  # bends down: a square would be negative
    assert found.pair_s == 0
    assert min(found.base_s, found.token_s) > 0
    assert fit_prefill([(100, 0.5)]).prefill_s(100) == pytest.approx(0.5)


def test_the_kv_transfer_profile_from_two_transfers():
    found = fit_transfers([(1000, 0.003), (5000, 0.5), (11_000, 0.013)])  # the one in between does not count
    assert (found.latency_s, found.bytes_per_s) == (pytest.approx(0.002), pytest.approx(1e6))
    assert found.transfer_s(3000) == pytest.approx(0.005)
    faster_when_larger = fit_transfers([(1000, 0.004), (2000, 0.002)])
    assert (faster_when_larger.latency_s, faster_when_larger.bytes_per_s) == (pytest.approx(0.003), pytest.approx(1e6))


TINY = Shape("LlamaForCausalLM", "llama", 48, 3, 4, 2, 12, 80, 260, 1024)
TINY_SIZES = ("--running", "2", "--prompt-tokens", "40,16", "--output-tokens", "64 8", "--repeats", "1")
DEADLINE_S = 60.0
TOKEN_BYTES = 2 * 3 * 2 * 12 * 2  # K and V, layers, heads, head size, bytes of a bfloat16


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """The process of the other end may take long to begin."""
    monkeypatch.setattr(peer, "DEADLINE_S", 600.0)


def run(*arguments):
    return CliRunner().invoke(main, ["doctor", *map(str, arguments)])


def concluded(part=None):
    """From a prompt of 10 ms + 1 ms a token, steps of 10 ms + 2.5 ms an answer, a KV transfer of 2 ms + 10 µs a token;
    and one node, by which a token and an answer take so much of that."""
    sizes = DoctorBench(1, 4, (100, 200, 300), (50, 1), 1)
    transfers = [Measured(160, 0.00216), Measured(20480, 0.02248)]
    return conclude("tiny", sizes, costs_of(1.0), None if part is None else costs_of(part), transfers, 10)


def costs_of(part):
    prompts = tuple((0.01 + part * 0.001 * num_tokens,) for num_tokens in (100, 200, 300))
    steps = tuple((0.01 + part * 0.0025 * batch,) * 2 for batch in (1, 2, 4, 8))
    return StepFigures(prompts), StepFigures(steps, (), {"device": "cpu"})


def test_what_follows_from_figures():
    figures = concluded()
    assert (figures.model, figures.engine, figures.cores, figures.running) == ("tiny", {"device": "cpu"}, 1, 4)
    assert figures.costs.prefill.prefill_s(150) == pytest.approx(0.16)
    assert figures.costs.decode.at(6, 5000) == pytest.approx(0.025)
    assert figures.costs.transfer_s(100) == pytest.approx(0.003)


@pytest.mark.parametrize(("part", "best"), [(0.2, ONE_NODE), (1.5, EVEN)])
def test_the_large_node_is_simulated_beside_both_ways_to_have_two(part, best):
    """Its steps take that part of the seconds of the small nodes, beyond 10 ms."""
    found = compare_topologies(SIZES, concluded(part).costs, 4, 200, 50)
    assert list(found.kept) == [SPLIT, COLOCATED, ONE_NODE]
    assert (found.best == ONE_NODE) == (best == ONE_NODE)
    # Two mixed nodes with 4 sequences each: prompts of 210 ms, and 50 steps of 20 ms for 4 outputs.
    assert found.requests_per_s == pytest.approx(RATE_SHARE * 2 / (0.21 + 50 * 0.02 / 4), rel=0.1)


def test_without_a_large_node_two_ways_are_simulated():
    assert list(compare_topologies(SIZES, concluded().costs, 4, 100, 1).kept) == [SPLIT, COLOCATED]


@pytest.mark.parametrize(
    ("kept", "best"),
    [
        ({SPLIT: 0.9, COLOCATED: 0.8, ONE_NODE: 0.85}, SPLIT),
        ({SPLIT: 0.9, COLOCATED: 0.8, ONE_NODE: 0.88}, EVEN),
        ({SPLIT: 0.5, COLOCATED: 1.0}, COLOCATED),
    ],
)
def test_the_best_keeps_a_twentieth_of_the_requests_more(kept, best):
    assert Topologies(1, 1, 1.0, kept).best == best


def test_the_conclusion_in_words():
    one, other = ({SPLIT: 0.9, COLOCATED: 0.7, ONE_NODE: 0.8}, {SPLIT: 0.5, COLOCATED: 0.7, ONE_NODE: 1.0})
    found = Topologies(64, 256, 2.0, one), Topologies(512, 16, 1.0, other)
    assert conclusions(replace(concluded(0.5), topologies=found)) == [
        "The split keeps more requests within their limits than any other way at prompts + outputs of 64 + 256 tokens",
        "On average a prefill and a decode node 70%, two mixed nodes 70%, one node of 2 cores 90% of the requests are "
        "good: splitserve up --mixed 1",
    ]
    assert conclusions(
        replace(concluded(0.5), topologies=(Topologies(64, 256, 2.0, {SPLIT: 0.9, COLOCATED: 0.9}),))
    ) == [
        "The split keeps more requests within their limits than any other way at none of these lengths",
        "On average a prefill and a decode node 90%, two mixed nodes 90% of the requests are good: about even",
    ]


@pytest.mark.parametrize(
    ("running", "batches"), [(1, (1, 2)), (3, (1, 2, 3, 4, 6)), (8, (1, 2, 4, 8, 16)), (9, (1, 2, 4, 8, 9, 16, 18))]
)
def test_batches(running, batches):
    assert batches_of(running) == batches


@pytest.mark.parametrize(
    ("cpus", "cores", "expected"),
    [
        ([0, 1], 1, (("0", "1"), True)),
        ([2, 3, 5, 7, 9], 2, (("2,3", "5,7"), True)),
        ([4], 1, (("4", "4"), False)),
        ([4, 6, 8], 2, (("4,6", "4,6"), False)),
        ([], 3, (("", ""), False)),
    ],
)
def test_cores_of_the_nodes(cpus, cores, expected):
    assert node_cpus(cpus, cores) == expected


def test_more_cores_than_there_are():
    with pytest.raises(SettingsError, match="--cores 3 is more than the 2 CPUs of this process"):
        node_cpus([0, 1], 3)


@pytest.mark.parametrize(
    ("num_cores", "taken", "expected"),
    [
        (8, (), "splitserve up 'my model' --prefill 1 --decode 1"),
        (0, (), "splitserve up 'my model' --prefill 1 --decode 1"),
        (1, (), "splitserve up 'my model' --mixed 1"),
        (2, ("--http-port",), r"splitserve up 'my model' --prefill 1 --decode 1 --http-port \d+"),
    ],
)
def test_the_command_that_would_serve(num_cores, taken, expected):
    assert re.fullmatch(expected, command_for("my model", num_cores, taken))


def test_the_environment_is_what_the_machine_says():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = find_environment("", [0, 1], {"--grpc-port": port})
    assert found.facts["versions"].split(", ")[:2] == [
        f"Python {sys.version.split()[0]}",
        f"splitserve {importlib.metadata.version('splitserve')}",
    ]
    assert found.facts["cores"] == f"2 of {psutil.cpu_count()} for this process"
    assert found.facts["ports"] == f"{port} (--grpc-port) in use"
    assert re.fullmatch(r"splitserve up --prefill 1 --decode 1 --grpc-port \d+", found.command)
    assert str(port) not in found.command
    assert found.lines()[-1].split("  ")[-1] == found.command


@pytest.mark.nightly
def test_the_command_measures_a_model(tmp_path):
    write_random_model(tmp_path / "tiny", TINY)
    result = run(tmp_path / "tiny", *TINY_SIZES, "--json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert (figures["model"], figures["cores"], figures["running"]) == ("tiny", 1, 2)
    assert figures["environment"]["command"].startswith("splitserve up ")
    assert (figures["engine"]["dtype"], figures["engine"]["threads"]) == ("bfloat16", "1")
    assert [each["amount"] for each in figures["prompts"]] == [16, 40]
    assert [each["amount"] for each in figures["steps"]] == [1, 2, 4]
    assert [each["amount"] for each in figures["transfers"]] == [
        16 * TOKEN_BYTES,
        512 * TOKEN_BYTES,
        2048 * TOKEN_BYTES,
    ]
    assert all(each["seconds"] > 0 for name in ("prompts", "steps", "transfers") for each in figures[name])
    assert figures["costs"]["token_bytes"] == TOKEN_BYTES
    lengths = [(each["prompt_tokens"], each["output_tokens"]) for each in figures["topologies"]]
    assert lengths == [(16, 8), (16, 64), (40, 8), (40, 64)]
    assert len(figures["conclusions"]) == 2
    for text in ("prefill node: prompts with 0 tokens", "decode node: decode steps with 512 tokens", "KV transfers"):
        assert text in result.stderr


@pytest.mark.parametrize("measures_here", few([True, False]))
def test_the_tables_show_every_figure(request, tmp_path, monkeypatch, measures_here):
    if measures_here:
        request.getfixturevalue("forked_processes")
        monkeypatch.setattr(measuring, "worker", worker_here)
    write_random_model(tmp_path / "tiny", TINY)
    result = run(tmp_path / "tiny", *TINY_SIZES, "--dtype", "float32", "--kv-cache-dtype", "int8")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("versions ")
    for text in (
        "this would run",
        "float32",
        "1 core a node",
        "fitted:",
        "µs a token",
        "ms a step",
        "GB/s",
        "Simulated:",
        "On average a prefill and a decode node",
    ):
        assert text in result.stdout, result.stdout


@pytest.mark.nightly
def test_a_node_whose_weights_do_not_fit_is_measured_too(tmp_path):
    write_random_model(tmp_path / "tiny", TINY)
    refused = run(tmp_path / "tiny", *TINY_SIZES, "--weights-memory-bytes", "1000")
    least = re.search(r"--weights-memory-bytes 1000: these weights take (\d+) at least", refused.stderr)
    assert (refused.exit_code, bool(least)) == (2, True), refused.output
    flags = ("--weights-memory-bytes", least[1], "--weights-disk-path", str(tmp_path))
    measured = run(tmp_path / "tiny", *TINY_SIZES, *flags, "--json")
    assert measured.exit_code == 0, measured.output
    assert all(each["seconds"] > 0 for each in json.loads(measured.stdout)["steps"])


@pytest.mark.nightly
def test_what_was_measured_is_shown_though_the_profile_cannot_be(tmp_path):
    write_random_model(tmp_path / "tiny", TINY)
    (tmp_path / "tiny" / "tokenizer.json").unlink()  # the cluster of --save needs it
    shown = run(tmp_path / "tiny", *TINY_SIZES, "--save", tmp_path / "profile.json")
    assert shown.exit_code != 0
    assert "On average a prefill and a decode node" in shown.stdout
    refused = run(tmp_path / "tiny", *TINY_SIZES, "--save", tmp_path / "no" / "profile.json")
    assert (refused.exit_code, "takes files" in refused.stderr) == (2, True)
    assert "prefill node" not in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt-tokens", "2000"], "2000 tokens are more than the model's 1024"),
        (["--prompt-tokens", "16", "--cores", "5000"], "--cores 5000 is more than the"),
        (["--dtype", "float8"], "float8"),
    ],
)
def test_what_is_refused(tmp_path, arguments, message):
    write_random_model(tmp_path / "tiny", TINY)
    result = run(tmp_path / "tiny", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_the_fake_model_is_refused(tmp_path):
    result = run(write_fake_model(tmp_path))
    assert (result.exit_code, result.stderr) == (
        2,
        "Error: the fake model computes nothing that could be measured\n",
    )


@pytest.mark.nightly
def test_an_error_of_a_node_is_told_in_its_words(tmp_path):
    write_random_model(tmp_path / "tiny", TINY)
    (tmp_path / "tiny" / "model.safetensors").unlink()
    result = run(tmp_path / "tiny", *TINY_SIZES)
    assert result.exit_code == 2
    assert "Error: " in result.stderr
    assert "safetensors" in result.stderr


async def test_a_node_is_gone_even_when_it_is_cancelled_twice(tmp_path):
    settings = dataclasses.asdict(EngineSettings(model=str(tmp_path)))
    others = set(psutil.Process().children())
    task = StepTask(settings, "", PROMPTS, (1,), (0,), 1)
    measuring = asyncio.create_task(measured({"prefill node": task}, str, at_once=False))
    async with asyncio.timeout(DEADLINE_S):
        while not (children := set(psutil.Process().children()) - others):
            await asyncio.sleep(0.01)
    for child in children:
        child.suspend()  # else it may find that there is no model before it is cancelled
    for _ in range(10):  # it is there before asyncio has all its pipes
        await asyncio.sleep(0.01)
    measuring.cancel()
    await asyncio.sleep(0)
    measuring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await measuring
    assert not any(child.is_running() for child in children)
