"""What a GGUF file says of a Cohere, Granite, LFM2, OLMo 2, Phi-3, Qwen3.5 or SmolLM3 model: its config, or one
sentence."""

import json

import gguf
import numpy as np
import pytest

from serving_core.errors import ModelError
from serving_core.model_files.config import read_model_config
from splitserve.gguf.folder import gguf_folder
from tests.gguf_files import replace, write_gguf

Kind = gguf.GGUFValueType


@pytest.fixture
def make(tmp_path):
    """Writes a file, changed, and gives its folder."""

    def make(family, change=lambda writer: None, **options):
        file = write_gguf(tmp_path / "tiny.gguf", family, change=change, num_hidden_layers=4, **options)
        return gguf_folder(file, tmp_path / "cache")

    return make


def saying(key, value, kind=Kind.UINT32):
    return lambda writer: replace(writer, key, value, kind)


def without(*keys):
    return lambda writer: [writer.kv_data[0].pop(key) for key in keys]


def test_scales_that_a_file_lacks_are_neutral(make):
    scales = [f"granite.{key}" for key in ("embedding_scale", "residual_scale", "logit_scale", "attention.scale")]
    found = read_model_config(make("granite", without(*scales))).differences
    assert (found.embedding_scale, found.residual_scale, found.logit_scale) == (1.0, 1.0, 1.0)
    assert found.score_scale == 16**-0.5  # that of a head


@pytest.mark.parametrize(("share", "rotated"), [(0.5, 8), (1.0, None)])
def test_of_phi_3_a_part_of_a_head_may_be_rotated(make, share, rotated):
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share}
    assert read_model_config(make("phi3", rope_parameters=rope)).differences.rotary_dim == rotated


@pytest.mark.parametrize(("window", "windows"), [(0, {None}), (24, {24})])
def test_phi_3_may_have_a_window_in_all_layers(make, window, windows):
    folder = make("phi3", saying("phi3.attention.sliding_window", window))
    assert set(read_model_config(folder).sliding_windows) == windows


def test_of_lfm2_the_layers_without_heads_are_convolutions(make, tmp_path):
    found, written = (json.loads((each / "config.json").read_text()) for each in (make("lfm2"), tmp_path / "tiny"))
    for name in ("layer_types", "num_key_value_heads", "conv_L_cache", "norm_eps"):
        assert found[name] == pytest.approx(written[name]), name


def test_of_qwen3_5_the_layers_of_linear_attention_are_those_that_were_written(make, tmp_path):
    found, written = (json.loads((each / "config.json").read_text()) for each in (make("qwen3_5"), tmp_path / "tiny"))
    linear = [name for name in written if name.startswith("linear_")]
    assert len(linear) == 5
    for name in ("layer_types", "rope_parameters", *linear):
        assert found[name] == written[name], name


HEADS = "lfm2.attention.head_count_kv"


def adding(name, *shape):
    return lambda writer: writer.add_tensor(name, np.zeros(shape, np.float32))


def renaming(old, new):
    def change(writer):
        for name in [name for name in writer.tensors[0] if old in name]:
            writer.tensors[0][name.replace(old, new)] = writer.tensors[0].pop(name)

    return change


REFUSED = {
    "a window of OLMo 3": ("olmo2", saying("olmo2.attention.sliding_window", 64), "must be absent, 0 or the context"),
    "factors by length": ("phi3", adding("rope_factors_long.weight", 8), "has rope_factors_long.weight, and a rope"),
    "no epsilon": ("cohere", without("command-r.attention.layer_norm_epsilon"), "layer_norm_epsilon is missing"),
    "no logit scale": ("cohere2", without("cohere2.logit_scale"), "logit_scale is missing in tiny.gguf"),
    "no window": ("cohere2", without("cohere2.attention.sliding_window"), "sliding_window is missing in tiny.gguf"),
    "no window of gpt-oss": ("gpt_oss", without("gpt-oss.attention.sliding_window"), "sliding_window is missing in ti"),
    "a scale of zero": ("granite", saying("granite.logit_scale", 0.0, Kind.FLOAT32), "logit_scale in tiny.gguf must"),
    "a scale of another": ("smollm3", saying("smollm3.logit_scale", 2.0, Kind.FLOAT32), "says logit_scale 2.0, and"),
    "too much rotated": ("phi3", saying("phi3.rope.dimension_count", 32), "partial_rotary_factor 2 is not supported"),
    "an odd rotation": ("phi3", saying("phi3.rope.dimension_count", 7), "7 rotated elements of a head of 16"),
    "half a head": ("granite", saying("granite.rope.dimension_count", 8), r"as large as a head \(16\), not 8"),
    "one number for all layers": ("lfm2", saying(HEADS, 2), "must be a list of 4 times 0 or the one number of heads"),
    "another number of layers": ("lfm2", saying(HEADS, [0, 2], Kind.ARRAY), "must be a list of 4 times 0 or the one"),
    "two numbers of heads": ("lfm2", saying(HEADS, [0, 2, 0, 4], Kind.ARRAY), "must be a list of 4 times 0 or the"),
    "no attention": ("lfm2", saying(HEADS, [0] * 4, Kind.ARRAY), "must be a list of 4 times 0 or the one number"),
    "negative heads": ("lfm2", saying(HEADS, [0, -2, 0, -2], Kind.ARRAY), "num_key_value_heads"),
    "no kernel": ("lfm2", without("lfm2.shortconv.l_cache"), "shortconv.l_cache is missing in tiny.gguf"),
    "values without keys": (
        "qwen3_5",
        saying("qwen35.ssm.group_count", 3),
        r"multiple of ssm.group_count \(3\), not 4",
    ),
    "a part of a head": (
        "qwen3_5",
        saying("qwen35.ssm.inner_size", 50),
        r"of ssm.time_step_rank \(4\), not 50",
    ),
    "drafts": ("qwen3_5", saying("qwen35.nextn_predict_layers", 1), "says nextn_predict_layers 1, and a model with"),
    "experts in one": ("qwen3_5_moe", renaming("ffn_gate_exps", "ffn_gate_up_exps"), r"lacks blk\.0\.ffn_gate_exps\.w"),
    "no size of experts": (
        "qwen3_5_moe",
        without("qwen35moe.expert_feed_forward_length"),
        "feed_forward_length is mis",
    ),
    "no shared size": ("qwen3_5_moe", without("qwen35moe.expert_shared_feed_forward_length"), "forward_length is mis"),
    "no state": ("qwen3_5", without("qwen35.ssm.state_size"), "ssm.state_size is missing in tiny.gguf"),
    "experts": ("granite", saying("granite.expert_count", 8), "says expert_count 8, and a model with that"),
}


@pytest.mark.parametrize(("family", "change", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_served_is_a_sentence_and_leaves_nothing(make, tmp_path, family, change, sentence):
    with pytest.raises(ModelError, match=sentence):
        make(family, change)
    assert not (tmp_path / "cache").exists() or list((tmp_path / "cache").iterdir()) == []
