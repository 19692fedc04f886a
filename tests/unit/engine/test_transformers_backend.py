"""Models that transformers computes over our pool and with our attention: greedy answers against its own `generate`."""

from functools import partial

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.attention.paged import PortableAttention
from engine.build import build_engine
from engine.transformers_backend import decoder
from engine.transformers_backend.decoder import Sight
from engine.transformers_backend.tried import TRIED, TRIED_WITH
from serving_core.errors import ModelError, SettingsError
from serving_core.node.blocks import BlockAllocator
from serving_core.requests import Request, SamplingParams, Work
from serving_core.settings import EngineSettings
from tests.effort import few
from tests.toy_scheduler import greedy, run_all, token_ids
from tests.transformers_models import (
    DESCRIBED,
    FAMILIES,
    GEMMAS,
    NUM_TOKENS,
    PROMPTS,
    UNTRIED,
    architecture_of,
    generated,
    greedy_answers,
    is_greedy_answer,
    transformers_model,
    write_transformers_model,
)
from tests.unit.engine.native_kit import choose_native
from tests.unit.engine.quantized_checkpoints import rounded
from tests.unit.engine.transformers_kit import rewrite


def load(folder, **fields):
    return build_engine(EngineSettings(**{"model": str(folder), "num_kv_blocks": 64, "block_size": 8, **fields}))


def answers(engine, prompts=PROMPTS, **scheduling):
    return token_ids(run_all(engine, prompts, greedy(NUM_TOKENS), **scheduling))


@pytest.fixture
def folder_of(written):
    """Return a function that gives the folder of a model, which no test may change."""
    return partial(written, write_transformers_model)


@pytest.fixture(scope="module")
def expected_of(written):
    """Return a function that gives transformers' answers to the prompts, computed once for each family; `drafts` as for
    `generated`."""
    known = {}

    def expected(family, drafts=()):
        if family not in known:
            known[family] = generated(written(write_transformers_model, family), PROMPTS, NUM_TOKENS, drafts)
        return known[family]

    return expected


# Each has something that none before it has: windows, caps, biases, latents, sinks, experts.
DIFFERENT = ("ministral", "gemma2", "gpt2", "glm4", "mixtral", "deepseek_v3", "gpt_oss")


@pytest.mark.parametrize("family", few(FAMILIES, *DIFFERENT))
def test_answers_are_those_of_transformers(family, folder_of, expected_of):
    """In chunks that end within blocks, steps of answers beside chunks of prompts."""
    engine = load(folder_of(family), model_impl="transformers")
    found = answers(engine, chunk_tokens=19, joins_at=[3, 0, 1])
    assert found == expected_of(family, found)
    assert len({token for answer in found for token in answer}) > 4  # no model that says the same all the time
    assert engine.config.architecture in TRIED


@pytest.mark.parametrize("family", few(FAMILIES, "gpt_oss"))
def test_drafts_do_not_change_what_transformers_answers(family, folder_of, monkeypatch):
    """Drafts make the oracle of these tests cheaper, and change nothing else."""
    model = transformers_model(folder_of(family), attn_implementation="eager")
    prompt, num_tokens = PROMPTS[1], 8
    [whole] = greedy_answers(model, [prompt], num_tokens, ignore_eos=True)
    model.generation_config.eos_token_id = [whole[4]]  # so that the answer ends early
    [ended] = greedy_answers(model, [prompt], num_tokens)
    assert ended == whole[: whole.index(whole[4]) + 1]
    for draft in (whole, ended[:-1], [*ended[:-1], ended[-1] ^ 1], []):
        assert not is_greedy_answer(model, prompt, draft, num_tokens)
        assert greedy_answers(model, [prompt], num_tokens, [draft]) == [ended]
    monkeypatch.setattr(model, "generate", None)
    assert greedy_answers(model, [prompt], num_tokens, [ended]) == [ended]
    assert greedy_answers(model, [prompt], num_tokens, [whole], ignore_eos=True) == [whole]


def test_the_architectures_that_count_as_tried_are_those_above():
    assert {architecture_of(family) for family in FAMILIES} == TRIED
    assert transformers.__version__ == TRIED_WITH


def answers_otherwise(folder, before):
    """Return whether transformers' answer to one of the prompts differs from that before."""
    model = transformers_model(folder, attn_implementation="eager")
    return not all(is_greedy_answer(model, *pair, NUM_TOKENS) for pair in zip(PROMPTS, before, strict=True))


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("mistral", {"sliding_window": None}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"layer_types": ["full_attention"] * 4}),
        ("gemma2", {"query_pre_attn_scalar": 70}),
        ("gpt_oss", {"layer_types": ["full_attention"] * 4}),
        pytest.param("granite", {"attention_multiplier": 0.3}, marks=pytest.mark.nightly),
        pytest.param("phi3", {"sliding_window": None}, marks=pytest.mark.nightly),
    ],
)
def test_what_attention_is_told_decides_answers(family, fields, expected_of, copied):
    """Else the test above would say nothing of it."""
    folder = copied(write_transformers_model, family)
    before = expected_of(family)
    assert not answers_otherwise(folder, before)
    assert answers_otherwise(rewrite(folder, **fields), before)


def test_sinks_decide_answers(expected_of, copied):
    folder = copied(write_transformers_model, "gpt_oss")
    tensors = load_file(folder / "model.safetensors")
    sinks = {name: torch.full_like(tensor, 3.0) for name, tensor in tensors.items() if name.endswith("sinks")}
    save_file(tensors | sinks, folder / "model.safetensors", {"format": "pt"})
    assert answers_otherwise(folder, expected_of("gpt_oss"))
    engine = load(folder)
    assert isinstance(engine.attention, PortableAttention)
    after = answers(engine, chunk_tokens=19)
    assert after == generated(folder, PROMPTS, NUM_TOKENS, after)


def test_native_where_there_is_a_native_model(folder_of):
    folder = folder_of("qwen3")
    native, other = load(folder), load(folder, model_impl="transformers")
    found = answers(native)
    assert found == answers(other) == generated(folder, PROMPTS, NUM_TOKENS, found)
    assert (native.fingerprint["model_impl"], other.fingerprint["model_impl"]) == ("native", "transformers")
    assert other.description["model_impl"] == f"transformers {transformers.__version__}"


def test_windows_that_alternate_in_a_mistral(expected_of, copied):
    """Which transformers takes for its Ministral, of other answers."""
    folder = copied(write_transformers_model, "mistral")
    rewrite(folder, layer_types=FAMILIES["ministral"][1]["layer_types"])
    assert answers_otherwise(folder, expected_of("mistral"))
    native, other = (
        answers(load(folder, model_impl=model_impl), chunk_tokens=19) for model_impl in ("native", "transformers")
    )
    assert native == other == generated(folder, PROMPTS, NUM_TOKENS, native)


@pytest.mark.parametrize("rope_type", few(["dynamic", "default"]))
def test_a_llama_that_our_decoder_does_not_know(rope_type, folder_of):
    rope = {"rope_type": rope_type, "rope_theta": 1e4, **({} if rope_type == "default" else {"factor": 2.0})}
    folder = folder_of("llama", rope_parameters=rope)  # with gelu
    engine = load(folder)
    assert engine.config.is_transformers
    found = answers(engine, chunk_tokens=19)
    assert found == generated(folder, PROMPTS, NUM_TOKENS, found)


@pytest.mark.parametrize("family", few(DESCRIBED, "gemma3", "mixtral", "olmo2"))
def test_our_decoder_answers_as_transformers(family, folder_of, monkeypatch):
    """With compiled kernels and without."""
    found = {}
    for is_native in (True, False):
        choose_native(monkeypatch, is_native)
        engine = load(folder_of(family), model_impl="native")
        found[is_native] = answers(engine, chunk_tokens=19, joins_at=[3, 0, 1])
    expected = generated(folder_of(family), PROMPTS, NUM_TOKENS, found[True])
    assert found == {True: expected, False: expected}


@pytest.mark.parametrize(
    "fields",
    few([{"tie_word_embeddings": True, "residual_multiplier": 0.3}, {"attention_bias": True, "mlp_bias": True}]),
)
def test_our_decoder_answers_as_transformers_of_other_granites(fields, folder_of):
    folder = folder_of("granite", **fields)
    found = answers(load(folder, model_impl="native"))
    assert found == generated(folder, PROMPTS, NUM_TOKENS, found)


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
def test_our_decoder_answers_as_transformers_of_other_gemmas(family, fields, folder_of):
    folder = folder_of(family, **fields)
    found = answers(load(folder, model_impl="native"), chunk_tokens=19, joins_at=[3, 0, 1])
    assert found == generated(folder, PROMPTS, NUM_TOKENS, found)


@pytest.mark.parametrize("family", few(GEMMAS, "gemma3"))
def test_a_bfloat16_gemma_is_as_close_to_the_truth_as_that_of_transformers(family, folder_of):
    """Which scales vectors by a rounded number, and adds 1 to weights in float32."""
    folder = folder_of(family, spread=0.1)
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


@pytest.mark.parametrize("family", few(["deepseek_v3", "cohere2"]))
def test_cached_prefixes_serve(family, folder_of):
    engine = load(folder_of(family), model_impl="transformers")
    allocator = BlockAllocator(engine.num_blocks)
    prompts = [PROMPTS[2], [*PROMPTS[2][:50], 1, 2, 3]]
    found = [answer for prompt in prompts for answer in answers(engine, [prompt], allocator=allocator)]
    assert found == generated(folder_of(family), prompts, NUM_TOKENS, found)
    assert allocator.blocks_by_name


def test_a_latent_takes_the_place_of_keys_and_values(folder_of):
    """Of 4 heads of 16 + 12 numbers 20 + 6 that all share."""
    engine = load(folder_of("deepseek_v3"))
    assert engine.kv_pool_bytes == 64 * 8 * 4 * (20 + 6) * 4  # blocks, tokens, layers, numbers of 4 bytes
    assert engine.pool.values(0).numel() == 0


def test_names_as_the_hub_has_them(copied):
    """GPT-2's lack the name of the decoder, and hold masks."""
    folder = copied(write_transformers_model, "gpt2")
    theirs = transformers_model(folder, attn_implementation="eager")
    tensors = {
        name.removeprefix("transformer."): tensor for name, tensor in load_file(folder / "model.safetensors").items()
    }
    tensors |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 8, 8).tril().bool() for layer in range(3)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    found = answers(load(folder))
    assert found == greedy_answers(theirs, PROMPTS, NUM_TOKENS, found)


def test_layers_are_reported_when_their_keys_and_values_are_there(folder_of):
    engine = load(folder_of("starcoder2", num_hidden_layers=11))
    request = Request("one", 0, PROMPTS[1], len(PROMPTS[1]), SamplingParams(max_tokens=1))
    work = Work(request, 0, len(PROMPTS[1]), list(range(6)))
    seen = []
    engine.step([work], lambda num_done: seen.append((num_done, bool(engine.pool.keys(num_done - 1)[:6].any()))))
    assert seen == [(8, True), (11, True)]


OTHER_DTYPES = [{"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8_e4m3"}]


@pytest.mark.parametrize("fields", few(OTHER_DTYPES, *OTHER_DTYPES[:2]))
@pytest.mark.parametrize("family", few(["gemma2", "phi3", "deepseek_v3"]))
def test_other_dtypes_serve(family, fields, folder_of, untried):
    """And come close enough to transformers' own attention."""
    engine = load(folder_of(family, spread=0.08), model_impl="transformers", **fields)
    assert len(answers(engine, chunk_tokens=19)) == len(PROMPTS)


@pytest.fixture
def untried(monkeypatch):
    """No architecture counts as tried."""
    monkeypatch.setattr("engine.transformers_backend.loading.TRIED", frozenset())


@pytest.mark.parametrize("family", few([UNTRIED, "gemma2", "gpt_oss", "gpt_neox"], UNTRIED, "gemma2"))
def test_untried_architectures_are_compared_first(family, folder_of, untried, caplog):
    with caplog.at_level("INFO", "engine.transformers_backend.loading"):
        load(folder_of(family), model_impl="transformers")
    assert "agrees here with transformers' own attention" in caplog.text


def test_a_window_that_masks_and_layers_do_not_agree_upon(folder_of, expected_of, monkeypatch, caplog):
    folder = folder_of("mistral")
    monkeypatch.setattr(decoder, "sight_of", lambda mask_function, window: Sight(window + 1))
    engine = load(folder, model_impl="transformers")
    assert "computed sequence by sequence: MistralAttention asks for a window of 13 under a mask of 14" in caplog.text
    assert answers(engine) == expected_of("mistral")


def test_scores_that_are_not_capped_are_found_out(folder_of, untried, monkeypatch):
    folder = folder_of("gemma2")
    monkeypatch.setattr(decoder.Call, "is_scored", False)
    with pytest.raises(
        ModelError, match=r"Gemma2ForCausalLM is off by [\d.]+ of its logits .* --no-verify-model serves"
    ):
        load(folder, model_impl="transformers")
    assert load(folder, model_impl="transformers", verify_model=False).config.is_transformers


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("starcoder2", {}),  # with biases
        pytest.param("phi3", {}, marks=pytest.mark.nightly),  # one module for several projections
        ("deepseek_v3", {"first_k_dense_replace": 4}),  # without experts: layers of latent KV
    ],
)
def test_quantized_weights_answer_as_rounded_ones_do(family, fields, copied):
    folder = copied(write_transformers_model, family, **fields)
    plain = load(folder, model_impl="transformers")
    engine = load(folder, model_impl="transformers", quantization="int8")
    assert engine.weight_bytes < 0.7 * plain.weight_bytes
    found = answers(engine, chunk_tokens=19, joins_at=[3, 0, 1])
    assert found == generated(rounded(folder), PROMPTS, NUM_TOKENS, found)


@pytest.mark.parametrize("quantization", [pytest.param("int4", marks=pytest.mark.nightly), "w8a8"])
def test_other_quantizations_serve(quantization, folder_of):
    """And change what is answered, as models this small must."""
    folder = folder_of("starcoder2")
    found = answers(load(folder, quantization=quantization), chunk_tokens=19)
    assert [len(answer) for answer in found] == [NUM_TOKENS] * len(PROMPTS)
    plain = answers(load(folder), chunk_tokens=19)
    assert found != plain == generated(folder, PROMPTS, NUM_TOKENS, plain)


@pytest.mark.parametrize(
    ("family", "sentence"),
    [
        ("granitemoe", "--quantization int8: transformers computes GraniteMoeForCausalLM, with experts as they are"),
        ("gpt2", "--quantization int8: transformers computes GPT2LMHeadModel, without linear modules"),
    ],
)
def test_models_whose_weights_would_stay_are_not_quantized(family, sentence, folder_of):
    with pytest.raises(ModelError, match=sentence):
        load(folder_of(family), quantization="int8")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"batch_invariant": True}, "--batch-invariant: transformers computes Starcoder2ForCausalLM"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size is 2, and there are 1 ranks"),
        ({"model_impl": "native"}, "architecture 'Starcoder2ForCausalLM' is not supported; supported are LlamaFor"),
    ],
)
def test_settings_that_cannot_be(fields, sentence, folder_of):
    with pytest.raises((SettingsError, ModelError), match=sentence):
        load(folder_of("starcoder2"), **fields)
