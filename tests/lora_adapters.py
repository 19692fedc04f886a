"""Small random LoRA adapters in PEFT's layout, and the models that they stand for: with their products added to the
weights, in float32."""

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
NEURONS = ("gate_proj", "up_proj", "down_proj")
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def write_adapter(
    folder: Path,
    model: Path,
    *,
    seed: int,
    targets: Sequence[str] = (*ATTENTION, *NEURONS),
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> Path:
    """Writes an adapter for these projections of all layers; `fields` override those of its config."""
    config = {**_CONFIG, "target_modules": list(targets), **fields}
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in sorted(load_file(model / "model.safetensors").items()):
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets:
            halves = {"lora_A": (config["r"], weight.shape[1]), "lora_B": (weight.shape[0], config["r"])}
            for half, shape in halves.items():
                # As large as the weights: so that answers are other ones.
                values = torch.randn(shape, generator=generator) * 0.25
                tensors[f"base_model.model.{module}.{half}.weight"] = values.to(dtype)
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


def write_merged(folder: Path, model: Path, adapter: Path) -> Path:
    """Writes the model with the adapter in its weights."""
    shutil.copytree(model, folder)
    config, halves = json.loads((adapter / CONFIG).read_text()), load_file(adapter / WEIGHTS)
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config["use_rslora"] else config["r"])
    weights = load_file(model / "model.safetensors")
    for name in weights:
        prefix = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{prefix}.lora_A.weight" in halves:
            down, up = (halves[f"{prefix}.{half}.weight"].float() for half in ("lora_A", "lora_B"))
            weights[name] = weights[name] + scale * (up @ down)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


_CONFIG = {  # as PEFT writes it
    "alpha_pattern": {},
    "auto_mapping": None,
    "base_model_name_or_path": "tiny",
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layer_replication": None,
    "layers_to_transform": None,
    "lora_alpha": 8,
    "lora_dropout": 0.05,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_type": "LORA",
    "r": 4,
    "rank_pattern": {},
    "task_type": "CAUSAL_LM",
    "use_dora": False,
    "use_rslora": False,
}
