"""Families that our decoder computes by their differences from Llama's, as their config.json has them."""

import json

import pytest
import transformers

from serving_core.errors import ModelError
from serving_core.model_files.config import read_model_config
from serving_core.model_files.differences import FAMILIES, GELU_TANH, Differences
from serving_core.model_files.rope import DefaultRope, LinearRope
from tests.transformers_models import MIXTURES
from tests.unit.serving_core.test_model_config import LLAMA

CONFIGS = {
    family.model_type: {**LLAMA, "architectures": [architecture], "model_type": family.model_type}
    for architecture, family in FAMILIES.items()
    if family.model_type not in MIXTURES
}
WRITTEN = ("num_key_value_heads",)  # of which defaults differ
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}


@pytest.fixture
def read(tmp_path):
    """Writes a config.json and reads it."""

    def read(config, **settings):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return read_model_config(tmp_path, **settings)

    return read


@pytest.mark.parametrize("model_type", CONFIGS)
def test_defaults_are_those_of_transformers(model_type, read):
    written = ("head_dim", "max_position_embeddings", "num_key_value_heads") if "gemma" in model_type else WRITTEN
    given = {name: value for name, value in CONFIGS[model_type].items() if name not in written}
    given["num_attention_heads"] = 16 if model_type == "gemma" else given["num_attention_heads"]
    config, theirs = read(given, model_impl="native"), transformers.AutoConfig.for_model(**given)
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.rms_norm_eps == getattr(theirs, FAMILIES[config.architecture].eps_name)
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    ropes = theirs.rope_parameters
    assert config.rope == DefaultRope(ropes.get("full_attention", ropes)["rope_theta"])
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 3
    window = getattr(theirs, "sliding_window", None)
    assert config.sliding_windows == tuple(window if kind == "sliding_attention" else None for kind in kinds)
    assert config.head_dim == getattr(theirs, "head_dim", config.head_dim)
    assert config.max_position_embeddings == theirs.max_position_embeddings
    rotated = getattr(theirs, "no_rope_layers", [1, 1, 1])
    assert config.differences.unrotated_layers == tuple(layer for layer in range(3) if not rotated[layer])
    assert config.differences.logit_scale == getattr(theirs, "logit_scale", 1.0)
    assert config.differences.logit_softcap == getattr(theirs, "final_logit_softcapping", None)
    assert config.differences.score_softcap == getattr(theirs, "attn_logit_softcapping", None)
    if "gemma" in model_type:
        activation = getattr(theirs, "hidden_activation", None) or theirs.hidden_act
        assert config.differences.activation == activation == GELU_TANH
        assert config.differences.embedding_scale == theirs.hidden_size**0.5


COHERE2 = {"order_of_interleaved_layers": "local_attn_first", "rotary_pct": 1, "use_parallel_block": True}


@pytest.mark.parametrize(
    ("fields", "unrotated", "windows"),
    [
        ({**COHERE2, "sliding_window_pattern": 2}, (1,), (9, None, 9)),
        ({"layer_types": ["full_attention", "full_attention", "sliding_attention"]}, (0, 1), (None, None, 9)),
    ],
)
def test_which_layers_of_cohere2_rotate_and_slide(fields, unrotated, windows, read):
    config = read({**CONFIGS["cohere2"], "sliding_window": 9, "logit_scale": 0.25, **fields}, model_impl="native")
    assert config.differences == Differences(
        centers_norms=True,
        is_parallel=True,
        rotates_neighbours=True,
        unrotated_layers=unrotated,
        logit_scale=0.25,
    )
    assert config.sliding_windows == windows


LINEAR = {"rope_type": "linear", "factor": 8.0}
BY_TYPE = {
    "full_attention": {**LINEAR, "rope_theta": 3e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
}


@pytest.mark.parametrize(
    ("fields", "windows", "ropes"),
    [
        ({}, (9, 9, 9), (DefaultRope(1e6), DefaultRope(1e4))),
        (
            {"sliding_window_pattern": 2, "rope_local_base_freq": 5e3, "rope_theta": 7e5, "rope_scaling": LINEAR},
            (9, None, 9),
            (LinearRope(7e5, 8.0), DefaultRope(5e3)),
        ),
        (
            {
                "_sliding_window_pattern": 6,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
                "rope_parameters": BY_TYPE,
            },
            (None, 9, None),
            (LinearRope(3e5, 8.0), DefaultRope(2e4)),
        ),
        ({"rope_parameters": {"full_attention": LINEAR}}, (9, 9, 9), (LinearRope(1e6, 8.0), DefaultRope(1e4))),
    ],
)
def test_which_layers_of_gemma3_slide_and_how_they_rotate(fields, windows, ropes, read):
    given = {**CONFIGS["gemma3_text"], "sliding_window": 9, "query_pre_attn_scalar": 16, **fields}
    config, theirs = read(given, model_impl="native"), transformers.AutoConfig.for_model(**given)
    assert config.sliding_windows == windows
    assert (config.rope, config.differences.sliding_rope) == ropes
    assert [config.rope_of(layer) for layer in range(3)] == [ropes[window is not None] for window in windows]
    assert config.differences.score_scale == 0.25
    assert config.qk_norm
    for kind, rope in zip(("full_attention", "sliding_attention"), ropes, strict=True):
        said = theirs.rope_parameters[kind]
        assert said["rope_theta"] == rope.theta
        assert said.get("factor") == getattr(rope, "factor", None)


def test_what_granite_scales(read):
    scales = {"embedding_multiplier": 12, "attention_multiplier": 0.25, "residual_multiplier": 0.22}
    assert read({**CONFIGS["granite"], **scales, "logits_scaling": 8}).differences == Differences(
        embedding_scale=12.0, score_scale=0.25, residual_scale=0.22, logit_scale=0.125
    )


@pytest.mark.parametrize(
    ("rope", "rotary_dim"),
    [
        ({}, None),
        ({"partial_rotary_factor": 0.5}, 6),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0, "partial_rotary_factor": 0.34}}, 4),
    ],
)
def test_how_much_of_a_head_phi3_rotates(rope, rotary_dim, read):
    config = read({**CONFIGS["phi3"], **rope, "sliding_window": 5}, model_impl="native")
    assert config.differences == Differences(is_fused=True, rotary_dim=rotary_dim)
    assert config.sliding_windows == (5, 5, 5)


@pytest.mark.parametrize(
    ("fields", "unrotated", "windows"),
    [
        ({"no_rope_layer_interval": 2}, (1,), (None, None, None)),
        ({"no_rope_layers": [0, 1, 0, 1]}, (0, 2), (None, None, None)),
        ({"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 7}, (0, 2), (7, None, 7)),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 7,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            },
            (),
            (7, 7, None),
        ),
    ],
)
def test_which_layers_of_smollm3_rotate_and_slide(fields, unrotated, windows, read):
    config = read({**CONFIGS["smollm3"], **fields}, model_impl="native")
    assert config.differences == Differences(unrotated_layers=unrotated)
    assert config.sliding_windows == windows


@pytest.mark.parametrize(
    ("model_type", "fields", "sentence"),
    [
        (
            "granite",
            {"clip_qkv": 8.0},
            r"our own decoder of GraniteForCausalLM does not know clip_qkv \(8\.0\)",
        ),
        ("cohere", {"use_qk_norm": True}, "does not know use_qk_norm"),
        (
            "cohere",
            {"quantization_config": {"quant_method": "gptq"}},
            "a quantization_config is not supported for Cohere",
        ),
        ("cohere2", {"sliding_window": None}, "sliding_window is missing"),
        ("cohere2", {"rotary_pct": 0.5}, r"does not know rotary_pct \(0\.5\)"),
        ("granite", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("gemma", {"hidden_act": "silu"}, "hidden_act 'silu' is not supported"),
        ("gemma", {"hidden_activation": "gelu"}, r"does not know hidden_activation \('gelu'\)"),
        ("gemma", {"final_logit_softcapping": 30.0}, "does not know final_logit_softcapping"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported"),
        ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping .* must be above 0"),
        ("gemma2", {"sliding_window": None}, "sliding_window is missing"),
        ("gemma2", {"sliding_window_size": 2048}, "does not know sliding_window_size"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, r"does not know attn_logit_softcapping \(50\.0\)"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 1e4}}, "rope_theta in rope_parameters .* is not supported"),
        ("gemma3_text", {"rope_scaling": LINEAR, "rope_parameters": BY_TYPE}, "together are not supported"),
        ("gemma3_text", {"rope_scaling": YARN}, "rope type 'yarn' is not supported for layers of one type"),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier .* must be above 0"),
        ("granite", {"rope_parameters": {**YARN, "rope_type": "dynamic"}}, "rope type 'dynamic' is not supported"),
        ("olmo2", {"mlp_bias": True}, "does not know mlp_bias"),
        ("phi3", {"rope_scaling": YARN}, "rope type 'yarn' is not supported in Phi-3"),
        ("phi3", {"partial_rotary_factor": 0.45}, "5 rotated elements of a head of 12 are not supported"),
        ("phi3", {"partial_rotary_factor": 1e308}, r"partial_rotary_factor 1e\+308 is not supported; it is at most 1"),
        ("phi3", {"attention_bias": True}, "does not know attention_bias"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers .* must be a list of 3 times 0 or 1"),
        ("smollm3", {"layer_types": ["sliding_attention"] * 3, "sliding_window": 7}, "want use_sliding_window"),
        ("smollm3", {"layer_types": ["chunked_attention"] * 3}, "layer type 'chunked_attention' is not supported"),
    ],
)
def test_what_is_not_described_is_left_to_transformers(model_type, fields, sentence, read):
    config = {**CONFIGS[model_type], **fields}
    if "quantization_config" not in fields:
        assert read(config).is_transformers
    with pytest.raises(ModelError, match=sentence):
        read(config, model_impl="native")


@pytest.mark.parametrize("model_type", ["gemma", "gemma3_text"])
def test_attention_that_goes_both_ways_is_left_to_nobody(model_type, read):
    with pytest.raises(ModelError, match="attention that goes both ways is not supported"):
        read({**CONFIGS[model_type], "use_bidirectional_attention": True})


BASE = transformers.PreTrainedConfig(
    num_labels=2, return_dict=True, chunk_size_feed_forward=2, problem_type="regression"
)
LABELS = {"id2label": {"0": "no", "1": "yes"}, "label2id": {"no": 0, "yes": 1}}


@pytest.mark.parametrize(
    "fields",
    [
        {"clip_qkv": None},
        {"clip_qkv": False},
        {"use_cache": True, "auto_map": {}},
        BASE.to_dict() | {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]} | LABELS,
    ],
)
def test_what_is_off_or_without_effect_is_no_hindrance(fields, read):
    assert not read({**CONFIGS["olmo2"], **fields}).is_transformers


def test_gemmas_without_a_head_make_embeddings_unless_attention_goes_both_ways(read):
    headless = {**CONFIGS["gemma2"], "architectures": ["Gemma2Model"]}
    assert read(headless).embedder is not None
    with pytest.raises(ModelError, match="attention that goes both ways is not supported"):
        read({**headless, "use_bidirectional_attention": True})
    with pytest.raises(ModelError, match="architecture 'Gemma3TextModel' is not supported"):  # EmbeddingGemma
        read({**CONFIGS["gemma3_text"], "architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True})
    with pytest.raises(ModelError, match=r"text_config in .* must be an object in Gemma3ForConditionalGeneration"):
        read({**CONFIGS["gemma3_text"], "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"})
