"""Describe how decoders of other families differ from Llama's, including mixtures of experts. Torch-free.

A family is described by functions that read its config.json. A setting that the description does not cover is never
ignored: the transformers backend computes such a model, or it is refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from serving_core.errors import ModelError
from serving_core.json_fields import JsonFields
from serving_core.model_files.rope import FULL, SLIDING, Rope, read_rope, rope_kind, rotary_share

MOST_EXPERTS: Final = 1024  # of a layer, as in engine/native/experts.c
EXPERTS_NAMES: Final = (  # in config.json
    "num_experts",
    "num_experts_per_tok",
    "num_local_experts",
    "output_router_logits",
    "router_aux_loss_coef",
)
QWEN_NAMES: Final = (
    *EXPERTS_NAMES,
    "decoder_sparse_step",
    "max_window_layers",
    "mlp_only_layers",
    "moe_intermediate_size",
    "norm_topk_prob",
    "sliding_window",
    "use_sliding_window",
)


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a layer, gated feed-forwards of which each token takes a few, and their names in the
    checkpoint.
    """

    num_experts: int
    num_chosen: int  # experts of each token
    intermediate_size: int  # of one expert
    is_normalized: bool  # whether the weights of the chosen experts sum to 1
    shared_size: int = 0  # of a shared expert, which all tokens take under its own gate; 0: none
    dense_layers: tuple[int, ...] = ()  # layers with a feed-forward instead of experts
    module: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    @property
    def active_size(self) -> int:
        """Return the number of neurons that a token uses."""
        return self.num_chosen * self.intermediate_size + self.shared_size

    @property
    def num_gates(self) -> int:
        """Return the number of gate logits of a token, including the shared expert's."""
        return self.num_experts + bool(self.shared_size)

    def share_taken(self, num_tokens: float) -> float:
        """Return the expected fraction of a layer's experts that num_tokens tokens use, if each chooses at random."""
        return float(1 - (1 - self.num_chosen / self.num_experts) ** num_tokens)


def mixtral_experts(config: JsonFields) -> Experts:
    """Read Mixtral's experts from config.json. Raises ModelError for a missing or wrong setting."""
    size = config.integer("intermediate_size")
    return Experts(*_numbers(config), size, True, module="block_sparse_moe", projections=("w1", "w3", "w2"))


def olmoe_experts(config: JsonFields) -> Experts:
    size = config.integer("intermediate_size")
    return Experts(*_numbers(config), size, config.boolean("norm_topk_prob", False))


def qwen_experts(config: JsonFields, num_layers: int, *, has_shared: bool) -> Experts:
    listed, step = config.raw("mlp_only_layers") or [], config.integer("decoder_sparse_step", 1)
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        raise config.error("mlp_only_layers", "a list of numbers of layers")
    return Experts(
        *_numbers(config),
        config.integer("moe_intermediate_size"),
        config.boolean("norm_topk_prob", False),
        shared_size=config.integer("shared_expert_intermediate_size") if has_shared else 0,
        dense_layers=tuple(layer for layer in range(num_layers) if layer in listed or (layer + 1) % step),
    )


def _numbers(config: JsonFields) -> tuple[int, int]:
    """Return the numbers of experts, and of experts per token."""
    if config.raw("quantization_config") is not None:
        raise ModelError("a quantization_config is not supported for mixtures of experts; --quantization int8 is")
    config = config.renamed({"num_experts": ("num_local_experts",)})  # the name differs by family and version
    num_experts, num_chosen = config.integer("num_experts"), config.integer("num_experts_per_tok")
    if num_experts > MOST_EXPERTS:
        raise config.error("num_experts", f"at most {MOST_EXPERTS}")
    if num_chosen > num_experts:
        raise config.error("num_experts_per_tok", f"at most the number of experts ({num_experts})")
    return num_experts, num_chosen


SILU, GELU_TANH = "silu", "gelu_pytorch_tanh"  # activations of gates, by transformers' names
SWISH: Final = "swish"  # another name of silu


@dataclass(frozen=True, slots=True)
class Differences:
    """The differences of a decoder from Llama's, from its tokens to its logits. The defaults are Llama's."""

    embedding_scale: float = 1.0  # factor of the tokens' embeddings
    rounds_embedding_scale: bool = False  # rounds the factor to the compute dtype
    centers_norms: bool = False  # norms subtract the mean first
    norm_offset: float = 0.0  # added to the stored weights of norms, in float32
    is_parallel: bool = False  # attention and feed-forward read the same input, and both are added
    norms_inputs: bool = True  # norms stand before attention and feed-forward
    norms_outputs: bool = False  # norms stand behind them
    norms_projections: bool = False  # one norm over all queries of a token, and one over all its keys
    is_fused: bool = False  # one stored tensor holds queries, keys and values, another one gates and ups
    rotary_dim: int | None = None  # leading elements of a head that are rotated; None: all
    rotates_neighbours: bool = False  # the elements of a pair are adjacent
    unrotated_layers: tuple[int, ...] = ()
    sliding_rope: Rope | None = None  # of layers with a window, if they rotate differently
    score_scale: float | None = None  # factor of query-key products; None: 1 / sqrt(head_dim)
    score_softcap: float | None = None  # scores become cap * tanh(score / cap)
    activation: str = SILU  # of gates
    residual_scale: float = 1.0  # factor of the outputs of attention and feed-forward
    logit_scale: float = 1.0
    logit_softcap: float | None = None  # logits become cap * tanh(logit / cap)
    experts: Experts | None = None  # instead of a feed-forward

    @property
    def rearranges(self) -> bool:
        """Return whether projections are stored in another form than they are computed in."""
        return self.is_fused or self.rotary_dim is not None or self.rotates_neighbours


@dataclass(frozen=True, slots=True)
class Family:
    """Models of one transformers architecture, and the names in its config.json beyond the common ones."""

    model_type: str
    read: Callable[[JsonFields, int, int], Differences]  # of config.json, head_dim and the number of layers
    names: tuple[str, ...] = ()  # names that it reads
    defaults: Mapping[str, Any] = field(default_factory=dict)  # transformers' defaults that differ from Llama's
    presumed: Mapping[str, Any] = field(default_factory=dict)  # names, and the only value that each may have
    eps_name: str = "rms_norm_eps"  # setting of the norms' epsilon


def check_names(config: JsonFields, architecture: str) -> None:
    """Raise ModelError if config.json has a setting that the Family of its architecture does not know.

    Null and false count as off.
    """
    family = FAMILIES[architecture]
    known = {*LLAMAS_NAMES, *NAMES_WITHOUT_EFFECT, *family.names, family.eps_name}
    for name in config.names:
        value = config.raw(name)
        if name not in known and value is not None and value is not False and value != family.presumed.get(name):
            raise ModelError(f"our own decoder of {architecture} does not know {name} ({value!r:.80}) in config.json")


def eps_name(architecture: str) -> str:
    """Return the config.json name of the norms' epsilon."""
    return FAMILIES[architecture].eps_name if architecture in FAMILIES else "rms_norm_eps"


def read_layer_types(config: JsonFields, usual: list[bool]) -> list[bool]:
    """Return, for each layer, whether it has a sliding window, by layer_types; `usual` if that is missing.

    Raises ModelError unless layer_types has one known name for each layer.
    """
    layer_types, num_layers = config.raw("layer_types"), len(usual)
    if layer_types is None:
        return usual
    known = {FULL: False, SLIDING: True}
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise config.error("layer_types", f"a list of {num_layers} names")
    if unknown := [name for name in layer_types if name not in known]:
        raise ModelError(f"layer type {unknown[0]!r} is not supported; supported are {' and '.join(known)}")
    return [known[name] for name in layer_types]


def _cohere(config: JsonFields, head_dim: int, num_layers: int) -> Differences:
    return Differences(
        centers_norms=True, is_parallel=True, rotates_neighbours=True, logit_scale=config.positive("logit_scale")
    )


def _cohere2(config: JsonFields, head_dim: int, num_layers: int) -> Differences:
    pattern = config.integer("sliding_window_pattern", 4)
    slides = read_layer_types(config, [(layer + 1) % pattern > 0 for layer in range(num_layers)])
    unrotated = tuple(layer for layer in range(num_layers) if not slides[layer])
    return replace(_cohere(config, head_dim, num_layers), unrotated_layers=unrotated)


def _gemma(config: JsonFields, head_dim: int, num_layers: int) -> Differences:
    """Read Gemma's differences. Here "gelu" means its approximation, too."""
    return _with_gelu(config, "hidden_act", ("gelu", GELU_TANH))


def _gemma2(config: JsonFields, head_dim: int, num_layers: int) -> Differences:
    return replace(_with_four_norms(config), score_softcap=_softcap(config, "attn_logit_softcapping"))


def _gemma3(config: JsonFields, head_dim: int, num_layers: int) -> Differences:
    rope = read_rope(config, config.integer("max_position_embeddings"), layer_type=SLIDING)
    return replace(_with_four_norms(config), sliding_rope=rope)


def _with_four_norms(config: JsonFields) -> Differences:
    return replace(
        _with_gelu(config, "hidden_activation", (GELU_TANH,)),
        norms_outputs=True,
        score_scale=config.positive("query_pre_attn_scalar") ** -0.5,
        logit_softcap=_softcap(config, "final_logit_softcapping"),
    )


def _with_gelu(config: JsonFields, name: str, known: tuple[str, ...]) -> Differences:
    """Return the differences common to all Gemma models."""
    if config.text(name) not in known:
        raise ModelError(f"{name} {config.text(name)!r:.80} is not supported; supported is {' and '.join(known)}")
    scale = config.integer("hidden_size") ** 0.5
    return Differences(embedding_scale=scale, rounds_embedding_scale=True, norm_offset=1.0, activation=GELU_TANH)


def _softcap(config: JsonFields, name: str) -> float | None:
    return None if config.raw(name) is None else config.positive(name)


def _granite(config: JsonFields, head_dim: int, num_layers: int) -> Differences:
    return Differences(
        embedding_scale=config.positive("embedding_multiplier", 1.0),
        score_scale=config.positive("attention_multiplier", 1.0),
        residual_scale=config.positive("residual_multiplier", 1.0),
        logit_scale=1 / config.positive("logits_scaling", 1.0),
    )


def _mixtral(config: JsonFields, head_dim: int, num_layers: int) -> Differences:
    return Differences(experts=mixtral_experts(config))


def _olmo2(config: JsonFields, head_dim: int, num_layers: int) -> Differences:
    return Differences(norms_inputs=False, norms_outputs=True, norms_projections=True)


def _olmoe(config: JsonFields, head_dim: int, num_layers: int) -> Differences:
    return Differences(norms_projections=True, experts=olmoe_experts(config))


def _phi3(config: JsonFields, head_dim: int, num_layers: int) -> Differences:
    if rope_kind(config) != "default":
        raise ModelError(f"rope type {rope_kind(config)!r} is not supported in Phi-3, where it may depend on the text")
    if (share := rotary_share(config)) > 1:
        raise ModelError(f"partial_rotary_factor {share:g} is not supported; it is at most 1")
    rotary_dim = int(head_dim * share)
    if not rotary_dim or rotary_dim % 2:
        raise ModelError(f"{rotary_dim} rotated elements of a head of {head_dim} are not supported; they form pairs")
    return Differences(is_fused=True, rotary_dim=None if rotary_dim == head_dim else rotary_dim)


def _qwen2_moe(config: JsonFields, head_dim: int, num_layers: int) -> Differences:
    return Differences(experts=qwen_experts(config, num_layers, has_shared=True))


def _qwen3_moe(config: JsonFields, head_dim: int, num_layers: int) -> Differences:
    return Differences(experts=qwen_experts(config, num_layers, has_shared=False))


def _smollm3(config: JsonFields, head_dim: int, num_layers: int) -> Differences:
    interval = config.integer("no_rope_layer_interval", 4)
    rotated = config.raw("no_rope_layers")  # 1 where a layer rotates, in spite of the name
    if rotated is None:
        rotated = [(layer + 1) % interval for layer in range(num_layers)]
    if not isinstance(rotated, list) or len(rotated) < num_layers or not all(type(flag) is int for flag in rotated):
        raise config.error("no_rope_layers", f"a list of {num_layers} times 0 or 1")
    return Differences(unrotated_layers=tuple(layer for layer in range(num_layers) if not rotated[layer]))


LLAMAS_NAMES: Final = (  # read by the native decoder for all models
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "quantization_config",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "tie_word_embeddings",
    "torch_dtype",
    "vocab_size",
)
# Settings of training, of files, of transformers itself, without effect on the computation
NAMES_WITHOUT_EFFECT: Final = (
    "_attn_implementation_autoset",
    "_name_or_path",
    "attention_dropout",
    "auto_map",
    "cache_implementation",
    "chunk_size_feed_forward",
    "embd_pdrop",
    "id2label",
    "initializer_range",
    "label2id",
    "model_max_length",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "resid_pdrop",
    "return_dict",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
)
_GEMMA_DEFAULTS: Final = {"head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True}
_GEMMA2_DEFAULTS: Final = {
    **_GEMMA_DEFAULTS,
    "hidden_activation": GELU_TANH,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA2_NAMES: Final = (
    "attention_bias",
    "final_logit_softcapping",
    "hidden_activation",
    "layer_types",
    "query_pre_attn_scalar",
    "sliding_window",
)
FAMILIES: Final = {
    "Cohere2ForCausalLM": Family(
        "cohere2",
        _cohere2,
        ("attention_bias", "layer_types", "logit_scale", "sliding_window", "sliding_window_pattern"),
        {"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "sliding_window": 4096, "tie_word_embeddings": True},
        {
            "layer_switch": 4,
            "order_of_interleaved_layers": "local_attn_first",
            "position_embedding_type": "rope_gptj",
            "rotary_pct": 1.0,
            "use_embedding_sharing": True,
            "use_gated_activation": True,
            "use_parallel_block": True,
            "use_parallel_embedding": True,
        },
        eps_name="layer_norm_eps",
    ),
    "CohereForCausalLM": Family(
        "cohere",
        _cohere,
        ("attention_bias", "logit_scale"),
        {"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "rope_theta": 5e5, "tie_word_embeddings": True},
        eps_name="layer_norm_eps",
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        _gemma2,
        (*_GEMMA2_NAMES, "attn_logit_softcapping"),
        {**_GEMMA2_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        {"sliding_window_size": 4096},
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        _gemma3,
        (*_GEMMA2_NAMES, "_sliding_window_pattern", "rope_local_base_freq", "sliding_window_pattern"),
        {**_GEMMA2_DEFAULTS, "max_position_embeddings": 131_072, "rope_theta": 1e6},
    ),
    "GemmaForCausalLM": Family(
        "gemma",
        _gemma,
        ("attention_bias",),
        {**_GEMMA_DEFAULTS, "hidden_act": GELU_TANH, "num_key_value_heads": 16},
        {"hidden_activation": GELU_TANH},
    ),
    "GraniteForCausalLM": Family(
        "granite",
        _granite,
        (
            "attention_bias",
            "attention_multiplier",
            "embedding_multiplier",
            "logits_scaling",
            "mlp_bias",
            "residual_multiplier",
        ),
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        _mixtral,
        (*EXPERTS_NAMES, "router_jitter_noise", "sliding_window"),
        {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None},
    ),
    "Olmo2ForCausalLM": Family("olmo2", _olmo2, ("attention_bias",), {"rms_norm_eps": 1e-5}),
    "OlmoeForCausalLM": Family(
        "olmoe", _olmoe, (*EXPERTS_NAMES, "attention_bias", "norm_topk_prob"), {"rms_norm_eps": 1e-5}
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        _phi3,
        ("original_max_position_embeddings", "partial_rotary_factor", "sliding_window"),
        {"rms_norm_eps": 1e-5, "sliding_window": None},
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe", _qwen2_moe, (*QWEN_NAMES, "layer_types", "qkv_bias", "shared_expert_intermediate_size")
    ),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", _qwen3_moe, (*QWEN_NAMES, "attention_bias")),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        _smollm3,
        (
            "attention_bias",
            "layer_types",
            "max_window_layers",
            "mlp_bias",
            "no_rope_layer_interval",
            "no_rope_layers",
            "sliding_window",
            "use_sliding_window",
        ),
        {"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
    ),
}
