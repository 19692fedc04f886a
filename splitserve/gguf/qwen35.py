"""Build the part of config.json that only Qwen3.5 has from GGUF metadata: its layers of linear attention.

The sections of its rotary embedding, which place pictures, make no difference to text.
"""

from typing import Any, Final

from serving_core.json_fields import JsonFields
from serving_core.model_files.rope import FULL
from splitserve.gguf.families import rope_of_a_part

NAMES: Final = ("qwen35", "qwen35moe")
KERNEL, KEY_DIM, ALL_VALUES_DIM = "ssm.conv_kernel", "ssm.state_size", "ssm.inner_size"
KEY_HEADS, VALUE_HEADS = "ssm.group_count", "ssm.time_step_rank"
PERIOD: Final = "full_attention_interval"
USED: Final = dict.fromkeys(  # in addition to the keys of all architectures
    NAMES, frozenset({KERNEL, KEY_DIM, ALL_VALUES_DIM, KEY_HEADS, VALUE_HEADS, PERIOD, "rope.dimension_sections"})
)
USUAL_PERIOD: Final = 4  # the last layer of each period has no linear attention
LINEAR: Final = "linear_attention"  # a layer type


def qwen35_config(fields: JsonFields, head_dim: int, rope: dict[str, Any]) -> dict[str, Any]:
    """Return the part of config.json that only Qwen3.5 has. Raises ModelError for a wrong value."""
    num_key_heads, num_value_heads = fields.integer(KEY_HEADS), fields.integer(VALUE_HEADS)
    if num_value_heads % num_key_heads:
        raise fields.error(VALUE_HEADS, f"a multiple of {KEY_HEADS} ({num_key_heads})")
    if (all_values_dim := fields.integer(ALL_VALUES_DIM)) % num_value_heads:
        raise fields.error(ALL_VALUES_DIM, f"a multiple of {VALUE_HEADS} ({num_value_heads})")
    period = fields.integer(PERIOD, USUAL_PERIOD)
    return {
        "layer_types": [LINEAR if (layer + 1) % period else FULL for layer in range(fields.integer("block_count"))],
        "linear_conv_kernel_dim": fields.integer(KERNEL),
        "linear_num_key_heads": num_key_heads,
        "linear_num_value_heads": num_value_heads,
        "linear_key_head_dim": fields.integer(KEY_DIM),
        "linear_value_head_dim": all_values_dim // num_value_heads,
        "rope_parameters": rope_of_a_part(fields, head_dim, rope),
    }
