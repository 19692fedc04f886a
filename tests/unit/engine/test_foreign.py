"""Models that transformers computes over our pool and with our attention: greedy answers against its own `generate`."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.attention.paged import PortableAttention
from engine.engine import Engine
from engine.foreign import interface
from engine.foreign.sight import Sight
from engine.foreign.tried import TRIED, TRIED_WITH
from engine.quantization.weight_quantization import quantize
from serving_core.blocks import BlockAllocator
from serving_core.errors import ModelError, SettingsError
from serving_core.requests import Request, SamplingParams, Work
from serving_core.settings import EngineSettings
from tests.foreign_models import (
    DESCRIBED,
    FAMILIES,
    GEMMAS,
    UNTRIED,
    architecture_of,
    generated,
    write_foreign_model,
)
from tests.effort import few
from tests.toy_scheduler import greedy, run_all
from tests.unit.engine.test_llama import choose_native, transformers_model

PROMPTS = [[5, 6, 7], [(7 * at * at + 3) % 250 for at in range(41)], [(11 * at + at * at) % 250 for at in range(90)]]
NUM_TOKENS = 24


def load(folder, **fields):
    return Engine(EngineSettings(**{"model": str(folder), "num_kv_blocks": 64, "block_size": 8, **fields}))


def answers(engine, prompts=PROMPTS, **scheduling):
    found = run_all(engine, prompts, greedy(NUM_TOKENS), **scheduling)
    return [[token.token_id for token in tokens] for tokens in found]


def rewrite(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


# Each has something that none before it has: windows, caps, biases, latents, sinks, experts.
DIFFERENT = ("llama", "ministral", "gemma2", "gpt2", "glm4", "mixtral", "deepseek_v3", "gpt_oss")


@pytest.mark.parametrize("family", few(FAMILIES, *DIFFERENT))
def test_answers_are_those_of_transformers(family, tmp_path):
    """In chunks that end within blocks, steps of answers beside chunks of prompts."""
    folder = write_foreign_model(tmp_path, family)
    expected = generated(folder, PROMPTS, NUM_TOKENS)
    assert len({token for answer in expected for token in answer}) > 4  # no model that says the same all the time
    engine = load(folder, model_impl="transformers")
    assert answers(engine, chunk_tokens=19, joins_at=[3, 0, 1]) == expected
    assert engine.config.architecture in TRIED


def test_the_architectures_that_count_as_tried_are_those_above():
    assert {architecture_of(family) for family in FAMILIES} == TRIED
    assert transformers.__version__ == TRIED_WITH


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("mistral", {"sliding_window": None}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"layer_types": ["full_attention"] * 4}),
        ("gemma2", {"query_pre_attn_scalar": 70}),
        ("granite", {"attention_multiplier": 0.3}),
        ("phi3", {"sliding_window": None}),
        ("gpt_oss", {"layer_types": ["full_attention"] * 4}),
    ],
)
def test_what_attention_is_told_decides_answers(family, fields, tmp_path):
    """Else the test above would say nothing of it."""
    folder = write_foreign_model(tmp_path, family)
    before = generated(folder, PROMPTS, NUM_TOKENS)
    assert generated(rewrite(folder, **fields), PROMPTS, NUM_TOKENS) != before


def test_sinks_decide_answers(tmp_path):
    folder = write_foreign_model(tmp_path, "gpt_oss")
    before = generated(folder, PROMPTS, NUM_TOKENS)
    tensors = load_file(folder / "model.safetensors")
    sinks = {name: torch.full_like(tensor, 3.0) for name, tensor in tensors.items() if name.endswith("sinks")}
    save_file(tensors | sinks, folder / "model.safetensors", {"format": "pt"})
    after = generated(folder, PROMPTS, NUM_TOKENS)
    assert after != before
    engine = load(folder)
    assert isinstance(engine.attention, PortableAttention)
    assert answers(engine, chunk_tokens=19) == after


def test_native_where_there_is_a_native_model(tmp_path):
    folder = write_foreign_model(tmp_path, "qwen3")
    native, foreign = load(folder), load(folder, model_impl="transformers")
    assert answers(native) == answers(foreign) == generated(folder, PROMPTS, NUM_TOKENS)
    assert (native.fingerprint["model_impl"], foreign.fingerprint["model_impl"]) == ("native", "transformers")
    assert foreign.description["model_impl"] == f"transformers {transformers.__version__}"


def test_windows_that_alternate_in_a_mistral(tmp_path):
    """Which transformers takes for its Ministral, of other answers."""
    folder = write_foreign_model(tmp_path, "mistral")
    before = generated(folder, PROMPTS, NUM_TOKENS)
    expected = generated(rewrite(folder, layer_types=FAMILIES["ministral"][1]["layer_types"]), PROMPTS, NUM_TOKENS)
    assert expected != before
    for model_impl in ("native", "transformers"):
        assert answers(load(folder, model_impl=model_impl), chunk_tokens=19) == expected


@pytest.mark.parametrize("rope_type", ["default", "dynamic"])
def test_a_llama_that_our_decoder_does_not_know(rope_type, tmp_path):
    rope = {"rope_type": rope_type, "rope_theta": 1e4, **({} if rope_type == "default" else {"factor": 2.0})}
    folder = write_foreign_model(tmp_path, "llama", rope_parameters=rope)  # with gelu
    engine = load(folder)
    assert engine.config.is_foreign
    assert answers(engine, chunk_tokens=19) == generated(folder, PROMPTS, NUM_TOKENS)


@pytest.mark.parametrize("family", few(DESCRIBED, "gemma3", "mixtral", "olmo2"))
def test_our_decoder_answers_as_transformers(family, tmp_path, monkeypatch):
    """With compiled kernels and without."""
    folder = write_foreign_model(tmp_path, family)
    expected = generated(folder, PROMPTS, NUM_TOKENS)
    for is_native in (True, False):
        choose_native(monkeypatch, is_native)
        assert answers(load(folder, model_impl="native"), chunk_tokens=19, joins_at=[3, 0, 1]) == expected


@pytest.mark.parametrize(
    "fields", [{"tie_word_embeddings": True, "residual_multiplier": 0.3}, {"attention_bias": True, "mlp_bias": True}]
)
def test_our_decoder_answers_as_transformers_of_other_granites(fields, tmp_path):
    folder = write_foreign_model(tmp_path, "granite", **fields)
    assert answers(load(folder, model_impl="native")) == generated(folder, PROMPTS, NUM_TOKENS)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("gemma", {"attention_bias": False, "num_key_value_heads": 1, "hidden_act": "gelu"}),
        ("gemma2", {"attention_bias": True, "tie_word_embeddings": False, "attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None, "layer_types": None, "sliding_window": 5}),
        ("gemma3", {"attention_bias": True, "final_logit_softcapping": 3.0, "rope_parameters": None}),
        ("gemma3", {"tie_word_embeddings": False, "layer_types": ["sliding_attention"] * 4}),
    ],
)
def test_our_decoder_answers_as_transformers_of_other_gemmas(family, fields, tmp_path):
    folder = write_foreign_model(tmp_path, family, **fields)
    engine = load(folder, model_impl="native")
    assert answers(engine, chunk_tokens=19, joins_at=[3, 0, 1]) == generated(folder, PROMPTS, NUM_TOKENS)


@pytest.mark.parametrize("family", GEMMAS)
def test_a_bfloat16_gemma_is_as_close_to_the_truth_as_that_of_transformers(family, tmp_path):
    """Which scales vectors by a rounded number, and adds 1 to weights in float32."""
    folder = write_foreign_model(tmp_path, family, spread=0.1)
    with torch.inference_mode():
        truth, rounded = (
            transformers_model(folder, dtype)(torch.tensor([PROMPTS[2]])).logits[0, -1].float().log_softmax(-1)
            for dtype in (torch.float32, torch.bfloat16)
        )
    engine = load(folder, model_impl="native", dtype="bfloat16")
    ((token,),) = run_all(engine, [PROMPTS[2]], greedy(1, logprobs=len(truth)), chunk_tokens=40)
    ours = torch.tensor([logprob for _, logprob in sorted(token.top_logprobs)])
    our_error, their_error = ((logprobs - truth).square().mean().sqrt() for logprobs in (ours, rounded))
    assert their_error > 1e-4  # the comparison is not between two float32 models
    assert our_error < 1.5 * their_error


@pytest.mark.parametrize("family", ["cohere2", "deepseek_v3"])
def test_cached_prefixes_serve(family, tmp_path):
    folder = write_foreign_model(tmp_path, family)
    engine = load(folder, model_impl="transformers")
    allocator = BlockAllocator(engine.num_blocks)
    prompts = [PROMPTS[2], [*PROMPTS[2][:50], 1, 2, 3]]
    expected = generated(folder, prompts, NUM_TOKENS)
    for prompt, answer in zip(prompts, expected, strict=True):
        assert answers(engine, [prompt], allocator=allocator) == [answer]
    assert allocator.blocks_by_name


def test_a_latent_takes_the_place_of_keys_and_values(tmp_path):
    """Of 4 heads of 16 + 12 numbers 20 + 6 that all share."""
    engine = load(write_foreign_model(tmp_path, "deepseek_v3"))
    assert engine.kv_pool_bytes == 64 * 8 * 4 * (20 + 6) * 4  # blocks, tokens, layers, numbers of 4 bytes
    assert engine.pool.values(0).numel() == 0


def test_names_as_the_hub_has_them(tmp_path):
    """GPT-2's lack the name of the decoder, and hold masks."""
    folder = write_foreign_model(tmp_path, "gpt2")
    expected = generated(folder, PROMPTS, NUM_TOKENS)
    tensors = {
        name.removeprefix("transformer."): tensor for name, tensor in load_file(folder / "model.safetensors").items()
    }
    tensors |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 8, 8).tril().bool() for layer in range(3)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert answers(load(folder)) == expected


def test_layers_are_reported_when_their_keys_and_values_are_there(tmp_path):
    engine = load(write_foreign_model(tmp_path, "starcoder2", num_hidden_layers=11))
    request = Request("one", 0, PROMPTS[1], len(PROMPTS[1]), SamplingParams(max_tokens=1))
    work = Work(request, 0, len(PROMPTS[1]), list(range(6)))
    seen = []
    engine.step([work], lambda num_done: seen.append((num_done, bool(engine.pool.keys(num_done - 1)[:6].any()))))
    assert seen == [(8, True), (11, True)]


@pytest.mark.parametrize("fields", [{"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8_e4m3"}])
@pytest.mark.parametrize("family", few(["gemma2", "phi3", "deepseek_v3"]))
def test_other_dtypes_serve(family, fields, tmp_path, untried):
    """And come close enough to transformers' own attention."""
    engine = load(write_foreign_model(tmp_path, family, spread=0.08), model_impl="transformers", **fields)
    assert len(answers(engine, chunk_tokens=19)) == len(PROMPTS)


@pytest.fixture
def untried(monkeypatch):
    """No architecture counts as tried."""
    monkeypatch.setattr("engine.foreign.verification.TRIED", frozenset())


@pytest.mark.parametrize("family", [UNTRIED, "gemma2", "gpt_oss", "gpt_neox"])
def test_untried_architectures_are_compared_first(family, tmp_path, untried, caplog):
    with caplog.at_level("INFO", "engine.foreign.verification"):
        load(write_foreign_model(tmp_path, family), model_impl="transformers")
    assert "agrees here with transformers' own attention" in caplog.text


def test_a_window_that_masks_and_layers_do_not_agree_upon(tmp_path, monkeypatch):
    folder = write_foreign_model(tmp_path, "mistral")
    monkeypatch.setattr(interface, "sight_of", lambda mask_function, window: Sight(window + 1))
    with pytest.raises(ModelError, match="MistralAttention asks for a window of 13 under a mask of 14"):
        load(folder, model_impl="transformers")


def test_scores_that_are_not_capped_are_found_out(tmp_path, untried, monkeypatch):
    folder = write_foreign_model(tmp_path, "gemma2")
    monkeypatch.setattr(interface.Call, "is_scored", False)
    with pytest.raises(
        ModelError, match=r"Gemma2ForCausalLM is off by [\d.]+ of its logits .* --no-verify-model serves"
    ):
        load(folder, model_impl="transformers")
    assert load(folder, model_impl="transformers", verify_model=False).config.is_foreign


def rounded(folder, num_ranks=1):
    """The same checkpoint with what is quantized of it rounded to 8 bits, made whole again. Inputs of what ends
    attention and feed-forwards are divided over ranks, which have scales of their own."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and name.startswith("model.layers.") and "kv_b_proj" not in name:
            is_divided = name.endswith(("o_proj.weight", "c_proj.weight"))
            parts = tensor.chunk(num_ranks if is_divided else 1, dim=1)
            tensors[name] = torch.cat([quantize(part, 8).dense() for part in parts], dim=1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("starcoder2", {}),  # with biases
        pytest.param("phi3", {}, marks=pytest.mark.nightly),  # one module for several projections
        ("deepseek_v3", {"first_k_dense_replace": 4}),  # without experts: layers of latent KV
    ],
)
def test_quantized_weights_answer_as_rounded_ones_do(family, fields, tmp_path):
    folder = write_foreign_model(tmp_path, family, **fields)
    plain = load(folder, model_impl="transformers")
    engine = load(folder, model_impl="transformers", quantization="int8")
    assert engine.weight_bytes < 0.7 * plain.weight_bytes
    found = answers(engine, chunk_tokens=19, joins_at=[3, 0, 1])
    assert found == generated(rounded(folder), PROMPTS, NUM_TOKENS)


@pytest.mark.parametrize("quantization", [pytest.param("int4", marks=pytest.mark.nightly), "w8a8"])
def test_other_quantizations_serve(quantization, tmp_path):
    """And change what is answered, as models this small must."""
    folder = write_foreign_model(tmp_path, "starcoder2")
    found = answers(load(folder, quantization=quantization), chunk_tokens=19)
    assert [len(answer) for answer in found] == [NUM_TOKENS] * len(PROMPTS)
    assert found != generated(folder, PROMPTS, NUM_TOKENS)


@pytest.mark.parametrize(
    ("family", "sentence"),
    [
        ("granitemoe", "--quantization int8: transformers computes GraniteMoeForCausalLM, with experts as they are"),
        ("gpt2", "--quantization int8: transformers computes GPT2LMHeadModel, without linear modules"),
    ],
)
def test_models_whose_weights_would_stay_are_not_quantized(family, sentence, tmp_path):
    with pytest.raises(ModelError, match=sentence):
        load(write_foreign_model(tmp_path, family), quantization="int8")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"batch_invariant": True}, "--batch-invariant: transformers computes Starcoder2ForCausalLM"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size is 2, and there are 1 ranks"),
        ({"model_impl": "native"}, "architecture 'Starcoder2ForCausalLM' is not supported; supported are LlamaFor"),
    ],
)
def test_settings_that_cannot_be(fields, sentence, tmp_path):
    with pytest.raises((SettingsError, ModelError), match=sentence):
        load(write_foreign_model(tmp_path, "starcoder2"), **fields)
