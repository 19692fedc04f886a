"""Load a decoder's LoRA adapters from their files: each rank loads the slices that match its slices of the
projections.
"""

from collections.abc import Iterable, Mapping

import torch

from engine.model.checkpoint import Part, SafetensorsCheckpoint
from engine.model.layers import Linear
from engine.model.llama import LlamaDecoder
from engine.model.lora import Delta
from engine.model.weights import in_checkpoint
from serving_core.errors import ModelError
from serving_core.model_files.adapters import DOWN, UP, StoredAdapter
from serving_core.sharding import Extent, whole


def load_adapters(
    decoder: LlamaDecoder, adapters: Iterable[StoredAdapter], dtype: torch.dtype, device: torch.device
) -> int:
    """Load the adapters of a filled decoder, cast to dtype; return the bytes they take. Raises ModelError if one is
    damaged.
    """
    projections = {
        layer: {in_checkpoint(path, name): outputs for name, outputs in layer.parts.items()}
        for path, layer in decoder.named_modules()
        if isinstance(layer, Linear)
    }
    for adapter in adapters:
        checkpoint = SafetensorsCheckpoint([adapter.file])
        changed = {layer: parts for layer, parts in projections.items() if adapter.projections & parts.keys()}
        deltas = {layer: _delta(adapter, checkpoint, layer, parts, dtype, device) for layer, parts in changed.items()}
        decoder.adapters.take(adapter.name, deltas)
    return decoder.adapters.num_bytes


def _delta(
    adapter: StoredAdapter,
    checkpoint: SafetensorsCheckpoint,
    layer: Linear,
    parts: Mapping[str, Extent],
    dtype: torch.dtype,
    device: torch.device,
) -> Delta:
    """Return the adapter's delta for all parts of a Linear at once: each changed part has ranks of its own for its own
    outputs.
    """
    inputs, rank, changed = layer.inputs, whole(adapter.rank), [name for name in parts if name in adapter.projections]
    down = torch.zeros(len(changed) * rank.total, len(inputs.held), dtype=dtype, device=device)
    up = torch.zeros(sum(len(outputs.held) for outputs in parts.values()), len(down), dtype=dtype, device=device)
    row = 0
    for name, outputs in parts.items():
        rows = slice(row, row + len(outputs.held))
        row = rows.stop
        if name not in changed:
            continue
        place = changed.index(name) * rank.total
        ranks = slice(place, place + rank.total)
        down[ranks] = checkpoint.read_all(Part(adapter.tensor_name(name, DOWN), (rank, inputs)))
        exact = checkpoint.read_all(Part(adapter.tensor_name(name, UP), (outputs, rank))).double()
        up[rows, ranks] = exact.mul_(adapter.scale).to(dtype)  # rounded once
    if not (down.isfinite().all() and up.isfinite().all()):
        kind = str(dtype).removeprefix("torch.")
        raise ModelError(f"adapter {adapter.name} holds numbers that are not finite as {kind}")
    return Delta(down, up if layer.rows is None else up[list(layer.rows)])
