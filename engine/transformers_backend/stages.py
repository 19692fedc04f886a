"""Reduce a model of transformers to one pipeline stage: some layers of its list of layers, the embeddings in the first
stage, the head in the last.

The model's own code runs on every stage. Layers of other stages return their input, and embeddings of other stages
return zeros. The stage's first layer replaces its input by the tensor from the stage before, and the output of its last
layer goes to the next stage.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from engine.pipeline import Pipeline
from serving_core.errors import ModelError
from serving_core.sharding import Shard

VECTORS: Final = 3  # dimensions of the tensor between layers: [1, T, E]


class StageTransfer:
    """Hooks that replace the input of a stage's first layer, and send the output of its last layer to the next stage.

    They do so only while `is_on`, which is False at first, so that a model can be tried.
    """

    def __init__(self, model: nn.Module, shard: Shard, pipeline: Pipeline) -> None:
        self.is_on = False
        self._pipeline = pipeline
        self._name = type(model).__name__
        own = _layers(model, shard.layers.total)[shard.layers.held.start : shard.layers.held.stop]
        if not shard.is_first:
            own[0].register_forward_pre_hook(self._receive)
        if not shard.is_last:
            own[-1].register_forward_hook(self._send)

    def _receive(self, layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        vectors = self._checked(inputs[0] if inputs else None)
        if not self.is_on:
            return inputs
        _, num_tokens, width = vectors.shape
        return (self._pipeline.receive(num_tokens, width, vectors.dtype).unsqueeze(0), *inputs[1:])

    def _send(self, layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        vectors, taken = self._checked(output), self._checked(inputs[0] if inputs else None)
        if vectors.dtype != taken.dtype:
            raise ModelError(f"layers of {self._name} give {vectors.dtype} and take {taken.dtype}: no stages can")
        if self.is_on:
            self._pipeline.send(vectors.squeeze(0).clone())

    def _checked(self, given: Any) -> torch.Tensor:
        if not isinstance(given, torch.Tensor) or given.ndim != VECTORS or len(given) != 1:
            raise ModelError(f"what goes from layer to layer of {self._name} is not one vector of each token")
        return given


def keep_stage(model: Any, shard: Shard) -> None:
    """Remove from a model on the meta device the modules that other pipeline stages compute.

    `shard` has the layers of this stage. Raises ModelError for a model that cannot be divided into stages.
    """
    layers = _layers(model, shard.layers.total)
    emptied = [layer for number, layer in enumerate(layers) if number not in shard.layers.held]
    for layer in emptied:
        _empty(layer, _pass_on)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None:
        raise ModelError(f"{type(model).__name__} cannot be divided into stages: it names no head")
    if not shard.is_last:
        _empty(head, _pass_on)
        emptied.append(head)
    inside = set(layers.modules())
    for module in model.modules():
        is_wanted = shard.is_first or (shard.is_last and module is embedding and model.all_tied_weights_keys)
        if isinstance(module, nn.Embedding) and module not in inside and not is_wanted:
            _empty(module, _Zeros(module.embedding_dim, model.dtype))
            emptied.append(module)
    for module in model.modules():  # some modules initialize the modules in them
        if set(module.children()) & set(emptied) and not (module._parameters or module._buffers):
            module._is_hf_initialized = True
    kept = model.state_dict().keys()
    tied = model.all_tied_weights_keys
    model.all_tied_weights_keys = {name: source for name, source in tied.items() if {name, source} <= kept}


def _layers(model: nn.Module, num_layers: int) -> nn.ModuleList:
    """Return the outermost list of num_layers modules."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise ModelError(f"{type(model).__name__} cannot be divided into stages: it has no one list of {num_layers} layers")


def _empty(module: Any, forward: Callable[..., torch.Tensor]) -> None:
    """Remove a module's contents and replace its computation, but keep its attributes, which the model may read."""
    for held in (module._modules, module._parameters, module._buffers):
        held.clear()
    module.forward = forward
    module._is_hf_initialized = True  # nothing is left to initialize


def _pass_on(vectors: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
    return vectors


class _Zeros:
    """A replacement of token or position embeddings that returns zeros."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self._width, self._dtype = width, dtype

    def __call__(self, *inputs: Any, **named: Any) -> torch.Tensor:
        ids = next(each for each in (*inputs, *named.values()) if isinstance(each, torch.Tensor))
        return torch.zeros(*ids.shape, self._width, dtype=self._dtype, device=ids.device)
