"""Read a model folder's description of its model. Torch-free; nothing in the folder is ever imported.

A model is an embedder if its architecture is a decoder without a head (Qwen3Model), or if the folder has
sentence-transformers' modules.json with a pooling module.

A model is native, or computed by the transformers backend. For the latter only sizes are read here; the engine checks
that transformers, which has defaults of its own, reads the same sizes.
"""

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from serving_core.errors import ModelError
from serving_core.json_fields import JsonFields, read_json_object
from serving_core.layout import DTYPE_BYTES, KVLayout
from serving_core.model_files.differences import (
    FAMILIES,
    SILU,
    SWISH,
    Differences,
    Experts,
    check_names,
    eps_name,
    read_layer_types,
)
from serving_core.model_files.rope import FULL, LONGROPE, DefaultRope, Rope, original_context, read_rope, rope_kind
from serving_core.model_files.stored_quantization import StoredQuantization, read_dequantized, read_stored_quantization
from serving_core.model_files.tokenizer_files import read_eos_token_id
from serving_core.requests import LAST, MEAN, Pooling

TEXT_CONFIG: Final = "text_config"
ARCHITECTURES: Final = "architectures"
# Architectures whose text part is a plain decoder, and transformers' defaults for fields that text_config omits. Other
# architectures may treat text differently even without an image, and are unknown here.
WHOLES: Final[Mapping[str, Mapping[str, Any]]] = {
    "Gemma3ForConditionalGeneration": {
        "model_type": "gemma3_text",
        "num_attention_heads": 8,
        "vocab_size": 262_208,
    },
    "InternVLForConditionalGeneration": {},
    "LlavaForConditionalGeneration": {},
    "Mistral3ForConditionalGeneration": {},
    # Their text is computed by transformers.
    "Gemma3nForConditionalGeneration": {ARCHITECTURES: ["Gemma3nForCausalLM"]},
    "Gemma4ForConditionalGeneration": {ARCHITECTURES: ["Gemma4ForCausalLM"]},
    "Llama4ForConditionalGeneration": {ARCHITECTURES: ["Llama4ForCausalLM"]},
    "Qwen3_5ForConditionalGeneration": {ARCHITECTURES: ["Qwen3_5ForCausalLM"]},
    "Qwen3_5MoeForConditionalGeneration": {ARCHITECTURES: ["Qwen3_5MoeForCausalLM"]},
}
OF_THE_WHOLE: Final = (  # settings of the whole model that apply to its text part
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "quantization_config",
    "tie_word_embeddings",
    "torch_dtype",
)
TEXT_ROOTS: Final = {  # prefixes of tensor names in checkpoints, and those of a decoder alone
    "language_model.lm_head.": "lm_head.",
    "language_model.model.": "model.",
    "model.language_model.": "model.",
}
PICTURE_ROOTS: Final = (  # and of sounds
    "audio_tower.",
    "embed_audio.",
    "embed_vision.",
    "multi_modal_projector.",
    "vision_model.",
    "vision_tower.",
    "visual.",
)


def is_whole(config: JsonFields) -> bool:
    """Return whether a config.json describes a model with a text part and others, such as for images (WHOLES)."""
    return _text_architecture(config) in WHOLES


def text_config(config: JsonFields, where: str) -> JsonFields:
    """Return the config.json of the text part of a model that has others too (WHOLES). `where` names it in errors.

    Its architecture is that of WHOLES, or None where it follows from the model_type. Raises ModelError if there is no
    text part.
    """
    architecture = _text_architecture(config)
    said = config.raw(TEXT_CONFIG)
    if not isinstance(said, dict):
        raise config.error(TEXT_CONFIG, f"an object in {architecture}")
    shared = {name: config.raw(name) for name in OF_THE_WHOLE if config.raw(name) is not None}
    defaults = WHOLES[architecture]
    return JsonFields({**defaults, **said, **shared, ARCHITECTURES: defaults.get(ARCHITECTURES)}, where)


def text_names(stored: Iterable[str]) -> dict[str, str]:
    """Return the stored name of each tensor by the name that a text decoder alone has for it.

    Tensors of pictures and sounds are left out. A tensor that belongs neither to text nor to these keeps its name.
    Raises ModelError for two tensors of one name.
    """
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


def _text_architecture(config: JsonFields) -> str:
    names = config.raw("architectures")
    return names[0] if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) else ""


GENERATE, POOLING = "generate", "pooling"  # values of --runner, beside auto
MODULES_FILE: Final = "modules.json"
POOLING_FOLDER: Final = re.compile(r"[\w-]{1,64}")  # beside config.json
MOST_MODULES: Final = 16
_KINDS: Final = {"mean_tokens": MEAN, "mean": MEAN, "lasttoken": LAST}
_MODE: Final = "pooling_mode"


@dataclass(frozen=True, slots=True)
class Embedder:
    """How a model pools a text into one vector, unless a request overrides it."""

    kind: str = LAST  # one of serving_core.requests.POOLINGS
    normalizes: bool = True
    may_be_cut: bool = False  # to its leading dimensions, for which such models are trained (Matryoshka)
    lengths: tuple[int, ...] = ()  # allowed dimensions; empty: any

    @property
    def pooling(self) -> Pooling:
        """Return the pooling of a request that sets neither normalization nor dimensions."""
        return Pooling(self.kind, self.normalizes)


def read_embedder(folder: Path, config: JsonFields, runner: str, *, is_headless: bool) -> Embedder | None:
    """Return how the model of a folder pools a text into a vector, or None if the model generates text.

    `config` is config.json, and `runner` a value of --runner. `is_headless`: the checkpoint has no head. Raises
    ModelError for an unsupported pooling, and where `runner` is GENERATE without a head.
    """
    if runner == GENERATE:
        if is_headless:
            raise ModelError(f"--runner {GENERATE}: the checkpoint has no head, and its model makes embeddings alone")
        return None
    modules = _modules(folder)
    found = _pooling(folder, modules)
    if found is None and not is_headless and runner != POOLING:
        return None
    lengths = config.raw("matryoshka_dimensions")
    if lengths is not None and not _are_lengths(lengths):
        raise config.error("matryoshka_dimensions", "a list of integers above 0")
    return Embedder(
        kind=LAST if found is None else found,
        normalizes=found is None or "Normalize" in [name for name, _ in modules],
        may_be_cut=config.boolean("is_matryoshka", False) or bool(lengths),
        lengths=tuple(lengths or ()),
    )


def _are_lengths(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and each > 0 for each in value)


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Return the kinds and folders of sentence-transformers' modules; empty without any."""
    path = folder / MODULES_FILE
    if not path.exists():
        return []
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {str(error)[:200]}") from error
    if not isinstance(entries, list) or len(entries) > MOST_MODULES:
        raise ModelError(f"{path} must hold a list of at most {MOST_MODULES} modules")
    return list(_described(entries, path))


def _described(entries: list[Any], path: Path) -> Iterator[tuple[str, str]]:
    for entry in entries:
        kind, place = (entry.get(name) for name in ("type", "path")) if isinstance(entry, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(place, str):
            raise ModelError(f"{path} must hold modules with a type and a path, not {entry!r:.80}")
        yield kind.rpartition(".")[2], place


def _pooling(folder: Path, modules: list[tuple[str, str]]) -> str | None:
    """Return how the hidden states of a text are pooled; None if no module says so."""
    found = None
    for kind, place in modules:
        if kind not in ("Transformer", "Pooling", "Normalize"):
            raise ModelError(f"module {kind!r:.80} of {MODULES_FILE} is not supported")
        if kind == "Pooling":
            if not POOLING_FOLDER.fullmatch(place):
                raise ModelError(f"{MODULES_FILE} names {place!r:.80}, which is not a folder beside it")
            found = _kind(read_json_object(folder / place / "config.json"))
    return found


def _kind(pooling: JsonFields) -> str:
    if not pooling.boolean("include_prompt", True):
        raise pooling.unsupported("include_prompt")
    named = pooling.raw(_MODE)
    flags = [name for name in pooling.names if name.startswith(f"{_MODE}_") and pooling.raw(name) is True]
    asked = [named] if isinstance(named, str) else [name.removeprefix(f"{_MODE}_") for name in flags]
    if len(asked) != 1 or asked[0] not in _KINDS:
        what = " and ".join(asked) or "nothing"
        raise ModelError(f"pooling of {what:.200} is not supported; supported are mean_tokens and lasttoken")
    return _KINDS[asked[0]]


logger = logging.getLogger(__name__)

FAKE_ARCHITECTURE = "FakeForCausalLM"
MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    **{architecture: family.model_type for architecture, family in FAMILIES.items()},
    FAKE_ARCHITECTURE: "splitserve_fake",
}
DEFAULT_SLIDING_WINDOW = 4096  # transformers' default
QWEN3_HEAD_DIM = 128  # transformers' default
MOST_LAYERS = 1024
NATIVE = "native"
TRANSFORMERS = "transformers"
DECODER_SUFFIXES = ("ForCausalLM", "LMHeadModel")  # of decoders that generate text
HEADLESS_SUFFIX = "Model"  # of decoders without a head, such as embedding models
# Parts of encoders' names
ENCODERS = ("Bert", "BERT", "Bidirectional", "Electra", "Encoder", "MPNet", "Roberta", "roberta")
NEUTRAL_FIELDS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")  # without effect on the computation


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder's configuration.

    sliding_windows has one entry for each layer: the number of tokens that a token attends to, itself included, or None
    for all. For the transformers backend norms, rotation, biases, windows and differences have neutral values:
    transformers reads these itself.
    """

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
    differences: Differences
    model_impl: str = NATIVE
    has_latent_kv: bool = False  # the cache holds one vector per token, from which all heads compute keys and values
    config_digest: str = ""  # for the transformers backend: SHA-256 of all of config.json
    embedder: Embedder | None = None  # set if the model computes embeddings and generates no text
    is_text_part: bool = False  # the checkpoint has more than a text decoder

    @property
    def experts(self) -> Experts | None:
        """Return the experts of the model's layers; None if it has none."""
        return self.differences.experts

    @property
    def is_transformers(self) -> bool:
        """Return whether the transformers backend computes the model."""
        return self.model_impl == TRANSFORMERS

    def rope_of(self, layer: int) -> Rope | None:
        """Return the rotary embedding of a layer; None if the layer does not rotate."""
        if layer in self.differences.unrotated_layers:
            return None
        return (self.sliding_windows[layer] and self.differences.sliding_rope) or self.rope

    def kv_layout(self, block_size: int, dtype: str) -> KVLayout:
        """Return the memory layout of the whole model's KV cache, in blocks of `block_size` tokens of this dtype."""
        sizes = (self.num_layers, self.num_kv_heads, self.head_dim, block_size, dtype)
        return KVLayout.uniform(*sizes, is_latent=self.has_latent_kv)


def read_model_config(folder: Path, model_impl: str = "auto", runner: str = "auto") -> ModelConfig:
    """Read config.json, generation_config.json, the tokenizer's eos_token and any embedding settings of a model folder.

    Both files give end tokens, generation_config.json with priority; the tokenizer's eos_token ends outputs too.
    `model_impl` is a value of --model-impl, `runner` one of --runner. A config.json without a dtype counts as float32.

    Raises ModelError with one sentence if the folder or a file is missing or broken, or requires something unsupported.
    """
    if not folder.is_dir():
        raise ModelError(f"there is no model folder {folder}")
    config = read_json_object(folder / "config.json")
    if is_text_part := is_whole(config):
        whole = _text_architecture(config)
        is_ours = ARCHITECTURES not in WHOLES[whole]
        if is_ours and model_impl == TRANSFORMERS:
            raise ModelError(f"of {whole} our own decoders alone compute the text, not transformers")
        if not is_ours and model_impl == NATIVE:
            raise ModelError(f"of {whole} transformers alone computes the text, not our own decoders")
        config = text_config(config, f"the text_config of {folder / 'config.json'}")
        model_impl = NATIVE if is_ours else TRANSFORMERS
    architecture, model_type, is_headless = _architecture(config, model_impl)
    family = FAMILIES.get(architecture)
    said = config if family is None else config.with_defaults(family.defaults)
    vocab_size = config.integer("vocab_size")
    sources = [config]
    if (folder / "generation_config.json").exists():
        sources.insert(0, read_json_object(folder / "generation_config.json"))
    if architecture in MODEL_TYPES:
        _refuse_both_ways(config)
    return ModelConfig(
        architecture=architecture,
        model_type=model_type,
        vocab_size=vocab_size,
        tie_word_embeddings=said.boolean("tie_word_embeddings", False),
        dtype=_dtype(config),
        bos_token_id=next(iter(_token_ids(sources, "bos_token_id", vocab_size)), None),
        eos_token_ids=_end_tokens(folder, sources, vocab_size),
        embedder=read_embedder(folder, config, runner, is_headless=is_headless),
        is_text_part=is_text_part,
        **_fields(config, said, architecture, model_impl, is_headless=is_headless),
    )


def _fields(
    config: JsonFields, said: JsonFields, architecture: str, model_impl: str, *, is_headless: bool
) -> dict[str, Any]:
    """Return the fields as the native decoder reads them, or as transformers does if the native decoder does not
    support the model.
    """
    is_fake = architecture == FAKE_ARCHITECTURE
    is_other_type = config.text("model_type", MODEL_TYPES.get(architecture, "")) != MODEL_TYPES.get(architecture)
    if architecture not in MODEL_TYPES or is_other_type or (model_impl == TRANSFORMERS and not is_fake):
        return _transformers_fields(config)
    try:
        return _native_fields(said, architecture)
    except ModelError as error:
        if model_impl != "auto" or is_fake or is_headless:
            raise
        logger.info("%s is left to transformers: %s", architecture, error)
        return _transformers_fields(config)


def _native_fields(config: JsonFields, architecture: str) -> dict[str, Any]:
    num_heads, num_layers = config.integer("num_attention_heads"), _num_layers(config)
    head_dim = _head_dim(config, architecture, num_heads)
    differences = Differences()
    if architecture in FAMILIES:
        check_names(config, architecture)
        differences = FAMILIES[architecture].read(config, head_dim, num_layers)
    if differences.activation == SILU and config.text("hidden_act", SILU) not in (SILU, SWISH):
        raise ModelError(f"hidden_act {config.text('hidden_act')!r} is not supported; supported is {SILU}")
    if differences.rearranges and config.raw("quantization_config") is not None:
        raise ModelError(f"a quantization_config is not supported for {architecture}: its weights are rearranged")
    max_position_embeddings = config.integer("max_position_embeddings")
    bias = config.boolean("attention_bias", False)
    return {
        "hidden_size": config.integer("hidden_size"),
        "intermediate_size": config.integer("intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": _num_kv_heads(config, num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": config.number(eps_name(architecture), 1e-6),
        "rope": read_rope(
            config,
            max_position_embeddings,
            may_be_partial=differences.rotary_dim is not None,
            layer_type=None if differences.sliding_rope is None else FULL,
        ),
        "qkv_bias": _has_qkv_bias(config, architecture) or (architecture in _WITH_ATTENTION_BIAS and bias),
        "o_bias": architecture in _WITH_ATTENTION_BIAS and bias,
        "mlp_bias": architecture in _WITH_MLP_BIAS and config.boolean("mlp_bias", False),
        "qk_norm": architecture in ("Gemma3ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
        "sliding_windows": _sliding_windows(config, architecture, num_layers, differences.unrotated_layers),
        "stored_quantization": read_stored_quantization(config),
        "differences": differences,
    }


def _has_qkv_bias(config: JsonFields, architecture: str) -> bool:
    return architecture == "Qwen2ForCausalLM" or (
        architecture == "Qwen2MoeForCausalLM" and config.boolean("qkv_bias", True)
    )


def _transformers_fields(config: JsonFields) -> dict[str, Any]:
    if config.boolean("is_encoder_decoder", False):
        raise ModelError("an encoder-decoder is not supported: its cache is not keys and values of one text")
    if config.raw("model_type") == LONGCAT:
        config = config.with_defaults({"num_hidden_layers": 2 * config.integer("num_layers")})
    sizes = config.renamed(_OTHER_NAMES)
    if isinstance(layer_types := config.raw("layers_block_type"), list):
        sizes = sizes.with_defaults({"num_hidden_layers": len(layer_types)})
    num_heads, num_layers = sizes.integer("num_attention_heads", 1), _num_layers(sizes)  # 1: no layer has attention
    hidden_size = sizes.integer("hidden_size")
    said = {name: config.raw(name) for name in sorted(config.names) if name not in NEUTRAL_FIELDS}
    return {
        "hidden_size": hidden_size,
        "intermediate_size": _transformers_neurons(sizes, 4 * hidden_size),
        "num_layers": num_layers,
        "num_heads": num_heads,
        **_kv_heads(sizes, num_heads, max(1, hidden_size // num_heads)),
        "max_position_embeddings": _transformers_context(sizes),
        "rms_norm_eps": 0.0,
        "rope": DefaultRope(0.0),
        "qkv_bias": False,
        "o_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "sliding_windows": (None,) * num_layers,
        "stored_quantization": read_dequantized(config),
        "differences": Differences(),
        "model_impl": TRANSFORMERS,
        "config_digest": hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest(),
    }


def _transformers_neurons(sizes: JsonFields, default: int) -> int:
    """Return the feed-forward neurons of a layer; of the largest if config.json has one number a layer."""
    said = sizes.raw("intermediate_size")
    is_by_layer = isinstance(said, list) and said and all(type(each) is int and each > 0 for each in said)
    return int(max(said)) if is_by_layer else sizes.integer("intermediate_size", default)


def _transformers_context(sizes: JsonFields) -> int:
    """Return the longest context; for longrope the original one, beyond which a token's rotation depends on the longest
    text in its batch. UNSTATED_CONTEXT where config.json has none.
    """
    longest = sizes.integer("max_position_embeddings", UNSTATED_CONTEXT)
    if rope_kind(sizes) != LONGROPE:
        return longest
    return min(longest, original_context(sizes, longest))


def _kv_heads(sizes: JsonFields, num_heads: int, head_dim: int) -> dict[str, Any]:
    """Return the number of KV heads and their widths. Latent KV has one head, with keys only."""
    if sizes.raw("kv_lora_rank") is None:
        return {"num_kv_heads": _num_kv_heads(sizes, num_heads), "head_dim": sizes.integer("head_dim", head_dim)}
    latent_dim = sizes.integer("kv_lora_rank") + sizes.integer("qk_rope_head_dim")
    return {"num_kv_heads": 1, "head_dim": latent_dim, "has_latent_kv": True}


LONGCAT = "longcat_flash"  # whose layers have two attentions each
_OTHER_NAMES = {  # in configs of transformers
    "hidden_size": ("n_embd", "d_model"),
    "intermediate_size": ("n_inner", "ffn_dim"),
    "num_attention_heads": ("n_head", "num_heads", "n_heads", "attention_heads", "decoder_attention_heads"),
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers", "decoder_layers"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "model_max_length", "seq_length", "context_length"),
}
UNSTATED_CONTEXT: Final = 32_768  # tokens, for models without a limit of their own
_WITH_MLP_BIAS = ("LlamaForCausalLM", "GraniteForCausalLM", "SmolLM3ForCausalLM")
_WITH_ATTENTION_BIAS = (
    *_WITH_MLP_BIAS,
    "Cohere2ForCausalLM",
    "CohereForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GemmaForCausalLM",
    "Olmo2ForCausalLM",
    "OlmoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)


def _architecture(config: JsonFields, model_impl: str) -> tuple[str, str, bool]:
    """Return the architecture's name with a head, its model_type, and whether it lacks the head."""
    names = config.raw("architectures")
    model_type = config.text("model_type", "")
    if names is None:
        names = [name for name, known_type in MODEL_TYPES.items() if known_type == model_type] or [model_type]
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise config.error("architectures", "a list of one name")
    name = _with_head(names[0])
    if any(word in name for word in ENCODERS) and not name.endswith(DECODER_SUFFIXES):
        raise ModelError(f"architecture {name!r:.80} is not supported: its attention goes both ways, ours is causal")
    if name not in MODEL_TYPES and (model_impl == NATIVE or not name.endswith(DECODER_SUFFIXES)):
        supported = ", ".join(known for known in MODEL_TYPES if known != FAKE_ARCHITECTURE)
        more = (
            "" if model_impl == NATIVE else f", and by transformers those named ...{' or ...'.join(DECODER_SUFFIXES)}"
        )
        raise ModelError(f"architecture {name!r} is not supported; supported are {supported}{more}")
    is_native_alone = model_impl == NATIVE or not model_type or model_type in MODEL_TYPES.values()
    if name in MODEL_TYPES and model_type != MODEL_TYPES[name] and is_native_alone:
        raise config.error("model_type", f"{MODEL_TYPES[name]!r} for {name}")
    return name, model_type, name != names[0]


def _with_head(name: str) -> str:
    """Return the name of a native architecture with its head."""
    whole = name.removesuffix(HEADLESS_SUFFIX) + DECODER_SUFFIXES[0]
    return whole if name.endswith(HEADLESS_SUFFIX) and whole in MODEL_TYPES and whole != FAKE_ARCHITECTURE else name


def _refuse_both_ways(config: JsonFields) -> None:
    if not config.boolean("is_causal", True) or config.boolean("use_bidirectional_attention", False):
        raise ModelError("attention that goes both ways is not supported, and config.json asks for it")


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


def _sliding_windows(
    config: JsonFields, architecture: str, num_layers: int, unrotated_layers: tuple[int, ...]
) -> tuple[int | None, ...]:
    if architecture in ("MistralForCausalLM", "MixtralForCausalLM", "Phi3ForCausalLM"):
        config = config.with_defaults({"sliding_window": DEFAULT_SLIDING_WINDOW})
        window = None if config.raw("sliding_window") is None else config.integer("sliding_window")
        slides = [window is not None] * num_layers
        if architecture == "MistralForCausalLM":  # with layer_types, transformers takes it for Ministral
            slides = read_layer_types(config, slides)
        if any(slides) and window is None:
            raise ModelError("layers of sliding_attention want a sliding_window")
        return tuple(window if slide else None for slide in slides)
    if architecture == "Cohere2ForCausalLM":  # layers that rotate have a window
        window = config.integer("sliding_window")
        return tuple(None if layer in unrotated_layers else window for layer in range(num_layers))
    if architecture in ("Gemma2ForCausalLM", "Gemma3ForCausalLM"):
        every = 2 if architecture == "Gemma2ForCausalLM" else config.integer("sliding_window_pattern", 6)
        slides = read_layer_types(config, [(layer + 1) % every > 0 for layer in range(num_layers)])
        return tuple(config.integer("sliding_window") if slide else None for slide in slides)
    if architecture.startswith("Qwen"):
        config = config.with_defaults({"sliding_window": DEFAULT_SLIDING_WINDOW})
    elif architecture != "SmolLM3ForCausalLM":
        return (None,) * num_layers
    return _windows_if_used(config, architecture, num_layers, unrotated_layers)


def _windows_if_used(
    config: JsonFields, architecture: str, num_layers: int, unrotated_layers: tuple[int, ...]
) -> tuple[int | None, ...]:
    """Return the windows of a model whose use_sliding_window enables them."""
    slides = [False] * num_layers
    is_used = config.boolean("use_sliding_window", False) and config.raw("sliding_window") is not None
    if architecture == "SmolLM3ForCausalLM":
        slides = read_layer_types(config, [is_used and layer in unrotated_layers for layer in range(num_layers)])
        if any(slides) and not is_used:
            raise ModelError("layers of sliding_attention want use_sliding_window and a sliding_window")
    elif is_used and architecture == "Qwen3MoeForCausalLM":  # it has no layer_types
        slides = [True] * num_layers
    elif is_used:
        first = config.integer("max_window_layers", 28, minimum=0)
        usual = [layer >= first for layer in range(num_layers)]
        if architecture == "Qwen2MoeForCausalLM":
            usual = [layer < first and layer % 2 == 0 for layer in range(num_layers)]
        slides = read_layer_types(config, usual)
    window = config.integer("sliding_window") if any(slides) else None
    return tuple(window if slide else None for slide in slides)


def _dtype(config: JsonFields) -> str:
    name = config.text("dtype", config.text("torch_dtype", "float32"))
    if name not in DTYPE_BYTES:
        raise ModelError(f"dtype {name!r} is not supported; supported are {', '.join(DTYPE_BYTES)}")
    return name


def _end_tokens(folder: Path, sources: list[JsonFields], vocab_size: int) -> tuple[int, ...]:
    """Return the tokens that end an output, as in vLLM including the tokenizer's eos_token, which fine-tuned models may
    have in addition to their base model's config.
    """
    of_config, of_tokenizer = _token_ids(sources, "eos_token_id", vocab_size), read_eos_token_id(folder)
    if of_tokenizer is None or of_tokenizer in of_config or not 0 <= of_tokenizer < vocab_size:
        return of_config
    return (*of_config, of_tokenizer)


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
