"""Read LoRA adapters (arXiv 2106.09685) in PEFT's format: adapter_config.json and adapter_model.safetensors.
Torch-free.

An adapter that a node could not compute exactly is refused before anything is loaded. A config setting that is set, and
is known neither to be harmless nor to be supported, is refused by name: DoRA, modules saved whole, patterns of ranks
and scales, and settings of later versions of PEFT.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from serving_core.errors import ModelError
from serving_core.json_fields import JsonFields, read_json_object
from serving_core.model_files.adapter_names import adapter_key, parse_adapters
from serving_core.model_files.config import TEXT_ROOTS, ModelConfig
from serving_core.model_files.stored_tensors import FLOATS, StoredTensor, file_tensors

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
MOST_RANK: Final = 512
PREFIX, MODEL = "base_model.model.", "model."  # prefixes of tensor names: PEFT's, and a decoder's own before its layers
# Prefixes before the layers in PEFT: of a model with a head, without one, and of a multimodal model.
ROOTS: Final = (MODEL, "", *(root for root, ours in TEXT_ROOTS.items() if ours == MODEL))
DOWN, UP = "lora_A", "lora_B"  # the halves of an adapter: from the inputs to the rank, and from the rank to the outputs

_READ: Final = ("bias", "init_lora_weights", "lora_alpha", "peft_type", "r", "use_rslora")
# Settings of training, of the base model's location, or implied by the tensors.
_HARMLESS: Final = (
    *("auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config"),
    *("exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout"),
    *("lora_ga_config", "megatron_config", "megatron_core", "peft_version", "qalora_group_size", "revision"),
    *("runtime_config", "target_modules", "task_type"),
)
# Other values change the base model too
_HARMLESS_BEGINNINGS: Final = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """An adapter that fits a model: it adds scale * up(down(inputs)) to the outputs of its projections."""

    name: str
    file: Path
    rank: int
    scale: float
    projections: frozenset[str]  # changed projections, under the names of a plain decoder
    root: str  # one of ROOTS
    num_elements: int

    def tensor_name(self, projection: str, half: str) -> str:
        """Return the name, in the adapter's file, of a projection's tensor; `half` is DOWN or UP.

        Does not check that the tensor exists.
        """
        return _tensor_name(self.root, projection, half)

    def digest(self) -> str:
        """Return the SHA-256, in hexadecimal, of the scale and the whole file.

        Raises ModelError if the file cannot be read.
        """
        hasher = hashlib.sha256(f"{self.scale!r} ".encode())
        try:
            with self.file.open("rb") as stream:
                return hashlib.file_digest(stream, lambda: hasher).hexdigest()
        except OSError as error:
            raise ModelError(f"{self.file} cannot be read: {error.strerror}") from error


def read_adapters(given: Sequence[str], config: ModelConfig) -> list[StoredAdapter]:
    """Return the adapters of --lora NAME=FOLDER for the model of `config`, from their configs and headers of weights.

    Raises SettingsError for malformed values, and ModelError, which names the adapter, for one that does not fit.
    """
    return [read_adapter(name, folder, config) for name, folder in parse_adapters(given).items()]


def read_adapter(name: str, folder: Path, config: ModelConfig) -> StoredAdapter:
    """Return the adapter in a folder, reading only headers. Raises ModelError, which names the adapter."""
    try:
        return _read(name, folder, config)
    except ModelError as error:
        raise ModelError(f"adapter {name}: {error}") from error


def adapter_facts(adapters: Iterable[StoredAdapter]) -> dict[str, str]:
    """Return what adapters add to a node's fingerprint: the content digest of each.

    Raises ModelError when a file cannot be read.
    """
    return {adapter_key(adapter.name): adapter.digest() for adapter in adapters}


def _read(name: str, folder: Path, config: ModelConfig) -> StoredAdapter:
    fields, file = read_json_object(folder / CONFIG_FILE), folder / WEIGHTS_FILE
    rank, scale = _rank_and_scale(fields)
    if not file.is_file():
        raise ModelError(f"{folder} has no {WEIGHTS_FILE}; the weights of an adapter must be safetensors")
    shapes, stored = _shapes(config), file_tensors(file)
    root = _root(stored)
    projections = _projections(file, stored, root, rank, shapes)
    _check_layers(fields, projections, shapes)
    num_elements = sum(math.prod(tensor.shape) for tensor in stored.values())
    return StoredAdapter(name, file, rank, scale, projections, root, num_elements)


def _rank_and_scale(fields: JsonFields) -> tuple[int, float]:
    if fields.text("peft_type") != "LORA":
        raise fields.unsupported("peft_type")
    for name in fields.names:
        if fields.raw(name) and name not in (*_READ, *_HARMLESS):
            raise fields.unsupported(name)
    if fields.text("bias", "none") != "none":
        raise fields.unsupported("bias")
    if fields.raw("init_lora_weights") not in _HARMLESS_BEGINNINGS:
        raise fields.unsupported("init_lora_weights")
    rank, alpha = fields.integer("r"), fields.positive("lora_alpha")
    if rank > MOST_RANK:
        raise fields.error("r", f"at most {MOST_RANK}")
    return rank, alpha / (math.sqrt(rank) if fields.boolean("use_rslora", False) else rank)


def _shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the outputs and inputs of each projection that an adapter may change; experts are excluded."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, neurons = config.hidden_size, config.intermediate_size
    attention = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
    }
    feed_forward = {
        "mlp.gate_proj": (neurons, hidden),
        "mlp.up_proj": (neurons, hidden),
        "mlp.down_proj": (hidden, neurons),
    }
    shapes: dict[str, tuple[int, int]] = {}
    for layer in range(config.num_layers):
        has_experts = config.experts is not None and layer not in config.experts.dense_layers
        of_layer = attention if has_experts else attention | feed_forward
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    return shapes


def _tensor_name(root: str, projection: str, half: str) -> str:
    return f"{PREFIX}{root}{projection.removeprefix(MODEL)}.{half}.weight"


def _root(stored: Iterable[str]) -> str:
    """Return the prefix of the layers in the file; the usual one if the file has none."""
    return next((root for root in ROOTS for name in stored if name.startswith(f"{PREFIX}{root}layers.")), MODEL)


def _projections(
    file: Path, stored: Mapping[str, StoredTensor], root: str, rank: int, shapes: Mapping[str, tuple[int, int]]
) -> frozenset[str]:
    """Return the projections that the file changes, each with both halves."""
    wanted = {_tensor_name(root, projection, half): projection for projection in shapes for half in (DOWN, UP)}
    if unknown := sorted(stored.keys() - wanted.keys()):
        raise ModelError(f"{file} holds {unknown[0]:.200}, which is not LoRA of a projection in the model's layers")
    changed = frozenset(wanted[name] for name in stored)
    if not changed:
        raise ModelError(f"{file} holds no tensors")
    for projection in sorted(changed):
        num_outputs, num_inputs = shapes[projection]
        _check(file, stored, _tensor_name(root, projection, DOWN), (rank, num_inputs))
        _check(file, stored, _tensor_name(root, projection, UP), (num_outputs, rank))
    return changed


def _check(file: Path, stored: Mapping[str, StoredTensor], name: str, shape: tuple[int, int]) -> None:
    if name not in stored:
        raise ModelError(f"{file} lacks {name}")
    tensor = stored[name]
    if tensor.shape != shape:
        fitting = f"{list(shape)} fits the model and r in {CONFIG_FILE}"
        raise ModelError(f"{name} in {file} has shape {list(tensor.shape)}, and {fitting}")
    if not tensor.is_float:
        raise ModelError(f"{name} in {file} is stored as {tensor.dtype}; supported are {', '.join(FLOATS)}")


def _check_layers(fields: JsonFields, projections: frozenset[str], shapes: Iterable[str]) -> None:
    """Refuse an adapter for a model with fewer layers, which no other check detects."""
    targets = fields.raw("target_modules")
    if not isinstance(targets, list) or fields.raw("layers_to_transform") is not None or fields.raw("exclude_modules"):
        return
    named = {target for target in targets if isinstance(target, str)}
    meant = [name for name in shapes if name.rpartition(".")[2] in named]
    if missing := [name for name in meant if name not in projections]:
        raise ModelError(f"target_modules in {CONFIG_FILE} means {missing[0]} too, and {WEIGHTS_FILE} lacks it")
