"""What a node can be told of a draft model, and what is refused by name before anything is loaded."""

import json

import pytest

from engine.engine import Engine
from serving_core.errors import SettingsError
from serving_core.flags import build
from serving_core.needs import needs_of
from serving_node.draft_model import check_draft_model
from serving_node.settings import NodeSettings
from tests.tiny_models import VOCAB_SIZE, write_fake_model, write_tiny_embedder, write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), dtype="bfloat16")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("small"), dtype="bfloat16", num_hidden_layers=1)


def checked(model, **values):
    return check_draft_model(build(NodeSettings, {"model": str(model), "speculation": "draft", **values}))


def test_its_engine_is_like_the_nodes_with_a_pool_of_its_own(model, small):
    draft, config = checked(
        model,
        speculative_model=str(small),
        speculative_quantization="int8",
        speculative_kv_cache_memory_bytes=100_000,
        block_size=8,
        kv_cache_memory_bytes=10**9,
        device="cpu",
    )
    engine, needs = Engine(draft), needs_of(draft, config)
    assert (engine.layout.block_size, engine.description["quantization"]) == (8, "int8")
    assert engine.kv_pool_bytes == needs.pool_bytes <= 100_000
    assert needs.weight_bytes <= engine.weight_bytes


@pytest.mark.parametrize("speculation", ["off", "lookup"])
def test_without_drafts_there_is_none(model, small, speculation):
    assert checked(model, speculation=speculation) is None
    with pytest.raises(SettingsError, match=f"--speculation {speculation}: there is a --speculative-model, which"):
        checked(model, speculation=speculation, speculative_model=str(small))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"speculative_model": ""}, "--speculation draft needs the folder of a smaller model: --speculative-model"),
        ({"tensor_parallel_size": 2}, "one rank, and --tensor-parallel-size is 2 and --pipeline-parallel-size 1"),
        ({"pipeline_parallel_size": 3}, "one rank, and --tensor-parallel-size is 1 and --pipeline-parallel-size 3"),
        ({"speculative_kv_cache_memory_bytes": 100}, "--speculative-kv-cache-memory-bytes 100 holds no block of "),
    ],
)
def test_what_cannot_be_is_refused_by_name(model, small, values, sentence):
    with pytest.raises(SettingsError, match=sentence):
        checked(model, **{"speculative_model": str(small), **values})


def test_both_have_the_same_tokens(model, tmp_path):
    folder = write_fake_model(tmp_path)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "vocab_size": 300}))
    with pytest.raises(SettingsError, match=f"vocabulary of 300 tokens, and the model one of {VOCAB_SIZE}"):
        checked(model, speculative_model=str(folder))


def test_one_that_makes_embeddings_writes_nothing(model, tmp_path):
    folder = write_tiny_embedder(tmp_path, dtype="bfloat16")
    with pytest.raises(SettingsError, match="--speculative-model makes embeddings"):
        checked(model, speculative_model=str(folder))
