"""Mixtures of experts: what config.json says of those that take the place of feed-forwards. Torch-free."""

from dataclasses import dataclass
from typing import Final

from serving_core.errors import ModelError
from serving_core.json_fields import JsonFields

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
    """The experts of a layer, gated feed-forwards of which each token takes a few; and what they are called in the
    checkpoint."""

    num_experts: int
    num_chosen: int  # by each token
    intermediate_size: int  # of one
    is_normalized: bool  # whether the weights of those chosen sum up to 1
    shared_size: int = 0  # of one more, which all tokens take under a gate of its own; 0: there is none
    dense_layers: tuple[int, ...] = ()  # those with a feed-forward instead
    module: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    @property
    def active_size(self) -> int:
        """Neurons that a token takes."""
        return self.num_chosen * self.intermediate_size + self.shared_size

    @property
    def num_gates(self) -> int:
        """Numbers that are worked out of a token to choose among them, and to weigh the shared one."""
        return self.num_experts + bool(self.shared_size)

    def share_taken(self, num_tokens: float) -> float:
        """Of a layer's experts the share that so many tokens take, if each takes its own at random."""
        return float(1 - (1 - self.num_chosen / self.num_experts) ** num_tokens)


def mixtral_experts(config: JsonFields) -> Experts:
    """Raises ModelError, as do the others."""
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
    """Of experts, and of those that a token takes."""
    if config.raw("quantization_config") is not None:
        raise ModelError("a quantization_config is not supported for mixtures of experts; --quantization int8 is")
    config = config.renamed({"num_experts": "num_local_experts"})  # which name it is differs by family and version
    num_experts, num_chosen = config.integer("num_experts"), config.integer("num_experts_per_tok")
    if num_experts > MOST_EXPERTS:
        raise config.error("num_experts", f"at most {MOST_EXPERTS}")
    if num_chosen > num_experts:
        raise config.error("num_experts_per_tok", f"at most the number of experts ({num_experts})")
    return num_experts, num_chosen
