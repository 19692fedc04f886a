"""Try every type of decoder that transformers knows: a small random model of each, answers against its `generate`.

`python -m tests.model_census [TYPE ...]` tries them all in some minutes and prints each result; without types it writes
the table of docs/reference/models.md anew. A nightly test compares the rows with what it finds.
"""

import copy
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

from tests.doc_table import DOCS, END, page_with
from tests.tiny_models import BOS, EOS, VOCAB_SIZE, write_tokenizer
from tests.transformers_models import NUM_TOKENS, PROMPTS, generated

PAGE: Final = DOCS / "reference" / "models.md"
MODULE: Final = "tests.model_census"
MOST_PARAMETERS: Final = 30_000_000
NOT_MADE: Final = "not tried: no small model of it can be made"
SPREAD: Final = 0.15  # of weights

# What a field is set to in the config of every type that has it.
SIZES: Final[dict[str, Any]] = {
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "n_positions": 512,
    "max_seq_len": 512,
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "lru_width": 64,
    "intermediate_size": 96,
    "n_inner": 96,
    "d_inner": 96,
    "ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "num_hidden_layers": 4,
    "num_layers": 4,
    "n_layer": 4,
    "n_layers": 4,
    "decoder_layers": 4,
    "encoder_layers": 4,
    "num_encoder_layers": 4,
    "num_decoder_layers": 4,
    "num_blocks": 4,
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "attention_types": [[["global", "local"], 2]],
    "sliding_window": 13,
    "attention_window_size": 13,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "n_shared_experts": 1,
    "num_expert_group": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    # latents and indexers
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_n_heads": 8,
    "index_head_dim": 16,
    "index_topk": 24,
    # states
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_d_state": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_d_ssm": 128,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "state_size": 16,
    "ssm_state_size": 16,
    "time_step_rank": 8,
    "expand": 2,
    "n_groups": 1,
    "attn_layer_indices": [1, 3],
    "attn_layer_offset": 1,
    "attn_layer_period": 2,
}
_HALF: Final = {"layer_types": ["linear_attention", "full_attention"] * 2}
_NONE: Final = object()  # a field that is left to its default
SPECIAL: Final[dict[str, dict[str, Any]]] = {
    "gemma3n_text": {
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 1,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "laurel_rank": 8,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 0,
    },
    "glm_moe_dsa": {"index_n_heads": 32},  # fewer equal scores, among which a choice is by chance
    "granitemoehybrid": _HALF,
    "hrm_text": {"num_hidden_layers": 1, "num_layers_per_stack": _NONE},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "num_layers": 2,
        "num_hidden_layers": _NONE,
        "head_dim": 8,
        "zero_expert_num": 2,
    },
    "mamba2": {"num_heads": 8},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 6, "attn_layer_period": 3},
    "zamba2": {
        "layer_types": ["linear_attention", "linear_attention", "hybrid", "linear_attention"],
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba"],
    },
    "zaya": {"num_experts_per_tok": 1},
}


def types() -> list[str]:
    """Return the model_type of every causal language model of transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def write_type(folder: Path, model_type: str) -> bool:
    """Write a small random model of a type; return False if none can be made."""
    import torch
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        config = small_config(model_type)
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        with torch.device("meta"):
            num_parameters = sum(each.numel() for each in model_class(copy.deepcopy(config)).parameters())
        if num_parameters > MOST_PARAMETERS:
            return False
        torch.manual_seed(0)
        model = model_class(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, SPREAD)
        model.save_pretrained(folder)
    except Exception:  # noqa: BLE001  # whatever transformers raises for sizes that do not fit together
        return False
    write_tokenizer(folder)
    return True


def small_config(model_type: str) -> Any:
    """Return the config of a small model of a type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    default = config_class().to_dict()
    fields = {name: value for name, value in SIZES.items() if name in default}
    if "kv_lora_rank" in default:
        fields["num_key_value_heads"] = 4
        fields.pop("head_dim", None)
    if default.get("is_decoder") is False:
        fields["is_decoder"] = True
    if isinstance(kinds := default.get("layer_types"), list):
        fields["layer_types"] = ([*dict.fromkeys(kinds)] * 4)[:4]
    fields |= SPECIAL.get(model_type, {})
    return config_class(**{name: value for name, value in fields.items() if value is not _NONE})


def outcome(folder: Path) -> str:
    """Serve a model; return "equal" and how it is computed, or the sentence of its refusal."""
    from engine.build import build_engine
    from serving_core.errors import ModelError, SettingsError
    from serving_core.settings import EngineSettings
    from tests.toy_scheduler import greedy, run_all, token_ids

    try:
        engine = build_engine(EngineSettings(model=str(folder), num_kv_blocks=64, block_size=8))
    except (ModelError, SettingsError) as error:
        return f"refused: {str(error).replace(str(folder), 'MODEL')}"
    found = token_ids(run_all(engine, PROMPTS, greedy(NUM_TOKENS), chunk_tokens=19, joins_at=[3, 0, 1]))
    if found != generated(folder, PROMPTS, NUM_TOKENS, found):
        return "WRONG"
    if not engine.config.is_transformers:
        return "equal, by our decoder"
    is_paged = type(engine.model).__name__ == "TransformersDecoder"
    return "equal, over paged attention" if is_paged else "equal, sequence by sequence"


def row_of(model_type: str) -> str:
    """Return the row of the table for one type."""
    with tempfile.TemporaryDirectory() as folder:
        found = outcome(Path(folder)) if write_type(Path(folder), model_type) else NOT_MADE
    return f"| `{model_type}` | {found} |"


def rows_of_page() -> dict[str, str]:
    """Return the results on the page by type."""
    part = PAGE.read_text().partition(f"begin: python -m {MODULE} ")[2].partition(END)[0]
    rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line.endswith("` |")]
    return {
        name.strip("`"): f"| `{name.strip('`')}` | {found} |" for found, names in rows for name in names.split(", ")
    }


def main(asked: list[str]) -> None:
    rows = []
    for model_type in asked or types():
        rows.append(row_of(model_type))
        sys.stdout.write(f"{rows[-1]}\n")
        sys.stdout.flush()
    if not asked:
        equal = sum("| equal" in row for row in rows)
        not_made = sum(NOT_MADE in row for row in rows)
        head = (
            f"{equal} of {len(rows)} types are equal, {len(rows) - equal - not_made} refused, {not_made} not tried.\n"
        )
        types_by_result = defaultdict[str, list[str]](list)
        for row in rows:
            name, found = row.strip("| ").split(" | ")
            types_by_result[found].append(name)
        table = [f"| {found} | {', '.join(names)} |" for found, names in sorted(types_by_result.items())]
        text = "\n".join([head, "| result | model_type |", "|---|---|", *table]) + "\n"
        PAGE.write_text(page_with(text, PAGE, MODULE))


if __name__ == "__main__":
    main(sys.argv[1:])
