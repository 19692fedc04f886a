"""Say how layers that keep a fixed state, as transformers computes them, are divided over ranks.

A rank computes some heads of a linear attention, or some channels of a convolution, and keeps their states. What all
heads share, such as the one group of B and C in most Mamba2 models, is on every rank.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from torch import nn


class Section(NamedTuple):
    """A run of a dimension. Each rank holds a share of a section, or all of a shared one."""

    length: int
    is_shared: bool = False


Sections = tuple[Section, ...]


class Division(NamedTuple):
    """How one layer is divided. Names that the layer lacks mean nothing."""

    units: tuple[int, ...]  # of heads, groups or channels; the number of ranks divides each
    sizes: Mapping[str, Sections]  # attributes that become the rank's
    columns: Mapping[str, Sections]  # parameters, buffers, and modules whose outputs are divided
    summed: tuple[str, ...]  # linear modules whose inputs are divided
    gathered: str  # a norm over the outputs of all ranks, or ""
    states: Mapping[str, Sections]  # of transformers' cache, whose second dimension is divided


def divisions(model: nn.Module) -> dict[str, Division]:
    """Return how the layers of a whole model that keep a state are divided, by path.

    Layers of unknown classes are missing.
    """
    modules: list[tuple[str, Any]] = list(model.named_modules())
    return {path: RULES[type(each).__name__](each) for path, each in modules if type(each).__name__ in RULES}


def _gated_delta_net(layer: Any) -> Division:
    keys, values, heads = Section(layer.key_dim), Section(layer.value_dim), Section(layer.num_v_heads)
    mixed = (keys, keys, values)
    columns = {
        "in_proj_qkv": mixed,
        "in_proj_qkvz": (Section(2 * (layer.key_dim + layer.value_dim)),),  # head by head
        "in_proj_ba": (Section(2 * layer.num_v_heads),),
        "conv1d": mixed,
        **dict.fromkeys(("q_proj", "k_proj"), (keys,)),
        **dict.fromkeys(("in_proj_z", "v_proj", "g_proj"), (values,)),
        **dict.fromkeys(("in_proj_a", "in_proj_b", "a_proj", "b_proj", "A_log", "dt_bias"), (heads,)),
    }
    sizes = {"num_v_heads": (heads,), "num_k_heads": (Section(layer.num_k_heads),), "conv_dim": mixed}
    return Division(
        units=(layer.num_k_heads, layer.num_v_heads),
        sizes={**sizes, "key_dim": (keys,), "value_dim": (values,)},
        columns=columns,
        summed=("out_proj", "o_proj"),
        gathered="",
        states={"conv_states": mixed, "recurrent_states": (heads,)},
    )


def _mamba2(layer: Any) -> Division:
    is_one = layer.n_groups == 1
    channels, heads = Section(layer.intermediate_size), Section(layer.num_heads)
    groups, of_groups = (Section(size, is_one) for size in (layer.n_groups, layer.n_groups * layer.ssm_state_size))
    mixed = (channels, of_groups, of_groups)
    columns = {
        **dict.fromkeys(("in_proj", "mup_vector"), (channels, *mixed, heads)),
        "conv1d": mixed,
        **dict.fromkeys(("A_log", "D", "dt_bias"), (heads,)),
    }
    return Division(
        units=(layer.num_heads,) if is_one else (layer.num_heads, layer.n_groups),
        sizes={
            "num_heads": (heads,),
            "intermediate_size": (channels,),
            "conv_dim": mixed,
            "n_groups": (groups,),
            "norm.n_groups": (groups,),
        },
        columns=columns if is_one else {**columns, "norm": (channels,)},
        summed=("out_proj",),
        gathered="norm" if is_one else "",
        states={"conv_states": mixed, "recurrent_states": (heads,)},
    )


def _mamba(layer: Any) -> Division:
    channels = (Section(layer.intermediate_size),)
    return Division(
        units=(layer.intermediate_size,),
        sizes={"intermediate_size": channels},
        columns={"in_proj": 2 * channels, **dict.fromkeys(("conv1d", "dt_proj", "A_log", "D"), channels)},
        summed=("x_proj", "out_proj"),
        gathered="",
        states={"conv_states": channels, "recurrent_states": channels},
    )


def _short_convolution(layer: Any) -> Division:
    channels = (Section(layer.conv.in_channels),)
    return Division(
        units=(layer.conv.in_channels,),
        sizes={},
        columns={"in_proj": 3 * channels, "conv": channels},
        summed=("out_proj",),
        gathered="",
        states={"conv_states": channels},
    )


RULES: Final[Mapping[str, Callable[[Any], Division]]] = {  # by the class of the layer
    "BambaMixer": _mamba2,
    "FalconH1Mixer": _mamba2,
    "FalconMambaMixer": _mamba,
    "GraniteMoeHybridMambaLayer": _mamba2,
    "JambaMambaMixer": _mamba,
    "Lfm2MoeShortConv": _short_convolution,
    "Lfm2ShortConv": _short_convolution,
    "Lfm3ShortConv": _short_convolution,
    "Mamba2Mixer": _mamba2,
    "MambaMixer": _mamba,
    "NemotronHMamba2Mixer": _mamba2,
    "OlmoHybridGatedDeltaNet": _gated_delta_net,
    "Qwen3NextGatedDeltaNet": _gated_delta_net,
    "Qwen3_5GatedDeltaNet": _gated_delta_net,
    "Qwen3_5MoeGatedDeltaNet": _gated_delta_net,
}
