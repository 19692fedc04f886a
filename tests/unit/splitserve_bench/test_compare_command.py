import asyncio
import json
import os
import sys

import click
import pytest
from click.testing import CliRunner

from serving_core.errors import SettingsError
from splitserve.cli import main
from splitserve.launch.models import LocalModel
from splitserve_bench.compare.command import (
    CompareCommand,
    compare_command,
    cores_of,
    parse_engine_flag,
    parse_rate,
)
from splitserve_bench.compare.contenders import PeerContender, colocated
from splitserve_bench.compare.run import (
    Cells,
    CompareBench,
    CompareOptions,
    Workload,
    compare_contenders,
    seed_of,
    served_by_all,
)
from splitserve_bench.errors import BenchError
from splitserve_bench.options import repeat_flags
from splitserve_bench.serve.command import Dataset
from splitserve_bench.serve.metrics import Limits
from splitserve_bench.serve.records import ServedModel
from tests.tiny_models import VOCAB_SIZE, write_fake_model
from tests.unit.splitserve_bench.load_servers import Script, http_server
from tests.unit.splitserve_bench.stand_ins import run_load_here

AZURE_ROWS = [f"2023-11-16 18:17:0{i}.0000000,{100 + i},{10 + i}" for i in range(8)]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--slo-scale ttft:6 tpot:1.5 --json", ["--slo-scale", "ttft:6 tpot:1.5", "--json"]),
        (
            "--goodput ttft:6 tpot:1 e2el:3 model --json",
            "--goodput ttft:6 --goodput tpot:1 --goodput e2el:3 model --json",
        ),
        ("--goodput ttft:6 model ttft:1", "--goodput ttft:6 model ttft:1"),
        (
            "--slo-scale ttft:1 --slo-scale ttft:2 tpot:3 m",
            ["--slo-scale", "ttft:1", "--slo-scale", "ttft:2 tpot:3", "m"],
        ),
        ("model --seed 3", "model --seed 3"),
    ],
)
def test_several_pairs_may_follow_one_flag(words, expected):
    expected = expected.split() if isinstance(expected, str) else expected
    assert repeat_flags(words.split(), CompareCommand.lists, CompareCommand.joined) == expected


def test_flags_of_the_clusters_are_read_as_up_reads_them():
    assert parse_engine_flag("dtype=float32") == ("dtype", "float32")
    assert parse_engine_flag("--max-model-len=128") == ("max_model_len", 128)
    assert parse_engine_flag("enable-prefix-caching=false") == ("enable_prefix_caching", False)
    assert parse_engine_flag("policy=lmetric") == ("policy", "lmetric")


@pytest.mark.parametrize(
    "text", ["dtype", "dtype=int1", "prefill=2", "grpc-port=1", "mixed=1", "nothing=1", "max-model-len=x"]
)
def test_other_flags_of_the_clusters_are_refused(text):
    with pytest.raises(SettingsError, match=f"--engine-flag {text}: "):
        parse_engine_flag(text)


@pytest.mark.parametrize("text", ["0", "-1", "inf", "nan", "x", "1e9"])
def test_what_is_no_rate_is_refused(text):
    with pytest.raises(ValueError, match="is not a rate"):
        parse_rate(text)


def test_cores_are_those_that_the_process_may_use():
    allowed = sorted(os.sched_getaffinity(0))
    assert cores_of(0) == allowed
    assert cores_of(1) == allowed[:1]
    with pytest.raises(SettingsError, match="more than this process may use"):
        cores_of(len(allowed) + 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--goodput", "ttft:1", "--slo-scale", "ttft:2"], "not both"),
        (["--own-unloaded"], "needs --at-rates"),
        (["--own-unloaded", "--at-rates", "1", "--goodput", "ttft:2"], "limits that are multiples"),
        (["--dataset-name", "azure"], "needs a trace: --dataset-path"),
        (["--dataset-path", __file__], "--dataset-path is of a data set that is a file"),
        (["--dataset-name", "azure", "--dataset-path", __file__, "--burstiness", "9"], "--burstiness 9 is of random"),
        (["--kinds", "colocated,pie"], "'pie' is none of colocated, split, auto, custom, peer"),
        (["--splits", "1P"], "not of the form"),
    ],
)
def test_flags_that_make_no_sense_are_refused_before_anything_starts(tmp_path, arguments, message):
    result = CliRunner().invoke(main, ["bench", "compare", str(write_fake_model(tmp_path)), *arguments])
    assert result.exit_code == 2
    assert message in result.output


def test_a_comparison_without_contenders_is_refused(tmp_path):
    result = CliRunner().invoke(compare_command, [str(write_fake_model(tmp_path)), "--kinds", "peer"])
    assert isinstance(result.exception, SettingsError)
    assert str(result.exception).startswith("nobody takes part")


def test_the_longest_request_is_one_that_all_can_take(tmp_path):
    model = LocalModel(write_fake_model(tmp_path, max_position_embeddings=512), "fake")
    assert served_by_all(model, None, []) == ServedModel("fake", 512, VOCAB_SIZE)
    peers = [ServedModel("peer", 300, None), ServedModel("peer", None, None)]
    assert served_by_all(model, 400, peers).max_model_len == 300


def test_prompts_of_a_probe_begin_alike_where_that_is_wanted():
    data = Dataset(random_input_len=20, random_output_len=4, random_prefix_len=30)
    workload = Workload(data, ServedModel("", 1000, 1000))
    loads = [workload.load(4.0, 50, seed) for seed in (1, 2)]
    assert [len({each.prompt[:30] for each in load}) for load in loads] == [1, 1]
    assert {len(each.prompt) for load in loads for each in load} == {50}
    assert loads[0][0].prompt[:30] != loads[1][0].prompt[:30]  # no probe finds the KV of another


def test_a_load_is_the_same_for_the_same_seed_and_lasts_as_its_rate_says():
    workload = Workload(Dataset(random_input_len=20, random_output_len=4), ServedModel("", 1000, 1000))
    load = workload.load(4.0, 50, seed=1)
    assert load == workload.load(4.0, 50, seed=1)
    assert load[-1].send_at_s == pytest.approx(50 / 4)
    assert not {each.prompt for each in load} & {each.prompt for each in workload.load(4.0, 50, seed=2)}
    faster = workload.load(8.0, 50, seed=1)
    assert [each.prompt for each in faster] == [each.prompt for each in load]
    assert [each.send_at_s for each in faster] == pytest.approx([each.send_at_s / 2 for each in load])


def test_loads_are_clipped_to_what_all_can_take():
    workload = Workload(Dataset(random_input_len=200, random_output_len=100), ServedModel("", 64, 1000))
    assert {len(each.prompt) + each.output_tokens for each in workload.load(1.0, 5, seed=0)} == {64}


def test_the_share_that_is_clipped_is_known(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *AZURE_ROWS]))
    shares = [
        Workload(Dataset("azure", str(path)), ServedModel("", most, 1000)).clipped_share()
        for most in (None, 124, 123, 115, 64)
    ]
    assert shares == [0, 0, 1 / 8, 5 / 8, 1]  # 110, 112, ... 124 tokens
    data = Dataset(random_input_len=60, random_output_len=5)
    assert [Workload(data, ServedModel("", most, 1000)).clipped_share() for most in (65, 64)] == [0, 1]


def test_a_trace_is_stretched_to_the_rate_and_its_seed_chooses_the_stretch(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *AZURE_ROWS]))
    workload = Workload(Dataset("azure", str(path)), ServedModel("", 1000, 1000))
    load = workload.load(0.5, 4, seed=0)
    assert [each.send_at_s for each in load] == pytest.approx([0, 2, 4, 6])
    lengths = {tuple(len(each.prompt) for each in workload.load(0.5, 4, seed)) for seed in range(40)}
    assert lengths == {tuple(range(100 + first, 104 + first)) for first in range(5)}
    assert len(workload.load(0.5, 100, seed=0)) == 8  # all that there are
    with pytest.raises(BenchError, match="cannot be read"):
        Workload(Dataset("azure", str(tmp_path / "none.csv")), ServedModel("", 1000, 1000))


def test_seeds_differ_by_rate_and_number_and_are_the_same_every_time():
    seeds = {seed_of(base, rate, number) for base in (0, 1) for rate in (0.0, 1.0, 1.5) for number in range(3)}
    assert len(seeds) == 18
    assert seed_of(0, 1.5, 2) == seed_of(0, 1.5, 2)


async def compare(model, folder, *targets, words=()):
    """A comparison of these servers as peers, in a process of its own."""
    peers = [word for number, target in enumerate(targets) for word in ("--peer", f"{number}={target.address}")]
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "splitserve", "bench", "compare", str(model), "--kinds", "peer", *peers),
        *("--goodput", "ttft:60000", "--at-rates", "50,100", "--num-prompts", "5", "--seconds", "0"),
        *("--random-input-len", "9", "--random-output-len", "2", "--save-dir", str(folder), *words),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@pytest.mark.nightly
async def test_a_comparison_that_was_killed_goes_on_with_what_is_missing(tmp_path):
    model, folder = write_fake_model(tmp_path / "model"), tmp_path / "saved"
    is_held, goes_on = asyncio.Event(), asyncio.Event()

    async def hold(key):
        if len(third.order) > 8 + 2:  # within its first load, after the warm-up
            is_held.set()
            await goes_on.wait()

    first, second, third = Script(), Script(), Script(hold=hold)
    async with http_server(first) as a, http_server(second) as b, http_server(third) as c:
        killed = await compare(model, folder, a, b, c)
        await is_held.wait()
        killed.kill()
        await killed.communicate()
        assert len(list((folder / "probes").glob("*.json"))) == 2
        goes_on.set()
        asked = [len(each.order) for each in (first, second)]
        resumed = await compare(model, folder, a, b, c, words=["--json"])
        output, errors = await resumed.communicate()
        assert resumed.returncode == 0, errors.decode()
        assert "saved loads: 2; only what is missing is measured" in errors.decode()
        assert [len(each.order) for each in (first, second)] == [number + 8 + 5 for number in asked]  # the other rate
        assert "peer 2, 50 req/s" in errors.decode()
        everything = [len(each.order) for each in (first, second, third)]
        again = await compare(model, folder, a, b, c, words=["--json"])
        assert (await again.communicate())[0] == output
        assert [len(each.order) for each in (first, second, third)] == everything
        other = await compare(model, folder, a, b, c, words=["--seed", "1"])
        _, errors = await other.communicate()
    assert other.returncode == 2
    assert "holds a comparison of other arguments or code: its bench.seed is 0, not 1;" in errors.decode()
    probes = json.loads(output)["contenders"][2]["probes"]
    assert [(probe["num_good"], probe["is_repeated"]) for probe in probes] == [(5, True), (5, False)]
    assert not any("ttft_ms" in seen.asked for script in (first, second, third) for seen in script.seen.values())


def asked_of(folder, *contenders, save_dir=None):
    """Of 5 requests at one rate, all of which are good."""
    bench = CompareBench(
        criteria=(Limits(ttft_s=60.0),),
        send_limits=False,
        own_unloaded=False,
        attainment=0.9,
        tolerance=0.1,
        max_probes=1,
        first_rate=None,
        at_rates=(50.0,),
        num_prompts=5,
        seconds=0.0,
        request_timeout_s=60.0,
        seed=0,
    )
    dataset = Dataset(random_input_len=9, random_output_len=2)
    model, cores = LocalModel(folder, "model"), sorted(os.sched_getaffinity(0))
    return CompareOptions(
        model, cores, {}, contenders, colocated(1, len(cores)), dataset, bench, (), save_dir, as_json=True
    )


def test_a_comparison_does_not_go_on_with_other_weights_or_kernels(tmp_path, monkeypatch):
    one, other = (
        write_fake_model(tmp_path / name / "model", num_layers=layers) for name, layers in (("a", 2), ("b", 3))
    )
    monkeypatch.delenv("SPLITSERVE_NATIVE", raising=False)
    saved = tmp_path / "saved"
    Cells(saved, asked_of(one).arguments())
    with pytest.raises(SettingsError, match="other arguments or code: its model_files is "):
        Cells(saved, asked_of(other).arguments())
    Cells(saved, asked_of(one).arguments())
    (one / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(SettingsError, match="other arguments or code: its model_files is "):
        Cells(saved, asked_of(one).arguments())
    (one / "model.safetensors").unlink()
    monkeypatch.setenv("SPLITSERVE_NATIVE", "off")
    with pytest.raises(SettingsError, match="other arguments or code: its kernels is , not off;"):
        Cells(saved, asked_of(one).arguments())


async def test_what_was_found_is_told_before_it_turns_out_that_it_cannot_be_saved(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("splitserve_bench.compare.arena.run_load", run_load_here)
    model, folder = write_fake_model(tmp_path / "model"), tmp_path / "saved"
    (folder / "attainment.png").mkdir(parents=True)
    async with http_server(Script()) as target:
        with pytest.raises(BenchError, match="saved cannot be written to: Is a directory"):
            await compare_contenders(asked_of(model, PeerContender("peer a", target.address), save_dir=folder))
    (found,) = json.loads(capsys.readouterr().out)["contenders"]
    assert (found["name"], found["probes"][0]["num_good"]) == ("peer a", 5)


def test_it_has_a_help_text():
    result = CliRunner().invoke(compare_command, ["--help"])
    assert result.exit_code == 0
    assert "--slo-scale" in click.unstyle(result.output)
