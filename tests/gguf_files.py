"""GGUF files small enough for tests, written by gguf's own writer from random transformers models.

The tokenizer is byte-level: a token id below 256 is that byte, as in tests/tiny_models.py, and a few merges are on top.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
from safetensors.numpy import load_file, save_file

from tests.tiny_models import BOS, CHAT_TEMPLATE, EOS, SPECIAL_TOKENS, byte_vocabulary
from tests.transformers_models import write_any_model

MERGES = ["Ġ t", "h e", "i n", "Ġt he"]
TOKENS = [*sorted(byte_vocabulary(), key=byte_vocabulary().get), *SPECIAL_TOKENS, *("".join(m.split()) for m in MERGES)]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": len(TOKENS)}
MODEL_ARCHS = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "olmoe": gguf.MODEL_ARCH.OLMOE,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "cohere": gguf.MODEL_ARCH.COMMAND_R,
    "cohere2": gguf.MODEL_ARCH.COHERE2,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "olmo2": gguf.MODEL_ARCH.OLMO2,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "qwen3_5": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5_moe": gguf.MODEL_ARCH.QWEN35MOE,
}
INTERLEAVED: Final = (gguf.MODEL_ARCH.GRANITE, gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.SMOLLM3)
SCALES: Final = {  # methods of the writer, and what they are given from config.json
    "add_attention_scale": "attention_multiplier",
    "add_embedding_scale": "embedding_multiplier",
    "add_residual_scale": "residual_multiplier",
    "add_logit_scale": "logits_scaling",
}
MIXTURES: dict[str, dict[str, Any]] = {  # sizes that blocks of 32 divide, and what files cannot say
    "mixtral": {"sliding_window": None},
    "olmoe": {},
    "qwen2_moe": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {"moe_intermediate_size": 32, "norm_topk_prob": True},
}
OF_EXPERT: Final = re.compile(r"(?<=\.experts)\.(\d+)(?=\.)")
Change = Callable[[gguf.GGUFWriter], None]


def write_gguf(
    file: Path,
    family: str = "llama",
    *,
    stored: str = "F32",
    seed: int = 0,
    change: Change = lambda writer: None,
    part_tensors: int = 0,
    stacks: bool = True,
    **config: Any,
) -> Path:
    """Writes a file and, in a folder beside it with its name less the suffix, a model of the same weights, as floats of
    what the file has. `change` may add to what is written, or replace metadata. With
    `part_tensors` the model is in parts of so many tensors; given is the first then. Unless it `stacks` them, each
    expert has tensors of its own, as in older files of Mixtral."""
    fields = {**SIZES, **MIXTURES.get(family, {}), **config}
    folder = write_any_model(file.with_suffix(""), family, seed=seed, **fields)
    said = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[MODEL_ARCHS[family]], split_max_tensors=part_tensors)
    _add_config(writer, said)
    _add_scales(writer, said)
    if "num_experts_per_tok" in said:
        _add_experts(writer, said)
    if "linear_num_key_heads" in said:
        _add_linear_attention(writer, said)
    _add_tokenizer(writer)
    kind = gguf.GGMLQuantizationType[stored]
    tensors = _rounded(folder / "model.safetensors", kind)
    if "linear_num_key_heads" in said:
        tensors = {name: _of_linear_attention(name, tensor, said) for name, tensor in tensors.items()}
    if family == "gpt_oss":
        tensors = {known: each for name, tensor in tensors.items() for known, each in _of_gpt_oss(name, tensor)}
    _add_tensors(writer, family, said, _stacked(tensors) if stacks else tensors, kind)
    change(writer)
    write(writer)
    num_parts = len(writer.tensors)
    return file.with_name(f"{file.stem}-00001-of-{num_parts:05}.gguf") if num_parts > 1 else file


def write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def replace(writer: gguf.GGUFWriter, key: str, value: Any, kind: gguf.GGUFValueType) -> None:
    """Says something else, or something more, about the model."""
    writer.kv_data[0].pop(key, None)
    writer.add_key_value(key, value, kind)


def _add_config(writer: gguf.GGUFWriter, said: dict[str, Any]) -> None:
    writer.add_context_length(said["max_position_embeddings"])
    writer.add_embedding_length(said["hidden_size"])
    writer.add_block_count(said["num_hidden_layers"])
    if said["model_type"] != "qwen3_5_moe_text":
        writer.add_feed_forward_length(said["intermediate_size"])
    writer.add_head_count(said["num_attention_heads"])
    num_kv_heads = said["num_key_value_heads"]
    if said["model_type"] == "lfm2":
        num_kv_heads = [0 if layer_type == "conv" else num_kv_heads for layer_type in said["layer_types"]]
        writer.add_shortconv_l_cache(said["conv_L_cache"])
    writer.add_head_count_kv(num_kv_heads)
    head_dim = said.get("head_dim", said["hidden_size"] // said["num_attention_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if "layer_norm_eps" in said:
        writer.add_layer_norm_eps(said["layer_norm_eps"])
        writer.add_logit_scale(said["logit_scale"])
    else:
        writer.add_layer_norm_rms_eps(said["norm_eps"] if "norm_eps" in said else said["rms_norm_eps"])
    writer.add_vocab_size(said["vocab_size"])
    ropes = said["rope_parameters"]
    rope = ropes.get("full_attention", ropes)  # of Gemma 3, whose other rope llama.cpp knows
    _add_rope(writer, rope)
    if not said["model_type"].startswith("gemma"):
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    elif said["model_type"] != "gemma":
        writer.add_sliding_window(said["sliding_window"])
        for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
            if said[cap] is not None:
                getattr(writer, f"add_{cap}")(said[cap])
    if said["model_type"] in ("cohere2", "gpt_oss", "phi3"):
        writer.add_sliding_window(said["sliding_window"])


def _add_rope(writer: gguf.GGUFWriter, rope: dict[str, Any]) -> None:
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] != "default":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _add_linear_attention(writer: gguf.GGUFWriter, said: dict[str, Any]) -> None:
    writer.add_ssm_conv_kernel(said["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(said["linear_key_head_dim"])
    writer.add_ssm_group_count(said["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(said["linear_num_value_heads"])
    writer.add_ssm_inner_size(said["linear_value_head_dim"] * said["linear_num_value_heads"])
    writer.add_full_attention_interval(said["layer_types"].index("full_attention") + 1)


def _add_scales(writer: gguf.GGUFWriter, said: dict[str, Any]) -> None:
    for add, ours in SCALES.items():
        if ours in said:
            getattr(writer, add)(said[ours])


def _add_experts(writer: gguf.GGUFWriter, said: dict[str, Any]) -> None:
    writer.add_expert_count(said.get("num_experts", said.get("num_local_experts")))
    writer.add_expert_used_count(said["num_experts_per_tok"])
    if said["model_type"] == "gpt_oss":
        writer.add_expert_feed_forward_length(said["intermediate_size"])
    if "moe_intermediate_size" in said:
        writer.add_expert_feed_forward_length(said["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in said:
        writer.add_expert_shared_feed_forward_length(said["shared_expert_intermediate_size"])


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if token in SPECIAL_TOKENS else normal for token in TOKENS])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_chat_template(CHAT_TEMPLATE)


def _rounded(file: Path, kind: gguf.GGMLQuantizationType) -> dict[str, np.ndarray]:
    """The tensors of a file, which it has from now on as they come out of blocks of that kind."""
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if _is_quantized(name, tensor):
            tensors[name] = gguf.dequantize(gguf.quantize(tensor, kind), kind)
    save_file(tensors, file, {"format": "pt"})
    return tensors


def _is_quantized(name: str, tensor: np.ndarray) -> bool:
    return tensor.ndim == 2 and not name.endswith("shared_expert_gate.weight")


def _of_linear_attention(name: str, tensor: np.ndarray, said: dict[str, Any]) -> np.ndarray:
    """The tensor as llama.cpp wants it: decays, and the first heads of values of all heads of keys first."""
    num_keys, num_values = said["linear_num_key_heads"], said["linear_num_value_heads"]
    key_dim, value_dim = said["linear_key_head_dim"], said["linear_value_head_dim"]
    order = [key * (num_values // num_keys) + turn for turn in range(num_values // num_keys) for key in range(num_keys)]
    rows = [head * value_dim + row for head in order for row in range(value_dim)]
    match name.split(".")[-2:]:
        case [_, "A_log"]:
            return -np.exp(tensor[order])
        case [_, "dt_bias"] | ["in_proj_a" | "in_proj_b", _]:
            return tensor[order]
        case ["in_proj_z", _]:
            return tensor[rows]
        case ["in_proj_qkv" | "conv1d", _]:
            first = 2 * num_keys * key_dim
            return tensor[[*range(first), *(first + row for row in rows)]]
        case ["out_proj", _]:
            return tensor[:, rows]
        case [norm, "weight"] if norm.endswith("norm") and "linear_attn" not in name:
            return tensor + 1
    return tensor


def _of_gpt_oss(name: str, tensor: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a file, by names that gguf knows: each projection of experts alone, outputs before inputs."""
    path, _, last = name.rpartition(".")
    projections = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)} if "gate_up" in last else {}
    if not path.endswith("mlp.experts"):
        yield f"{name}.weight" if last == "sinks" else name, tensor
        return
    for projection, outputs in (projections or {"down_proj": slice(None)}).items():
        if last.endswith("_bias"):
            yield f"{path}.{projection}.bias", np.ascontiguousarray(tensor[..., outputs])
        else:
            yield f"{path}.{projection}.weight", np.ascontiguousarray(tensor[..., outputs].swapaxes(1, 2))


def _stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """With one tensor of all experts of a layer for each projection."""
    found, experts = dict[str, np.ndarray](), defaultdict[str, dict[int, np.ndarray]](dict)
    for name, tensor in tensors.items():
        if number := OF_EXPERT.search(name):
            experts[OF_EXPERT.sub("", name)][int(number[1])] = tensor
        else:
            found[name] = tensor
    return found | {name: np.stack([each[number] for number in sorted(each)]) for name, each in experts.items()}


def _add_tensors(
    writer: gguf.GGUFWriter,
    family: str,
    said: dict[str, Any],
    tensors: dict[str, np.ndarray],
    stored: gguf.GGMLQuantizationType,
) -> None:
    names = gguf.get_tensor_name_map(MODEL_ARCHS[family], said["num_hidden_layers"])
    for name, tensor in tensors.items():
        heads = {"q_proj": said["num_attention_heads"], "k_proj": said["num_key_value_heads"]}
        if MODEL_ARCHS[family] in INTERLEAVED and (num_heads := heads.get(name.split(".")[-2])):
            halves = tensor.reshape(num_heads, 2, -1, *tensor.shape[1:])
            tensor = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)
        if family.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        kind = stored if _is_quantized(name, tensor) else gguf.GGMLQuantizationType.F32
        if name.endswith("shared_expert_gate.weight"):  # one row
            tensor = tensor[0]
        if name.endswith(("conv.conv.weight", "conv1d.weight")):  # of one input channel
            tensor = tensor[:, 0]
        known = OF_EXPERT.sub("", name).replace(".dt_bias", ".dt_proj.bias")
        theirs = names.get_name(known, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, name
        if number := OF_EXPERT.search(name):
            theirs = theirs.replace("_exps", f".{number[1]}")
        writer.add_tensor(theirs, gguf.quantize(tensor, kind), raw_dtype=kind)
