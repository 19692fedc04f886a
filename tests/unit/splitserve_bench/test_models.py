"""Which models the benches take, asked as a user asks; and models of random weights."""

from dataclasses import replace

import pytest
from click.testing import CliRunner
from tokenizers import Tokenizer

from serving_core.errors import SettingsError
from serving_core.model_files.config import read_model_config
from splitserve.cli import main
from splitserve_bench.engine.costs import body_parameters, head_parameters
from splitserve_bench.models import SHAPES, Shape, shape_of, write_random_model
from tests.tiny_models import write_tiny_llama

TINY = Shape("Qwen3ForCausalLM", "qwen3", 48, 3, 4, 2, 16, 80, 260, 1024)
MIXTURE = Shape("Qwen3MoeForCausalLM", "qwen3_moe", 48, 3, 4, 2, 16, 80, 260, 1024, 6, 2, 24)

MEASURED = (
    ["doctor"],
    *(["bench", name] for name in ("engine", "compare")),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    reader = {"architectures": ["Qwen3Model"], "model_type": "qwen3", "head_dim": 12}
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "reader", **reader)


@pytest.mark.parametrize("command", MEASURED, ids=" ".join)
def test_a_model_that_makes_embeddings_is_refused_before_anything_is_started(folder, command):
    result = CliRunner().invoke(main, [*command, str(folder)])
    assert result.exit_code == 1
    said = "reader makes embeddings, and what is measured here is a model that generates text"
    assert result.output.splitlines()[-1] == f"Error: {said}"


# ---- random weights ----


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("qwen3-0.6b", 596),
        ("llama-3.2-1b", 1236),
        ("smollm2-135m", 134),
        ("qwen3-30b-a3b", 30_532 - 311),  # whose head is tied here
    ],  # as published, less norms
)
def test_shapes_have_as_many_parameters_as_their_models(name, millions):
    assert SHAPES[name].num_parameters // 10**6 in (millions - 1, millions)


@pytest.mark.nightly
@pytest.mark.parametrize("shape", [TINY, MIXTURE], ids=lambda shape: shape.model_type)
def test_a_random_model_is_one_that_transformers_can_read(shape, tmp_path):
    import transformers

    write_random_model(tmp_path, shape)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() > 1)
    assert matrices == shape.num_parameters
    config = read_model_config(tmp_path)
    not_taken = 3 * 3 * 48 * 24 * (shape.num_experts - shape.num_chosen)
    assert body_parameters(config) + head_parameters(config) == matrices - not_taken
    assert (config.dtype, config.tie_word_embeddings) == ("bfloat16", True)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("w7 w259 w0").ids == [7, 259, 0]


def test_only_what_fits_into_memory_is_written(monkeypatch):
    monkeypatch.setattr("splitserve_bench.models.available_bytes", lambda: 10 * 2**30)
    assert shape_of("qwen3-30b-a3b", 4) == replace(SHAPES["qwen3-30b-a3b"], num_layers=4)
    with pytest.raises(SettingsError, match=r"48 layers of qwen3-30b-a3b take 56\.\d GiB, and 10\.0 GiB of memory are"):
        shape_of("qwen3-30b-a3b", 0)
    with pytest.raises(SettingsError, match="--layers 49: qwen3-30b-a3b has 48"):
        shape_of("qwen3-30b-a3b", 49)
