"""Linear modules of a model of transformers that compute with quantized weights, as ours do. The hooks by which ranks
divide them stay."""

from typing import Any, Final

import torch
from torch import nn

from engine.foreign.latent import EXPAND
from engine.quantization.quantized_linear import QuantizedMatrix, quantized_matrix
from serving_core.errors import ModelError
from serving_core.weight_bits import INPUT_BITS, WEIGHT_BITS

EXPERTS: Final = 3  # dimensions of the weights of several in one


def check_quantizable(model: Any, quantization: str) -> None:
    """Raises ModelError for a model most of whose weights would stay as they are."""
    name = type(model).__name__
    if any(parameter.ndim == EXPERTS for parameter in model.parameters()):
        raise ModelError(f"--quantization {quantization}: transformers computes {name}, with experts as they are")
    if not _linear_modules(model):
        raise ModelError(f"--quantization {quantization}: transformers computes {name}, without linear modules")


def quantize_model(model: Any, quantization: str) -> int:
    """Has the linear modules of a filled model, but for the head and for what expands latents, compute with quantized
    weights, and lets go of their own. Gives the bytes that these take."""
    num_bytes = 0
    for module in _linear_modules(model):
        matrix = quantized_matrix(module.weight.detach(), WEIGHT_BITS[quantization])
        if module.bias is not None:
            matrix.set_bias(module.bias)
        matrix.round_inputs(INPUT_BITS.get(quantization, 16))
        module.weight = module.bias = None
        module.forward = _Product(matrix)
        num_bytes += matrix.num_bytes
    return num_bytes


def _linear_modules(model: Any) -> list[Any]:
    left = {model.get_output_embeddings()} | {each.kv_b_proj for each in model.modules() if hasattr(each, EXPAND)}
    linear = [module for module in model.modules() if type(module) is nn.Linear and module not in left]
    return [module for module in linear if getattr(module, "weight", None) is not None]


class _Product:
    def __init__(self, matrix: QuantizedMatrix) -> None:
        self._matrix = matrix

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        outputs = self._matrix(x.reshape(-1, x.shape[-1]))
        return outputs.view(*x.shape[:-1], outputs.shape[1])
