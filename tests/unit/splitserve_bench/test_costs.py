"""Costs of the tiny model, worked out by hand.

It has 3 layers of 4 heads and 2 KV heads of 12, hidden size 48, inner size 80 and 260 token ids.
"""

import pytest
import transformers

from serving_core.model_config import read_model_config
from splitserve_bench.engine.costs import body_parameters, decode_flops, decode_kv_bytes, head_parameters, prompt_flops
from splitserve_bench.engine.random_models import SHAPES, Shape, write_random_model
from tests.tiny_models import write_tiny_model

LAYER = 48 * 48 + 2 * 48 * 24 + 48 * 48 + 3 * 48 * 80  # q, k and v, o, gate and up and down
TINY = Shape("Qwen3ForCausalLM", "qwen3", 48, 3, 4, 2, 16, 80, 260, 1024)


@pytest.fixture
def config(tmp_path):
    return read_model_config(write_tiny_model(tmp_path))


def test_parameters_are_those_of_the_matrices(config):
    assert body_parameters(config) == 3 * LAYER == 55_296
    assert head_parameters(config) == 48 * 260 == 12_480


def test_a_prompt_takes_the_head_once_and_half_of_its_square(config):
    assert prompt_flops(config, 10) == 2 * 55_296 * 10 + 2 * 12_480 + 2 * 10**2 * 48 * 3 == 1_159_680


def test_a_window_bounds_what_a_prompt_sees(tmp_path):
    config = read_model_config(write_tiny_model(tmp_path, "mistral", sliding_window=4))
    # Without a window 10^2 / 2 token pairs a layer; with it 6 tokens less see what is more than 4 behind: 6^2 / 2.
    assert prompt_flops(config, 10) == 2 * 55_296 * 10 + 2 * 12_480 + 2 * (10**2 - 6**2) * 48 * 3
    assert prompt_flops(config, 4) == 2 * 55_296 * 4 + 2 * 12_480 + 2 * 4**2 * 48 * 3
    assert decode_flops(config, [3, 9]) - decode_flops(config, [3, 4]) == 0


def test_a_decode_step_sees_all_contexts(config):
    assert decode_flops(config, [5, 9]) == 2 * (55_296 + 12_480) * 2 + 4 * 48 * 3 * 14 == 279_168


def test_a_decode_step_reads_the_kv_of_all_contexts(config):
    in_float32 = 2 * 2 * 12 * 4  # K and V, heads, head size, bytes
    assert decode_kv_bytes(config, config.kv_layout(16, "float32"), [5, 9]) == in_float32 * 3 * 14 == 8_064
    in_int8 = 2 * (2 * 12 + 2 * 4 / 16)  # a float32 scale of each head for 16 tokens
    assert decode_kv_bytes(config, config.kv_layout(16, "int8"), [5, 9]) == in_int8 * 3 * 14 == 2_058


@pytest.mark.parametrize(
    ("name", "millions"),
    [("qwen3-0.6b", 596), ("llama-3.2-1b", 1236), ("smollm2-135m", 134)],  # as published, less norms
)
def test_shapes_have_as_many_parameters_as_their_models(name, millions):
    shape = SHAPES[name]
    assert _num_parameters(shape) // 10**6 in (millions - 1, millions)


def test_a_random_model_is_one_that_transformers_can_read(tmp_path):
    write_random_model(tmp_path, TINY)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 2)
    assert matrices == _num_parameters(TINY)
    config = read_model_config(tmp_path)
    assert body_parameters(config) + head_parameters(config) == matrices
    assert (config.dtype, config.tie_word_embeddings) == ("bfloat16", True)


def _num_parameters(shape):
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer = shape.hidden_size * (2 * heads + 2 * kv_heads + 3 * shape.intermediate_size)
    return shape.num_layers * layer + shape.vocab_size * shape.hidden_size
