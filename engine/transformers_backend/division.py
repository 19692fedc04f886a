"""Divide a model of transformers over the ranks of a stage.

Division follows the model's own tp_plan, and `mixers` for layers that keep a state; modules that neither they nor this
module name are computed whole on every rank. Divided parameters hold the rank's part alone; hooks do the sums and
gathers, over this node's own group.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from engine.parallel import LEADER, RankGroup
from engine.transformers_backend.mixers import Division, Section, Sections
from serving_core.errors import ModelError, SettingsError
from serving_core.sharding import share_of

# Divided dimension of a matrix [outputs, inputs].
DIVIDED: Final = {
    "colwise": -2,
    "colwise_gather_output": -2,
    "packed_colwise": -2,
    "packed_rowwise": -1,
    "rowwise": -1,
    "rowwise_split_input": -1,
}
GATHERED: Final = "colwise_gather_output"
# Styles of modules that are whole on every rank
WHOLE: Final = ("embedding_rowwise", "local_params", "mla_kv_a_proj", "replicated_with_grad_allreduce")
# Styles of modules whose outputs are parts of a sum
SUMMED: Final = ("moe_tp_experts", "rowwise", "rowwise_split_input")
WHOLE_NORM: Final = "norm of all columns"  # a style of this module: inputs are gathered, outputs divided again
PACKED: Final = ("packed_colwise", "packed_rowwise")  # styles of two matrices in one, stacked


def _beside(attention: str, output: str, feed_forward: tuple[str, ...] = ()) -> dict[str, str]:
    """Return a plan for an attention, by the path and the name of its output projection, and a feed-forward.

    The last name of the feed-forward is that of its output projection.
    """
    columns = [*(f"{attention}.{name}_proj" for name in "qkv"), *feed_forward[:-1]]
    names = {
        **dict.fromkeys(columns, "colwise"),
        **dict.fromkeys((f"{attention}.{output}", *feed_forward[-1:]), "rowwise"),
    }
    return {f"model.layers.*.{name}": style for name, style in names.items()}


def _gated(path: str) -> tuple[str, ...]:
    return tuple(f"{path}.{name}_proj" for name in ("gate", "up", "down"))


_LFM2: Final = _beside("self_attn", "out_proj", tuple(f"feed_forward.w{number}" for number in (1, 3, 2)))
BESIDE_PLANS: Final[Mapping[str, Mapping[str, str]]] = {  # modules that plans omit, or that take part in another way
    "BambaForCausalLM": _beside("self_attn", "o_proj", _gated("feed_forward")),
    "CohereForCausalLM": {f"model.layers.*.self_attn.{name}.weight": "colwise" for name in ("q_norm", "k_norm")},
    "FalconH1ForCausalLM": _beside("self_attn", "o_proj", _gated("feed_forward")),
    "Glm4MoeLiteForCausalLM": {"model.layers.*.self_attn.q_proj": "colwise"},
    "GraniteMoeHybridForCausalLM": _beside("self_attn", "o_proj"),
    "JambaForCausalLM": _beside("self_attn", "o_proj", _gated("feed_forward")),
    "Lfm2ForCausalLM": _LFM2,
    "Lfm2MoeForCausalLM": _LFM2,
    "Lfm3ForCausalLM": {**_beside("self_attn", "o_proj"), "model.layers.*.self_attn.g_proj": "colwise"},
    "NemotronHForCausalLM": _beside("mixer", "o_proj"),
    "OlmoHybridForCausalLM": {
        **_beside("self_attn", "o_proj"),
        **{f"model.layers.*.self_attn.{name}": WHOLE_NORM for name in ("q_norm", "k_norm")},
    },
}


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a parameter that a rank holds: its share of each section of one dimension."""

    dim: int  # counted from the end
    sections: Sections
    rank: int
    size: int
    is_gathered: bool = False  # whether every rank gets the outputs of all

    @property
    def total(self) -> int:
        return sum(each.length for each in self.sections)

    @property
    def runs(self) -> list[range]:
        """Return the runs of the dimension that the rank holds."""
        runs, start = [], 0
        for length, is_shared in self.sections:
            share = range(length) if is_shared else share_of(length, self.rank, self.size)
            runs.append(range(start + share.start, start + share.stop))
            start += length
        return runs

    @property
    def num_held(self) -> int:
        return sum(map(len, self.runs))

    def held(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of the rank's part of a whole tensor."""
        return torch.cat([tensor.narrow(self.dim, run.start, len(run)) for run in self.runs], dim=self.dim)


def divide(model: Any, group: RankGroup, num_heads: int, rules: Mapping[str, Division]) -> dict[str, Cut]:
    """Reduce a model on the meta device to this rank's part; return the cut of each divided parameter, by name.

    All ranks get equally many of the `num_heads` KV heads (or of the heads that latents stand for). `rules` are the
    divisions of layers that keep a state, by path. Hooks that sum and gather over the group are added. Raises
    ModelError for a plan with unsupported styles, or SettingsError for unequal parts.
    """
    if group.size == 1:
        return {}
    plan: Mapping[str, str] = {**model.tp_plan, **BESIDE_PLANS.get(type(model).__name__, {})}
    if plan and num_heads % group.size:
        raise SettingsError(
            f"--tensor-parallel-size {group.size}: transformers computes this model, and its {num_heads} KV heads "
            "are to be divided equally"
        )
    tied = {name.rpartition(".")[0] for name in model.all_tied_weights_keys}
    cuts: dict[str, Cut] = {}
    for path, module in model.named_modules():
        if path in rules:
            cuts |= {f"{path}.{name}": cut for name, cut in _divide_mixer(module, rules[path], group).items()}
        if any(f"{path}.".startswith(f"{mixer}.") for mixer in rules):
            continue
        for name, _ in list(module.named_parameters(recurse=False)):
            style = plan.get(_pattern(f"{path}.{name}"))
            if style is not None:
                cuts[f"{path}.{name}"] = _cut_as(module, name, style, group)
        style = plan.get(_pattern(path))
        is_held = next(module.parameters(), None) is not None
        if style is not None and is_held and path not in tied:
            cuts |= {f"{path}.{name}": cut for name, cut in _divide_module(module, style, group).items()}
    return cuts


def check_heads_divided(model: nn.Module, cuts: Mapping[str, Cut], group: RankGroup, layers: Iterable[int]) -> None:
    """Raise ModelError unless the modules that compute what these layers keep of a sequence are divided.

    `cuts` is the result of `divide`.
    """
    if group.size == 1:
        return
    divided = {name for name, cut in cuts.items() if not cut.is_gathered}
    numbered: dict[str, Any] = {path: each for path, each in model.named_modules() if hasattr(each, "layer_idx")}
    outer = {above for path in numbered for above in numbered if path.startswith(f"{above}.")}
    inner = {path: module for path, module in numbered.items() if path not in outer}
    for layer in layers:
        paths = [path for path, module in inner.items() if module.layer_idx == layer]
        whole = [path for path in paths if not any(name.startswith(f"{path}.") for name in divided)]
        if whole or not paths:
            part = type(inner[whole[0]]).__name__ if whole else f"layer {layer}"
            raise ModelError(
                f"--tensor-parallel-size {group.size}: {type(model).__name__} is computed sequence by sequence, and "
                f"there is no plan to divide its {part} over ranks"
            )


def finish_division(model: nn.Module, cuts: Mapping[str, Cut], rank: int) -> None:
    """Divide the buffers of a filled model, and remove the biases of sums over ranks from all ranks but 0.

    Rank 0 alone adds the biases. `cuts` is the result of `divide`.
    """
    for name, cut in cuts.items():
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        if attribute in module._buffers:
            setattr(module, attribute, cut.held(getattr(module, attribute)))
        elif rank != LEADER and attribute == "weight" and cut.dim == -1 and isinstance(module, nn.Linear):
            module.register_parameter("bias", None)


def _pattern(path: str) -> str:
    """Return a path as plans spell it, with stars for numbers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def _divide_mixer(layer: Any, rule: Division, group: RankGroup) -> dict[str, Cut]:
    """Divide a layer that keeps a state; return the cuts of its parameters and buffers."""
    for units in rule.units:
        if units % group.size:
            raise SettingsError(
                f"--tensor-parallel-size {group.size}: {units} heads, groups or channels of {type(layer).__name__} are "
                "to be divided equally"
            )
    cuts: dict[str, Cut] = {}
    for name, sections in rule.columns.items():
        cuts |= _divide_columns(layer, name, sections, group)
    for name in rule.summed:
        if hasattr(layer, name):
            of_module = _divide_module(getattr(layer, name), "rowwise", group)
            cuts |= {f"{name}.{attribute}": cut for attribute, cut in of_module.items()}
    if hasattr(layer, rule.gathered):
        _divide_module(getattr(layer, rule.gathered), WHOLE_NORM, group)
    for name, sections in rule.sizes.items():
        path, _, attribute = name.rpartition(".")
        owner = getattr(layer, path, None) if path else layer
        if hasattr(owner, attribute):
            setattr(owner, attribute, Cut(-1, sections, group.rank, group.size).num_held)
    return cuts


def _divide_columns(layer: Any, name: str, sections: Sections, group: RankGroup) -> dict[str, Cut]:
    """Divide a parameter or a module of a layer by its first dimension, if there is one of this name.

    A buffer is divided by its last one, later, since it is computed whole.
    """
    part = getattr(layer, name, None)
    if part is None:
        return {}
    if isinstance(part, nn.Module):
        own = list(part.named_parameters(recurse=False))
        return {f"{name}.{each}": _cut(part, each, -whole.ndim, sections, group) for each, whole in own}
    if isinstance(part, nn.Parameter):
        return {name: _cut(layer, name, -part.ndim, sections, group)}
    return {name: Cut(-1, sections, group.rank, group.size)}


def _divide_module(module: nn.Module, style: str, group: RankGroup) -> dict[str, Cut]:
    """Divide a module; return the cuts of its parameters."""
    if style in SUMMED:
        module.register_forward_hook(_Sum(group))
    if style in WHOLE or style == "moe_tp_experts":
        return {}
    if style == WHOLE_NORM:
        weight = next(module.parameters(), None)
        if weight is None:  # in place of a norm
            return {}
        module.register_forward_pre_hook(_GatherInputs(group, len(weight)))
        module.register_forward_hook(_SplitOutput(share_of(len(weight), group.rank, group.size)))
        return {}
    if style not in DIVIDED or not isinstance(module, nn.Linear):
        raise ModelError(f"the model's tp_plan divides {type(module).__name__} by {style!r}, which is not supported")
    inputs, outputs = module.in_features, module.out_features
    if style == "rowwise_split_input":
        module.register_forward_pre_hook(_Split(share_of(inputs, group.rank, group.size)))
    if style == GATHERED:
        module.register_forward_hook(_Gather(group, outputs))
    cuts = {"weight": _cut_as(module, "weight", style, group)}
    if module.bias is not None and DIVIDED[style] == -2:
        cuts["bias"] = _cut_as(module, "bias", style, group)
    return cuts


def _cut_as(module: nn.Module, name: str, style: str, group: RankGroup) -> Cut:
    """Replace a parameter by one of the size that the rank holds, as a style of plans says."""
    whole = getattr(module, name)
    if style not in DIVIDED:
        raise ModelError(f"the model's tp_plan divides {name} by {style!r}, which is not supported")
    dim = max(DIVIDED[style], -whole.ndim)
    num_parts = 2 if style in PACKED else 1
    sections = (Section(whole.shape[dim] // num_parts),) * num_parts
    return _cut(module, name, dim, sections, group, is_gathered=style == GATHERED)


def _cut(
    module: nn.Module, name: str, dim: int, sections: Sections, group: RankGroup, *, is_gathered: bool = False
) -> Cut:
    """Replace a parameter by one of the size that the rank holds of these sections of a dimension."""
    whole, cut = getattr(module, name), Cut(dim, sections, group.rank, group.size, is_gathered)
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
    """Gathers outputs of `total` columns."""

    def __init__(self, group: RankGroup, total: int) -> None:
        self._group, self._total = group, total

    def __call__(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        held = share_of(self._total, self._group.rank, self._group.size)
        whole = output.new_zeros((*output.shape[:-1], self._total))
        whole[..., held.start : held.stop] = output
        self._group.all_reduce(whole)
        return whole


class _GatherInputs:
    """Gathers the tensors among a module's inputs, of `total` columns each."""

    def __init__(self, group: RankGroup, total: int) -> None:
        self._gather = _Gather(group, total)

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(self._gather(module, None, each) if isinstance(each, torch.Tensor) else each for each in inputs)


class _Split:
    """Takes the held columns of whole inputs."""

    def __init__(self, held: range) -> None:
        self._held = slice(held.start, held.stop)

    def __call__(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (inputs[0][..., self._held], *inputs[1:])


class _SplitOutput:
    """Takes the held columns of a whole output."""

    def __init__(self, held: range) -> None:
        self._held = slice(held.start, held.stop)

    def __call__(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output[..., self._held]
