"""Memory that one process writes and others read, without a name in any file system."""

import fcntl
import mmap
import os
import secrets
import socket
from collections.abc import Sequence
from typing import Final

from kv_transfer.results import TransferError
from serving_core.memory import available_bytes

NONCE_BYTES: Final = 16
HEAD_BYTES: Final = 4096  # before the first slot: the nonce
LEAST_FREE_BYTES: Final = 256 * 2**20  # what an area has to leave to the machine, or to the cgroup

# Of linux/fcntl.h, not all of which Python's fcntl knows.
_ADD_SEALS, _GET_SEALS = 1033, 1034
_NO_MORE_SEALS, _NO_SHRINKING, _NO_GROWING, _NO_FUTURE_WRITING = 0x1, 0x2, 0x4, 0x10
# Without them a reader could be ended by SIGBUS, where its writer has cut the memory or punched holes into it.
SEALS: Final = _NO_SHRINKING | _NO_GROWING | _NO_FUTURE_WRITING | _NO_MORE_SEALS
_BLOCK_BYTES: Final = 512  # of st_blocks


class WrittenArea:
    """The writer's end: the one mapping that can write, ever."""

    def __init__(self, num_bytes: int, nonce: bytes) -> None:
        """Allocates the memory itself, not only addresses. Raises OSError where there is not enough."""
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
        """Sends the descriptor, which nobody can write with, and keeps none. To be called once. Raises OSError."""
        try:
            socket.send_fds(reader, [b"."], [self._descriptor])
        finally:
            os.close(self._descriptor)

    def write(self, offset: int, frames: Sequence[memoryview]) -> None:
        """Puts these there, one behind the other."""
        for frame in frames:
            self._map[offset : offset + len(frame)] = frame
            offset += len(frame)

    def close(self) -> None:
        """Readers keep what they have mapped."""
        self._map.close()


class ReadArea:
    """A reader's end."""

    def __init__(self, descriptor: int, num_bytes: int, nonce: bytes) -> None:
        """Leaves the descriptor to its owner. Raises TransferError where it is not what was offered."""
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
        """Fills the target with what lies there."""
        target[:] = self._view[offset : offset + len(target)]

    def close(self) -> None:
        self._view.release()
        self._map.close()
