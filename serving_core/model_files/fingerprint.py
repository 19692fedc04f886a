"""Compute the facts that must be equal on all nodes that serve one model together. Torch-free."""

import dataclasses
import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

from serving_core.errors import ModelError
from serving_core.layout import KVLayout
from serving_core.model_files.config import FAKE_ARCHITECTURE, ModelConfig
from serving_core.model_files.gguf_weights import gguf_weights
from serving_core.model_files.weight_files import is_gguf, read_header_bytes, weight_files

EDGE_BYTES: Final = 2**20
# The contents of config.json, for any implementation that computes the model, and its dtype.
SHAPE: Final = (
    "architecture",
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "embedder",
)


def fingerprint(
    folder: Path, config: ModelConfig, layout: KVLayout, dtype: str, quantization: str = "none"
) -> dict[str, str]:
    """Return the facts of a node that must be equal on all nodes of a fleet, as readable texts by name.

    They are all of the model config, the compute dtype, --quantization, KV dtype, KV layout and weights. `weights` is a
    SHA-256 over, for every file of weights, its size, its whole header and its first and last MiB. So it distinguishes
    models and fine-tunes in milliseconds, but not two files that differ only in the middle. Raises ModelError if the
    weights cannot be read.
    """
    facts = {field.name: str(getattr(config, field.name)) for field in dataclasses.fields(config)}
    facts["dtype"] = dtype
    facts["quantization"] = quantization
    facts |= layout_facts(layout)
    facts["weights"] = _weights(folder, config)
    return facts


def layout_facts(layout: KVLayout) -> dict[str, str]:
    """Return the facts of a fingerprint that follow from the KV layout alone."""
    facts = {
        "kv_cache_dtype": layout.dtype,
        "block_size": str(layout.block_size),
        "kv_widths": layout.layers_text,
    }
    return {**facts, "state_bytes": str(layout.state_bytes)} if layout.state_bytes else facts


def model_facts(folder: Path, config: ModelConfig) -> dict[str, str]:
    """Return the facts of every node's fingerprint that follow from the model folder alone.

    `weights` is among them if the folder has weights; the other files suffice for what clients learn about a model.
    """
    facts = {name: str(getattr(config, name)) for name in SHAPE}
    with suppress(ModelError):
        facts["weights"] = _weights(folder, config)
    return facts


def _weights(folder: Path, config: ModelConfig) -> str:
    return "none" if config.architecture == FAKE_ARCHITECTURE else _weights_digest(folder)


def _weights_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    if is_gguf(folder):
        weights = gguf_weights(folder)
        with weights.open() as streams:
            for stream, header_bytes in zip(streams, weights.headers_bytes, strict=True):
                _digest_file(stream, header_bytes + EDGE_BYTES, digest)
        return digest.hexdigest()
    for file in weight_files(folder):
        try:
            with file.open("rb") as stream:
                _digest_file(stream, read_header_bytes(stream), digest)
        except OSError as error:
            raise ModelError(f"{file} cannot be read: {error.strerror}") from error
    return digest.hexdigest()


def _digest_file(stream: BinaryIO, header_bytes: int, digest: "hashlib._Hash") -> None:
    size_bytes = os.fstat(stream.fileno()).st_size
    digest.update(size_bytes.to_bytes(8, "little"))
    stream.seek(0)
    digest.update(stream.read(max(EDGE_BYTES, min(header_bytes, size_bytes))))
    stream.seek(max(0, size_bytes - EDGE_BYTES))
    digest.update(stream.read())
