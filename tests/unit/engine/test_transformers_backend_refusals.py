"""What transformers may know and cannot be served here, and folders that are not whole: one sentence each."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.build import build_engine
from serving_core.errors import ModelError, SettingsError
from serving_core.layout import Widths
from serving_core.settings import EngineSettings
from tests.transformers_models import REFUSED, write_refused_model, write_transformers_model
from tests.unit.engine.transformers_kit import rewrite


def load(folder, **fields):
    return build_engine(EngineSettings(model=str(folder), **{"num_kv_blocks": 64, **fields}))


@pytest.mark.parametrize("architecture", REFUSED)
def test_architectures_that_are_refused(architecture, written):
    refused = REFUSED[architecture]
    with pytest.raises(ModelError) as error:
        load(written(write_refused_model, architecture))
    assert str(error.value) == refused.sentence


def retensor(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


ORIGINAL = "original_max_position_embeddings"
QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda tensors: tensors.pop(QUERY), rf"^the weights lack {QUERY}$"),
        (
            lambda tensors: tensors.update(strange=torch.ones(3)),
            r"^the weights hold strange, which the model has no use",
        ),
        (
            lambda tensors: tensors.update({QUERY: torch.ones(48, 47)}),
            r"has shape \[48, 47\], and the model wants \[48, 48",
        ),
        (lambda tensors: tensors.update({QUERY: torch.ones(48, 48).long()}), "is stored as I64; supported are F32"),
    ],
)
def test_weights_that_are_not_the_models(change, sentence, copied):
    with pytest.raises(ModelError, match=sentence):
        load(retensor(copied(write_transformers_model, "starcoder2"), change))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"architectures": ["NoSuchForCausalLM"]},
            "transformers has no text decoder 'NoSuchForCausalLM' for model_type",
        ),
        ({"model_type": "no_such"}, "transformers cannot read this config.json: .*no_such"),
        ({"hidden_act": "no such"}, "transformers cannot build Starcoder2ForCausalLM of this config.json"),
        ({"num_key_value_heads": 4}, "has shape|the model has 4 query and 4 KV heads"),
    ],
)
def test_configs_that_transformers_reads_otherwise(fields, sentence, copied):
    with pytest.raises(ModelError, match=sentence):
        load(rewrite(copied(write_transformers_model, "starcoder2"), **fields))


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("gemma2", {"layer_types": ["full_attention"]}),
        ("gemma2", {"layer_types": ["no_such"] * 4}),
        ("gemma2", {"sliding_window": "wide"}),
        ("gemma2", {"rope_parameters": "fast"}),
        ("gemma2", {"rope_parameters": {"rope_type": "no_such"}}),
        ("gemma2", {"rms_norm_eps": "small"}),
        ("gemma2", {"hidden_activation": 3}),
        ("gemma2", {"vocab_size": 2**31 - 1}),
        ("gemma2", {"hidden_size": 2**31 - 1}),
        ("gemma2", {"query_pre_attn_scalar": 0}),
        ("gemma2", {"query_pre_attn_scalar": -1}),
        ("starcoder2", {"pad_token_id": 10**6}),
        ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1e308}}),
        ("deepseek_v3", {"n_group": 0}),
        ("qwen3_moe", {"decoder_sparse_step": 0}),
        ("starcoder2", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, ORIGINAL: 0}}),
        ("mixtral", {"num_local_experts": 10**9}),
        ("mixtral", {"num_experts_per_tok": 100}),
        ("gpt2", {"n_inner": -1}),
        ("gpt2", {"layer_norm_epsilon": None}),
    ],
)
def test_absurd_configs_end_in_a_sentence(family, fields, copied):
    folder = rewrite(copied(write_transformers_model, family), **fields)
    with pytest.raises(ModelError) as error:
        load(folder)
    assert len(str(error.value)) < 500
    assert "\n" not in str(error.value)


def test_a_width_that_only_transformers_knows(copied):
    folder = copied(write_transformers_model, "gemma2", head_dim=transformers.Gemma2Config().head_dim)
    path = folder / "config.json"
    path.write_text(
        json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "head_dim"})
    )
    layout = load(folder, model_impl="transformers").layout
    assert (layout.num_kv_heads, layout.widths) == (2, (Widths(256, 256),) * 4)


def test_code_in_the_folder_is_never_run(copied):
    folder = copied(write_transformers_model, "starcoder2")
    (folder / "modeling_evil.py").write_text("raise SystemExit('executed')")
    evil = {"AutoConfig": "modeling_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    assert load(rewrite(folder, auto_map=evil)).config.is_transformers
    with pytest.raises(ModelError, match=r"transformers cannot read this config\.json"):
        load(rewrite(folder, model_type="evil"))


def test_a_rotation_that_depends_on_the_longest_text_in_a_batch(copied):
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "long_factor": [4.0] * 6,
        "short_factor": [1.0] * 6,
        "original_max_position_embeddings": 100,
        "partial_rotary_factor": 1.0,
    }
    folder = copied(
        write_transformers_model,
        "phi3",
        rope_parameters=rope,
        partial_rotary_factor=1.0,
        original_max_position_embeddings=100,
    )
    assert load(folder).max_model_len == 100
    with pytest.raises(SettingsError, match="--max-model-len 101 is more than the model's 100"):
        load(folder, max_model_len=101)
    assert load(folder, max_model_len=50).max_model_len == 50
