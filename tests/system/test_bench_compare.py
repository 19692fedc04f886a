"""`splitserve bench compare` with real clusters that it starts itself, and one that runs already as its peer."""

import json
import os

import pytest
from click.testing import CliRunner

from splitserve_bench.compare.command import compare_command
from tests.tiny_models import write_fake_model

TRANSFER_PHASES = ("kv_alloc_s", "kv_transfer_s", "decode_queue_s")
NUM_PROMPTS, OUTPUT_TOKENS = 6, 5
CONTENDERS = {
    "colocated 1x2": "colocated",
    "colocated 2x1": "colocated",
    "split 1P+1D": "split",
    "auto 2x1": "auto",
    "small": "custom",
    "peer own": "peer",
}

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a split needs two CPUs"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_fake_model(tmp_path_factory.mktemp("model") / "fake")


@pytest.fixture(scope="module")
def peer_url(start_cluster, model):
    return f"{start_cluster(model, http=True).url}/v1"


def test_each_contender_answers_the_same_requests(model, peer_url, tmp_path):
    arguments = [str(model), "--cores", "2", "--kinds", "colocated,split,auto,custom,peer", "--splits", "1P+1D"]
    arguments += ["--contender", "small=1P+1B max-num-seqs=1"]
    arguments += ["--peer", f"own={peer_url}", "--engine-flag", "block-size=8"]
    arguments += ["--at-rates", "20", "--num-prompts", str(NUM_PROMPTS), "--seconds", "0"]
    arguments += ["--random-input-len", "40", "--random-output-len", str(OUTPUT_TOKENS), "--random-range-ratio", "0.5"]
    arguments += ["--goodput", "ttft:20000", "tpot:20000", "--json", "--save-dir", str(tmp_path)]
    result = CliRunner().invoke(compare_command, arguments)
    assert result.exit_code == 0, result.output
    compared = json.loads(result.stdout)
    assert {each["name"]: each["kind"] for each in compared["contenders"]} == CONTENDERS
    for contender in compared["contenders"]:
        assert contender["failure"] == ""
        (probe,) = contender["probes"]
        assert (probe["rate"], probe["num_good"], probe["num_total"]) == (20.0, NUM_PROMPTS, NUM_PROMPTS)
        assert contender["result"]["best_rate"] == 20.0
    assert compared["verdict"][0].startswith("No winner: ")
    assert json.loads((tmp_path / "comparison.json").read_text()) == compared
    assert (tmp_path / "attainment.png").stat().st_size > 0

    probes = [json.loads(path.read_text()) for path in sorted((tmp_path / "probes").iterdir())]
    assert [probe["contender"] for probe in probes] == sorted(CONTENDERS)
    told = {(probe["contender"], each["told_ttft_ms"]) for probe in probes for each in probe["requests"]}
    assert told == {(name, None if kind == "peer" else 20000) for name, kind in CONTENDERS.items()}
    asked = {
        tuple((each["scheduled_s"], each["num_prompt_tokens"], each["num_output_tokens"]) for each in probe["requests"])
        for probe in probes
    }
    assert len(asked) == 1  # the same requests, due at the same moments
    assert all(each["timeline"] is not None for probe in probes for each in probe["requests"])
    handed_over_s = {
        probe["contender"]: sum(each["timeline"][phase] for each in probe["requests"] for phase in TRANSFER_PHASES)
        for probe in probes
    }
    assert handed_over_s["split 1P+1D"] > 0
    assert handed_over_s["peer own"] > 0
    colocated = [each for probe in probes if "colocated" in probe["contender"] for each in probe["requests"]]
    assert not any(each["timeline"]["kv_transfer_s"] for each in colocated)
    autos = [each["timeline"] for probe in probes if probe["contender"] == "auto 2x1" for each in probe["requests"]]
    assert all(each["ttft_margin_s"] > 0 for each in autos), "each was planned for, with its limits"
    kept = [(each["loser"], each["keeper"], each["num_total"], each["num_lost"]) for each in compared["causes"]]
    fixed = ("colocated 1x2", "colocated 2x1", "split 1P+1D")
    assert kept == [("auto 2x1", name, NUM_PROMPTS, 0) for name in fixed]
    logs = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert logs == ["001-colocated-1x2", "002-colocated-2x1", "003-split-1P+1D", "004-auto-2x1", "005-small"]

    again = CliRunner().invoke(compare_command, arguments)
    assert "saved loads: 6;" in again.output
    assert json.loads(again.stdout) == compared
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == logs  # nothing was started
