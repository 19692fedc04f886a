"""Build the part of config.json that only LFM2 has from GGUF metadata: which layers are convolutions, and how long."""

from collections.abc import Sequence
from typing import Any, Final

from serving_core.json_fields import JsonFields
from serving_core.model_files.rope import FULL

NAME: Final = "lfm2"
HEADS: Final = "attention.head_count_kv"  # of each layer; 0 in those that are convolutions
KERNEL: Final = "shortconv.l_cache"
USED: Final = {NAME: frozenset({KERNEL})}  # in addition to the keys of all architectures
CONVOLUTION: Final = "conv"  # a layer type


def lfm2_config(fields: JsonFields) -> dict[str, Any]:
    """Return the part of config.json that only LFM2 has. Raises ModelError for a wrong value."""
    num_layers, heads = fields.integer("block_count"), fields.raw(HEADS)
    is_list = isinstance(heads, Sequence) and not isinstance(heads, str) and len(heads) == num_layers
    of_attention = {each for each in heads if each != 0} if is_list else set()
    if len(of_attention) != 1:
        raise fields.error(HEADS, f"a list of {num_layers} times 0 or the one number of heads")
    (num_kv_heads,) = of_attention
    return {
        "num_key_value_heads": num_kv_heads,
        "layer_types": [FULL if each else CONVOLUTION for each in heads],
        "norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": fields.integer(KERNEL),
        "block_auto_adjust_ff_dim": False,
    }
