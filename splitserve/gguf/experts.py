"""Build the config of mixture-of-experts models from GGUF metadata, and check that all experts are present.

Whether the weights of a token's experts are normalized to sum 1 is missing in most files; as in llama.cpp, it is known
by the architecture.
"""

from collections.abc import Mapping
from typing import Any, Final

from serving_core.errors import ModelError
from serving_core.json_fields import JsonFields
from serving_core.model_files.differences import MOST_EXPERTS
from serving_core.model_files.gguf_header import GgufTensor
from serving_core.model_files.gguf_weights import EXPERT_COUNT, STACKED

CHOSEN: Final = "expert_used_count"
SIZE, SHARED_SIZE = "expert_feed_forward_length", "expert_shared_feed_forward_length"
IS_NORMALIZED: Final = "expert_weights_norm"
NORMALIZES: Final = {
    "gpt-oss": True,
    "llama": True,
    "olmoe": False,
    "qwen2moe": False,
    "qwen35moe": True,
    "qwen3moe": True,
}
SHARES: Final = ("qwen2moe", "qwen35moe")  # an expert that computes all tokens
USED: Final = frozenset({EXPERT_COUNT, CHOSEN, SIZE, IS_NORMALIZED})
MIXTRAL: Final = ("MixtralForCausalLM", "mixtral")  # a llama with experts
MOST_EXPERT_TENSORS: Final = 2**18  # of a model; one for each expert and projection
PROJECTIONS: Final = ("gate", "up", "down")


def used_of(name: str, own: Mapping[str, Any]) -> frozenset[str]:
    """Return the metadata keys that describe the experts of architecture `name`; empty if it has no experts.

    `own` is the architecture's metadata.
    """
    if name not in NORMALIZES or (name == "llama" and not own.get(EXPERT_COUNT)):
        return frozenset()
    return USED | {SHARED_SIZE} if name in SHARES else USED


def experts_config(name: str, fields: JsonFields, tensors: Mapping[str, GgufTensor], where: str) -> dict[str, Any]:
    """Return the expert part of config.json for the architecture `name`; `where` names the file in errors.

    Raises ModelError for unsupported metadata, and when an expert tensor is missing or has another shape than the
    metadata.
    """
    num_experts, num_chosen = fields.integer(EXPERT_COUNT), fields.integer(CHOSEN)
    if num_experts > MOST_EXPERTS:
        raise fields.error(EXPERT_COUNT, f"at most {MOST_EXPERTS}")
    if num_chosen > num_experts:
        raise fields.error(CHOSEN, f"at most the number of experts ({num_experts})")
    if fields.boolean(IS_NORMALIZED, NORMALIZES[name]) is not NORMALIZES[name]:
        raise fields.error(IS_NORMALIZED, f"{NORMALIZES[name]} for {name}, as llama.cpp computes it")
    size = _size(name, fields, num_chosen)
    _check_tensors(tensors, fields, num_experts, size, where)
    config: dict[str, Any] = {"num_experts_per_tok": num_chosen, "mlp_bias": False}
    if name == "llama":
        architecture, model_type = MIXTRAL
        return {**config, "architectures": [architecture], "model_type": model_type, "num_local_experts": num_experts}
    if name == "gpt-oss":
        return {**config, "num_local_experts": num_experts, "intermediate_size": size}
    config |= {"num_experts": num_experts, "norm_topk_prob": NORMALIZES[name]}
    if name == "olmoe":
        return config
    config["moe_intermediate_size"] = size
    if name in SHARES:
        shared_size = fields.integer(SHARED_SIZE) if SHARED_SIZE in fields else fields.integer("feed_forward_length")
        config["shared_expert_intermediate_size"] = shared_size
    if name == "qwen2moe":
        config |= {"qkv_bias": "blk.0.attn_q.bias" in tensors, "attention_bias": False}
    return config


def _size(name: str, fields: JsonFields, num_chosen: int) -> int:
    """Return the intermediate size of an expert."""
    if name == "gpt-oss":
        return fields.integer(SIZE)
    if name.startswith("qwen"):  # the oldest files have the total size of a token's experts
        return fields.integer(SIZE) if SIZE in fields else max(1, fields.integer("feed_forward_length") // num_chosen)
    size = fields.integer("feed_forward_length")
    if fields.integer(SIZE, size) != size:
        raise fields.error(SIZE, f"absent, or feed_forward_length ({size})")
    return size


def _check_tensors(
    tensors: Mapping[str, GgufTensor], fields: JsonFields, num_experts: int, size: int, where: str
) -> None:
    """Check that the file has all expert tensors, so that nothing larger than the file is built."""
    num_layers, hidden_size = fields.integer("block_count"), fields.integer("embedding_length")
    num_stacked = sum(f"{STACKED}." in name for name in tensors)
    count = num_experts * max(num_stacked, num_layers * len(PROJECTIONS))
    if count > MOST_EXPERT_TENSORS:
        raise ModelError(
            f"{where} says that it has {count} projections of experts; at most {MOST_EXPERT_TENSORS} are read"
        )
    for layer in range(num_layers):
        for projection in PROJECTIONS:
            shape: tuple[int, ...] = (hidden_size, size) if projection == "down" else (size, hidden_size)
            name = f"blk.{layer}.ffn_{projection}"
            wanted = {f"{name}{STACKED}.weight": (num_experts, *shape)}
            if f"{name}.0.weight" in tensors:  # Mixtral files from before experts were stacked
                wanted = {f"{name}.{expert}.weight": shape for expert in range(num_experts)}
            for tensor_name, its_shape in wanted.items():
                if (tensor := tensors.get(tensor_name)) is None:
                    raise ModelError(f"{where} lacks {tensor_name}")
                if tensor.shape != its_shape:
                    found = f"{tensor_name} has shape {list(tensor.shape)}"
                    raise ModelError(f"{found}, and the model wants {list(its_shape)}")
