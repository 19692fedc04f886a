"""Model folders small enough for tests: random weights in the Hugging Face layout, or the fake model.

Every folder has a byte-level tokenizer in which a token id below 256 is that byte: "a" is token 97.
"""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

BOS, EOS, USER, ASSISTANT = 256, 257, 258, 259
VOCAB_SIZE = 260
SPECIAL_TOKENS = {"<|bos|>": BOS, "<|eos|>": EOS, "<|user|>": USER, "<|assistant|>": ASSISTANT}
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def write_fake_model(
    folder: Path,
    *,
    num_layers: int = 2,
    num_kv_heads: int = 2,
    head_dim: int = 4,
    max_position_embeddings: int = 4096,
    step_s: float = 0.0,
    token_s: float = 0.0,
) -> Path:
    """Writes a folder that the fake engine serves; engine/fake.py says how to work out its answers."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["FakeForCausalLM"],
        "model_type": "splitserve_fake",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": num_kv_heads * head_dim,
        "intermediate_size": 1,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_kv_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_position_embeddings,
        "dtype": "float32",
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "step_s": step_s,
        "token_s": token_s,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    write_tokenizer(folder)
    return folder


def write_tiny_model(
    folder: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: str = "50GB",
    **config: Any,
) -> Path:
    """Writes a random transformers model of a family; `config` overrides fields of its transformers config."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    config_class = getattr(transformers, f"{family.capitalize()}Config")
    model_class = getattr(transformers, f"{family.capitalize()}ForCausalLM")
    torch.manual_seed(seed)
    model = model_class(config_class(**{**_SIZES, **config}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Far from flat, so that greedy answers depend on the whole context; biases and norms are not neutral.
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.25)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    write_tokenizer(folder)
    return folder


def write_tiny_llama(folder: Path, *, seed: int = 0, dtype: str = "float32", **config: Any) -> Path:
    """Writes a random Llama like that of `write_tiny_model`, and with other weights, without transformers, which takes
    seconds to import; `config` overrides fields of its config.json."""
    import torch
    from safetensors.torch import save_file

    fields: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": dtype,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        **_SIZES,
        **config,
    }
    hidden_size, intermediate_size = fields["hidden_size"], fields["intermediate_size"]
    kv_size = hidden_size // fields["num_attention_heads"] * fields["num_key_value_heads"]
    layer = {
        "input_layernorm": [hidden_size],
        "mlp.down_proj": [hidden_size, intermediate_size],
        "mlp.gate_proj": [intermediate_size, hidden_size],
        "mlp.up_proj": [intermediate_size, hidden_size],
        "post_attention_layernorm": [hidden_size],
        "self_attn.k_proj": [kv_size, hidden_size],
        "self_attn.o_proj": [hidden_size, hidden_size],
        "self_attn.q_proj": [hidden_size, hidden_size],
        "self_attn.v_proj": [kv_size, hidden_size],
    }
    shapes = {"lm_head": [VOCAB_SIZE, hidden_size], "model.embed_tokens": [VOCAB_SIZE, hidden_size]}
    shapes |= {f"model.layers.{n}.{name}": layer[name] for n in range(fields["num_hidden_layers"]) for name in layer}
    shapes["model.norm"] = [hidden_size]
    generator = torch.Generator().manual_seed(seed)
    weights = {
        f"{name}.weight": torch.empty(shape)
        .normal_(1.0 if "norm" in name else 0.0, 0.25, generator=generator)
        .to(getattr(torch, dtype))
        for name, shape in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(fields, indent=2))
    write_tokenizer(folder)
    return folder


def write_tiny_embedder(
    folder: Path, family: str = "qwen3", *, pooling: str = "", normalizes: bool = True, **config: Any
) -> Path:
    """Writes a random decoder of a family without its head, as models for embeddings come. With a `pooling`, such as
    mean_tokens or lasttoken, also what sentence-transformers writes beside it."""
    import transformers

    write_tiny_model(folder, family, **config)
    headless = transformers.AutoModel.from_pretrained(folder)
    headless.save_pretrained(folder)
    if pooling:
        kinds = ["Transformer", "Pooling", *(["Normalize"] if normalizes else [])]
        places = ["", *(f"{index}_{kind}" for index, kind in enumerate(kinds[1:], 1))]
        modules = [
            {"idx": index, "name": str(index), "path": place, "type": f"sentence_transformers.models.{kind}"}
            for index, (kind, place) in enumerate(zip(kinds, places, strict=True))
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        modes = {f"pooling_mode_{name}": name == pooling for name in ("cls_token", "mean_tokens", "lasttoken")}
        described = {"word_embedding_dimension": headless.config.hidden_size, **modes, "include_prompt": True}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(described))
    return folder


_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}


def write_tokenizer(folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json with the chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=byte_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))


@cache
def grammar_for_nodes(kind: str, value: str) -> str:
    """What a coordinator gives nodes of a model with this tokenizer."""
    from coordinator.text.constraints import to_grammar
    from serving_core.grammars import Grammars

    with TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        return Grammars(Path(folder), (EOS,)).for_nodes(to_grammar(kind, value, None))


def byte_vocabulary() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes, each with the byte itself as its id."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    stand_ins = {chr(byte): byte for byte in printable}
    stand_ins.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return stand_ins
