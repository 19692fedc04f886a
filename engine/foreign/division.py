"""How the ranks of a node divide a model of transformers: by its own tp_plan, which says of modules and parameters how
they are divided. What neither it nor we name, every rank computes whole.

Divided parameters hold the rank's part alone; sums and gathers are hooks, over our own group.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from engine.parallel import LEADER, RankGroup
from serving_core.errors import ModelError, SettingsError
from serving_core.sharding import share_of

# Of a matrix [outputs, inputs]: which dimension is divided.
DIVIDED: Final = {
    "colwise": -2,
    "colwise_gather_output": -2,
    "packed_colwise": -2,
    "rowwise": -1,
    "rowwise_split_input": -1,
}
WHOLE: Final = ("embedding_rowwise", "mla_kv_a_proj", "replicated_with_grad_allreduce")  # on every rank
SUMMED: Final = ("moe_tp_experts", "rowwise", "rowwise_split_input")  # outputs are parts of a sum
BESIDE_PLANS: Final[Mapping[str, Mapping[str, str]]] = {  # what plans leave out, of attention that they divide
    "CohereForCausalLM": {f"model.layers.*.self_attn.{name}.weight": "colwise" for name in ("q_norm", "k_norm")},
    "Glm4MoeLiteForCausalLM": {"model.layers.*.self_attn.q_proj": "colwise"},
}
PACKED: Final = 2  # matrices, one below the other


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a parameter that a rank holds: of each of `parts` equal runs of one dimension a share."""

    dim: int  # from the end
    total: int
    parts: int
    rank: int
    size: int

    def runs(self, total: int, parts: int) -> list[range]:
        """Those held of a dimension of this length that has so many of the parts."""
        length = total // parts
        share = share_of(length, self.rank, self.size)
        return [range(part * length + share.start, part * length + share.stop) for part in range(parts)]

    @property
    def num_held(self) -> int:
        return sum(map(len, self.runs(self.total, self.parts)))


def divide(model: Any, group: RankGroup, num_heads: int) -> dict[str, Cut]:
    """Makes this rank's part of a model that is on the meta device, of whose `num_heads` KV heads, or of those that
    latents stand for, all ranks are to have equally many. Gives what it holds of each parameter that is divided, by its
    name. Raises ModelError for a plan that asks for more than we can, or SettingsError for ranks whose parts would not
    be equal."""
    plan: Mapping[str, str] = model.tp_plan if group.size > 1 else {}
    plan = plan and {**plan, **BESIDE_PLANS.get(type(model).__name__, {})}
    if plan and num_heads % group.size:
        raise SettingsError(
            f"--tensor-parallel-size {group.size}: transformers computes this model, and its {num_heads} KV heads "
            "are to be divided equally"
        )
    tied = {name.rpartition(".")[0] for name in model.all_tied_weights_keys}
    cuts: dict[str, Cut] = {}
    for path, module in model.named_modules():
        for name, _ in list(module.named_parameters(recurse=False)):
            style = plan.get(_pattern(f"{path}.{name}"))
            if style is not None:
                cuts[f"{path}.{name}"] = _cut(module, name, style, group)
        style = plan.get(_pattern(path))
        is_held = next(module.parameters(), None) is not None
        if style is not None and is_held and path not in tied:
            cuts |= {f"{path}.{name}": cut for name, cut in _divide_module(module, style, group).items()}
    return cuts


def leave_biases(model: nn.Module, cuts: Mapping[str, Cut], rank: int) -> None:
    """To be called once the model is filled: of a sum over ranks only rank 0 adds the bias."""
    for name, cut in cuts.items():
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        if rank != LEADER and attribute == "weight" and cut.dim == -1 and isinstance(module, nn.Linear):
            module.register_parameter("bias", None)


def _pattern(path: str) -> str:
    """A path as plans spell it, with stars for numbers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def _divide_module(module: nn.Module, style: str, group: RankGroup) -> dict[str, Cut]:
    """What is held of its parameters."""
    if style in SUMMED:
        module.register_forward_hook(_Sum(group))
    if style in WHOLE or style == "moe_tp_experts":
        return {}
    if style not in DIVIDED or not isinstance(module, nn.Linear):
        raise ModelError(f"the model's tp_plan divides {type(module).__name__} by {style!r}, which is not supported")
    inputs, outputs = module.in_features, module.out_features
    if style == "rowwise_split_input":
        module.register_forward_pre_hook(_Split(share_of(inputs, group.rank, group.size)))
    if style == "colwise_gather_output":
        module.register_forward_hook(_Gather(group, outputs))
    cuts = {"weight": _cut(module, "weight", style, group)}
    if module.bias is not None and DIVIDED[style] == -2:
        cuts["bias"] = _cut(module, "bias", style, group)
    return cuts


def _cut(module: nn.Module, name: str, style: str, group: RankGroup) -> Cut:
    """Replaces a parameter by one of the size that the rank holds."""
    whole = getattr(module, name)
    if style not in DIVIDED:
        raise ModelError(f"the model's tp_plan divides {name} by {style!r}, which is not supported")
    dim = max(DIVIDED[style], -whole.ndim)
    parts = PACKED if style == "packed_colwise" else 1
    cut = Cut(dim, whole.shape[dim], parts, group.rank, group.size)
    shape = list(whole.shape)
    shape[dim] = cut.num_held
    setattr(module, name, nn.Parameter(torch.empty(shape, dtype=whole.dtype, device="meta"), requires_grad=False))
    return cut


class _Sum:
    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def __call__(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        output = output.contiguous()
        self._group.all_reduce(output)
        return output


class _Gather:
    """Makes outputs whole, of `total` columns."""

    def __init__(self, group: RankGroup, total: int) -> None:
        self._group, self._total = group, total

    def __call__(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        held = share_of(self._total, self._group.rank, self._group.size)
        whole = output.new_zeros((*output.shape[:-1], self._total))
        whole[..., held.start : held.stop] = output
        self._group.all_reduce(whole)
        return whole


class _Split:
    """Takes the held columns of whole inputs."""

    def __init__(self, held: range) -> None:
        self._held = slice(held.start, held.stop)

    def __call__(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (inputs[0][..., self._held], *inputs[1:])
