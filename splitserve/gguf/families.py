"""Build the part of config.json of Cohere, gpt-oss, Granite and Phi-3 models from GGUF metadata.

Some values are missing in the file; as in llama.cpp, they are known by the architecture.
"""

from typing import Any, Final

from serving_core.json_fields import JsonFields
from serving_core.model_files.rope import FULL, SLIDING

ROTATED: Final = "rope.dimension_count"
WINDOW: Final = "attention.sliding_window"
LOGIT_SCALE: Final = "logit_scale"
GRANITES: Final = {  # the numbers that Granite multiplies by; where a file lacks one, it is 1
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    LOGIT_SCALE: "logits_scaling",
}
SCORE_SCALE: Final = "attention.scale"
USED: Final = {  # in addition to the keys of all architectures
    "cohere2": frozenset({LOGIT_SCALE}),
    "command-r": frozenset({LOGIT_SCALE}),
    "gpt-oss": frozenset[str](),
    "granite": frozenset({*GRANITES, SCORE_SCALE}),
    "phi3": frozenset[str](),
}
HAS_WINDOW: Final = ("cohere2", "gpt-oss", "phi3")
CENTERS_NORMS: Final = ("cohere2", "command-r")
EPSILONS: Final = {  # names in config.json
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
PERIODS: Final = {"cohere2": 4, "gpt-oss": 2}  # the last layer of each period has no window


def epsilon(name: str) -> str:
    """Return the metadata key of the norms' epsilon for the architecture `name`."""
    return "attention.layer_norm_epsilon" if name in CENTERS_NORMS else "attention.layer_norm_rms_epsilon"


def rope_of_a_part(fields: JsonFields, head_dim: int, rope: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary embedding for the share of a head that is rotated."""
    share = fields.integer(ROTATED, head_dim) / head_dim
    return rope if share == 1 else {**rope, "partial_rotary_factor": share}


def family_config(name: str, fields: JsonFields, head_dim: int, rope: dict[str, Any]) -> dict[str, Any]:
    """Return the part of config.json that only the family of the architecture `name`, one of USED, has.

    Raises ModelError for a wrong value.
    """
    if name == "granite":
        scales = {ours: fields.positive(key, 1.0) for key, ours in GRANITES.items()}
        return {**scales, "attention_multiplier": fields.positive(SCORE_SCALE, head_dim**-0.5)}
    if name == "phi3":
        window = fields.integer(WINDOW, 0, minimum=0) or None
        return {"sliding_window": window, "rope_parameters": rope_of_a_part(fields, head_dim, rope)}
    config: dict[str, Any] = {}
    if name == "gpt-oss":
        config["rope_parameters"] = {**rope, "truncate": False} if rope["rope_type"] == "yarn" else rope
    else:
        config["logit_scale"] = fields.positive(LOGIT_SCALE)
    if (period := PERIODS.get(name)) is not None:
        num_layers = fields.integer("block_count")
        config["sliding_window"] = fields.integer(WINDOW)
        config["layer_types"] = [SLIDING if (layer + 1) % period else FULL for layer in range(num_layers)]
    return config
