"""KV blocks as 1-D uint8 tensors, which stay on the device they are on."""

from collections.abc import Sequence
from typing import Protocol

import torch

from kv_transfer.payload import HOST, Payload
from serving_core.layout import KVLayout

# Mixing constants of MurmurHash3 as int32, and the golden ratio, which tells positions apart.
_GOLDEN, _FIRST, _SECOND = (value - (value >> 31 << 32) for value in (0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35))


class TensorPayload(Payload):
    """Tensors of any device. The checksum is that of HOST in host memory, and device_checksum elsewhere, where a
    change passes once in 2**32 times: both ends of a transfer are of one kind."""

    def checksum(self, keys: torch.Tensor, values: torch.Tensor) -> int:
        if keys.device.type == "cpu":
            return HOST.checksum(keys.numpy().data, values.numpy().data)
        return device_checksum(keys, values)

    def checksums(self, planes: Sequence[torch.Tensor]) -> list[int]:
        if not planes or planes[0].device.type == "cpu":
            return super().checksums(planes)
        mixed = [_mixed(keys, values) for keys, values in zip(planes[::2], planes[1::2], strict=True)]
        return [_unsigned(each) for each in torch.stack(mixed).tolist()]  # the host waits for the device once

    def joined(self, views: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(views))


def device_checksum(keys: torch.Tensor, values: torch.Tensor) -> int:
    """A checksum of 32 bits, computed where the tensors are.

    Every word of four bytes, little-endian, the last of K and of V filled up with zeros, is mixed with its place as
    MurmurHash3 finishes; the sum of them is mixed once more. One changed word always gives another checksum.
    """
    return _unsigned(int(_mixed(keys, values)))


def _mixed(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The checksum as int32, where the tensors are."""
    words = torch.cat((_filled_up(keys), _filled_up(values))).view(torch.int32)
    places = torch.arange(len(words), dtype=torch.int32, device=words.device)
    return _mix(_mix(words + places * _GOLDEN).sum(dtype=torch.int32))


def _unsigned(checksum: int) -> int:
    return checksum & 0xFFFFFFFF


def _filled_up(planes: torch.Tensor) -> torch.Tensor:
    """To whole words."""
    odd = -len(planes) % 4
    return torch.nn.functional.pad(planes, (0, odd)) if odd else planes


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
