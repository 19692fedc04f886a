"""Work out the costs of a decoder: floating-point operations, and bytes that must be read. Torch-free.

With P parameters in the matrices of the layers that a token is multiplied with, P_head in the head, d = heads * head
size, L layers and S prompt tokens:

    a prompt         2 * P * S + 2 * P_head + 2 * S^2 * d * L      the head once; a token sees half the prompt
    a decode step    2 * (P + P_head) * B + 4 * d * L * contexts   B requests; the sum of what their tokens see
    its KV bytes     2 * K * head size * value bytes * L * contexts, and the scales of an 8-bit cache

Norms, rotation and activation are left out. A sliding window limits how many tokens a token sees.
"""

from collections.abc import Sequence

from serving_core.layout import KVLayout
from serving_core.model_files.config import ModelConfig


def body_parameters(config: ModelConfig) -> int:
    """Return the number of weights of all layers that a token is multiplied with: of experts the chosen ones."""
    heads = config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    attention = config.hidden_size * (2 * heads + 2 * kv_heads)
    dense = 3 * config.hidden_size * config.intermediate_size
    if (experts := config.experts) is None:
        return config.num_layers * (attention + dense)
    mixture = config.hidden_size * (3 * experts.active_size + experts.num_gates)
    num_mixtures = config.num_layers - len(experts.dense_layers)
    return config.num_layers * attention + len(experts.dense_layers) * dense + num_mixtures * mixture


def head_parameters(config: ModelConfig) -> int:
    """Return the number of weights of the matrix that computes the logits."""
    return config.hidden_size * config.vocab_size


def prompt_flops(config: ModelConfig, num_tokens: int) -> int:
    """Return the floating-point operations of a prompt of `num_tokens` and the logits of its last token.

    How the prompt is cut into steps does not matter.
    """
    seen_twice = 0
    for window in config.sliding_windows:
        beyond = 0 if window is None else max(0, num_tokens - window)
        seen_twice += num_tokens**2 - beyond**2
    matrices = body_parameters(config) * num_tokens + head_parameters(config)
    return 2 * matrices + 2 * config.num_heads * config.head_dim * seen_twice


def decode_flops(config: ModelConfig, contexts: Sequence[float]) -> float:
    """Return the floating-point operations of one decode step.

    `contexts` has for each request the tokens that its token sees, itself included.
    """
    matrices = (body_parameters(config) + head_parameters(config)) * len(contexts)
    return 2 * matrices + 4 * config.num_heads * config.head_dim * _seen(config, contexts)


def decode_kv_bytes(config: ModelConfig, layout: KVLayout, contexts: Sequence[float]) -> float:
    """Return the bytes of KV that one decode step reads.

    `contexts` has for each request the tokens that its token sees.
    """
    return 2 * layout.cache_shape.num_bytes / layout.block_size * _seen(config, contexts)


def _seen(config: ModelConfig, contexts: Sequence[float]) -> float:
    """Return how many tokens all tokens of a step see, added up over all layers."""
    return sum(
        context if window is None else min(context, window) for window in config.sliding_windows for context in contexts
    )
