"""What a model folder says about its model. Torch-free; nothing in the folder is ever imported or executed."""

from dataclasses import dataclass
from pathlib import Path

from serving_core.errors import ModelError
from serving_core.json_fields import JsonFields, read_json_object
from serving_core.layout import DTYPE_BYTES, KVLayout
from serving_core.rope_config import Rope, read_rope
from serving_core.stored_quantization import StoredQuantization, read_stored_quantization

FAKE_ARCHITECTURE = "FakeForCausalLM"
MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    FAKE_ARCHITECTURE: "splitserve_fake",
}
MISTRAL_SLIDING_WINDOW = 4096  # what transformers takes when config.json does not say
QWEN3_HEAD_DIM = 128  # likewise
MOST_LAYERS = 1024


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder, as far as we need to know it. sliding_windows has one entry for each layer: the number of tokens
    a token sees, itself included, or None for all."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: Rope
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    tie_word_embeddings: bool
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    stored_quantization: StoredQuantization | None

    def kv_layout(self, block_size: int, dtype: str) -> KVLayout:
        """How the whole model's KV cache lies in memory."""
        return KVLayout.uniform(self.num_layers, self.num_kv_heads, self.head_dim, block_size, dtype)


def read_model_config(folder: Path) -> ModelConfig:
    """Reads config.json and, for the end-of-answer tokens, generation_config.json, which wins.

    Raises ModelError with one sentence when the folder or a file is missing or broken, or asks for something that
    is not supported. A config.json without a dtype counts as float32.
    """
    if not folder.is_dir():
        raise ModelError(f"there is no model folder {folder}")
    config = read_json_object(folder / "config.json")
    architecture = _architecture(config)
    _refuse_unsupported(config)
    num_heads = config.integer("num_attention_heads")
    max_position_embeddings = config.integer("max_position_embeddings")
    bias = config.boolean("attention_bias", False)
    vocab_size = config.integer("vocab_size")
    num_layers = _num_layers(config)
    sources = [config]
    if (folder / "generation_config.json").exists():
        sources.insert(0, read_json_object(folder / "generation_config.json"))
    return ModelConfig(
        architecture=architecture,
        model_type=MODEL_TYPES[architecture],
        vocab_size=vocab_size,
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(config, num_heads),
        head_dim=_head_dim(config, architecture, num_heads),
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=read_rope(config, max_position_embeddings),
        qkv_bias=architecture == "Qwen2ForCausalLM" or (architecture in _WITH_ATTENTION_BIAS and bias),
        o_bias=architecture in _WITH_ATTENTION_BIAS and bias,
        mlp_bias=architecture == "LlamaForCausalLM" and config.boolean("mlp_bias", False),
        qk_norm=architecture == "Qwen3ForCausalLM",
        sliding_windows=_sliding_windows(config, architecture, num_layers),
        tie_word_embeddings=config.boolean("tie_word_embeddings", False),
        dtype=_dtype(config),
        bos_token_id=next(iter(_token_ids(sources, "bos_token_id", vocab_size)), None),
        eos_token_ids=_token_ids(sources, "eos_token_id", vocab_size),
        stored_quantization=read_stored_quantization(config),
    )


_WITH_ATTENTION_BIAS = ("LlamaForCausalLM", "Qwen3ForCausalLM")


def _architecture(config: JsonFields) -> str:
    names = config.raw("architectures")
    model_type = config.text("model_type", "")
    if names is None:
        names = [name for name, known_type in MODEL_TYPES.items() if known_type == model_type] or [model_type]
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise config.error("architectures", "a list of one name")
    name = names[0]
    if name not in MODEL_TYPES:
        supported = ", ".join(known for known in MODEL_TYPES if known != FAKE_ARCHITECTURE)
        raise ModelError(f"architecture {name!r} is not supported; supported are {supported}")
    if model_type != MODEL_TYPES[name]:
        raise config.error("model_type", f"{MODEL_TYPES[name]!r} for {name}")
    return name


def _refuse_unsupported(config: JsonFields) -> None:
    activation = config.text("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"hidden_act {activation!r} is not supported; supported is silu")


def _num_layers(config: JsonFields) -> int:
    num_layers = config.integer("num_hidden_layers")
    if num_layers > MOST_LAYERS:
        raise config.error("num_hidden_layers", f"at most {MOST_LAYERS}")
    return num_layers


def _num_kv_heads(config: JsonFields, num_heads: int) -> int:
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise config.error("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    return num_kv_heads


def _head_dim(config: JsonFields, architecture: str, num_heads: int) -> int:
    if config.raw("head_dim") is not None:
        head_dim = config.integer("head_dim")
    elif architecture == "Qwen3ForCausalLM":
        head_dim = QWEN3_HEAD_DIM
    else:
        hidden_size = config.integer("hidden_size")
        if hidden_size % num_heads:
            raise config.error("hidden_size", f"a multiple of num_attention_heads ({num_heads}) without a head_dim")
        head_dim = hidden_size // num_heads
    if head_dim % 2 and architecture != FAKE_ARCHITECTURE:
        raise ModelError(f"an odd head_dim ({head_dim}) is not supported; rotation works on pairs")
    return head_dim


def _sliding_windows(config: JsonFields, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    if architecture == "MistralForCausalLM":
        given = "sliding_window" in config and config.raw("sliding_window") is None
        window = None if given else config.integer("sliding_window", MISTRAL_SLIDING_WINDOW)
        return (window,) * num_layers
    if not architecture.startswith("Qwen") or not config.boolean("use_sliding_window", False):
        return (None,) * num_layers
    if config.raw("sliding_window") is None:
        return (None,) * num_layers
    window = config.integer("sliding_window")
    return tuple(window if slides else None for slides in _sliding_layers(config, num_layers))


def _sliding_layers(config: JsonFields, num_layers: int) -> list[bool]:
    layer_types = config.raw("layer_types")
    if layer_types is None:
        first = config.integer("max_window_layers", 28, minimum=0)
        return [layer >= first for layer in range(num_layers)]
    known = {"full_attention": False, "sliding_attention": True}
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise config.error("layer_types", f"a list of {num_layers} names")
    if unknown := [name for name in layer_types if name not in known]:
        raise ModelError(f"layer type {unknown[0]!r} is not supported; supported are {' and '.join(known)}")
    return [known[name] for name in layer_types]


def _dtype(config: JsonFields) -> str:
    name = config.text("dtype", config.text("torch_dtype", "float32"))
    if name not in DTYPE_BYTES:
        raise ModelError(f"dtype {name!r} is not supported; supported are {', '.join(DTYPE_BYTES)}")
    return name


def _token_ids(sources: list[JsonFields], name: str, vocab_size: int) -> tuple[int, ...]:
    for fields in sources:
        value = fields.raw(name)
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
            raise fields.error(name, f"token ids below the vocabulary size ({vocab_size})")
        return tuple(ids)
    return ()
