"""Build the Gemma-specific part of config.json from GGUF metadata.

Some values are missing in the file; as in llama.cpp, they are known by the architecture and the number of layers.
"""

from collections.abc import Sequence
from typing import Any, Final

from serving_core.json_fields import JsonFields
from serving_core.model_files.rope import FULL, SLIDING

WINDOW: Final = "attention.sliding_window"
PATTERN: Final = "attention.sliding_window_pattern"
LOCAL_BASE: Final = "rope.freq_base_swa"
SCORE_CAP, LOGIT_CAP = "attn_logit_softcapping", "final_logit_softcapping"
USED: Final = {  # in addition to the keys of all architectures
    "gemma": frozenset[str](),
    "gemma2": frozenset({SCORE_CAP, LOGIT_CAP, PATTERN}),
    "gemma3": frozenset({LOGIT_CAP, PATTERN, LOCAL_BASE}),
}
USUAL_PERIOD: Final = {"gemma2": 2, "gemma3": 6}  # the last layer of each period has no window
LAYERS_OF_27B: Final = {"gemma2": 46, "gemma3": 62}  # in these models, scores are not scaled by the size of a head


def gemma_config(name: str, fields: JsonFields, rope: dict[str, Any]) -> dict[str, Any]:
    """Return the part of config.json that only Gemma has, for the architecture `name`.

    `rope` is the rotary embedding of layers without a sliding window. Raises ModelError for a wrong value.
    """
    if name == "gemma":
        return {"rope_parameters": rope}
    num_layers, hidden_size = fields.integer("block_count"), fields.integer("embedding_length")
    num_heads = fields.integer("attention.head_count")
    per_head = hidden_size // num_heads
    is_27b = num_layers == LAYERS_OF_27B[name]
    caps = {"attn_logit_softcapping": SCORE_CAP, "final_logit_softcapping": LOGIT_CAP}
    config = {
        "query_pre_attn_scalar": per_head if is_27b else fields.integer("attention.key_length", per_head),
        "sliding_window": fields.integer(WINDOW),
        "layer_types": [SLIDING if slides else FULL for slides in _slides(name, fields, num_layers)],
        "rope_parameters": rope,
        **{ours: fields.positive(key) for ours, key in caps.items() if key in fields},
    }
    if name == "gemma3":
        local = {"rope_type": "default", "rope_theta": fields.positive(LOCAL_BASE, 10_000.0)}
        config["rope_parameters"] = {FULL: rope, SLIDING: local}
    return config


def _slides(name: str, fields: JsonFields, num_layers: int) -> list[bool]:
    """Return which layers have a sliding window, from a list or a period."""
    said = fields.raw(PATTERN)
    if isinstance(said, Sequence) and not isinstance(said, str):
        if len(said) != num_layers or not all(each in (0, 1) for each in said):
            raise fields.error(PATTERN, f"a number, or a list of {num_layers} times true or false")
        return [bool(each) for each in said]
    period = fields.integer(PATTERN, USUAL_PERIOD[name])
    return [(layer + 1) % period > 0 for layer in range(num_layers)]
