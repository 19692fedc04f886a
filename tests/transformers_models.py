"""Small models of many architectures, random, by the config classes of transformers; and what transformers answers."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from serving_core.model_files.differences import FAMILIES as DESCRIPTIONS
from tests.tiny_models import BOS, EOS, VOCAB_SIZE, write_tiny_model, write_tokenizer
from tests.tiny_models import FAMILIES as TINY_FAMILIES

PROMPTS = [[5, 6, 7], [(7 * at * at + 3) % 250 for at in range(41)], [(11 * at + at * at) % 250 for at in range(90)]]
WINDOW = 13
NUM_TOKENS = 24  # of a greedy answer to each
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # not hidden_size / num_attention_heads
    "max_position_embeddings": 512,
}
_WHOLE_HEADS = {**_SIZES, "head_dim": 12}
_GPT2 = {"vocab_size": VOCAB_SIZE, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 512}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2}
_LATENT = {
    **{name: value for name, value in _SIZES.items() if name != "head_dim"},
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 20,
    "moe_intermediate_size": 24,
    "n_group": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "topk_group": 1,
    "v_head_dim": 12,
}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW}
_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # architecture: the prefix of its classes in transformers, and its config
    "llama": ("Llama", {**_SIZES, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    "mistral": ("Mistral", {**_SIZES, "sliding_window": WINDOW}),
    "qwen2": ("Qwen2", {**_WHOLE_HEADS, **_WINDOWS, "use_sliding_window": True}),
    "qwen3": ("Qwen3", {**_SIZES, "tie_word_embeddings": True}),
    "granite": (
        "Granite",
        {
            **_WHOLE_HEADS,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
        },
    ),
    "olmo2": ("Olmo2", _WHOLE_HEADS),
    "smollm3": ("SmolLM3", {**_WHOLE_HEADS, "no_rope_layers": [1, 0, 1, 0], **_WINDOWS, "use_sliding_window": True}),
    "phi3": ("Phi3", {**_WHOLE_HEADS, "partial_rotary_factor": 0.5, "sliding_window": WINDOW}),
    "starcoder2": ("Starcoder2", {**_WHOLE_HEADS, "sliding_window": WINDOW, "use_bias": True}),
    "cohere2": ("Cohere2", {**_SIZES, **_WINDOWS, "logit_scale": 0.5}),
    "glm4": ("Glm4", {**_SIZES, "partial_rotary_factor": 0.5, "attention_bias": True}),
    "exaone4": ("Exaone4", {**_SIZES, **_WINDOWS, "sliding_window_pattern": 2}),
    "gemma2": (
        "Gemma2",
        {
            **_SIZES,
            **_WINDOWS,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 7,
        },
    ),
    "gemma3": ("Gemma3", {**_SIZES, **_WINDOWS, "query_pre_attn_scalar": 7, "rope_parameters": _ROPES}),
    "gpt_neox": ("GPTNeoX", {**_WHOLE_HEADS, "num_key_value_heads": 4, "rotary_pct": 0.5}),
    "gpt2": ("GPT2", _GPT2),
    "mixtral": ("Mixtral", {**_SIZES, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "qwen2_moe": (
        "Qwen2Moe",
        {**_WHOLE_HEADS, **_EXPERTS, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    ),
    "qwen3_moe": ("Qwen3Moe", {**_SIZES, **_EXPERTS, "moe_intermediate_size": 24}),
    "olmoe": ("Olmoe", {**_WHOLE_HEADS, **_EXPERTS}),
    "deepseek_v2": ("DeepseekV2", {**_LATENT, "q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3", _LATENT),
    "glm4_moe_lite": ("Glm4MoeLite", _LATENT),
    "gemma": ("Gemma", {**_SIZES, "attention_bias": True}),
    "cohere": ("Cohere", _WHOLE_HEADS),
    "olmo": ("Olmo", {**_WHOLE_HEADS, "clip_qkv": 0.7}),
    "olmo3": ("Olmo3", {**_WHOLE_HEADS, **_WINDOWS}),
    "phi": ("Phi", {**_WHOLE_HEADS, "partial_rotary_factor": 0.5}),
    "opt": ("OPT", {**_WHOLE_HEADS, "num_key_value_heads": 4, "ffn_dim": 80, "word_embed_proj_dim": 48}),
    "gpt_bigcode": ("GPTBigCode", {**_GPT2, "multi_query": True}),
    "nemotron": ("Nemotron", _SIZES),
    "glm": ("Glm", _SIZES),
    "seed_oss": ("SeedOss", _SIZES),
    "ernie4_5": ("Ernie4_5", {**_SIZES, "use_bias": True}),
    "apertus": ("Apertus", {**_WHOLE_HEADS, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}),
    "ministral": ("Ministral", {**_SIZES, **_WINDOWS}),
    "granitemoe": ("GraniteMoe", {**_WHOLE_HEADS, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "phimoe": ("Phimoe", {**_WHOLE_HEADS, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "glm4_moe": (
        "Glm4Moe",
        {
            **_SIZES,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 24,
            "n_group": 2,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "topk_group": 1,
            "use_qk_norm": True,
        },
    ),
    "gpt_oss": ("GptOss", {**_SIZES, **_WINDOWS, "num_local_experts": 6, "num_experts_per_tok": 2}),
}


_HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 12,
}
_MAMBA = {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 12, "mamba_n_groups": 1, "mamba_d_ssm": 96}
_INDEXER = {"index_n_heads": 8, "index_head_dim": 16, "index_topk": 40}
_JAMBA = {"attn_layer_offset": 1, "attn_layer_period": 2, "num_experts": 2, "mamba_dt_rank": 8}

SEQUENCES: dict[str, tuple[str, dict[str, Any]]] = {
    # Families that transformers computes sequence by sequence. Each has something that the paged attention cannot
    # compute: a state of recurrent or convolution layers, an attention of its own, or an indexer with keys of its own.
    "deepseek_v32": ("DeepseekV32", {**_LATENT, **_INDEXER}),
    "diffllama": ("DiffLlama", _WHOLE_HEADS),
    "falcon_h1": ("FalconH1", {**_WHOLE_HEADS, **_MAMBA}),
    "jamba": ("Jamba", {**_WHOLE_HEADS, **_JAMBA}),
    "lfm2": ("Lfm2", {**_WHOLE_HEADS, "layer_types": ["conv", "full_attention"] * 2}),
    "mamba": ("Mamba", {**_WHOLE_HEADS, "state_size": 8}),
    "qwen3_5": ("Qwen3_5", {**_SIZES, **_LINEAR, **_HYBRID}),
    "stablelm": ("StableLm", {**_WHOLE_HEADS, "partial_rotary_factor": 0.5}),
}

WHOLE_SEQUENCES = ("deepseek_v32", "diffllama", "stablelm")  # of these, which run on one rank

_ALL = {
    **FAMILIES,
    **SEQUENCES,
    "arcee": ("Arcee", _SIZES),
    "qwen3_5_moe": ("Qwen3_5Moe", {**_SIZES, **_LINEAR, **_HYBRID, **_EXPERTS, "moe_intermediate_size": 24}),
    "mamba2": ("Mamba2", {**_WHOLE_HEADS, "num_heads": 8, "head_dim": 12, "state_size": 8, "n_groups": 2}),
    "olmo_hybrid": ("OlmoHybrid", {**_WHOLE_HEADS, **_HYBRID, **_LINEAR, "linear_num_key_heads": 4}),
    "modernbert_decoder": ("ModernBertDecoder", {**_WHOLE_HEADS, "num_key_value_heads": 4, "local_attention": 26}),
}
WITHOUT_PLAN = ("gpt2", "gpt_bigcode", "opt")  # of transformers, to divide their weights
HEAD_ALONE = ("gpt_oss",)  # is divided
UNTRIED = "arcee"  # of which no test compares the answers at TP 1
INITIALIZES = "modernbert_decoder"  # likewise, whose modules initialize what is in them


class Refused(NamedTuple):
    """An architecture that is refused, and by which sentence."""

    config: str
    fields: dict[str, Any]
    sentence: str


REFUSED = {
    "BertLMHeadModel": Refused(
        "BertConfig", {}, "BertLMHeadModel lets a token see the tokens behind it, and is no decoder"
    ),
    "OpenAIGPTLMHeadModel": Refused(
        "OpenAIGPTConfig", {}, "OpenAIGPTLMHeadModel does not compute with transformers' cache"
    ),
    "RecurrentGemmaForCausalLM": Refused(
        "RecurrentGemmaConfig",
        {"lru_width": 48, "attention_window_size": WINDOW},
        "RecurrentGemmaForCausalLM keeps a state outside of transformers' cache, which is not supported",
    ),
}


def write_refused_model(folder: Path, architecture: str) -> Path:
    """Writes a random model of an architecture that is refused."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config, fields, _ = REFUSED[architecture]
    sizes = {**{name: size for name, size in _SIZES.items() if name != "head_dim"}, **fields}
    torch.manual_seed(0)
    getattr(transformers, architecture)(getattr(transformers, config)(**sizes)).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **sizes}))  # names of sizes that all have
    return folder


def write_transformers_model(folder: Path, family: str, *, seed: int = 0, spread: float = 0.25, **fields: Any) -> Path:
    """Writes a random model of a family; `fields` override those of its config, `spread` is that of its weights."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    _, sizes = _ALL[family]
    config_class, model_class = _classes(family)
    torch.manual_seed(seed)
    ends = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": 0}
    model = model_class(config_class(**{**sizes, **ends, **fields}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Far from flat, so that greedy answers depend on the whole context; biases and norms are not neutral.
            is_norm = name.endswith("weight") and ("norm" in name or ".ln_" in name)
            parameter.normal_(1.0 if is_norm else 0.0, spread)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_any_model(folder: Path, family: str, *, seed: int = 0, **fields: Any) -> Path:
    """Writes a random model of a family of these, or of those of tests.tiny_models."""
    write = write_tiny_model if family in TINY_FAMILIES else write_transformers_model
    return write(folder, family, seed=seed, **fields)


def architecture_of(family: str) -> str:
    """The name of its class in transformers."""
    prefix, _ = _ALL[family]
    return f"{prefix}LMHeadModel" if prefix == "GPT2" else f"{prefix}ForCausalLM"


DESCRIBED = [family for family in FAMILIES if architecture_of(family) in DESCRIPTIONS]  # that our decoder computes too
GEMMAS = ("gemma", "gemma2", "gemma3")  # likewise
MIXTURES = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")  # of these, with experts


def _classes(family: str) -> tuple[Any, Any]:
    import transformers

    prefix, _ = _ALL[family]
    config_name = f"{prefix}TextConfig" if prefix in ("Gemma3", "Qwen3_5", "Qwen3_5Moe") else f"{prefix}Config"
    return getattr(transformers, config_name), getattr(transformers, architecture_of(family))


def transformers_model(folder: Path, dtype: Any = None, **options: Any) -> Any:
    """Load a folder with transformers, in float32 unless another torch dtype is given."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype or torch.float32, **options).eval()


def generated(
    folder: Path, prompts: Sequence[list[int]], max_tokens: int, drafts: Sequence[list[int]] = ()
) -> list[list[int]]:
    """Return the greedy answer of transformers to each prompt alone, in float32; `drafts` as for `greedy_answers`."""
    model = transformers_model(folder, attn_implementation="eager")
    return greedy_answers(model, prompts, max_tokens, drafts)


def greedy_answers(
    model: Any,
    prompts: Sequence[list[int]],
    max_tokens: int,
    drafts: Sequence[list[int]] = (),
    *,
    ignore_eos: bool = False,
) -> list[list[int]]:
    """Return the greedy answer of a transformers model to each prompt alone.

    `drafts` are the answers that a test hopes for. They change the cost alone: one forward pass verifies a draft, and
    transformers' own `generate` answers where there is none or it is not the model's.
    """
    endless = {"min_new_tokens": max_tokens, "eos_token_id": None} if ignore_eos else {}
    answers = []
    for prompt, draft in itertools.zip_longest(prompts, drafts, fillvalue=[]):
        is_answer = is_greedy_answer(model, prompt, draft, max_tokens, ignore_eos=ignore_eos)
        answers.append(draft if is_answer else generate(model, prompt, max_tokens, **endless))
    return answers


def is_greedy_answer(
    model: Any, prompt: list[int], answer: list[int], max_tokens: int, *, ignore_eos: bool = False
) -> bool:
    """Return whether each token of an answer is the likeliest behind those before it, and the answer ends where it
    must: one forward pass of a transformers model."""
    import torch

    known = None if ignore_eos else model.generation_config.eos_token_id
    end_ids = known if isinstance(known, list) else [known]
    num_tokens = next((place for place, token in enumerate(answer, 1) if token in end_ids), max_tokens)
    if len(answer) != num_tokens:
        return False
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
    return logits.argmax(-1).tolist() == answer


def generate(model: Any, prompt: Sequence[int], max_tokens: int, **options: Any) -> list[int]:
    """Return the greedy answer of a transformers model's own `generate`, which takes the options."""
    import torch

    ids = torch.tensor([list(prompt)])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    return output[0, len(prompt) :].tolist()
