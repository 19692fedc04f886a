"""What an engine will need, against what a loaded one has; and weights that are not whole."""

import json

import pytest
from safetensors.torch import load_file, save_file

from engine.build import build_engine
from serving_core.errors import ModelError
from serving_core.layout import KVLayout
from serving_core.model_files.config import read_model_config
from serving_core.model_files.stored_tensors import stored_tensors
from serving_core.model_files.weight_files import INDEX_FILE
from serving_core.node.needs import check_settings, needs_of, num_blocks_for
from serving_core.settings import EngineSettings
from tests.tiny_models import write_fake_model, write_tiny_llama, write_tiny_model
from tests.transformers_models import write_transformers_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def sharded(tmp_path):
    folder = write_tiny_model(tmp_path / "sharded", max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("tie_word_embeddings", [False, True])
def test_whole_weights_and_the_pool_take_what_was_said(tmp_path, dtype, tie_word_embeddings):
    folder = write_tiny_model(tmp_path, tie_word_embeddings=tie_word_embeddings)
    settings = EngineSettings(model=str(folder), dtype=dtype, num_kv_blocks=7, device="cpu")
    needs = needs_of(settings, read_model_config(folder))
    stored = load_file(folder / "model.safetensors")
    element_bytes = 4 if dtype == "auto" else 2
    assert needs.weight_bytes == element_bytes * sum(tensor.numel() for tensor in stored.values())
    engine = build_engine(settings)
    assert (needs.pool_bytes, needs.weight_bytes <= engine.weight_bytes) == (engine.kv_pool_bytes, True)


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.5), ("int4", 0.3)])
def test_quantized_weights_take_at_least_what_was_said(folder, quantization, most):
    config = read_model_config(folder)
    settings = EngineSettings(model=str(folder), num_kv_blocks=7, device="cpu", quantization=quantization)
    weight_bytes = needs_of(settings, config).weight_bytes
    assert weight_bytes <= build_engine(settings).weight_bytes
    whole = needs_of(EngineSettings(model=str(folder), num_kv_blocks=7), config).weight_bytes
    assert weight_bytes < most * whole


@pytest.mark.parametrize(("tp_size", "num_heads"), [(1, 2), (2, 2), (3, 3)])
def test_the_pools_of_all_ranks_count(folder, tp_size, num_heads):
    """With more ranks than KV heads neighbours hold the same one."""
    settings = EngineSettings(model=str(folder), num_kv_blocks=7, tensor_parallel_size=tp_size)
    head_bytes = 2 * 3 * 16 * 12 * 4  # K and V, layers, tokens, elements, bytes
    assert needs_of(settings, read_model_config(folder)).pool_bytes == 7 * num_heads * head_bytes


@pytest.mark.parametrize(("tp_size", "num_blocks"), [(1, 7), (2, 12), (3, 18), (5, 36), (8, 36)])
def test_every_rank_has_as_many_blocks_as_fit_where_the_most_heads_are(tp_size, num_blocks):
    # 36 heads of a block fit; at most 5, 3, 2, 1 and 1 of the 5 heads are on a rank.
    layout = KVLayout.uniform(num_layers=1, num_kv_heads=5, head_dim=4, block_size=2, dtype="float32")
    head_bytes = 2 * 2 * 4 * 4  # K and V, tokens, elements, bytes
    fields = EngineSettings(kv_cache_memory_bytes=36 * head_bytes)
    assert num_blocks_for(fields, layout, tp_size) == num_blocks
    assert num_blocks_for(EngineSettings(num_kv_blocks=3), layout, tp_size) == 3


def test_the_pools_of_all_stages_count_as_that_of_one(folder):
    settings = EngineSettings(model=str(folder), num_kv_blocks=7, tensor_parallel_size=2, pipeline_parallel_size=3)
    alone = EngineSettings(model=str(folder), num_kv_blocks=7, tensor_parallel_size=2)
    config = read_model_config(folder)
    assert needs_of(settings, config) == needs_of(alone, config)


def test_every_rank_has_as_many_blocks_as_fit_where_the_most_layers_are():
    # 36 layers of a block fit; the largest of two stages has 4 of 7.
    layout = KVLayout.uniform(num_layers=7, num_kv_heads=1, head_dim=4, block_size=2, dtype="float32")
    settings = EngineSettings(kv_cache_memory_bytes=36 * 2 * 2 * 4 * 4, pipeline_parallel_size=2)
    assert num_blocks_for(settings, layout, 1) == 9


def test_every_rank_of_a_stage_holds_latents_whole(tmp_path):
    folder = write_transformers_model(tmp_path, "deepseek_v3")
    grid = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    settings = EngineSettings(model=str(folder), num_kv_blocks=7, block_size=16, **grid)
    config = read_model_config(folder)
    check_settings(settings, config, 2)
    # 4 layers, of which a rank has two; 20 + 6 numbers of 4 bytes.
    assert needs_of(settings, config).pool_bytes == 4 * 7 * 2 * 16 * (20 + 6) * 4


def test_the_fake_model_has_no_weights(tmp_path):
    settings = EngineSettings(model=str(write_fake_model(tmp_path)), num_kv_blocks=7)
    needs = needs_of(settings, read_model_config(tmp_path))
    assert (needs.weight_bytes, needs.pool_bytes) == (0, 7 * 2 * 2 * 16 * 2 * 4 * 4)


def test_the_tensors_of_several_files_are_those_of_one(folder, sharded):
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    for stored in (stored_tensors(folder), stored_tensors(sharded)):
        assert {name: tensor.shape for name, tensor in stored.items()} == shapes
        assert {tensor.dtype for tensor in stored.values()} == {"F32"}


@pytest.mark.parametrize("keep", [0, 5, 3000, -10])
def test_a_file_that_is_cut_short(tmp_path, keep):
    file = write_tiny_llama(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match="is not a whole safetensors file"):
        stored_tensors(tmp_path)


def test_a_tensor_that_is_not_where_the_index_says(sharded):
    name, file_name = next(iter(json.loads((sharded / INDEX_FILE).read_text())["weight_map"].items()))
    tensors = load_file(sharded / file_name)
    del tensors[name]
    save_file(tensors, sharded / file_name)
    with pytest.raises(ModelError, match=f"{name} is in {file_name}, and it is not"):
        stored_tensors(sharded)
