"""--batch-invariant on CUDA: a prompt in many histories, to the bit. tests/unit/engine/test_bits.py plays the same on a
CPU, where torch computes."""

import pytest

from engine.attention.tiled import TiledAttention
from engine.attention.varlen import VarlenAttention
from engine.build import build_engine
from engine.cuda_graphs import StaticDecode
from serving_core.settings import EngineSettings
from tests.tiny_models import write_tiny_model
from tests.unit.engine.histories_kit import check_histories, num_blocks_for

NUM_TOKENS = 530
DTYPES = ["float32", "bfloat16", "float16"]
MODELS = {  # grouped heads with a window within the prompt, and biases; single heads of an odd size; one key head
    "llama": {"head_dim": 64},
    "mistral": {"sliding_window": 261, "head_dim": 64},
    "qwen2": {"use_sliding_window": True, "sliding_window": 37, "max_window_layers": 1},
    "qwen3": {"head_dim": 128, "num_attention_heads": 7, "num_key_value_heads": 1, "tie_word_embeddings": True},
}


def load(folder, family, block_size, **fields):
    write_tiny_model(folder, family, seed=3, **MODELS[family])
    num_blocks = num_blocks_for(NUM_TOKENS, block_size)
    sizes = {"block_size": block_size, "num_kv_blocks": num_blocks, "max_model_len": 1024}
    return build_engine(EngineSettings(model=str(folder), device="cuda", batch_invariant=True, **sizes, **fields))


@pytest.mark.parametrize(("block_size", "enforce_eager"), [(16, False), (256, False), (256, True)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", MODELS)
def test_no_history_changes_a_bit(tmp_path, family, dtype, block_size, enforce_eager):
    engine = load(tmp_path, family, block_size, dtype=dtype, enforce_eager=enforce_eager)
    assert engine.is_batch_invariant, "the log says what is not kept"
    assert engine.attention.name in ("varlen_attn", "triton", "tiled")
    if enforce_eager or isinstance(engine.attention, TiledAttention):
        assert engine.program is None
    check_histories(engine, NUM_TOKENS)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_nor_with_weights_in_few_bits(tmp_path, quantization):
    engine = load(tmp_path, "llama", 16, dtype="bfloat16", quantization=quantization)
    assert engine.is_batch_invariant
    check_histories(engine, NUM_TOKENS)


@pytest.mark.parametrize("family", MODELS)
def test_steps_are_graphs_where_varlen_attn_keeps_bits(tmp_path, family):
    engine = load(tmp_path, family, 256, dtype="bfloat16")
    if not isinstance(engine.attention, VarlenAttention):
        pytest.skip("varlen_attn does not take this pool here, or does not keep bits; the log says which")
    assert isinstance(engine.program, StaticDecode), "graphs have other bits; the log says by how much"


@pytest.mark.parametrize("dtype", DTYPES)
def test_tiled_attention_keeps_bits_where_it_is_not_the_fastest(tmp_path, dtype, monkeypatch):
    monkeypatch.setattr(
        "engine.numerics.batch_invariant_attentions",
        lambda attention, num_heads: [TiledAttention(attention.pool, num_heads)],
    )
    engine = load(tmp_path, "mistral", 256, dtype=dtype)
    assert engine.is_batch_invariant
    check_histories(engine, NUM_TOKENS)


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8_e4m3"])
def test_keys_and_values_in_8_bits_are_not_promised(tmp_path, kv_cache_dtype):
    assert not load(tmp_path, "llama", 16, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype).is_batch_invariant
