"""KV blocks as 1-D uint8 tensors, which stay on the device they are on."""

from collections.abc import Sequence
from typing import Protocol

import torch

from kv_transfer.payload import HOST, Payload
from serving_core.layout import KVLayout

# Mixing constants of MurmurHash3 as int32, and the golden ratio, which tells positions apart.
_GOLDEN, _FIRST, _SECOND = (value - (value >> 31 << 32) for value in (0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35))


class TensorPayload(Payload):
    """Tensors of any device. The checksum is that of HOST in host memory, and device_checksums elsewhere, where a
    change passes once in 2**32 times: both ends of a transfer are of one kind."""

    def checksum(self, keys: torch.Tensor, values: torch.Tensor) -> int:
        if keys.device.type == "cpu":
            return HOST.checksum(keys.numpy().data, values.numpy().data)
        (checksum,) = device_checksums([keys, values], len(keys))  # as if they were one block
        return checksum

    def joined(self, views: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(views))


def device_checksums(views: Sequence[torch.Tensor], plane_bytes: int) -> tuple[int, ...]:
    """A 32-bit checksum of each block, over its K plane, then its V plane, computed where the views are.

    Every word of four bytes, little-endian, the last of a plane filled up with zeros, is mixed with its place in the
    block as MurmurHash3 finishes; the sum of them is mixed once more. A block with one changed word always has another
    checksum.
    """
    if not views:
        return ()
    planes = torch.cat(list(views)).view(2, -1, plane_bytes)
    if plane_bytes % 4:
        planes = torch.nn.functional.pad(planes, (0, -plane_bytes % 4))
    words = planes.view(torch.int32).transpose(0, 1).flatten(1)
    places = torch.arange(words.shape[1], dtype=torch.int32, device=words.device)
    sums = _mix(words + places * _GOLDEN).sum(1, dtype=torch.int32)
    return tuple(checksum & 0xFFFFFFFF for checksum in _mix(sums).tolist())


def _mix(words: torch.Tensor) -> torch.Tensor:
    """What MurmurHash3 finishes with: one to one, on int32 that wrap."""
    words = (words ^ _shifted(words, 16)) * _FIRST
    words = (words ^ _shifted(words, 13)) * _SECOND
    return words ^ _shifted(words, 16)


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, as unsigned words."""
    return torch.bitwise_right_shift(words, bits).bitwise_and(2 ** (32 - bits) - 1)


class TensorPool(Protocol):
    """What a KV pool offers, and the same for some of its heads."""

    @property
    def layout(self) -> KVLayout: ...

    def read_tensors(self, layer: int, block_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]: ...

    def write_tensors(self, layer: int, block_ids: Sequence[int], keys: torch.Tensor, values: torch.Tensor) -> None: ...

    def heads(self, heads: range) -> "TensorPool": ...


class TensorStore:
    """A KVStore whose buffers are tensors, over a KV pool or some of its heads."""

    def __init__(self, pool: TensorPool) -> None:
        self._pool = pool
        self.layout: KVLayout = pool.layout

    def heads(self, heads: range) -> "TensorStore":
        pool = self._pool.heads(heads)
        return self if pool is self._pool else TensorStore(pool)

    def read(self, layer: int, block_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return self._pool.read_tensors(layer, block_ids)

    def write(self, layer: int, block_ids: Sequence[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        self._pool.write_tensors(layer, block_ids, keys, values)
