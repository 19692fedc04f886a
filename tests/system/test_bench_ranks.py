"""`splitserve bench ranks` with the clusters that it starts: a model is divided, and answers alike."""

import json

import pytest
from click.testing import CliRunner

from splitserve_bench.commands import ranks
from tests.tiny_models import write_tiny_model

ARGUMENTS = ["--prompt-tokens", "60", "--prompts", "2", "--output-tokens", "24", "--repeats", "2"]
ARGUMENTS += ["--dtype", "float32", "--json"]


@pytest.mark.nightly
def test_a_model_in_stages_and_over_ranks(tmp_path):
    model = write_tiny_model(tmp_path / "model", num_key_value_heads=2)
    result = CliRunner().invoke(ranks, [str(model), *ARGUMENTS])
    assert result.exit_code == 0, result.output
    whole, stages, divided = json.loads(result.stdout)
    assert [each["division"] for each in (whole, stages, divided)] == [
        {"num_stages": 1, "tp_size": 1},
        {"num_stages": 2, "tp_size": 1},
        {"num_stages": 1, "tp_size": 2},
    ]
    assert all(each["num_equal"] == each["num_answers"] == 2 for each in (whole, stages, divided))
    assert [len(each["weight_bytes"]) for each in (whole, stages, divided)] == [1, 2, 2]
    assert all(max(each["weight_bytes"]) < whole["weight_bytes"][0] for each in (stages, divided))
    assert all(each["lone_prompt_s"] > 0 < each["tpot_s"] for each in (whole, stages, divided))
