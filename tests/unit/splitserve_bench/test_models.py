"""Which models the benches take, asked as a user asks."""

import json

import pytest
from click.testing import CliRunner

from splitserve.cli import main
from tests.tiny_models import write_tiny_model

MEASURED = (
    ["doctor"],
    *(["bench", name] for name in ("engine", "weights", "kv-cache", "cluster", "reuse", "overlap", "compare")),
)


@pytest.mark.parametrize("command", MEASURED, ids=" ".join)
def test_a_model_that_makes_embeddings_is_refused_before_anything_is_started(tmp_path, command):
    folder = write_tiny_model(tmp_path / "reader", "qwen3")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3Model"]}))
    result = CliRunner().invoke(main, [*command, str(folder)])
    assert result.exit_code == 1
    said = "reader makes embeddings, and what is measured here is a model that writes answers"
    assert result.output.splitlines()[-1] == f"Error: {said}"
