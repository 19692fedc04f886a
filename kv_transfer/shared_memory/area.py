"""Provide memory that one process writes and others read, without a name in any file system."""

import fcntl
import mmap
import os
import secrets
import socket
from collections.abc import Sequence
from typing import Final

from kv_transfer.results import TransferError
from serving_core.process.memory import available_bytes

NONCE_BYTES: Final = 16
HEAD_BYTES: Final = 4096  # before the first slot; begins with the nonce
LEAST_FREE_BYTES: Final = 256 * 2**20  # that must stay free on the machine or in the cgroup

# From linux/fcntl.h; Python's fcntl lacks some of them.
_ADD_SEALS, _GET_SEALS = 1033, 1034
_NO_MORE_SEALS, _NO_SHRINKING, _NO_GROWING, _NO_FUTURE_WRITING = 0x1, 0x2, 0x4, 0x10
# Without seals a writer could truncate or punch the memory, which kills readers by SIGBUS.
SEALS: Final = _NO_SHRINKING | _NO_GROWING | _NO_FUTURE_WRITING | _NO_MORE_SEALS
_BLOCK_BYTES: Final = 512  # of st_blocks


class WrittenArea:
    """Hold the writer's end: the only mapping that can ever write."""

    def __init__(self, num_bytes: int, nonce: bytes) -> None:
        """Allocate the memory itself, not only addresses. Raises OSError without enough memory."""
        if available_bytes() < num_bytes + LEAST_FREE_BYTES:
            raise OSError("there is too little free memory")
        descriptor = os.memfd_create("splitserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(descriptor, 0o600)
            os.ftruncate(descriptor, num_bytes)
            os.posix_fallocate(descriptor, 0, num_bytes)
            self._map = mmap.mmap(descriptor, num_bytes)
            self._map[:NONCE_BYTES] = nonce
            fcntl.fcntl(descriptor, _ADD_SEALS, SEALS)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def hand_over(self, reader: socket.socket) -> None:
        """Send the descriptor, with which no process can write, and close it here. Call once. Raises OSError."""
        try:
            socket.send_fds(reader, [b"."], [self._descriptor])
        finally:
            os.close(self._descriptor)

    def write(self, offset: int, frames: Sequence[memoryview]) -> None:
        """Write the frames one behind the other from `offset` on."""
        for frame in frames:
            self._map[offset : offset + len(frame)] = frame
            offset += len(frame)

    def close(self) -> None:
        """Unmap the memory. Readers keep their mappings."""
        self._map.close()


class ReadArea:
    """Hold a reader's end."""

    def __init__(self, descriptor: int, num_bytes: int, nonce: bytes) -> None:
        """Map the memory read-only; the caller keeps the descriptor.

        Raises TransferError if the memory does not match the offer.
        """
        try:
            seals = fcntl.fcntl(descriptor, _GET_SEALS)
            status = os.fstat(descriptor)
            if seals & SEALS != SEALS:
                raise TransferError("shared memory without the seals that protect its readers")
            if status.st_size != num_bytes or status.st_blocks * _BLOCK_BYTES < num_bytes:
                raise TransferError("shared memory of another size than was offered")
            self._map = mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise TransferError("what was handed over is no shared memory") from error
        self.num_bytes: Final = num_bytes
        self._view = memoryview(self._map)
        if not secrets.compare_digest(bytes(self._view[:NONCE_BYTES]), nonce):
            self.close()
            raise TransferError("other shared memory than was offered")

    def copy(self, offset: int, target: memoryview) -> None:
        """Fill `target` with the bytes from `offset` on."""
        target[:] = self._view[offset : offset + len(target)]

    def close(self) -> None:
        self._view.release()
        self._map.close()
