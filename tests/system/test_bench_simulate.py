"""`splitserve bench simulate`: a real cluster of the fake model and a simulated one, side by side."""

import dataclasses
import json
import subprocess
import sys

import pytest

from splitserve_bench.simulate.profile import (
    ControlProfile,
    CorridorProfile,
    NodeSizes,
    Profile,
    StepProfile,
    flat_grid,
)
from tests.tiny_models import write_fake_model, write_tokenizer

pytestmark = pytest.mark.nightly

DEADLINE_S = 240.0
STEP_S, TOKEN_S = 0.05, 0.002


@pytest.fixture
def model(tmp_path):
    """Its steps take so long that what a busy machine adds is little."""
    folder = write_fake_model(tmp_path / "fake")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "step_s": STEP_S, "token_s": TOKEN_S}))
    return folder


def profile():
    """As the fake model's own formula has it."""
    places = (1, 2, 512)
    steps = flat_grid(places, [STEP_S + TOKEN_S * place for place in places])
    sizes = NodeSizes(400, 16, 4096, 2, 512, 260, 512, 64, 256, 16)
    return Profile(
        "fake", 1, sizes, StepProfile(steps, steps, 0.0), CorridorProfile(0.001, 1e9), ControlProfile(0.002, 0.002)
    )


def run(model, path, *words):
    command = [sys.executable, "-m", "splitserve", "bench", "simulate", str(model), "--profile", str(path), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)


def test_both_serve_the_same_load(model, tmp_path):
    profile().save(tmp_path / "profile.json")
    words = ("--num-prompts", "6", "--random-input-len", "40", "--random-output-len", "8", "--request-rate", "2")
    done = run(model, tmp_path / "profile.json", *words, "--engine-flag", "num_kv_blocks=400", "--json")
    assert done.returncode == 0, done.stderr
    pairs = json.loads(done.stdout)
    assert [pair["fleet"] for pair in pairs] == ["1P+1D", "2B"]
    for pair in pairs:
        assert pair["real"]["attainment"] == pair["simulated"]["attainment"] == 1.0
        # No node is quicker than its model, though a busy client may hear of a first token late; how much slower it is,
        # is the machine's affair.
        assert pair["real"]["tpot_s"] >= 0.8 * STEP_S
        assert pair["simulated"]["tpot_s"] >= STEP_S
        assert pair["tpot_difference"] == pytest.approx(pair["simulated"]["tpot_s"] / pair["real"]["tpot_s"] - 1)


def test_texts_are_measured_by_the_tokenizer_of_the_model(model, tmp_path):
    write_tokenizer(model)
    profile().save(tmp_path / "profile.json")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello", "output_tokens": 3}')
    words = ("--dataset-name", "custom", "--dataset-path", str(tmp_path / "prompts.jsonl"))
    done = run(model, tmp_path / "profile.json", *words, "--engine-flag", "num_kv_blocks=400", "--json")
    assert done.returncode == 0, done.stderr
    assert [pair["real"]["attainment"] for pair in json.loads(done.stdout)] == [1.0, 1.0]


def test_a_profile_of_another_model_is_refused(model, tmp_path):
    dataclasses.replace(profile(), model="other").save(tmp_path / "profile.json")
    done = run(model, tmp_path / "profile.json")
    assert done.returncode == 2
    assert "--profile is of other, not of fake" in done.stderr
