"""What is read of the config.json of mixtures of experts."""

import json

import pytest
import transformers

from serving_core.errors import ModelError
from serving_core.model_files.config import read_model_config
from serving_core.model_files.differences import Experts
from serving_core.model_files.rope import DefaultRope
from tests.unit.serving_core.test_model_config import LLAMA

MIXTRAL = {
    **LLAMA,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.02,
}
OLMOE = {
    **LLAMA,
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "clip_qkv": None,
    "norm_topk_prob": False,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN3 = {  # with the names of the published 30B-A3B
    **LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 16,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "use_sliding_window": False,
}
QWEN2 = {
    **QWEN3,
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "shared_expert_intermediate_size": 40,
    "norm_topk_prob": False,
}


@pytest.fixture
def read(tmp_path):
    """Writes a config.json and reads it."""

    def read(config, model_impl="native"):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return read_model_config(tmp_path, model_impl)

    return read


def test_experts_of_each_family(read):
    names = {"module": "block_sparse_moe", "projections": ("w1", "w3", "w2")}
    assert read(MIXTRAL).experts == Experts(8, 2, 80, True, **names)
    assert read(OLMOE).experts == Experts(8, 2, 80, False)
    assert read(QWEN2).experts == Experts(8, 3, 24, False, shared_size=40)
    assert read(QWEN3).experts == Experts(8, 3, 24, True)
    assert (read(QWEN3).experts.active_size, read(QWEN2).experts.active_size) == (72, 112)
    assert (read(LLAMA).experts, read(MIXTRAL, "transformers").experts) == (None, None)


def test_attention_of_each_family(read):
    families = [read(config) for config in (MIXTRAL, OLMOE, QWEN2, QWEN3)]
    assert [config.qk_norm for config in families] == [False, False, False, True]
    assert [config.differences.norms_projections for config in families] == [False, True, False, False]
    assert [(config.qkv_bias, config.o_bias) for config in families] == [(False,) * 2] * 2 + [
        (True, False),
        (False, False),
    ]
    biased = read({**QWEN3, "attention_bias": True})
    assert (biased.qkv_bias, biased.o_bias, read({**QWEN2, "qkv_bias": False}).qkv_bias) == (True, True, False)


@pytest.mark.parametrize(
    ("changes", "dense_layers"),
    [
        ({"mlp_only_layers": [2, 0, 9]}, (0, 2)),
        ({"decoder_sparse_step": 2}, (0, 2)),
        ({"decoder_sparse_step": 3, "mlp_only_layers": None}, (0, 1)),
    ],
)
def test_layers_without_experts(read, changes, dense_layers):
    assert read({**QWEN3, **changes}).experts.dense_layers == dense_layers


@pytest.mark.parametrize("given", [MIXTRAL, OLMOE, QWEN2, QWEN3], ids=lambda given: given["model_type"])
def test_what_is_not_said_is_as_in_transformers(read, given):
    config, theirs = read(given), transformers.AutoConfig.for_model(**given)
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.rope == DefaultRope(theirs.rope_parameters["rope_theta"])
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    assert config.sliding_windows[0] == (getattr(theirs, "sliding_window", None) or None)


@pytest.mark.parametrize(
    ("given", "windows"),
    [
        (QWEN3, (13, 13, 13)),
        ({**QWEN2, "max_window_layers": 48}, (13, None, 13)),
        ({**QWEN2, "max_window_layers": 1}, (13, None, None)),
        ({**QWEN2, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}, (None, 13, None)),
        (MIXTRAL, (13, 13, 13)),
    ],
)
def test_windows(read, given, windows):
    used = {} if given is MIXTRAL else {"use_sliding_window": True}
    assert read({**given, **used, "sliding_window": 13}).sliding_windows == windows


@pytest.mark.parametrize(
    ("given", "changes", "sentence"),
    [
        (QWEN3, {"num_experts_per_tok": 9}, r"num_experts_per_tok .* at most the number of experts \(8\), not 9"),
        (MIXTRAL, {"num_local_experts": 4096}, "num_experts .* must be at most 1024, not 4096"),
        (OLMOE, {"num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        (QWEN3, {"mlp_only_layers": "all"}, "mlp_only_layers .* must be a list of numbers of layers, not 'all'"),
        (
            QWEN3,
            {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}},
            "a quantization_config is not supported for mixtures of experts",
        ),
        (
            OLMOE,
            {"clip_qkv": 8.0},
            r"our own decoder of OlmoeForCausalLM does not know clip_qkv \(8.0\)",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(read, given, changes, sentence):
    with pytest.raises(ModelError, match=sentence):
        read({**given, **changes})
