"""`splitserve doctor`: the arithmetic of when a split pays, by hand; what it concludes from given figures; and the
command on a tiny model."""

import asyncio
import dataclasses
import importlib.metadata
import json
import math
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
from splitserve_bench.doctor.environment import command_for, find_environment
from splitserve_bench.doctor.measure import DoctorBench, Measured, batches_of, conclude, measured, node_cpus
from splitserve_bench.doctor.report import pays_lines
from splitserve_bench.doctor.simulated import simulated_topologies
from splitserve_bench.doctor.split_model import (
    NodeCosts,
    PrefillCost,
    compare,
    fit_prefill,
    fit_transfers,
    pays_between,
)
from splitserve_bench.doctor.steps import PROMPTS, StepFigures, StepTask
from splitserve_bench.models import Shape, write_random_model
from splitserve_bench.simulate.profile import Grid, TransferProfile
from splitserve_bench.transfer import peer
from tests.effort import few
from tests.tiny_models import write_fake_model
from tests.unit.splitserve_bench.simulate_kit import SIZES
from tests.unit.splitserve_bench.stand_ins import worker_here

# A prompt takes 10 ms + 1 ms a token, a step 20 ms for 4 answers and 30 ms for 8, a KV transfer 2 ms + 10 µs a token.
STEPS = {4: 0.02, 8: 0.03}
COSTS = NodeCosts(
    PrefillCost(base_s=0.01, token_s=0.001, pair_s=0.0),
    Grid((4, 8), (100,), ((0.02,), (0.03,))),
    TransferProfile(latency_s=0.002, bytes_per_s=1e6),
    token_bytes=10,
)


def test_both_ways_by_hand():
    found = compare(COSTS, running=4, prompt_tokens=100, output_tokens=50)
    assert found.colocated_requests_per_s == pytest.approx(2 / (0.11 + 50 * 0.02 / 4))
    assert found.colocated_tpot_s == pytest.approx(0.02 + 3 * 0.11 / 50)  # three others begin while it runs
    assert found.split_requests_per_s == pytest.approx(1 / (50 * 0.03 / 8 + 0.003))
    assert found.split_tpot_s == pytest.approx(0.03 + 8 * 0.003 / 50)
    assert found.prefill_nodes == pytest.approx(0.113 / 0.1905)


@pytest.mark.parametrize(
    ("prompt_tokens", "requests", "pace", "verdict", "why"),
    [
        (10, (0.02 + 0.25) / 2 / 0.1896, 0.0212 / 0.030336, "colocated", "the prefill node idles"),
        (100, 0.36 / 2 / 0.1905, 0.0266 / 0.03048, "colocated", "two small batches step faster"),
        (170, 0.43 / 2 / 0.1912, 0.0308 / 0.030592, "split", "one large batch of sequences, more requests"),
        (200, 0.46 / 2 / 0.214, 0.0326 / 0.03064, "even", "within a tenth"),
        (220, 0.48 / 2 / 0.2342, 0.0338 / 0.030672, "split", "no prompt stalls a sequence"),
        (300, 0.56 / 2 / 0.315, 0.0386 / 0.0308, "colocated", "the prefill node is the bottleneck"),
    ],
)
def test_verdicts(prompt_tokens, requests, pace, verdict, why):
    found = compare(COSTS, 4, prompt_tokens, 50)
    assert found.requests_ratio == pytest.approx(requests)
    assert found.pace_ratio == pytest.approx(pace)
    assert (found.verdict, found.why) == (verdict, why)


def test_the_range_in_which_the_split_pays():
    least, most = pays_between(COSTS, 4, 50, 1000)
    # (n + 260) / 2 over 189.5 + 0.01 n, the decode node's ms, is 1.1 at 160.4; over 12 + 1.01 n, the prefill node's,
    # it falls below 1.1 at 191.2, from where on the pace decides, and below 1 / 1.1 at 284.8.
    assert 160.4 <= least <= 160.4 * 1.05
    assert 284.8 / 1.05 <= most <= 284.8
    assert 191.2 / 1.05 <= pays_between(COSTS, 4, 50, 200)[1] <= 191.2
    assert pays_between(COSTS, 4, 1, 1000) is None


def cached(cached_token_s, factor=1.0):
    """Steps that take so much longer for each token in a cache."""
    rows = [
        [factor * (step_s + batch * each * cached_token_s) for each in (0, 1000)] for batch, step_s in STEPS.items()
    ]
    return Grid(tuple(STEPS), (100, 1100), tuple(map(tuple, rows)))


def test_a_longer_context_makes_steps_longer():
    decode = cached(1e-6)
    assert decode.at(4, 350) == pytest.approx(0.02 + 4 * 250e-6)
    found = compare(replace(COSTS, decode=decode), 4, 300, 100)  # 350 tokens in the middle of an answer
    assert found.split_tpot_s == pytest.approx(0.03 + 8 * 250e-6 + 8 * 0.005 / 100)


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


@given(
    st.integers(1, 64),
    st.integers(1, 5000),
    st.integers(1, 5000),
    st.floats(1e-3, 1e3),
    st.floats(1e-6, 1e-2),
)
def test_a_machine_that_is_faster_in_all_judges_alike(running, prompt_tokens, output_tokens, factor, cached_token_s):
    slower = NodeCosts(
        PrefillCost(0.01 * factor, 0.001 * factor, 0.0),
        cached(cached_token_s, factor),
        TransferProfile(0.002 * factor, 1e6 / factor),
        10,
    )
    one = compare(replace(COSTS, decode=cached(cached_token_s)), running, prompt_tokens, output_tokens)
    other = compare(slower, running, prompt_tokens, output_tokens)
    assert other.requests_ratio == pytest.approx(one.requests_ratio)
    assert other.pace_ratio == pytest.approx(one.pace_ratio)
    assert math.isclose(other.split_requests_per_s * factor, one.split_requests_per_s)


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


def concluded(output_tokens=(50, 1), most_tokens=1000, part=None):
    """From a prompt of 10 ms + 1 ms a token, steps of 10 ms + 2.5 ms an answer, a KV transfer of 2 ms + 10 µs a token;
    and one node, by which a token and an answer take so much of that."""
    nodes = costs_of(1.0)
    sizes = DoctorBench(1, 4, (100, 200, 300), output_tokens, 1)
    transfers = [Measured(160, 0.00216), Measured(20480, 0.02248)]
    whole = None if part is None else costs_of(part)
    return conclude("tiny", sizes, nodes, whole, transfers, 10, most_tokens)


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
    lengths = [(each.prompt_tokens, each.output_tokens) for each in figures.comparisons]
    assert lengths == [(100, 50), (100, 1), (200, 50), (200, 1), (300, 50), (300, 1)]
    assert [each.output_tokens for each in figures.pays] == [50, 1]
    assert 161 <= figures.pays[0].least_prompt_tokens <= 169  # as in test_the_range_in_which_the_split_pays
    assert figures.pays[1].least_prompt_tokens is figures.pays[1].most_prompt_tokens is None


def test_the_conclusion_in_words():
    figures = concluded()
    least, most = figures.pays[0].least_prompt_tokens, figures.pays[0].most_prompt_tokens
    assert pays_lines(figures) == [
        "With 8 running sequences the split pays on this machine",
        f"  for outputs of 50 tokens with prompts of {least} to {most} tokens",
        "  for outputs of 1 tokens at no prompt length up to 1000",
        "For longer prompts have more prefill nodes, for longer outputs more decode nodes.",
    ]
    assert pays_lines(concluded((50,), 190))[1] == f"  for outputs of 50 tokens from prompts of {least} tokens on"
    assert pays_lines(concluded((5000,)))[1] == "  for outputs of 5000 tokens at no prompt length up to 1000"


def test_one_node_in_place_of_two():
    """A prompt of 100 takes 60 ms there and a step of 8 answers 20 ms: 1 / (60 + 50 * 20 / 8) ms. Of two nodes each has
    4 answers in steps of 20 ms, and prompts of 110 ms: 2 / (110 + 50 * 20 / 4) ms."""
    figures = concluded((50,), part=0.5)
    first = figures.comparisons[0]
    assert first.whole.requests_per_s == pytest.approx(1 / (0.060 + 50 * 0.020 / 8))
    assert first.whole.tpot_s == pytest.approx(0.020 + 7 * 0.060 / 50)
    ratios = [each.whole_ratio for each in figures.comparisons]
    most = max(first.split_requests_per_s, 2 / (0.110 + 50 * 0.020 / 4))
    assert ratios[0] == pytest.approx(first.whole.requests_per_s / most)
    told = f"{sorted(ratios)[1]:.2f} times as many requests/s as the better of both, in the median of these lengths"
    assert pays_lines(figures)[-1] == (
        f"One node of 2 cores would serve {told} ({min(ratios):.2f} to {max(ratios):.2f})"
    )


@pytest.mark.parametrize(("part", "is_better"), [(0.2, True), (1.5, False)])
def test_one_large_node_is_advised_where_it_keeps_more_in_the_simulator(part, is_better):
    """Its steps take that part of the seconds of the small nodes, beyond 10 ms."""
    figures = concluded((50,), part=part)
    assert (figures.usual.prompt_tokens, figures.usual.output_tokens) == (200, 50)
    kept = simulated_topologies("tiny", SIZES, figures.costs, figures.usual)
    assert (kept.whole > max(kept.others.values())) == is_better
    assert list(kept.others) == ["1P+1D", "2B"]
    line = pays_lines(dataclasses.replace(figures, topologies=kept))[-1]
    assert f"one node keeps {kept.whole:.0%}, 1P+1D {kept.others['1P+1D']:.0%}" in line
    assert line.endswith(": splitserve up --mixed 1") == is_better


def test_nothing_is_simulated_without_a_large_node():
    figures = concluded(part=None)
    assert simulated_topologies("tiny", SIZES, figures.costs, figures.usual) is None


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
    lengths = [(each["prompt_tokens"], each["output_tokens"]) for each in figures["comparisons"]]
    assert lengths == [(16, 8), (16, 64), (40, 8), (40, 64)]
    assert len(figures["conclusions"]) >= 3
    for text in ("prefill node: prompts with 0 tokens", "decode node: answers with 512 tokens", "KV transfers"):
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
        "Assumed:",
        "For longer prompts",
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
    assert "For longer prompts have more prefill nodes" in shown.stdout
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
