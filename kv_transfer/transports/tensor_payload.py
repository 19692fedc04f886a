"""Handle KV blocks as 1-D uint8 tensors, which stay on their device."""

from collections.abc import Sequence
from typing import Protocol

import torch

from kv_transfer.payload import HOST, Payload
from kv_transfer.wire import MAX_PAYLOAD_BYTES
from serving_core.layout import KVLayout

# Mixing constants of MurmurHash3 as int32; the golden ratio distinguishes positions.
_GOLDEN, _FIRST, _SECOND = (value - (value >> 31 << 32) for value in (0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35))


class TensorPayload(Payload):
    """Handles 1-D uint8 tensors on any device.

    The checksum is that of HOST in host memory, and `device_checksum` elsewhere, which misses about one random change
    in 2**32. Both ends of a transfer must use the same kind.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        """Make messages for tensors on `device`, or in host memory.

        A message costs Python the same time at any size: on a device it is as large as the wire allows.
        """
        self._is_on_device = device is not None and device.type != "cpu"

    @property
    def message_bytes(self) -> int:
        return MAX_PAYLOAD_BYTES if self._is_on_device else super().message_bytes

    def checksum(self, keys: torch.Tensor, values: torch.Tensor) -> int:
        if keys.device.type == "cpu":
            return HOST.checksum(keys.numpy().data, values.numpy().data)
        return device_checksum(keys, values)

    def checksums(self, caches: Sequence[torch.Tensor]) -> list[int]:
        if not caches or caches[0].device.type == "cpu":
            return super().checksums(caches)
        mixed = [_mixed(keys, values) for keys, values in zip(caches[::2], caches[1::2], strict=True)]
        return [_unsigned(each) for each in torch.stack(mixed).tolist()]  # one synchronization with the device

    def joined(self, views: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(views))


def device_checksum(keys: torch.Tensor, values: torch.Tensor) -> int:
    """Return a checksum of 32 bits over 1-D uint8 tensors, computed on their device.

    Keys and values are each padded with zeros to words of four bytes, little-endian. Each word is mixed with its
    position by the MurmurHash3 finalizer; the sum is mixed once more. A change of one word always changes the checksum.
    """
    return _unsigned(int(_mixed(keys, values)))


def _mixed(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the checksum as int32, on the tensors' device."""
    words = torch.cat((_filled_up(keys), _filled_up(values))).view(torch.int32)
    places = torch.arange(len(words), dtype=torch.int32, device=words.device)
    return _mix(_mix(words + places * _GOLDEN).sum(dtype=torch.int32))


def _unsigned(checksum: int) -> int:
    return checksum & 0xFFFFFFFF


def _filled_up(caches: torch.Tensor) -> torch.Tensor:
    """Pad with zeros to whole words."""
    odd = -len(caches) % 4
    return torch.nn.functional.pad(caches, (0, odd)) if odd else caches


def _mix(words: torch.Tensor) -> torch.Tensor:
    """Apply the finalizer of MurmurHash3: one to one on wrapping int32."""
    words = (words ^ _shifted(words, 16)) * _FIRST
    words = (words ^ _shifted(words, 13)) * _SECOND
    return words ^ _shifted(words, 16)


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right as unsigned words."""
    return torch.bitwise_right_shift(words, bits).bitwise_and(2 ** (32 - bits) - 1)


class TensorPool(Protocol):
    """A KV pool, or some of its heads, with tensors as buffers."""

    @property
    def layout(self) -> KVLayout: ...

    def read_tensors(self, layer: int, block_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]: ...

    def write_tensors(self, layer: int, block_ids: Sequence[int], keys: torch.Tensor, values: torch.Tensor) -> None: ...

    def heads(self, heads: range) -> "TensorPool": ...


class TensorStore:
    """Adapts a KV pool, or some of its heads, to a KVStore with tensors as buffers."""

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
