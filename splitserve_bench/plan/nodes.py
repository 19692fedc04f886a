"""List the kinds of node that a plan can have: those of profiles, or of devices of one hardware that hold the model."""

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Final

from engine.micro_batches import num_micro_batches
from engine.offload.residence import layers_elsewhere
from serving_core.errors import SettingsError
from serving_core.settings import EngineSettings
from serving_core.shapes import MIXED
from serving_node.settings import NodeSettings
from splitserve_bench.plan.hardware import CPU, DEVICES, LINK, Roofline, device_of, link_of
from splitserve_bench.plan.model_sizes import ModelSizes, read_model_sizes
from splitserve_bench.simulate.costs import ProfileCosts, costs_of
from splitserve_bench.simulate.profile import (
    ControlProfile,
    Grid,
    NodeSizes,
    Profile,
    StepProfile,
    TransferProfile,
    read_profile,
)

MEMORY: Final = 0.9  # of a device's, for weights and KV; vLLM's default too
MESSAGE_S: Final = 0.5e-3  # between coordinator and node, within a data centre
TRANSFER_S: Final = 1e-3  # of a KV transfer, beside its bytes
API_SERVER_S: Final = 1e-3  # from a client to the coordinator and back
PLACES: Final = (1, 2, 4, 8, *range(16, 128, 16), *range(128, 512, 32), *range(512, 16384, 128))
CONTEXTS: Final = (0, 128, 512, 2048, 8192, 32768, 131072)
SHEET_FLAGS: Final = ("weights_memory_bytes", "quantization", "kv_cache_dtype")


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """The flags of nodes. Paths are "" where none is given, numbers 0 where they are to be worked out."""

    model: str
    profiles: tuple[str, ...]
    prefill_hardware: tuple[str, ...]
    decode_hardware: tuple[str, ...]
    both_hardware: tuple[str, ...]
    link: str
    host_link: str
    gpus_per_host: int
    tp_sizes: tuple[int, ...]
    device_memory_bytes: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    dollars_per_h: tuple[tuple[str, float], ...] = ()
    watts: tuple[tuple[str, float], ...] = ()
    pp_sizes: tuple[int, ...] = (1,)
    weights_memory_bytes: int = 0
    quantization: str = "none"
    kv_cache_dtype: str = "auto"


@dataclass(frozen=True, eq=False)
class NodeKind:
    """Nodes that are alike: their profile, price and power. Two kinds are never equal."""

    profile: Profile
    host_bytes_per_s: float  # of KV to a node on another host; the profile has those to one on the same host
    dollars_per_h: float
    watts: float
    kv_cache_memory_bytes: int  # of each rank

    @property
    def sizes(self) -> NodeSizes:
        """Return what a node holds and takes."""
        return self.profile.node

    @property
    def hardware(self) -> str:
        """Return the name of its devices."""
        return self.profile.hardware

    @property
    def tp(self) -> int:
        """Return the tensor parallel size."""
        return self.profile.tensor_parallel_size

    @property
    def pp(self) -> int:
        """Return the number of pipeline stages."""
        return self.profile.pipeline_parallel_size

    @property
    def num_devices(self) -> int:
        """Return the number of devices of a node."""
        return self.tp * self.pp

    @property
    def grid(self) -> str:
        """Return the ranks of the node in words, such as TP2, or TP2 PP4."""
        return f"TP{self.tp} PP{self.pp}" if self.pp > 1 else f"TP{self.tp}"

    @cached_property
    def costs(self) -> ProfileCosts:
        """Return the times of the node's steps."""
        return costs_of(self.profile)


@dataclass(frozen=True, slots=True)
class Machines:
    """The kinds of node to plan with, and what they have in common.

    `unfit` says in words which other kinds were left out, and why.
    """

    name: str
    vocab_size: int
    max_model_len: int
    api_server_s: float
    kinds: tuple[NodeKind, ...]
    unfit: tuple[str, ...]  # why others are none, in words


def machines_of(options: NodeOptions) -> Machines:
    """Return the kinds of node that the flags allow.

    Raises SettingsError for flags that do not go together and when no kind can hold the model, and ModelError when the
    model's config.json cannot be used.
    """
    if options.profiles:
        return _machines_of_profiles(options)
    if not options.model:
        raise SettingsError("--model FOLDER is needed: how large the model is decides what fits and what steps take")
    names = _names(options)
    if not names:
        raise SettingsError("--hardware NAME is needed, or a --profile that splitserve doctor --save has written")
    _check_figures(options, names)
    model = read_model_sizes(Path(options.model)).stored_as(options.quantization, options.kv_cache_dtype)
    kinds: list[NodeKind] = []
    unfit: list[str] = []
    for hardware, tp, pp in product(names, options.tp_sizes, options.pp_sizes):
        try:
            kinds.append(_kind_of_sheet(options, model, hardware, tp, pp))
        except _Unfit as why:
            unfit.append(f"{hardware}, TP {tp}{f', PP {pp}' if pp > 1 else ''}: {why}")
    if not kinds:
        raise SettingsError(f"{model.name} fits nowhere: {'; '.join(unfit)}")
    max_model_len = min(options.max_model_len or model.max_model_len, model.max_model_len)
    return Machines(model.name, model.vocab_size, max_model_len, API_SERVER_S, tuple(kinds), tuple(unfit))


class _Unfit(Exception):
    """A kind of node that cannot exist, and why."""


def _names(options: NodeOptions) -> list[str]:
    return list(dict.fromkeys((*options.prefill_hardware, *options.decode_hardware, *options.both_hardware)))


def _machines_of_profiles(options: NodeOptions) -> Machines:
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    for flag in SHEET_FLAGS:
        if getattr(options, flag) != defaults[flag]:
            said = "a profile has what was measured: splitserve doctor takes that flag as well"
            raise SettingsError(f"--{flag.replace('_', '-')} is for data sheets: {said}")
    profiles = [_limited(read_profile(Path(path)), options) for path in options.profiles]
    first, names = profiles[0], sorted({profile.hardware for profile in profiles})
    if len(models := sorted({profile.model for profile in profiles})) > 1:
        raise SettingsError(f"--profile: nodes of a plan have one model, and the profiles are of {', '.join(models)}")
    if unknown := [name for name in _names(options) if name not in names]:
        raise SettingsError(f"--hardware: the profiles are of {', '.join(names)}, not of {unknown[0]}")
    if len(blocks := {(each.node.block_size, each.node.block_bytes) for each in profiles}) > 1:
        sizes = ", ".join(f"{size} tokens in {num_bytes} bytes" for size, num_bytes in sorted(blocks))
        raise SettingsError(f"--profile: nodes of a plan have KV blocks of one size, and the profiles have {sizes}")
    _check_figures(options, names)
    kinds = tuple(_kind_of_profile(profile, options) for profile in profiles)
    if (widest := max(kind.num_devices for kind in kinds)) > options.gpus_per_host:
        raise SettingsError(f"--gpus-per-host {options.gpus_per_host}: a node has {widest} devices, all of one host")
    max_model_len = max(profile.node.max_model_len for profile in profiles)
    return Machines(first.model, first.node.vocab_size, max_model_len, first.control.api_server_s, kinds, ())


def _limited(profile: Profile, options: NodeOptions) -> Profile:
    """Return the profile of the same node with the limits that the flags give."""
    node = profile.node
    node = dataclasses.replace(
        node,
        max_model_len=min(options.max_model_len or node.max_model_len, node.max_model_len),
        max_num_batched_tokens=options.max_num_batched_tokens or node.max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs or node.max_num_seqs,
    )
    flags = {**profile.flags, **_flags(options, has_elsewhere=False)}
    return dataclasses.replace(profile, node=node, flags=flags, hardware=profile.hardware.lower())


def _kind_of_profile(profile: Profile, options: NodeOptions) -> NodeKind:
    """Return the kind of node that a profile is of, with as many devices as its parallel sizes say.

    A node of `splitserve doctor` counts as one device, whatever its cores.
    """
    node, num_devices = profile.node, profile.tensor_parallel_size * profile.pipeline_parallel_size
    dollars_per_h, watts = _prices(options, profile.hardware)
    return NodeKind(
        profile,
        host_bytes_per_s=profile.kv_transfer.bytes_per_s,
        dollars_per_h=num_devices * dollars_per_h,
        watts=num_devices * watts,
        kv_cache_memory_bytes=node.num_blocks * node.block_bytes // num_devices,
    )


def _kind_of_sheet(options: NodeOptions, model: ModelSizes, hardware: str, tp: int, pp: int) -> NodeKind:
    """Return a kind of node whose steps are worked out from the hardware's data sheet.

    Raises _Unfit when it cannot exist.
    """
    if (device := DEVICES.get(hardware)) is None:
        raise SettingsError(f"{hardware} is none of {', '.join(DEVICES)}")
    if tp * pp > options.gpus_per_host:
        raise _Unfit(f"a host has {options.gpus_per_host} devices")
    if tp > model.num_heads:
        raise _Unfit(f"the model has {model.num_heads} heads")
    if pp > model.num_layers:
        raise _Unfit(f"the model has {model.num_layers} layers")
    elsewhere_bytes = _elsewhere_bytes(options.weights_memory_bytes, model, tp, pp)
    within, between = link_of(options.link or device.link, device), link_of(options.host_link, device)
    steps = Roofline(model, device, within, tp, pp, elsewhere_bytes * pp)
    node = _sizes(options, model, hardware, options.device_memory_bytes or device.memory_bytes, tp, pp)
    num_sending = min(tp, model.num_kv_heads) * pp  # ranks with KV that no other one has
    num_sharing = options.gpus_per_host if between.is_shared else 1
    dollars_per_h, watts = _prices(options, hardware)
    profile = Profile(
        model=model.name,
        cores=tp * pp,
        node=node,
        steps=_step_profile(steps, node),
        kv_transfer=TransferProfile(TRANSFER_S, num_sending * within.bytes_per_s * LINK),
        control=ControlProfile(MESSAGE_S, API_SERVER_S),
        flags=_flags(options, has_elsewhere=elsewhere_bytes > 0),
        hardware=hardware,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
    )
    return NodeKind(
        profile,
        host_bytes_per_s=num_sending * between.bytes_per_s * LINK / num_sharing,
        dollars_per_h=tp * pp * dollars_per_h,
        watts=tp * pp * watts,
        kv_cache_memory_bytes=node.num_blocks * model.rank_block_bytes(node.block_size, tp, pp),
    )


def _step_profile(steps: Roofline, sizes: NodeSizes) -> StepProfile:
    """Return the seconds of steps at places that are close enough to interpolate between.

    Beside a prompt, stages compute the attention of decoding requests in as many micro-batches as the prompt.
    """
    columns = [place for place in CONTEXTS if place <= sizes.max_model_len]
    answers = [place for place in PLACES if place < sizes.max_num_seqs] + [sizes.max_num_seqs]
    chunks = [place for place in PLACES if place < sizes.max_num_batched_tokens] + [sizes.max_num_batched_tokens]
    num_parts = num_micro_batches(sizes.max_num_batched_tokens, steps.pp) if steps.pp > 1 else 1
    return StepProfile(
        answers=_grid(answers, columns, [[steps.answers_s(num, each) for each in columns] for num in answers]),
        prompts=_grid(chunks, columns, [[steps.chunk_s(num, each) for each in columns] for num in chunks]),
        overhead_s=0.0,
        attention_beside_factor=(num_parts + steps.pp - 1) / (steps.pp * num_parts),
    )


def _flags(options: NodeOptions, *, has_elsewhere: bool) -> dict[str, str | int | bool]:
    """Return the flags that start such nodes: how they hold weights and KV, and how long requests may be."""
    flags: dict[str, str | int | bool] = {}
    if has_elsewhere:
        flags["weights_memory_bytes"] = options.weights_memory_bytes
    if options.max_model_len:
        flags["max_model_len"] = options.max_model_len
    if options.quantization != "none":
        flags["quantization"] = options.quantization
    if options.kv_cache_dtype != "auto":
        flags["kv_cache_dtype"] = options.kv_cache_dtype
    return flags


def _grid(rows: Sequence[float], columns: Sequence[float], seconds: Sequence[Sequence[float]]) -> Grid:
    return Grid(tuple(rows), tuple(columns), tuple(map(tuple, seconds)))


def _prices(options: NodeOptions, hardware: str) -> tuple[float, float]:
    """Return dollars an hour and watts of a device of this hardware.

    They are those that the flags give for the hardware's full name or its device's name; else the device's own, or 0 of
    an unknown one.
    """
    device = device_of(hardware)
    dollars_per_h, watts = dict(options.dollars_per_h), dict(options.watts)
    if device is None:
        return dollars_per_h.get(hardware, 0.0), watts.get(hardware, 0.0)
    return (
        dollars_per_h.get(hardware, dollars_per_h.get(device.name, device.dollars_per_h)),
        watts.get(hardware, watts.get(device.name, device.watts)),
    )


def _check_figures(options: NodeOptions, names: Collection[str]) -> None:
    """Raise SettingsError when the flags have a price or watts of an unknown hardware."""
    for flag, figures in (("--price", options.dollars_per_h), ("--watts", options.watts)):
        for name, _ in figures:
            if name not in names and name not in DEVICES:
                raise SettingsError(f"{flag} has {name}, and the hardware is {', '.join(names)}")


def _elsewhere_bytes(memory_bytes: int, model: ModelSizes, tp: int, pp: int) -> int:
    """Return the bytes of a rank's weights that have no room in the memory where it computes.

    Raises _Unfit when too many have none.
    """
    if not memory_bytes:
        return 0
    layers = [model.rank_layer_bytes(tp)] * model.stage_layers(pp)
    try:
        return layers[0] * len(layers_elsewhere(layers, model.rank_weight_bytes(tp, pp) - sum(layers), memory_bytes))
    except SettingsError as error:
        raise _Unfit(str(error)) from error


def _sizes(options: NodeOptions, model: ModelSizes, hardware: str, memory_bytes: int, tp: int, pp: int) -> NodeSizes:
    """Return what such a node holds and takes. Raises _Unfit when the weights leave no room for KV."""
    given = NodeSettings(max_num_batched_tokens=options.max_num_batched_tokens, max_num_seqs=options.max_num_seqs)
    node = given.resolved(MIXED, CPU if hardware == CPU else "cuda")
    block_size = EngineSettings().block_size
    weight_bytes = model.rank_weight_bytes(tp, pp)
    if options.weights_memory_bytes:
        weight_bytes = min(weight_bytes, options.weights_memory_bytes)
    num_blocks = (int(memory_bytes * MEMORY) - weight_bytes) // model.rank_block_bytes(block_size, tp, pp)
    if num_blocks < 1:
        raise _Unfit(f"{weight_bytes / 1e9:.0f} GB of weights a device leave no room for KV")
    max_model_len = min(options.max_model_len or model.max_model_len, model.max_model_len, num_blocks * block_size)
    return NodeSizes(
        num_blocks=num_blocks,
        block_size=block_size,
        block_bytes=model.layout(block_size).block_bytes,
        num_layers=model.num_layers,
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        max_num_batched_tokens=node.max_num_batched_tokens,
        max_num_seqs=node.max_num_seqs,
        max_num_queued=node.max_num_queued,
        overlap_min_tokens=node.overlap_min_tokens,
    )
