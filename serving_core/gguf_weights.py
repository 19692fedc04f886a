"""The tensors of a model folder that was made of a GGUF file, under the names of a Hugging Face checkpoint.

Such a folder has what the file's header says, as splitserve.gguf.folder writes it, and a link to the file, whose
weights stay where they are. Torch-free.
"""

import functools
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, Final

from serving_core.errors import ModelError
from serving_core.gguf_header import GgufHeader, GgufTensor, read_header

LINK: Final = "model.gguf"
SOURCE: Final = "model.gguf.source"  # the digest of what the folder was made of
ROPE_FACTORS: Final = "rope_freqs.weight"
MOST_ROPE_BYTES: Final = 2**16

OUTSIDE: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
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
INTERLEAVED: Final = (".q_proj.weight", ".q_proj.bias", ".k_proj.weight", ".k_proj.bias")
Identity = tuple[int, ...]


class GgufWeights:
    """The tensors by name, and their bytes as they are stored. To be had from `gguf_weights`."""

    def __init__(self, folder: Path) -> None:
        self.path: Final = folder / LINK
        try:
            with self.path.open("rb") as stream:
                self._identity = _identity(os.fstat(stream.fileno()))
                header = read_header(stream, self.path.resolve().name)
                digest = digest_of(header, stream)
            made_of = (folder / SOURCE).read_text(encoding="utf-8")
        except OSError as error:
            raise ModelError(f"{self.path.resolve()} cannot be read: {error.strerror}") from error
        if digest != made_of:
            raise _replaced(self.path)
        self.header_bytes: Final = len(header.content)
        self.tensors: Final = {
            checkpoint_name(name): tensor for name, tensor in header.tensors.items() if name != ROPE_FACTORS
        }
        self._is_llama = header.metadata.get("general.architecture") == "llama"

    def is_interleaved(self, name: str) -> bool:
        """Whether the rows of each head alternate between its halves, as llama.cpp rotates Llama's."""
        return self._is_llama and name.endswith(INTERLEAVED)

    @contextmanager
    def open(self) -> Iterator[BufferedReader]:
        """The file, to read tensors from. Raises ModelError when it is no longer the one whose header was read."""
        try:
            with self.path.open("rb") as stream:
                if _identity(os.fstat(stream.fileno())) != self._identity:
                    raise _replaced(self.path)
                yield stream
        except OSError as error:
            raise ModelError(f"{self.path.resolve()} cannot be read: {error.strerror}") from error


def gguf_weights(folder: Path) -> GgufWeights:
    """Raises ModelError when the file is gone, broken or another than the folder was made of."""
    try:
        identity = _identity((folder / LINK).stat())
    except OSError as error:
        raise ModelError(f"{(folder / LINK).resolve()} cannot be read: {error.strerror}") from error
    return _read(folder, identity)


@functools.lru_cache(maxsize=1)  # a process asks several times, and a vocabulary takes a tenth of a second to skip
def _read(folder: Path, identity: Identity) -> GgufWeights:
    return GgufWeights(folder)


def digest_of(header: GgufHeader, stream: BinaryIO) -> str:
    """SHA-256 of all bytes that config and tokenizer come from: the header, and the factors of a rope."""
    digest = hashlib.sha256(header.content)
    if ROPE_FACTORS in header.tensors:
        digest.update(read_tensor(stream, header.tensors[ROPE_FACTORS]))
    return digest.hexdigest()


def read_tensor(stream: BinaryIO, tensor: GgufTensor) -> bytes:
    """All bytes of a small tensor. Raises ModelError for one that is not."""
    if tensor.num_bytes > MOST_ROPE_BYTES:
        raise ModelError(f"{ROPE_FACTORS} has {tensor.num_bytes} bytes; at most {MOST_ROPE_BYTES} are read")
    stream.seek(tensor.start)
    return stream.read(tensor.num_bytes)


def checkpoint_name(name: str) -> str:
    """A tensor's name in a Hugging Face checkpoint; one that is not known gets a name that none has there."""
    module, _, attribute = name.rpartition(".")
    if module in OUTSIDE:
        return f"{OUTSIDE[module]}.{attribute}"
    match module.split("."):
        case ["blk", layer, part] if layer.isdecimal() and part in IN_LAYER:
            return f"model.layers.{layer}.{IN_LAYER[part]}.{attribute}"
    return f"gguf:{name}"


def _identity(now: os.stat_result) -> Identity:
    return now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns


def _replaced(link: Path) -> ModelError:
    return ModelError(
        f"{link.resolve()} is no longer the file that {link.parent} was made of; start again with the file as MODEL"
    )
