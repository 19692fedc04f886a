"""Models that see pictures too: of these we compute the part that reads and writes text. Torch-free."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from serving_core.errors import ModelError
from serving_core.json_fields import JsonFields

TEXT_CONFIG: Final = "text_config"
# Architectures whose text goes through a decoder as if it were alone, and what transformers takes where text_config
# does not say. Others may do something else to text where there is no picture, and are not known.
WHOLES: Final[Mapping[str, Mapping[str, Any]]] = {
    "Gemma3ForConditionalGeneration": {
        "model_type": "gemma3_text",
        "num_attention_heads": 8,
        "vocab_size": 262_208,
    },
    "InternVLForConditionalGeneration": {},
    "LlavaForConditionalGeneration": {},
    "Mistral3ForConditionalGeneration": {},
}
OF_THE_WHOLE: Final = (  # what it says of these holds for its text
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "quantization_config",
    "tie_word_embeddings",
    "torch_dtype",
)
TEXT_ROOTS: Final = {  # of tensors, as checkpoints have them, and as those of a decoder alone
    "language_model.lm_head.": "lm_head.",
    "language_model.model.": "model.",
    "model.language_model.": "model.",
}
PICTURE_ROOTS: Final = ("vision_tower.", "multi_modal_projector.")


def is_whole(config: JsonFields) -> bool:
    """Whether a config.json is that of a model of WHOLES."""
    return _architecture(config) in WHOLES


def text_config(config: JsonFields, where: str) -> JsonFields:
    """What the config.json of the text alone would say, of one of WHOLES, but for the architecture, which its
    model_type tells. Raises ModelError."""
    architecture = _architecture(config)
    said = config.raw(TEXT_CONFIG)
    if not isinstance(said, dict):
        raise config.error(TEXT_CONFIG, f"an object in {architecture}")
    shared = {name: config.raw(name) for name in OF_THE_WHOLE if config.raw(name) is not None}
    return JsonFields({**WHOLES[architecture], **said, **shared, "architectures": None}, where)


def text_names(stored: Iterable[str]) -> dict[str, str]:
    """The tensors of text under the names that a decoder alone has for them, and what the checkpoint calls them; any
    tensor that belongs neither to text nor to pictures keeps its name. Raises ModelError for two of one name."""
    found: dict[str, str] = {}
    for name in stored:
        if name.removeprefix("model.").startswith(PICTURE_ROOTS):
            continue
        root = next((root for root in TEXT_ROOTS if name.startswith(root)), "")
        ours = TEXT_ROOTS.get(root, "") + name.removeprefix(root)
        if ours in found:
            raise ModelError(f"the weights hold both {found[ours]} and {name}, which are the same of the text")
        found[ours] = name
    return found


def _architecture(config: JsonFields) -> str:
    names = config.raw("architectures")
    return names[0] if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) else ""
