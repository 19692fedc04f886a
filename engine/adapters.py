"""Load and unload LoRA adapters while an engine serves."""

from collections.abc import Iterator

import torch

from engine.engine import Engine
from engine.model.llama import LlamaDecoder
from engine.model.weights import adapter_deltas
from engine.numerics import computes_by_kernels
from serving_core.errors import ModelError
from serving_core.model_files.adapters import StoredAdapter
from serving_core.process.memory import available_bytes


def load_adapter(engine: Engine, adapter: StoredAdapter) -> Iterator[None]:
    """Load an adapter on this rank, one projection at each step of the iterator, between which the engine may compute.

    Requests may name the adapter when the iterator has ended. Raises ModelError, with nothing loaded, if the model or
    --batch-invariant takes no such adapter, if memory is lacking, or if the adapter is damaged.
    """
    decoder, pool = engine.model, engine.pool
    if not isinstance(decoder, LlamaDecoder):
        raise ModelError(
            f"{engine.config.architecture} takes no adapters: they are for models that our own code computes"
        )
    of_stage = engine.pipeline.stage if engine.pipeline else engine.group
    if engine.is_batch_invariant and not computes_by_kernels(decoder, engine.attention, of_stage):
        raise ModelError("--batch-invariant tries adapters at the start: give this one with --lora")
    _check_memory(adapter, pool.compute_dtype, pool.device)
    deltas = {}
    for projection, delta in adapter_deltas(decoder, adapter, pool.compute_dtype, pool.device):
        if engine.is_batch_invariant and not delta.is_batch_invariant:
            raise ModelError("the node's kernels cannot compute this adapter's projections batch-invariantly")
        deltas[projection] = delta
        yield
    engine.weight_bytes += decoder.adapters.add(adapter.name, deltas)


def unload_adapter(engine: Engine, name: str) -> None:
    """Unload an adapter that no request uses any more, if it is loaded. Call between steps."""
    if isinstance(engine.model, LlamaDecoder):
        engine.weight_bytes -= engine.model.adapters.remove(name)


def _check_memory(adapter: StoredAdapter, dtype: torch.dtype, device: torch.device) -> None:
    needed = adapter.num_elements * dtype.itemsize
    free = available_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    if needed > free:
        raise ModelError(f"the adapter takes up to {needed} bytes, and {free} are free")
