"""A draft model out of a model itself: its first layers, between its own embedding and head. It knows less than one of
its size that was trained, and needs none."""

import json
import re
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file

from engine.model.checkpoint import whole_tensor
from engine.model.weights import open_checkpoint
from serving_core.errors import SettingsError
from serving_core.model_config import read_model_config
from serving_core.stored_tensors import FLOATS

LAYER: Final = re.compile(r"model\.layers\.(\d+)\.")


def write_first_layers(folder: Path, num_layers: int, into: Path) -> None:
    """Into an empty folder. Raises SettingsError, or ModelError for weights that are stored quantized."""
    num_all = read_model_config(folder).num_layers
    if num_layers >= num_all:
        raise SettingsError(f"--draft-layers {num_layers}: the model has {num_all}, and a draft model has fewer")
    checkpoint = open_checkpoint(folder)
    tensors = {}
    for name in sorted(checkpoint.names()):
        layer = LAYER.match(name)
        if layer is None or int(layer[1]) < num_layers:
            shape, _ = checkpoint.describe(name)
            part = whole_tensor(name, shape, FLOATS)
            checkpoint.check(part)
            tensors[name] = checkpoint.read_all(part).to(torch.bfloat16)
    save_file(tensors, into / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (into / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
