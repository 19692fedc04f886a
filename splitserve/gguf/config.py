"""Build config.json and generation_config.json from the metadata of a GGUF file.

An unknown key of the architecture is refused, never ignored.
"""

import struct
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Final

from serving_core.errors import ModelError
from serving_core.json_fields import JsonFields
from serving_core.model_files.gguf_header import ROPE_FACTORS, GgufModel
from splitserve.gguf import experts, families, gemma, lfm2, qwen35

ARCHITECTURES: Final = {  # Mistral and Mixtral models are named llama too
    "cohere2": ("Cohere2ForCausalLM", "cohere2"),
    "command-r": ("CohereForCausalLM", "cohere"),
    "gemma": ("GemmaForCausalLM", "gemma"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "gpt-oss": ("GptOssForCausalLM", "gpt_oss"),
    "granite": ("GraniteForCausalLM", "granite"),
    lfm2.NAME: ("Lfm2ForCausalLM", "lfm2"),
    "llama": ("LlamaForCausalLM", "llama"),
    "olmo2": ("Olmo2ForCausalLM", "olmo2"),
    "olmoe": ("OlmoeForCausalLM", "olmoe"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen2moe": ("Qwen2MoeForCausalLM", "qwen2_moe"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen35": ("Qwen3_5ForCausalLM", "qwen3_5_text"),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3"),
}
ROTATES_LESS: Final = ("phi3", *qwen35.NAMES)  # than a whole head
SERVED_AS: Final = "bfloat16"
USED: Final = {
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.sliding_window",
    families.ROTATED,
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
}
OF_NO_USE: Final = {"vocab_size", "tensor_data_layout", "rope.scaling.finetuned"}
NEUTRAL: Final = {  # supported with this value only
    "attention.causal": True,
    "expert_gating_func": 1,  # softmax
    "expert_weights_scale": 1.0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
}
LONG_FACTORS: Final = "rope_factors_long.weight"
POOLING: Final = "pooling_type"
POOLINGS: Final = {1: "mean_tokens", 3: "lasttoken"}  # llama.cpp's numbers for the names of sentence-transformers
ENDINGS: Final = ("eos", "eot", "eom")  # end of a text, a turn, a message to a tool
MORE_ENDINGS: Final = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<EOT>",
    "_<EOT>",
)  # end an output even if the file does not say so, as in llama.cpp, except those that may be text, such as </s>
SAMPLING: Final = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def config_of(model: GgufModel, where: str) -> dict[str, Any]:
    """Return the contents of config.json for the model of a GGUF file; `where` names the file in errors.

    Raises ModelError for an unsupported model.
    """
    name = JsonFields(model.metadata, where).text("general.architecture")
    if name not in ARCHITECTURES:
        raise ModelError(f"{where} has architecture {name!r:.80}; supported are {', '.join(ARCHITECTURES)}")
    own = {key.removeprefix(f"{name}."): value for key, value in model.metadata.items() if key.startswith(f"{name}.")}
    of_experts = experts.used_of(name, own)
    also_used = of_experts | {families.epsilon(name)}
    for used in (families.USED, gemma.USED, lfm2.USED, qwen35.USED):
        also_used |= used.get(name, set())
    _refuse_unknown(own, also_used, where)
    fields = JsonFields(own, where)
    architecture, model_type = ARCHITECTURES[name]
    has_experts_alone = name in ("gpt-oss", "qwen35moe") and "feed_forward_length" not in fields
    hidden_size, num_heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    context = fields.integer("context_length")
    _refuse_unserved(fields, head_dim, may_rotate_less=name in ROTATES_LESS)
    rope = _rope(fields, _rope_factors(model, head_dim))
    if name not in gemma.USED and name not in families.HAS_WINDOW:
        _refuse_window(fields, context)
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": _vocab_size(model, where),
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer(experts.SIZE if has_experts_alone else "feed_forward_length"),
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads if name == lfm2.NAME else fields.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        families.EPSILONS[families.epsilon(name)]: fields.number(families.epsilon(name)),
        "attention_bias": "blk.0.attn_q.bias" in model.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in model.tensors,
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "dtype": SERVED_AS,
        "rope_parameters": rope,
    }
    if name in gemma.USED:
        config |= gemma.gemma_config(name, fields, rope)
    if name in families.USED:
        config |= families.family_config(name, fields, head_dim, rope)
    if name == lfm2.NAME:
        config |= lfm2.lfm2_config(fields)
    if name in qwen35.NAMES:
        config |= qwen35.qwen35_config(fields, head_dim, rope)
    if of_experts:
        config |= experts.experts_config(name, fields, model.tensors, where)
    return config


def generation_config_of(metadata: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the contents of generation_config.json: begin and end tokens, and sampling defaults from the file.

    `where` names the file in errors. Requires metadata whose tokens have been read. Raises ModelError for a wrong
    value.
    """
    fields = JsonFields(dict(metadata), where)
    sampling = {ours: fields.number(key, minimum=-1.0) for key, ours in SAMPLING.items() if key in fields}
    if "top_k" in sampling:
        sampling["top_k"] = int(sampling["top_k"])
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ENDINGS]
    ids = [fields.integer(key, minimum=0) for key in keys if key in fields]
    ids += [token_id for token_id, token in enumerate(metadata["tokenizer.ggml.tokens"]) if token in MORE_ENDINGS]
    return {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(ids)),
        **({"do_sample": True, **sampling} if sampling else {}),
    }


def modules_of(metadata: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the contents of modules.json and of the pooling config, by path, for an embedding model; else empty.

    Requires metadata whose config has been read. As in llama.cpp, embeddings have length 1.
    """
    name = JsonFields(dict(metadata), where).text("general.architecture")
    kind = metadata.get(f"{name}.{POOLING}", 0)
    if not kind:
        return {}
    places = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [{"type": f"sentence_transformers.models.{module}", "path": place} for module, place in places.items()]
    return {"modules.json": modules, "1_Pooling/config.json": {f"pooling_mode_{POOLINGS[kind]}": True}}


def _refuse_unknown(own: Mapping[str, Any], also_used: AbstractSet[str], where: str) -> None:
    for key, value in own.items():
        says_nothing = isinstance(value, int | float | str) and not value
        is_harmless = value == NEUTRAL[key] if key in NEUTRAL else key in USED | OF_NO_USE | also_used or says_nothing
        is_harmless |= key == POOLING and type(value) is int and value in POOLINGS
        if not is_harmless:
            raise ModelError(f"{where} says {key} {value!r:.40}, and a model with that cannot be served")


def _refuse_unserved(fields: JsonFields, head_dim: int, *, may_rotate_less: bool) -> None:
    for key in ("attention.value_length",) if may_rotate_less else ("attention.value_length", families.ROTATED):
        if fields.integer(key, head_dim) != head_dim:
            raise fields.error(key, f"as large as a head ({head_dim})")


def _refuse_window(fields: JsonFields, context: int) -> None:
    if 0 < fields.integer("attention.sliding_window", context, minimum=0) < context:
        raise fields.error("attention.sliding_window", f"absent, 0 or the context ({context})")


def _vocab_size(model: GgufModel, where: str) -> int:
    embedding = model.tensors.get("token_embd.weight")
    tokens = model.metadata.get("tokenizer.ggml.tokens", ())
    if embedding is None:
        raise ModelError(f"{where} lacks token_embd.weight")
    if isinstance(tokens, list) and len(tokens) > embedding.shape[0]:
        raise ModelError(f"{where} has {len(tokens)} tokens, and {embedding.shape[0]} rows of embeddings for them")
    return embedding.shape[0]


def _rope_factors(model: GgufModel, head_dim: int) -> list[float]:
    """Return the divisors of the frequencies, which llama.cpp stores instead of the parameters of Llama 3's rope."""
    if LONG_FACTORS in model.tensors:
        raise ModelError(f"the file has {LONG_FACTORS}, and a rope that depends on a text's length cannot be served")
    if (tensor := model.tensors.get(ROPE_FACTORS)) is None:
        return []
    if tensor.shape != (head_dim // 2,) or tensor.type.name != "F32":
        found = f"has shape {list(tensor.shape)} in {tensor.type.name}"
        raise ModelError(f"{ROPE_FACTORS} {found}, and the model wants [{head_dim // 2}] in F32")
    return list(struct.unpack(f"<{head_dim // 2}f", model.rope_factors))


def _rope(fields: JsonFields, factors: list[float]) -> dict[str, Any]:
    theta = fields.positive("rope.freq_base", 10_000.0)
    is_scaled = "rope.scaling.factor" in fields or "rope.scale_linear" in fields
    kind = fields.text("rope.scaling.type", "linear" if is_scaled else "none")
    if kind == "none" and factors:  # equal lists: they apply to texts of any length
        return {
            "rope_type": "longrope",
            "rope_theta": theta,
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
        }
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn") or factors:
        raise fields.error("rope.scaling.type", f"none{'' if factors else ', linear or yarn'}")
    factor = fields.positive("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": theta, "factor": factor}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = fields.integer("rope.scaling.original_context_length")
        rope["beta_fast"] = fields.positive("rope.scaling.yarn_beta_fast", 32.0)
        rope["beta_slow"] = fields.positive("rope.scaling.yarn_beta_slow", 1.0)
    return rope
