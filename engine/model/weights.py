"""Load a model's weights from the files of its folder, and its LoRA adapters from theirs: each rank loads the slices
that it computes with.
"""

import itertools
import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import torch
from torch import nn

from engine.model.checkpoint import Checkpoint, Part, SafetensorsCheckpoint, Span, TextPart, read_ahead, whole_tensor
from engine.model.layers import Layer, Linear
from engine.model.llama import LlamaDecoder
from engine.model.lora import Delta
from engine.model.stored_floats import FloatCheckpoint
from engine.model.stored_weights import READERS, join, matrix_of
from engine.native.linear_library import best_variant
from serving_core.errors import ModelError
from serving_core.model_files.adapters import DOWN, UP, StoredAdapter
from serving_core.model_files.load_progress import LoadProgress
from serving_core.model_files.stored_quantization import StoredQuantization
from serving_core.model_files.stored_tensors import FLOATS
from serving_core.model_files.weight_files import is_gguf, weight_files
from serving_core.node.needs import TIED_HEAD
from serving_core.settings import INPUT_BITS, WEIGHT_BITS
from serving_core.sharding import Extent, whole

logger = logging.getLogger(__name__)

MARKS: Final = ("qweight", "weight_scale")  # suffixes of tensors that only a quantized module has
ROOT: Final = "model."  # prefix of all tensors but the head's
EMBEDDING: Final = f"{ROOT}embed_tokens.weight"
HARMLESS_SUFFIX: Final = ".rotary_emb.inv_freq"  # older checkpoints store these values, which the decoder computes
MOST_NAMES: Final = 3


class _Stored(NamedTuple):
    """A module of the checkpoint whose weight is stored quantized, and the wanted part of it."""

    name: str
    outputs: Extent
    inputs: Extent


class _Target(NamedTuple):
    """A parameter of the model and the tensors that fill it, stacked; or, where they are stored quantized, all tensors
    involved.
    """

    module: Layer
    attribute: str
    parts: list[Part]
    stored_as: Sequence[_Stored] = ()


class Placement(Protocol):
    """Weight offload, as the loading of weights sees it: where each module's weights go."""

    def of(self, module: Layer) -> AbstractContextManager[None]:
        """Return a context that provides the memory in which the module is filled and packed.

        Raises SettingsError if memory or offload space is too small.
        """


def load_weights(
    model: LlamaDecoder,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str = "none",
    stored: StoredQuantization | None = None,
    placement: Placement | None = None,
    *,
    is_text_part: bool = False,
    shows_progress: bool = True,
) -> int:
    """Fill and pack every parameter of a model built on the meta device; return the bytes of the weights.

    Weights are cast to dtype. `quantization` is a value of --quantization, `stored` the checkpoint's own quantization,
    `placement` the weight offload, if any; `is_text_part`: the checkpoint has more than text; `shows_progress`:
    progress is logged. Reads only what the parameters take from the files, with little further memory. Before loading
    anything, raises ModelError if a tensor is missing, unknown, of another shape, or of a dtype other than a 16- or
    32-bit float. Each stage checks its own tensors.
    """
    checkpoint = _open_text(folder, is_text_part=is_text_part)
    if stored is not None and stored.become_floats:
        checkpoint, stored = FloatCheckpoint(checkpoint, stored), None
    targets = list(_targets(model, checkpoint, stored))
    parts = [part for target in targets for part in target.parts]
    _check(checkpoint, parts, model.is_elsewhere)
    input_bits = INPUT_BITS.get(quantization if stored is None else stored.method, 16)
    num_bytes = num_dense = 0
    sizes = [sum(map(checkpoint.stored_bytes, target.parts)) for target in targets]
    progress = LoadProgress(sum(sizes), len(parts), is_shown=shows_progress)
    with progress, closing(_coming(targets, sizes, checkpoint, progress)) as coming:
        for module, of_module in itertools.groupby(coming, key=lambda target: target.module):
            with nullcontext() if placement is None else placement.of(module):
                for target in of_module:
                    if not target.stored_as:
                        _fill(target, checkpoint, dtype, device)
                    elif not _take(target, checkpoint, stored, dtype, device):
                        num_dense += 1
                module.pack(WEIGHT_BITS.get(quantization))
            if isinstance(module, Linear):
                module.round_inputs(input_bits)
            num_bytes += module.num_bytes
    is_quantized = quantization in WEIGHT_BITS or stored is not None
    if is_quantized and device.type == "cpu" and best_variant() is None:
        logger.warning("quantized weights save memory but no time here: no kernel computes with them as they are")
    if num_dense:
        logger.warning("%d layers are kept as %s: their groups of inputs cannot be computed with", num_dense, dtype)
    return num_bytes


def load_adapters(
    decoder: LlamaDecoder, adapters: Iterable[StoredAdapter], dtype: torch.dtype, device: torch.device
) -> int:
    """Load these LoRA adapters into a filled decoder, cast to dtype; return the bytes of all of its adapters.

    Raises ModelError if a file is damaged or holds numbers that are not finite.
    """
    return sum(
        decoder.adapters.add(adapter.name, dict(adapter_deltas(decoder, adapter, dtype, device)))
        for adapter in adapters
    )


def adapter_deltas(
    decoder: LlamaDecoder, adapter: StoredAdapter, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[Linear, Delta]]:
    """Yield each projection of a filled decoder that an adapter changes, with its delta of this dtype on this device.

    Each is read from the adapter's file when it is asked for. Raises ModelError if the adapter is damaged.
    """
    checkpoint = SafetensorsCheckpoint([adapter.file])
    # Loaded adapters have products of their own.
    modules = [(path, each) for path, each in decoder.named_modules() if not path.startswith("adapters.")]
    for path, layer in modules:
        if not isinstance(layer, Linear):
            continue
        parts = {in_checkpoint(path, name): outputs for name, outputs in layer.parts.items()}
        if adapter.projections & parts.keys():
            yield layer, _delta_of(adapter, checkpoint, layer, parts, dtype, device)


def _delta_of(
    adapter: StoredAdapter,
    checkpoint: SafetensorsCheckpoint,
    layer: Linear,
    parts: Mapping[str, Extent],
    dtype: torch.dtype,
    device: torch.device,
) -> Delta:
    """Return the adapter's delta for all parts of a Linear at once: each changed part has ranks of its own for its own
    outputs.
    """
    inputs, rank, changed = layer.inputs, whole(adapter.rank), [name for name in parts if name in adapter.projections]
    down = torch.zeros(len(changed) * rank.total, len(inputs.held), dtype=dtype, device=device)
    up = torch.zeros(sum(len(outputs.held) for outputs in parts.values()), len(down), dtype=dtype, device=device)
    row = 0
    for name, outputs in parts.items():
        rows = slice(row, row + len(outputs.held))
        row = rows.stop
        if name not in changed:
            continue
        place = changed.index(name) * rank.total
        ranks = slice(place, place + rank.total)
        down[ranks] = checkpoint.read_all(Part(adapter.tensor_name(name, DOWN), (rank, inputs)))
        exact = checkpoint.read_all(Part(adapter.tensor_name(name, UP), (outputs, rank))).double()
        up[rows, ranks] = exact.mul_(adapter.scale).to(dtype)  # rounded once
    if not (down.isfinite().all() and up.isfinite().all()):
        kind = str(dtype).removeprefix("torch.")
        raise ModelError(f"adapter {adapter.name} holds numbers that are not finite as {kind}")
    return Delta(down, up if layer.rows is None else up[list(layer.rows)])


def stores_own_head(folder: Path, dtype: torch.dtype, *, is_text_part: bool = False) -> bool:
    """Return whether the checkpoint in `folder` stores a head that differs from the embedding, both cast to dtype.

    As in transformers, the model uses such a head even though config.json ties it to the embedding. `is_text_part`: the
    checkpoint has more than text. Raises ModelError if a file cannot be read as what it is.
    """
    checkpoint = _open_text(folder, is_text_part=is_text_part)
    if not {TIED_HEAD, EMBEDDING} <= checkpoint.names():
        return False
    head, embedding = (whole_tensor(name, checkpoint.describe(name)[0], FLOATS) for name in (TIED_HEAD, EMBEDDING))
    return head.shape != embedding.shape or not all(
        torch.equal(one.to(dtype), other.to(dtype))
        for (_, one), (_, other) in zip(checkpoint.read(head), checkpoint.read(embedding), strict=True)
    )


def _open_text(folder: Path, *, is_text_part: bool) -> Checkpoint:
    return TextPart(open_checkpoint(folder)) if is_text_part else open_checkpoint(folder, ROOT)


def open_checkpoint(folder: Path, root: str = "") -> Checkpoint:
    """Open the tensors of a model folder, safetensors or GGUF.

    Names get the prefix `root` if none in the safetensors files has it. Raises ModelError if a file is not what its
    name says.
    """
    if not is_gguf(folder):
        return SafetensorsCheckpoint(weight_files(folder), root)
    from engine.model.checkpoint import GgufCheckpoint  # here, as few models need its imports
    from engine.model.gpt_oss_files import GptOssFiles

    return GptOssFiles(GgufCheckpoint(folder))  # which changes no other model


def _coming(
    targets: Sequence[_Target], sizes: Sequence[int], checkpoint: Checkpoint, progress: LoadProgress
) -> Generator[_Target]:
    """Yield the targets while reading ahead for the next ones. A target must be loaded before the next one is
    requested.
    """

    def spans_of(target: _Target) -> Iterator[Span]:
        return itertools.chain.from_iterable(map(checkpoint.spans, target.parts))

    with closing(read_ahead(targets, spans_of)) as coming:
        for target, size in zip(coming, sizes, strict=True):
            yield target
            progress.add(size)


def _fill(target: _Target, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
    filled = torch.empty(getattr(target.module, target.attribute).shape, dtype=dtype, device=device)
    first_row = 0
    for part in target.parts:
        for row, tensor in checkpoint.read(part):
            filled[first_row + row : first_row + row + tensor.shape[0]] = tensor
        first_row += len(part.extents[0].held)
    setattr(target.module, target.attribute, nn.Parameter(filled, requires_grad=False))


def _take(
    target: _Target,
    checkpoint: Checkpoint,
    stored: StoredQuantization | None,
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Fill a layer with weights stored quantized; return False if they had to be dequantized."""
    assert stored is not None, "what is stored quantized is described in config.json"
    assert isinstance(target.module, Linear)
    read = READERS[stored.method].read
    weights = [read(stored, checkpoint, name, outputs, inputs) for name, outputs, inputs in target.stored_as]
    joined = join(weights)
    matrix = None if joined is None else matrix_of(joined, device)
    if matrix is not None:
        target.module.take(matrix)
        return True
    dense = torch.cat([weight.dense().to(dtype) for weight in weights]).to(device)
    target.module.weight = nn.Parameter(dense, requires_grad=False)
    return False


def _targets(model: nn.Module, checkpoint: Checkpoint, stored: StoredQuantization | None) -> Iterator[_Target]:
    for path, module in model.named_modules():
        for attribute, _ in module.named_parameters(recurse=False):
            assert isinstance(module, Layer), path
            sources = [(in_checkpoint(path, name), extents) for name, extents in module.sources(attribute)]
            is_weight = isinstance(module, Linear) and attribute == "weight"
            if stored is not None and is_weight and all(_is_quantized(checkpoint, name) for name, _ in sources):
                yield _quantized(module, checkpoint, stored, [_Stored(name, *extents) for name, extents in sources])
            else:
                yield _Target(module, attribute, [Part(f"{name}.{attribute}", extents) for name, extents in sources])


def _is_quantized(checkpoint: Checkpoint, name: str) -> bool:
    """Return whether the checkpoint stores this module quantized; a quantized checkpoint may leave some modules as
    floats.
    """
    return any(f"{name}.{mark}" in checkpoint.names() for mark in MARKS)


def _quantized(
    module: Layer, checkpoint: Checkpoint, stored: StoredQuantization, sources: Sequence[_Stored]
) -> _Target:
    parts_of = READERS[stored.method].parts
    parts = [
        part
        for name, outputs, inputs in sources
        for part in parts_of(stored, checkpoint, name, outputs.total, inputs.total)
    ]
    return _Target(module, "weight", parts, sources)


def in_checkpoint(path: str, name: str) -> str:
    """Return the checkpoint's name of the module at `path`; with `name`, that of the module of this name beside it."""
    if name:
        path = f"{path.rpartition('.')[0]}.{name}".removeprefix(".")
    return path if path == "lm_head" else ROOT + path


def _check(checkpoint: Checkpoint, parts: Sequence[Part], is_elsewhere: Callable[[str], bool]) -> None:
    wanted = {part.name for part in parts}
    present = checkpoint.names()
    if missing := sorted(wanted - present):
        raise ModelError(f"the weights lack {spell(missing)}")
    unwanted = {name for name in present - wanted if not is_elsewhere(name)}
    harmless = {name for name in unwanted if name.endswith(HARMLESS_SUFFIX) or _is_no_bias(checkpoint, name)}
    if unknown := sorted(unwanted - harmless - {TIED_HEAD}):
        raise ModelError(f"the weights hold {spell(unknown)}, which the model has no use for")
    for part in parts:
        checkpoint.check(part)


def _is_no_bias(checkpoint: Checkpoint, name: str) -> bool:
    """Return whether the tensor is a bias of zeros, which GPTQ tools add to layers without a bias."""
    module, _, attribute = name.rpartition(".")
    if attribute != "bias" or not _is_quantized(checkpoint, module):
        return False
    shape, _ = checkpoint.describe(name)
    if len(shape) != 1:
        return False
    return not checkpoint.read_all(Part(name, (Extent(shape[0], range(shape[0])),))).any()


def spell(names: Sequence[str]) -> str:
    """Return the first MOST_NAMES names with commas, and how many more there are."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
