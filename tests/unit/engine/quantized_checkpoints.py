"""Tiny models stored as GPTQ and AWQ do: rounded and packed by numpy, one number at a time."""

import json

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from engine.quantization import weight_quantization
from tests.tiny_models import write_tiny_model

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack(numbers, bits, order=None):
    """Rows [A, B] of numbers into int32 words [A, B * bits / 32]; number order[i] of a word's is i places up."""
    per_word = 32 // bits
    words = np.zeros((numbers.shape[0], numbers.shape[1] // per_word), dtype=np.uint32)
    for column in range(words.shape[1]):
        for place in range(per_word):
            source = column * per_word + (place if order is None else order[place])
            words[:, column] |= numbers[:, source].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(words.view(np.int32).copy())


def quantize(weight, groups, bits, symmetric):
    """Of a weight [N, K] whose input k is in groups[k]: numbers [N, K], scales [G, N] in float16, zeros [G, N] and the
    weight that they stand for."""
    num_groups, most = int(groups.max()) + 1, 2**bits - 1
    numbers = np.zeros(weight.shape, dtype=np.int64)
    dense = np.zeros(weight.shape, dtype=np.float32)
    scales = np.zeros((num_groups, weight.shape[0]), dtype=np.float16)
    zeros = np.zeros((num_groups, weight.shape[0]), dtype=np.int64)
    for group in range(num_groups):
        inputs = groups == group
        part = weight[:, inputs]
        least, largest = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        if symmetric:
            largest = np.maximum(largest, -least)
            least = -largest
        scale = ((largest - least) / most).astype(np.float16)
        zero = np.full(len(scale), (most + 1) // 2) if symmetric else np.clip(np.round(-least / scale), 0, most)
        rounded = np.clip(np.round(part / scale[:, None].astype(np.float32)) + zero[:, None], 0, most)
        numbers[:, inputs], scales[group], zeros[group] = rounded, scale, zero
        dense[:, inputs] = (rounded - zero[:, None]) * scale[:, None].astype(np.float32)
    return numbers, scales, zeros.astype(np.int64), dense


def groups_of(num_inputs, group_size, rng):
    """In order, or with a generator in any order."""
    groups = np.arange(num_inputs) // (num_inputs if group_size == -1 else group_size)
    return groups if rng is None else rng.permutation(groups)


def gptq_tensors(numbers, scales, zeros, groups, bits, first_format):
    stored_zeros = (zeros - 1) & (2**bits - 1) if first_format else zeros
    return {
        "qweight": pack(numbers, bits).t().contiguous(),
        "qzeros": pack(stored_zeros, bits),
        "scales": torch.from_numpy(scales),
        "g_idx": torch.from_numpy(groups.astype(np.int32)),
    }


def awq_tensors(numbers, scales, zeros):
    return {
        "qweight": pack(numbers.T, 4, AWQ_ORDER),
        "qzeros": pack(zeros, 4, AWQ_ORDER),
        "scales": torch.from_numpy(scales),
    }


def write_quantized(folder, method, *, bits=4, group_size=32, symmetric=False, act_order="no", fields=(), **config):
    """Writes folder/stored with quantized projections, and folder/dense with the weights that they stand for.

    act_order is "no", "alike" (the same order for projections of the same input) or "each".
    """
    family = config.pop("family", "llama")
    dense = write_tiny_model(folder / "dense", family, **{**SIZES, **config})
    stored = write_tiny_model(folder / "stored", family, **{**SIZES, **config})
    tensors, whole = load_file(stored / "model.safetensors"), load_file(dense / "model.safetensors")
    for number, name in enumerate(sorted(tensors)):
        module, _, kind = name.rpartition(".")
        if kind != "weight" or module.rpartition(".")[2] not in PROJECTIONS:
            continue
        weight = tensors.pop(name).numpy()
        rng = None
        if act_order != "no":
            rng = np.random.default_rng(weight.shape[1] if act_order == "alike" else number)
        groups = groups_of(weight.shape[1], group_size, rng)
        numbers, scales, zeros, rounded = quantize(weight, groups, bits, symmetric)
        whole[name] = torch.from_numpy(rounded)
        if method == "gptq":
            packed = gptq_tensors(numbers, scales, zeros, groups, bits, dict(fields).get("checkpoint_format") is None)
        else:
            packed = awq_tensors(numbers, scales, zeros)
        tensors.update({f"{module}.{suffix}": tensor for suffix, tensor in packed.items()})
    save_file(whole, dense / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, stored / "model.safetensors", metadata={"format": "pt"})
    describe(stored, {"quant_method": method, "bits": bits, "group_size": group_size, **dict(fields)})
    return stored, dense


def describe(folder, quantization_config):
    """Puts it into config.json."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization_config
    (folder / "config.json").write_text(json.dumps(config))


def edit(folder, change):
    """Lets a function change the tensors of a folder."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def rounded(folder, num_ranks=1):
    """Round the weights of a checkpoint that `--quantization int8` quantizes to 8 bits and back, in place. Ranks divide
    the inputs of the projections that end attention and feed-forwards, and have scales of their own."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and name.startswith("model.layers.") and "kv_b_proj" not in name:
            is_divided = name.endswith(("o_proj.weight", "c_proj.weight"))
            parts = tensor.chunk(num_ranks if is_divided else 1, dim=1)
            tensors[name] = torch.cat([weight_quantization.quantize(part, 8).dense() for part in parts], dim=1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
