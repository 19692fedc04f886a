"""Read the tensors of a model folder made of a GGUF file, under the names of a Hugging Face checkpoint. Torch-free.

A GGUF file has all experts of a layer in one tensor for each projection; a checkpoint has a tensor for each expert.

Such a folder has the contents of the file's header, as splitserve.gguf.folder writes them, and a link to the file, or
to each of its parts, whose weights stay in their place.
"""

import functools
import itertools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from io import BufferedReader
from pathlib import Path
from typing import Any, Final, NamedTuple

from serving_core.errors import ModelError
from serving_core.model_files.gguf_header import MOST_PARTS, ROPE_FACTORS, GgufTensor, open_parts, read_model

OUTSIDE: Final = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",  # LFM2's norm of its output
    "output_norm": "model.norm",
    "output": "lm_head",
}
IN_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NORMS_OF_OUTPUTS: Final = {  # of models with norms before and behind attention and feed-forward
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FUSED: Final = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
CONVOLUTIONS: Final = ("shortconv.conv", "ssm_conv1d")  # in files without the dimension of their one input channel
OF_LFM2: Final = {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
OF_LINEAR_ATTENTION: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_gate": "linear_attn.in_proj_z",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
OF_HEADS: Final = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
GATES_AND_SHARED: Final = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
GPT_OSS: Final = {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"}
OF_GPT_OSS: Final = {  # stacked as they are, and sinks without "weight"
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_exps.bias": "mlp.experts.gate_proj_bias",
    "ffn_up_exps.bias": "mlp.experts.up_proj_bias",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}
EXPERT_COUNT: Final = "expert_count"
STACKED: Final = "_exps"  # suffix of a tensor of all experts of a layer
ONE_ROW: Final = "ffn_gate_inp_shexp"  # a vector in files


class Names(NamedTuple):
    """The modules of a layer by llama.cpp's names; experts' names have a placeholder for the expert's number."""

    modules: Mapping[str, str]
    of_experts: Mapping[str, str] = {}
    parameters: Mapping[str, str] = {}  # whole names of tensors that a checkpoint does not call weight or bias


MIXTURE: Final = Names(
    IN_LAYER | GATES_AND_SHARED,
    {
        "ffn_gate": "mlp.experts.{}.gate_proj",
        "ffn_up": "mlp.experts.{}.up_proj",
        "ffn_down": "mlp.experts.{}.down_proj",
    },
)
MIXTRAL: Final = Names(
    IN_LAYER | {"ffn_gate_inp": "block_sparse_moe.gate"},
    {
        "ffn_gate": "block_sparse_moe.experts.{}.w1",
        "ffn_up": "block_sparse_moe.experts.{}.w3",
        "ffn_down": "block_sparse_moe.experts.{}.w2",
    },
)
PLAIN: Final = Names(IN_LAYER)
FOUR_NORMS: Final = Names(IN_LAYER | NORMS_OF_OUTPUTS)
NAMES: Final = {
    "gemma2": FOUR_NORMS,
    "gemma3": FOUR_NORMS,
    "gpt-oss": Names(IN_LAYER | GPT_OSS, MIXTURE.of_experts, OF_GPT_OSS),
    "lfm2": Names(IN_LAYER | OF_LFM2),
    "olmo2": FOUR_NORMS,
    "olmoe": MIXTURE,
    "phi3": Names(IN_LAYER | FUSED),
    "qwen2moe": MIXTURE,
    "qwen35": Names(IN_LAYER | OF_LINEAR_ATTENTION, parameters=OF_HEADS),
    "qwen35moe": Names(IN_LAYER | GATES_AND_SHARED | OF_LINEAR_ATTENTION, MIXTURE.of_experts, OF_HEADS),
    "qwen3moe": MIXTURE,
}  # other architectures use PLAIN, and Llama with experts uses MIXTRAL


def checkpoint_tensors(metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> dict[str, GgufTensor]:
    """Return the tensors of a GGUF file by the names of a checkpoint; a stack of experts becomes one tensor each.

    `metadata` is the file's. An unknown or duplicate tensor gets a name that no checkpoint has.
    """
    architecture = metadata.get("general.architecture")
    num_experts = metadata.get(f"{architecture}.{EXPERT_COUNT}", 0)
    names = MIXTRAL if architecture == "llama" and num_experts else NAMES.get(str(architecture), PLAIN)
    found: dict[str, GgufTensor] = {}
    for name, tensor in tensors.items():
        for checkpoint_name, part in _of_checkpoint(name, tensor, names, num_experts):
            found[checkpoint_name if checkpoint_name not in found else f"gguf:{name}"] = part
    return found


def _of_checkpoint(
    name: str, tensor: GgufTensor, names: Names, num_experts: object
) -> Iterator[tuple[str, GgufTensor]]:
    """Yield the checkpoint name of a tensor, or of each part of it."""
    match name.split(".", 2):
        case ["blk", layer, rest] if layer.isdecimal() and rest in names.parameters:
            yield f"model.layers.{layer}.{names.parameters[rest]}", tensor
            return
    module, _, attribute = name.rpartition(".")
    found: list[tuple[str, GgufTensor]] = []
    match module.split("."):
        case [_] if module in OUTSIDE:
            found = [(OUTSIDE[module], tensor)]
        case ["blk", layer, *path] if layer.isdecimal():
            in_layer = _of_layer(path, tensor, names, num_experts)
            found = [(f"model.layers.{layer}.{ours}", part) for ours, part in in_layer]
    for ours, part in found:
        yield f"{ours}.{attribute}", part
    if not found:
        yield f"gguf:{name}", tensor


def _of_layer(path: list[str], tensor: GgufTensor, names: Names, num_experts: object) -> list[tuple[str, GgufTensor]]:
    if (part := ".".join(path)) in names.modules:
        return [(names.modules[part], replace(tensor, shape=_shape(part, tensor.shape)))]
    match path:
        case [part] if part.endswith(STACKED) and len(tensor.shape) == 3 and tensor.shape[0] == num_experts:
            ours = names.of_experts.get(part.removesuffix(STACKED))
            return [(ours.format(expert), own) for expert, own in enumerate(tensor.slices())] if ours else []
        case [part, expert] if part in names.of_experts and expert.isdecimal():
            return [(names.of_experts[part].format(expert), tensor)]
    return []


def _shape(part: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that a checkpoint has for a tensor of this shape, the `part` of a layer."""
    if part == ONE_ROW and len(shape) == 1:
        return (1, *shape)
    return (shape[0], 1, shape[1]) if part in CONVOLUTIONS and len(shape) == 2 else shape


LINK: Final = "model.gguf"
SOURCE: Final = "model.gguf.source"  # file with the digest of the folder's source

INTERLEAVING: Final = ("granite", "llama", "smollm3")
ADDS_TO_NORMS: Final = ("gemma", "gemma2", "gemma3", "qwen35", "qwen35moe")
PLAIN_NORM: Final = "linear_attn.norm.weight"
INTERLEAVED: Final = (".q_proj.weight", ".q_proj.bias", ".k_proj.weight", ".k_proj.bias")
Identity = tuple[int, ...]


class GgufWeights:
    """Know a folder's tensors by name, and open the files of their bytes. Created by `gguf_weights`."""

    def __init__(self, folder: Path) -> None:
        self._links: Final = links_of(folder)
        with open_parts(self._links) as streams:
            self._identities = [_identity(os.fstat(stream.fileno())) for stream in streams]
            model = read_model(streams, [link.resolve().name for link in self._links])
            made_of = (folder / SOURCE).read_text(encoding="utf-8")
        if model.digest != made_of:
            raise _replaced(self._links[0])
        self.headers_bytes: Final = [len(header) for header in model.headers]
        self._architecture = str(model.metadata.get("general.architecture"))
        weights = {name: tensor for name, tensor in model.tensors.items() if name != ROPE_FACTORS}
        self.tensors: Final = checkpoint_tensors(model.metadata, weights)

    def is_interleaved(self, name: str) -> bool:
        """Return whether the rows of each head in a tensor alternate between its halves, as llama.cpp has Llama's."""
        return self._architecture in INTERLEAVING and name.endswith(INTERLEAVED)

    def addend(self, name: str) -> float:
        """Return the number that was added to a tensor when it was written: 1 for norms of Gemma and Qwen3.5, else 0.

        The decoders of these models add it by themselves, so that the reader must subtract it.
        """
        is_norm = name.endswith("norm.weight") and not name.endswith(PLAIN_NORM)
        return 1.0 if self._architecture in ADDS_TO_NORMS and is_norm else 0.0

    def file_of(self, name: str) -> Path:
        """Return the path of the file that holds a tensor."""
        return self._links[self.tensors[name].part]

    @contextmanager
    def open(self) -> Iterator[list[BufferedReader]]:
        """Return a context manager that opens the files of all parts and yields their streams.

        Raises ModelError if a file has changed since its header was read, or cannot be read.
        """
        with open_parts(self._links) as streams:
            for link, stream, identity in zip(self._links, streams, self._identities, strict=True):
                if _identity(os.fstat(stream.fileno())) != identity:
                    raise _replaced(link)
            yield streams


def gguf_weights(folder: Path) -> GgufWeights:
    """Return the tensors of a model folder made from a GGUF file, from a cache if its files are unchanged.

    Raises ModelError if a file is missing, broken or different from the folder's source.
    """
    try:
        identities = tuple(_identity(link.stat()) for link in links_of(folder))
    except OSError as error:
        raise ModelError(f"{Path(error.filename).resolve()} cannot be read: {error.strerror}") from error
    return _read(folder, identities)


@functools.lru_cache(maxsize=1)  # called several times per process, and skipping a vocabulary takes a tenth of a second
def _read(folder: Path, identities: tuple[Identity, ...]) -> GgufWeights:
    return GgufWeights(folder)


def link_name(part: int) -> str:
    """Return the name, within a folder, of the link to a part, counted from 0."""
    return LINK if part == 0 else f"{LINK}.{part + 1}"


def links_of(folder: Path) -> list[Path]:
    """Return the links to the parts of a folder: always the first, and those behind it that exist."""
    links = (folder / link_name(part) for part in range(MOST_PARTS))
    return [folder / LINK, *itertools.takewhile(Path.is_symlink, itertools.islice(links, 1, None))]


def _identity(now: os.stat_result) -> Identity:
    return now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns


def _replaced(link: Path) -> ModelError:
    return ModelError(
        f"{link.resolve()} is no longer the file that {link.parent} was made of; start again with the file as MODEL"
    )
