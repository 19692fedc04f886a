"""Reads parts of tensors from a GGUF file, or from several that are one model, as floats."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from engine.model.checkpoint import Checkpoint, Part
from engine.model.read_ahead import Span
from serving_core.errors import ModelError
from serving_core.gguf_header import GgufTensor
from serving_core.gguf_weights import gguf_weights
from serving_core.model_config import read_model_config
from serving_core.sharding import Extent, whole

PIECE_ELEMENTS: Final = 2**17  # that a thread turns into floats at once: about what its cache holds
PIECES_AHEAD: Final = 4  # of each thread, at most, that wait to be taken


class GgufCheckpoint(Checkpoint):
    """The tensors of a GGUF model, whatever they are stored as. Read some whole rows at a time, by as many threads as
    torch computes with; only few of them are floats at any time."""

    def __init__(self, folder: Path) -> None:
        """Raises ModelError when the files are not what the folder was made of."""
        self._weights = gguf_weights(folder)
        self._head_dim = read_model_config(folder).head_dim
        num_threads = torch.get_num_threads()
        self._at_once = num_threads * PIECES_AHEAD
        # One thread alone would only be handed to and fro.
        self._map = map if num_threads == 1 else ThreadPoolExecutor(num_threads, "gguf").map

    def names(self) -> set[str]:
        return set(self._weights.tensors)

    def describe(self, name: str) -> tuple[tuple[int, ...], str]:
        return self._weights.tensors[name].shape, "F32"

    def read(self, part: Part) -> Iterator[tuple[int, torch.Tensor]]:
        tensor, is_interleaved = self._weights.tensors[part.name], self._weights.is_interleaved(part.name)
        addend = self._weights.addend(part.name)
        is_vector = len(part.extents) == 1
        rows, columns = (whole(1), part.extents[0]) if is_vector else part.extents
        step = max(1, PIECE_ELEMENTS // columns.total)
        if is_interleaved:  # whole heads
            step = self._head_dim * max(1, step // self._head_dim)
        pieces = [range(row, min(row + step, rows.held.stop)) for row in range(rows.held.start, rows.held.stop, step)]
        with self._weights.open() as streams:
            file = streams[tensor.part].fileno()

            def read(piece: range) -> torch.Tensor:
                floats = torch.from_numpy(_floats(file, tensor, piece, columns))
                floats = floats[0] - addend if is_vector else floats
                return _halves_of_heads(floats, self._head_dim) if is_interleaved else floats

            for first in range(0, len(pieces), self._at_once):
                some = pieces[first : first + self._at_once]
                for piece, floats in zip(some, self._map(read, some), strict=True):
                    yield piece.start - rows.held.start, floats

    def spans(self, part: Part) -> Iterator[Span]:
        """Whole rows, whatever columns are wanted."""
        tensor = self._weights.tensors[part.name]
        rows = whole(1) if len(part.extents) == 1 else part.extents[0]
        stored = Span(self._weights.file_of(part.name), tensor.start, tensor.start + tensor.num_bytes)
        yield stored.of_rows(rows)


def _floats(
    file: int, tensor: GgufTensor, rows: range, columns: Extent
) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Rows of a tensor, and of these the columns that are held."""
    kind, held = tensor.type, columns.held
    row_bytes = columns.total // kind.block * kind.block_bytes
    stored = bytearray(len(rows) * row_bytes)
    if os.preadv(file, [stored], tensor.start + rows.start * row_bytes) < len(stored):
        raise ModelError(f"the GGUF file ended within rows {rows.start} to {rows.stop} of a tensor while it was read")
    first, last = held.start // kind.block, -(-held.stop // kind.block)
    blocks = np.frombuffer(stored, np.uint8).reshape(len(rows), row_bytes)
    blocks = blocks[:, first * kind.block_bytes : last * kind.block_bytes]
    # One long row, as the library goes through rows a few at a time.
    floats = dequantize(blocks.reshape(1, -1), GGMLQuantizationType(tensor.type_id)).reshape(len(rows), -1)
    return floats[:, held.start - first * kind.block : held.stop - first * kind.block]


def _halves_of_heads(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows that alternate between the halves of their head, with the first half before the second."""
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
