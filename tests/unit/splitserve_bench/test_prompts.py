"""`splitserve bench prompts`, with a tiny model; and prompts that are divided over nodes."""

import json
import re

import pytest
from click.testing import CliRunner

from serving_core.model_config import read_model_config
from splitserve.cli import main
from splitserve_bench.engine import divided_prompts, machine, quantized_prompts
from splitserve_bench.engine.costs import prompt_flops
from tests.tiny_models import write_fake_model, write_tiny_llama
from tests.unit.engine.native_kit import needs_library

SIZES = ("--prompts", "1x20,2x9", "--repeats", "2", "--threads", "1")


@pytest.fixture
def run(monkeypatch):
    """With a short look at the machine."""
    monkeypatch.setattr(quantized_prompts, "CPU_SHAPES", ((32, 64, 64),))
    monkeypatch.setattr(machine, "SAMPLE_S", 0.0)
    return lambda *arguments: CliRunner().invoke(main, ["bench", "prompts", *map(str, arguments)])


def test_rows_for_each_size_and_kind_of_weights(tmp_path, run):
    folder = write_tiny_llama(tmp_path, dtype="bfloat16")
    result = run(folder, *SIZES, "--quantization", "w8a8", "--quantization", "int8", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["prompts"]
    sizes = [(1, 20)] * 3 + [(2, 9)] * 3
    assert [(row["prompts"]["count"], row["prompts"]["num_tokens"]) for row in rows] == sizes
    assert [row["quantization"] for row in rows] == ["none", "w8a8", "int8"] * 2
    for row in rows:
        assert row["ratio"] > 0
        assert row["quantization"] != "none" or row["ratio"] == 1
        num_tokens = row["prompts"]["num_tokens"]
        flops_per_s = prompt_flops(read_model_config(folder), num_tokens) / num_tokens * row["tokens_per_s"]
        assert row["product_share"] == pytest.approx(flops_per_s / row["product_flops_per_s"])


def test_the_table(tmp_path, run):
    result = run(write_tiny_llama(tmp_path, dtype="bfloat16"), *SIZES)
    assert result.exit_code == 0, result.output
    assert "w8a8" in result.stdout
    assert "share of these" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("somewhere", "--shape", "smollm2-135m"), "give a MODEL or --shape, not both"),
        (("somewhere", "--layers", "2"), "--layers goes with --shape"),
        (("somewhere", "--quantization", "none"), "'none' is not one of"),
    ],
)
def test_what_does_not_go_together(arguments, sentence, run):
    result = run(*arguments)
    assert result.exit_code == 2
    assert sentence in result.output


def test_prompts_that_are_too_long_and_a_model_without_weights(tmp_path, run):
    result = run(write_tiny_llama(tmp_path / "tiny"), "--prompts", "1x9999")
    assert result.exit_code == 2
    assert "9999 tokens are more than the model's" in result.output
    result = run(write_fake_model(tmp_path / "fake"))
    assert result.exit_code == 2
    assert "the fake model computes nothing that could be measured" in result.output


# ---- prompts that are divided over nodes, with hosts that are processes ----

ROW = re.compile(r"\| (\d+) \| (\d+) ms \| (\d+) ms \| \d+ ms \| \d+ ms \| equal \|")


@pytest.mark.nightly
@needs_library
def test_a_step_over_one_pool_and_over_two_nodes():
    arguments = "--shape smollm2-135m --layers 1 --tokens 1024 --chunk 70 --hosts 1 --repeats 1"
    given = CliRunner().invoke(divided_prompts.main, arguments.split(), catch_exceptions=False)
    rows = [match.groups() for line in given.output.splitlines() if (match := ROW.fullmatch(line))]
    assert [row[0] for row in rows] == ["1", "2"]
    assert all(int(step) >= int(attention) for _, step, attention in rows)
