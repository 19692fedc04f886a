"""Costs of the tiny model, worked out by hand.

It has 3 layers of 4 heads and 2 KV heads of 12, hidden size 48, inner size 80 and 260 token ids.
"""

import pytest

from engine.build import build_engine
from serving_core.model_files.config import read_model_config
from serving_core.settings import EngineSettings
from splitserve_bench.engine.costs import (
    body_parameters,
    decode_flops,
    decode_kv_bytes,
    head_parameters,
    prompt_flops,
)
from splitserve_bench.engine.measure import read_weight_bytes
from tests.tiny_models import write_tiny_llama
from tests.transformers_models import write_transformers_model

LAYER = 48 * 48 + 2 * 48 * 24 + 48 * 48 + 3 * 48 * 80  # q, k and v, o, gate and up and down
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}


@pytest.fixture
def config(tmp_path):
    return read_model_config(write_tiny_llama(tmp_path))


def test_parameters_are_those_of_the_matrices(config):
    assert body_parameters(config) == 3 * LAYER == 55_296
    assert head_parameters(config) == 48 * 260 == 12_480


def test_a_prompt_takes_the_head_once_and_half_of_its_square(config):
    assert prompt_flops(config, 10) == 2 * 55_296 * 10 + 2 * 12_480 + 2 * 10**2 * 48 * 3 == 1_159_680


def test_a_window_bounds_what_a_prompt_sees(tmp_path):
    config = read_model_config(write_tiny_llama(tmp_path, **MISTRAL, sliding_window=4))
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


@pytest.mark.nightly
def test_a_mixture_costs_what_its_tokens_take(tmp_path):
    attention, dense = 2 * 48 * 48 + 2 * 48 * 24, 3 * 48 * 80
    fields = {"mlp_only_layers": [1], "num_key_value_heads": 2, "head_dim": 12}
    config = read_model_config(write_transformers_model(tmp_path, "qwen2_moe", num_hidden_layers=3, **fields))
    mixture = 6 * 48 + 2 * 3 * 48 * 24 + 48 + 3 * 48 * 40  # gate, two of six experts, the shared one and its gate
    assert body_parameters(config) == 3 * attention + dense + 2 * mixture
    assert config.experts.share_taken(1) == pytest.approx(2 / 6)
    assert config.experts.share_taken(3) == pytest.approx(1 - (4 / 6) ** 3)


@pytest.mark.nightly
def test_experts_that_no_token_takes_are_not_read(tmp_path):
    loaded = build_engine(EngineSettings(model=str(write_transformers_model(tmp_path, "mixtral")), num_kv_blocks=8))
    one, many = read_weight_bytes(loaded, 1), read_weight_bytes(loaded, 1000)
    experts = 4 * 6 * 3 * 48 * 80 * 4  # layers, experts, projections, bytes
    assert many - one == pytest.approx(4 / 6 * experts, rel=0.01)
