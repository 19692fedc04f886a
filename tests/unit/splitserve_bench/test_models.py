"""Which models the benches take, asked as a user asks."""

import pytest
from click.testing import CliRunner

from splitserve.cli import main
from tests.tiny_models import write_tiny_llama

MEASURED = (
    ["doctor"],
    *(["bench", name] for name in ("engine", "weights", "kv-cache", "cluster", "reuse", "overlap", "compare")),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    reader = {"architectures": ["Qwen3Model"], "model_type": "qwen3", "head_dim": 12}
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "reader", **reader)


@pytest.mark.parametrize("command", MEASURED, ids=" ".join)
def test_a_model_that_makes_embeddings_is_refused_before_anything_is_started(folder, command):
    result = CliRunner().invoke(main, [*command, str(folder)])
    assert result.exit_code == 1
    said = "reader makes embeddings, and what is measured here is a model that writes answers"
    assert result.output.splitlines()[-1] == f"Error: {said}"
