"""The kinds of node that a plan can have: devices of one hardware, joined as ranks, that hold the model."""

import dataclasses
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Final

from engine.offload.residence import layers_elsewhere
from serving_core.errors import SettingsError
from serving_core.json_fields import read_json_object
from serving_core.settings import EngineSettings
from serving_core.shapes import BOTH
from serving_node.settings import NodeSettings
from splitserve_bench.plan.asked import AskedNodes
from splitserve_bench.plan.devices import CPU, DEVICES, Device, device_of, link_of
from splitserve_bench.plan.model_sizes import ModelSizes, read_model_sizes
from splitserve_bench.plan.roofline import LINK, Roofline
from splitserve_bench.plan.stages import StagedRoofline
from splitserve_bench.plan.steps import MeasuredSteps
from splitserve_bench.plan.tables import Entry, Table, read_table
from splitserve_bench.simulate.costs import StepLoad, Steps
from splitserve_bench.simulate.grid import Grid
from splitserve_bench.simulate.profile import (
    ControlProfile,
    CorridorProfile,
    NodeSizes,
    Profile,
    StepProfile,
    read_profile,
)

MEMORY: Final = 0.9  # of a device's, for weights and KV; vLLM's default too
MESSAGE_S: Final = 0.5e-3  # between coordinator and node, within a data centre
TRANSFER_S: Final = 1e-3  # of a hand-over, beside its bytes
DOOR_S: Final = 1e-3  # from a client to the coordinator and back
PLACES: Final = (1, 2, 4, 8, *range(16, 128, 16), *range(128, 512, 32), *range(512, 16384, 128))
CONTEXTS: Final = (0, 128, 512, 2048, 8192, 32768, 131072)
QUANTIZED_FLAGS: Final = ("quantization", "kv_cache_dtype")
BESIDE: Final = 512  # tokens of a prompt, and tokens before each answer, of the steps that tell attention_beside_factor
MEASURED: Final = "measured"  # the hardware of a profile of `splitserve doctor --save`


@dataclass(frozen=True, slots=True)
class NodeKind:
    """Nodes that are alike. Bytes a second are those of one rank's link, in a host and between two."""

    hardware: str
    tp: int
    sizes: NodeSizes
    steps: Steps
    num_sending: int  # ranks with KV that no other one has
    bytes_per_s: float
    host_bytes_per_s: float
    message_s: float
    transfer_s: float
    dollars_per_h: float
    watts: float
    kv_cache_memory_bytes: int  # of each rank
    pp: int = 1  # stages of tp ranks
    weights_memory_bytes: int = 0  # of each rank; 0: they hold all
    profile: Profile | None = None  # that `splitserve doctor --save` has measured of them

    @property
    def num_devices(self) -> int:
        return self.tp * self.pp

    @property
    def grid(self) -> str:
        """Its ranks in words."""
        return f"TP{self.tp} PP{self.pp}" if self.pp > 1 else f"TP{self.tp}"


@dataclass(frozen=True, slots=True)
class Machines:
    """What there is to plan with."""

    name: str
    vocab_size: int
    max_model_len: int
    door_s: float
    kinds: tuple[NodeKind, ...]
    unfit: tuple[str, ...]  # why others are none, in words


def machines_of(asked: AskedNodes) -> Machines:
    """Raises SettingsError, ModelError and BenchError."""
    path = Path(asked.profile) if asked.profile else None
    if path is not None and path.is_file() and path.suffix == ".json" and "format" in read_json_object(path):
        return _measured(read_profile(path), asked)
    if not asked.model:
        raise SettingsError("--model FOLDER is needed: how large the model is decides what fits and what steps take")
    model = read_model_sizes(Path(asked.model)).stored_as(asked.quantization, asked.kv_cache_dtype)
    table = read_table(path) if path is not None else None
    if table is not None:
        _refuse_flags(asked, "tables have what was measured without it", QUANTIZED_FLAGS)
    names = dict.fromkeys((*asked.prefill_hardware, *asked.decode_hardware, *asked.both_hardware))
    if not names:
        raise SettingsError("--hardware NAME is needed, or a --profile that splitserve doctor --save has written")
    _check_figures(asked, names)
    kinds: list[NodeKind] = []
    unfit: list[str] = []
    for hardware in names:
        for tp, pp in product(asked.tp_sizes, asked.pp_sizes):
            try:
                kinds.append(_kind(asked, model, table, hardware, tp, pp))
            except _Unfit as why:
                unfit.append(f"{hardware}, TP {tp}{f', PP {pp}' if pp > 1 else ''}: {why}")
    if not kinds:
        raise SettingsError(f"{model.name} fits nowhere: {'; '.join(unfit)}")
    max_model_len = min(asked.max_model_len or model.max_model_len, model.max_model_len)
    return Machines(model.name, model.vocab_size, max_model_len, DOOR_S, tuple(kinds), tuple(unfit))


def profile_of(machines: Machines, kind: NodeKind) -> Profile:
    """For `splitserve simulate`: steps at places close enough to go straight between them."""
    sizes, steps = kind.sizes, kind.steps
    columns = [place for place in CONTEXTS if place <= sizes.max_model_len]
    answers = [place for place in PLACES if place < sizes.max_num_seqs] + [sizes.max_num_seqs]
    chunks = [place for place in PLACES if place < sizes.max_num_batched_tokens] + [sizes.max_num_batched_tokens]
    return Profile(
        model=machines.name,
        cores=kind.num_devices,
        node=sizes,
        steps=StepProfile(
            answers=_grid(answers, columns, steps.answers_s),
            prompts=_grid(chunks, columns, steps.chunk_s),
            overhead_s=0.0,
            attention_beside_factor=statistics.median(_beside_factor(steps, num) for num in answers),
        ),
        corridor=CorridorProfile(kind.transfer_s, kind.bytes_per_s * kind.num_sending),
        control=ControlProfile(kind.message_s, machines.door_s),
    )


def _beside_factor(steps: Steps, num_answers: int) -> float:
    """What the tokens before answers cost beside a prompt, over what they do alone: 1 where that is nothing."""
    alone_s = steps.answers_s(num_answers, BESIDE) - steps.answers_s(num_answers, 0)
    with_s, without_s = (steps.both_s(StepLoad(num_answers, num_answers * each, BESIDE)) for each in (BESIDE, 0))
    beside_s = with_s - without_s
    return beside_s / alone_s if min(alone_s, beside_s) > 0 else 1.0


def _grid(rows: Sequence[float], columns: Sequence[float], seconds_of: Callable[[float, float], float]) -> Grid:
    seconds = tuple(tuple(seconds_of(row, column) for column in columns) for row in rows)
    return Grid(tuple(rows), tuple(columns), seconds)


class _Unfit(Exception):
    """Such a node cannot be had."""


def _measured(profile: Profile, asked: AskedNodes) -> Machines:
    """One kind, of as many devices as a node had, which counts as one."""
    if asked.both_hardware:
        raise SettingsError("--hardware is for data sheets and tables: this profile was measured on what it is of")
    _check_figures(asked, (MEASURED,))
    said = "this profile has what was measured: splitserve doctor takes that flag as well"
    _refuse_flags(asked, said, ("weights_memory_bytes", *QUANTIZED_FLAGS))
    node = profile.node
    node = dataclasses.replace(
        node,
        max_model_len=min(asked.max_model_len or node.max_model_len, node.max_model_len),
        max_num_batched_tokens=asked.max_num_batched_tokens or node.max_num_batched_tokens,
        max_num_seqs=asked.max_num_seqs or node.max_num_seqs,
    )
    profile = dataclasses.replace(profile, node=node)
    speed, control = profile.corridor.bytes_per_s, profile.control
    kind = NodeKind(
        MEASURED,
        1,
        node,
        MeasuredSteps(profile),
        num_sending=1,
        bytes_per_s=speed,
        host_bytes_per_s=speed,
        message_s=control.message_s,
        transfer_s=profile.corridor.latency_s,
        dollars_per_h=dict(asked.dollars_per_h).get(MEASURED, 0.0),
        watts=dict(asked.watts).get(MEASURED, 0.0),
        kv_cache_memory_bytes=node.num_blocks * node.block_bytes,
        profile=profile,
    )
    return Machines(profile.model, node.vocab_size, node.max_model_len, control.door_s, (kind,), ())


def _refuse_flags(asked: AskedNodes, why: str, flags: Sequence[str]) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(asked)}
    for flag in flags:
        if getattr(asked, flag) != defaults[flag]:
            raise SettingsError(f"--{flag.replace('_', '-')} is for data sheets: {why}")


def _kind(asked: AskedNodes, model: ModelSizes, table: Table | None, hardware: str, tp: int, pp: int) -> NodeKind:
    device = device_of(hardware)
    if device is None and not (table is not None and asked.device_memory_bytes):
        raise SettingsError(f"{hardware} is none of {', '.join(DEVICES)}: a table of it needs --device-memory too")
    if tp * pp > asked.gpus_per_host:
        raise _Unfit(f"a host has {asked.gpus_per_host} devices")
    if tp > model.num_heads:
        raise _Unfit(f"the model has {model.num_heads} heads")
    if pp > model.num_layers:
        raise _Unfit(f"the model has {model.num_layers} layers")
    if pp > 1 and table is not None:
        raise _Unfit("tables are of one stage")
    elsewhere_bytes = _elsewhere_bytes(asked.weights_memory_bytes, model, tp, pp)
    if elsewhere_bytes and table is not None:
        raise _Unfit("tables are of weights that devices hold, and these take more than --weights-memory-bytes")
    within = link_of(asked.link or (device.link if device else "pcie"), device or DEVICES["l4"])
    between = link_of(asked.host_link, device or DEVICES["l4"])
    steps: Steps
    if table is None:
        assert device is not None
        stage = Roofline(model, device, within, tp, elsewhere_bytes * pp)
        steps = stage if pp == 1 else StagedRoofline(stage, pp)
    else:
        steps = table.steps(_entry(table, asked, hardware, tp), model, within)
    memory_bytes = asked.device_memory_bytes or (device.memory_bytes if device else 0)
    sizes = _sizes(asked, model, hardware, memory_bytes, tp, pp)
    share = asked.gpus_per_host if between.is_shared else 1
    return NodeKind(
        hardware,
        tp,
        sizes,
        steps,
        num_sending=min(tp, model.num_kv_heads) * pp,
        bytes_per_s=within.bytes_per_s * LINK,
        host_bytes_per_s=between.bytes_per_s * LINK / share,
        message_s=MESSAGE_S,
        transfer_s=TRANSFER_S,
        dollars_per_h=tp * pp * _figure(asked.dollars_per_h, hardware, device, device.dollars_per_h if device else 0.0),
        watts=tp * pp * _figure(asked.watts, hardware, device, device.watts if device else 0.0),
        kv_cache_memory_bytes=sizes.num_blocks * model.rank_block_bytes(sizes.block_size, tp, pp),
        pp=pp,
        weights_memory_bytes=asked.weights_memory_bytes if elsewhere_bytes else 0,
    )


def _figure(given: Sequence[tuple[str, float]], hardware: str, device: Device | None, usual: float) -> float:
    """What is given for the hardware, as it is called or as the device that it is."""
    figures = dict(given)
    return figures.get(hardware, figures.get(device.name, usual) if device else usual)


def _check_figures(asked: AskedNodes, names: Collection[str]) -> None:
    """Raises SettingsError for prices and watts of what is no hardware."""
    for flag, figures in (("--price", asked.dollars_per_h), ("--watts", asked.watts)):
        for name, _ in figures:
            if name not in names and name not in DEVICES:
                raise SettingsError(f"{flag} has {name}, and the hardware is {', '.join(names)}")


def _elsewhere_bytes(memory_bytes: int, model: ModelSizes, tp: int, pp: int) -> int:
    """Of a rank's weights, those that have no room where it computes."""
    if not memory_bytes:
        return 0
    layers = [model.rank_layer_bytes(tp)] * model.stage_layers(pp)
    try:
        return layers[0] * len(layers_elsewhere(layers, model.rank_weight_bytes(tp, pp) - sum(layers), memory_bytes))
    except SettingsError as error:
        raise _Unfit(str(error)) from error


def _entry(table: Table, asked: AskedNodes, hardware: str, tp: int) -> Entry:
    entries = table.entries()
    models = sorted({each.model for each in entries})
    wanted = asked.table_model or (models[0] if len(models) == 1 else "")
    if wanted not in models:
        raise SettingsError(f"--table-model must be one of the table's: {', '.join(models)}")
    for entry in entries:
        if (entry.model, entry.tp) == (wanted, tp) and entry.hardware.lower() in ("", hardware):
            return entry
    known = sorted({each.hardware.lower() for each in entries if each.model == wanted and each.hardware})
    if known and hardware not in known:
        raise SettingsError(f"the table has {wanted} on {', '.join(known)}, not on {hardware}")
    raise _Unfit("the table has no such size")


def _sizes(asked: AskedNodes, model: ModelSizes, hardware: str, memory_bytes: int, tp: int, pp: int) -> NodeSizes:
    told = NodeSettings(max_num_batched_tokens=asked.max_num_batched_tokens, max_num_seqs=asked.max_num_seqs)
    node = told.resolved(BOTH, CPU if hardware == CPU else "cuda")
    block_size = EngineSettings().block_size
    weight_bytes = model.rank_weight_bytes(tp, pp)
    if asked.weights_memory_bytes:
        weight_bytes = min(weight_bytes, asked.weights_memory_bytes)
    num_blocks = (int(memory_bytes * MEMORY) - weight_bytes) // model.rank_block_bytes(block_size, tp, pp)
    if num_blocks < 1:
        raise _Unfit(f"{weight_bytes / 1e9:.0f} GB of weights a device leave no room for KV")
    max_model_len = min(asked.max_model_len or model.max_model_len, model.max_model_len, num_blocks * block_size)
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
