import copy
import json

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models

from engine.ops.rope import inverse_frequencies
from serving_core.errors import ModelError
from serving_core.layout import KVLayout
from serving_core.model_files.config import read_model_config
from serving_core.model_files.rope import DefaultRope, LinearRope, Llama3Rope, YarnRope
from tests.effort import pairwise
from tests.tiny_models import EOS, VOCAB_SIZE, write_tokenizer

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
LONG = {"rope_type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [1.0, 2.0], "attention_factor": 1.0}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


@pytest.fixture
def read(tmp_path):
    """Writes a config.json (and generation_config.json) and reads it."""

    def read(config, generation=None, **settings):
        (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return read_model_config(tmp_path, **settings)

    return read


def test_plain_llama(read):
    config = read({**LLAMA, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2})
    assert (config.architecture, config.model_type, config.dtype) == ("LlamaForCausalLM", "llama", "bfloat16")
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (100, 48, 80)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (3, 4, 2, 12)
    assert (config.rms_norm_eps, config.max_position_embeddings) == (1e-5, 512)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == (False, False, False, False)
    assert config.sliding_windows == (None, None, None)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert config.kv_layout(16, "float32") == KVLayout.uniform(3, 2, 12, 16, "float32")


def test_defaults_are_those_of_transformers(read):
    config = read({key: value for key, value in LLAMA.items() if key != "num_key_value_heads"})
    reference = transformers.LlamaConfig(**{**LLAMA, "num_key_value_heads": None})
    assert config.num_kv_heads == reference.num_key_value_heads
    assert config.rms_norm_eps == reference.rms_norm_eps
    assert config.tie_word_embeddings == reference.tie_word_embeddings
    assert config.rope == DefaultRope(reference.rope_parameters["rope_theta"])
    assert read(MISTRAL).sliding_windows == (transformers.MistralConfig().sliding_window,) * 3
    assert read(QWEN3).head_dim == transformers.Qwen3Config().head_dim


@pytest.mark.parametrize(
    ("config", "biases_and_norm"),
    [
        ({**LLAMA, "attention_bias": True, "mlp_bias": True}, (True, True, True, False)),
        ({**MISTRAL, "attention_bias": True, "mlp_bias": True}, (False, False, False, False)),
        (QWEN2, (True, False, False, False)),
        ({**QWEN3, "attention_bias": True}, (True, True, False, True)),
    ],
)
def test_biases_and_norms_of_each_family(read, config, biases_and_norm):
    config = read(config)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == biases_and_norm


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({**MISTRAL, "sliding_window": 7}, (7, 7, 7)),
        ({**MISTRAL, "sliding_window": None}, (None, None, None)),
        ({**MISTRAL, "sliding_window": 7, "layer_types": MIXED}, (7, None, 7)),
        ({**MISTRAL, "sliding_window": None, "layer_types": ["full_attention"] * 3}, (None, None, None)),
        ({**QWEN2, "sliding_window": 7}, (None, None, None)),
        ({**QWEN2, "sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1}, (None, 7, 7)),
        ({**QWEN3, "sliding_window": None, "use_sliding_window": True}, (None, None, None)),
        (
            {
                **QWEN3,
                "sliding_window": 7,
                "use_sliding_window": True,
                "layer_types": MIXED,
            },
            (7, None, 7),
        ),
    ],
)
def test_sliding_windows(read, config, windows):
    assert read(config).sliding_windows == windows


EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
QWEN_MOE = {**LLAMA, **EXPERTS, "shared_expert_intermediate_size": 40}
QWENS = {
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen2_moe": {**QWEN_MOE, "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"},
    "qwen3_moe": {**LLAMA, **EXPERTS, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"},
}


@pytest.mark.parametrize("name", QWENS)
def test_windows_of_qwen_whose_size_is_not_told(read, name):
    fields = {**QWENS[name], "use_sliding_window": True, "max_window_layers": 1}
    theirs = transformers.AutoConfig.for_model(**fields)
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * 3  # Qwen3MoE has windows in all layers
    windows = tuple(theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds)
    assert (set(windows) - {None}, read(fields).sliding_windows) == ({4096}, windows)
    assert read({**fields, "sliding_window": None}).sliding_windows == (None, None, None)


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({"rope_theta": 500000.0}, DefaultRope(500000.0)),
        ({"rope_theta": 5e5, "rope_scaling": None}, DefaultRope(5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, DefaultRope(7.0)),
        ({"rope_theta": 3.0, "rope_scaling": {"type": "linear", "factor": 2}}, LinearRope(3.0, 2.0)),
        ({"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}, LinearRope(10000.0, 2.0)),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            Llama3Rope(10000.0, 8.0, 64, 1.0, 4.0),
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5, "truncate": False}},
            YarnRope(10000.0, 4.0, 512, 32.0, 1.0, 1.5, False),
        ),
    ],
)
def test_rope_in_both_spellings(read, fields, rope):
    assert read({**LLAMA, **fields}).rope == rope


ORIGINAL = "original_max_position_embeddings"
SCALED = {
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


@pairwise(kind=SCALED, beside=[None, 128], within=[None, 64], spelling=["rope_scaling", "rope_parameters"])
def test_the_original_length_beside_the_ropes_own_fields(read, kind, beside, within, spelling):
    """Phi-3 and its kin have it there, where it wins."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # which takes seconds to import

    fields = {**LLAMA, "head_dim": 64, spelling: SCALED[kind] | ({} if within is None else {ORIGINAL: within})}
    fields |= {} if beside is None else {ORIGINAL: beside}
    rope = read(fields).rope
    expected = LlamaRotaryEmbedding(transformers.LlamaConfig(**copy.deepcopy(fields)))
    assert torch.equal(inverse_frequencies(rope, 64), expected.inv_freq)
    assert getattr(rope, "attention_factor", 1.0) == expected.attention_scaling
    assert rope.original_max_position_embeddings == (beside or within or 512)


def test_yarn_attention_factor_follows_the_paper(read):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert read({**LLAMA, "rope_scaling": yarn}).rope.attention_factor == pytest.approx(1.138629436)  # 0.1 ln 4 + 1


def test_end_tokens_of_generation_config_win(read):
    assert read({**LLAMA, "eos_token_id": 2}, {"eos_token_id": [5, 6], "bos_token_id": 9}).eos_token_ids == (5, 6)
    assert read({**LLAMA, "eos_token_id": 2}, {"bos_token_id": 9}).eos_token_ids == (2,)
    assert read({**LLAMA, "bos_token_id": 2}, {"bos_token_id": 9}).bos_token_id == 9
    assert read(LLAMA, {}).eos_token_ids == ()


def name_eos_in_the_map_alone(folder):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|eos|>"}}))


def list_eos_in_the_config(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {str(VOCAB_SIZE): {"content": "<|turn|>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<|turn|>"}))


def name_a_word(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "z"}))


def make_unigram(folder):
    pieces = [("<unk>", 0.0), ("a", -1.0), ("</s>", -2.0)]
    Tokenizer(models.Unigram(pieces, unk_id=0)).save(str(folder / "tokenizer.json"))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}))


@pytest.mark.parametrize("change", [None, name_eos_in_the_map_alone, list_eos_in_the_config, name_a_word, make_unigram])
@pytest.mark.parametrize("of_config", [None, 5, [5, 6]])
def test_the_end_token_of_the_tokenizer_ends_answers_too(read, tmp_path, of_config, change):
    write_tokenizer(tmp_path)
    if change is not None:
        change(tmp_path)
    expected = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path).eos_token_id
    assert expected is not None
    found = read({**LLAMA, "vocab_size": VOCAB_SIZE + 1, "eos_token_id": of_config}).eos_token_ids
    assert found == (*(of_config if isinstance(of_config, list) else [of_config] if of_config else []), expected)


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "nowhere"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}),
        ("tokenizer.json", {"added_tokens": [{"id": 1}]}),
        ("tokenizer.json", {"added_tokens": 5}),
        ("tokenizer.json", {"model": [1]}),
        ("tokenizer.json", {"model": {"vocab": 5}}),
        ("tokenizer.json", {"model": {"vocab": {"nowhere": None}}}),
    ],
)
def test_tokenizer_files_that_list_no_tokens_are_refused_with_a_sentence(read, tmp_path, file, changes):
    write_tokenizer(tmp_path)
    for name, given in (("tokenizer_config.json", {"eos_token": "nowhere"}), (file, changes)):
        fields = json.loads((tmp_path / name).read_text())
        (tmp_path / name).write_text(json.dumps(fields | given))
    with pytest.raises(ModelError, match="do not list tokens with their ids"):
        read(LLAMA)


def test_an_end_token_of_the_tokenizer_that_counts_once_or_not_at_all(read, tmp_path):
    write_tokenizer(tmp_path)
    config = {**LLAMA, "vocab_size": VOCAB_SIZE}
    assert read(config, {"eos_token_id": [EOS, 5]}).eos_token_ids == (EOS, 5)
    assert read(LLAMA, {"eos_token_id": 5}).eos_token_ids == (5,)  # the model has no such token
    fields = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields | {"eos_token": "nowhere"}))
    assert read(config, {"eos_token_id": 5}).eos_token_ids == (5,)
    for name in ("tokenizer_config.json", "tokenizer.json"):
        (tmp_path / name).write_text("[]")
        with pytest.raises(ModelError, match=rf"{name} must hold a JSON object"):
            read(config, {"eos_token_id": 5})
        write_tokenizer(tmp_path)
        fields = json.loads((tmp_path / "tokenizer_config.json").read_text())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields | {"eos_token": "nowhere"}))


def test_custom_code_is_ignored_not_run(read, tmp_path):
    (tmp_path / "modeling_evil.py").write_text("raise SystemExit('executed')")
    config = read({**LLAMA, "auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}})
    assert config.architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"architectures": ["BertForMaskedLM"]}, "'BertForMaskedLM' is not supported: its attention goes both"),
        ({"architectures": None, "model_type": "gpt_oss"}, "'gpt_oss' is not supported; supported are LlamaFor"),
        (
            {"architectures": ["Idefics3ForConditionalGeneration"]},
            "'Idefics3ForConditionalGeneration' is not supported",
        ),
        ({"architectures": []}, "architectures .* must be a list of one name"),
        ({"model_type": "mistral"}, "model_type .* must be 'llama' for LlamaForCausalLM"),
        ({"quantization_config": {"bits": 4}}, "quant_method '' of a quantization_config is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported is silu"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported; supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing in rope_scaling"),
        ({"rope_scaling": "yarn"}, "rope_scaling .* must be an object"),
        ({"rope_scaling": LONG | {"short_factor": [1.0, 1.0]}, "head_dim": 4}, "depends on how long a text is"),
        ({"rope_scaling": LONG | {"attention_factor": 1.2}, "head_dim": 4}, "depends on how long a text is"),
        ({"rope_scaling": LONG, "head_dim": 8}, "a list of 4 numbers above 0"),
        ({"rope_scaling": LONG | {"short_factor": [1, 0], "long_factor": [1, 0]}, "head_dim": 4}, "numbers above 0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor .* must be above 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differ by layer type"),
        ({"torch_dtype": "float64"}, "dtype 'float64' is not supported; supported are float32"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"vocab_size": 0}, "vocab_size .* must be an integer of at least 1, not 0"),
        ({"vocab_size": "many"}, "vocab_size .* must be an integer"),
        ({"vocab_size": True}, "vocab_size .* must be an integer"),
        ({"hidden_size": -3}, "hidden_size .* must be an integer"),
        ({"hidden_size": 50}, r"hidden_size .* must be a multiple of num_attention_heads \(4\)"),
        ({"head_dim": 11}, r"an odd head_dim \(11\) is not supported"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers .* must be at most 1024"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads .* must be a divisor of num_attention_heads \(4\)"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps .* must be a finite number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings .* must be true or false"),
        ({"eos_token_id": 100}, r"eos_token_id .* below the vocabulary size \(100\)"),
        ({"eos_token_id": [1, -1]}, "eos_token_id"),
    ],
)
def test_refusals_name_the_thing(read, changes, sentence):
    with pytest.raises(ModelError, match=sentence):
        read({**LLAMA, **changes}, model_impl="native")


@pytest.mark.parametrize("given", [LLAMA, MISTRAL, QWEN2, QWEN3])
def test_what_our_decoder_does_not_know_is_left_to_transformers(read, given):
    dynamic = {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    quantized = {"quantization_config": {"quant_method": "fp8"}, "hidden_act": "gelu"}
    for fields in ({"hidden_act": "gelu"}, dynamic, quantized):
        assert read({**given, **fields}).is_transformers
    assert not read({**given, "hidden_act": "swish"}).is_transformers  # another name of silu


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quant_method 'mxfp4' of a quantization_config"),
        ({"is_causal": False}, "attention that goes both ways"),
        ({"architectures": ["LlamaModel"], "hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
    ],
)
def test_what_transformers_would_not_compute_either_is_refused_by_us(read, changes, sentence):
    with pytest.raises(ModelError, match=sentence):
        read({**LLAMA, **changes})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types .* must be a list of 3 names"),
        (
            {"layer_types": ["full_attention", "chunked_attention", 3]},
            "layer type 'chunked_attention' is not supported",
        ),
    ],
)
def test_refused_layer_types(read, changes, sentence):
    with pytest.raises(ModelError, match=sentence):
        read({**QWEN2, "use_sliding_window": True, "sliding_window": 7, **changes}, model_impl="native")


def test_a_layer_with_a_window_of_no_width(read):
    with pytest.raises(ModelError, match="layers of sliding_attention want a sliding_window"):
        read({**MISTRAL, "sliding_window": None, "layer_types": MIXED}, model_impl="native")


@pytest.mark.parametrize("text", ["", "{", "[]", "\udcff", "[" * 100_000])
def test_broken_config(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError, match=r"config\.json"):
        read_model_config(tmp_path)


def test_missing_folder_and_missing_config(tmp_path):
    with pytest.raises(ModelError, match="there is no model folder"):
        read_model_config(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config\.json cannot be read: No such file"):
        read_model_config(tmp_path)


STARCODER2 = {**LLAMA, "architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2"}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 100,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 512,
}


@pytest.mark.parametrize("given", [STARCODER2, GPT2])
def test_sizes_of_a_model_that_transformers_computes(read, given):
    config = read(given)
    theirs = transformers.AutoConfig.for_model(**given)
    assert (config.is_transformers, config.model_impl) == (True, "transformers")
    assert config.hidden_size == theirs.hidden_size
    assert (config.num_layers, config.num_heads) == (theirs.num_hidden_layers, theirs.num_attention_heads)
    assert (config.num_kv_heads, config.head_dim) == (2 if given is STARCODER2 else 4, 12)
    assert config.max_position_embeddings == theirs.max_position_embeddings


def test_each_layer_of_longcat_flash_has_two_attentions(read):
    kinds = {"architectures": ["LongcatFlashForCausalLM"], "model_type": "longcat_flash"}
    given = {name: value for name, value in {**LLAMA, **kinds, "num_layers": 3}.items() if name != "num_hidden_layers"}
    assert read(given).num_layers == transformers.AutoConfig.for_model(**given).num_hidden_layers == 6


def test_all_that_decides_what_is_computed_is_in_the_digest(read):
    digest = read(STARCODER2).config_digest
    assert read({**STARCODER2, "norm_epsilon": 2.0}).config_digest != digest
    assert read({**STARCODER2, "transformers_version": "9", "dtype": "bfloat16"}).config_digest == digest


def test_native_and_transformers_by_name(read):
    assert (read(LLAMA).is_transformers, read(LLAMA).config_digest) == (False, "")
    with pytest.raises(
        ModelError, match=r"'Starcoder2ForCausalLM' is not supported; supported are LlamaForCausalLM, [\w, ]*$"
    ):
        read(STARCODER2, model_impl="native")
    assert read(LLAMA, model_impl="transformers").is_transformers
    assert read({**LLAMA, "hidden_act": "gelu"}, model_impl="transformers").is_transformers


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"is_encoder_decoder": True}, "an encoder-decoder is not supported"),
        (
            {"quantization_config": {"quant_method": "quark"}},
            "quant_method 'quark' of a quantization_config is not supported",
        ),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers .* must be at most 1024"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads .* must be a divisor of num_attention_heads \(4\)"),
    ],
)
def test_refusals_of_transformers_models(read, changes, sentence):
    with pytest.raises(ModelError, match=sentence):
        read({**STARCODER2, **changes})
