"""Sum and gather between ranks of one machine through shared memory: a decode step has two sums per layer, and each
takes gloo a millisecond.

Rank 0 creates the memory, without a name, and the others open it through rank 0's process. Success shows that all ranks
are on one machine and belong to one user, and that the memory is the one that rank 0 announced.
"""

import ctypes
import mmap
import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Protocol

import torch

from engine.native.library import load, wanted_variants
from engine.native.program import NativeProgram
from serving_core.errors import RankLost

VERSION: Final = 2  # SHARED_SUMS_VERSION in native/shared_sums.h
SLOT_BYTES: Final = 2**18
LEADER: Final = 0
GONE: Final = -2  # in native/shared_sums.c
ELEMENTS: Final = {torch.float32: 0, torch.bfloat16: 1}
MOST_RANKS: Final = 64
NONCE_BYTES: Final = 16
MOST_PATIENCE_S: Final = 2.0**32


class Exchange(Protocol):
    """Messages between the ranks before they share memory."""

    rank: int
    size: int

    def exchange(self, data: bytes) -> list[bytes]: ...


class _View(ctypes.Structure):
    """SharedSums in native/shared_sums.h."""

    _fields_ = [
        ("memory", ctypes.c_void_p),
        ("peers", ctypes.c_int32 * MOST_RANKS),
        ("slot_bytes", ctypes.c_int64),
        ("patience_ns", ctypes.c_int64),
        ("round", ctypes.c_uint64),
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("failed", ctypes.c_int32),
    ]


class _Functions:
    """The functions of the compiled library."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        pointer, int64 = ctypes.c_void_p, ctypes.c_int64
        self.num_bytes = library.shared_sums_bytes
        self.num_bytes.restype, self.num_bytes.argtypes = int64, [ctypes.c_int32, int64]
        self.add = library.shared_sums_add
        self.add.restype = ctypes.c_int32
        self.add.argtypes = [pointer, pointer, int64, ctypes.c_int32, int64, int64, pointer]
        self.record = library.shared_sums_record
        self.record.restype = ctypes.c_int32
        self.record.argtypes = [pointer, pointer, pointer, int64, ctypes.c_int32]
        self.gather = library.shared_sums_gather
        self.gather.restype, self.gather.argtypes = ctypes.c_int32, [pointer] * 4
        if library.shared_sums_version() != VERSION:
            raise OSError(f"{path.name} is of another version: install the package again")


class SharedSums:
    """One rank's end of the memory through which the ranks of a machine sum and gather.

    All ranks call the same methods in the same order with tensors of the same shapes, contiguous and on the CPU. A call
    raises RankLost if a peer does not answer in time or has ended; the object cannot be used afterwards.
    """

    def __init__(
        self, functions: _Functions, memory: mmap.mmap, rank: int, peers: Sequence[int], patience_s: float
    ) -> None:
        """Wrap the mapped memory. `peers` holds a pidfd for each rank, -1 for this one."""
        self._functions, self._memory = functions, memory
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        patience_ns = int(min(patience_s, MOST_PATIENCE_S) * 1e9)
        of_peers = (ctypes.c_int32 * MOST_RANKS)(*peers)
        self._view = _View(address, of_peers, SLOT_BYTES, patience_ns, 0, rank, len(peers), 0)
        self._address = ctypes.addressof(self._view)

    def takes(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor can be summed here (contiguous, a dtype of ELEMENTS); the same on every rank."""
        return tensor.dtype in ELEMENTS and tensor.is_contiguous()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace the tensor on every rank, in place, by its sum over the ranks, added in rank order."""
        self._add(tensor, 0, tensor.numel(), tensor)

    def reduce_scatter(self, tensor: torch.Tensor, own: range) -> torch.Tensor:
        """Return the rows `own`, [len(own), E], of the sum of a tensor [T, E] over the ranks."""
        sums = tensor.new_empty(len(own), tensor.shape[1])
        self._add(tensor, own.start * tensor.shape[1], own.stop * tensor.shape[1], sums)
        return sums

    def gather(self, local: torch.Tensor, num_bytes: Sequence[int], gathered: torch.Tensor | None) -> None:
        """Send num_bytes[rank] bytes of `local`; write those of all ranks, in rank order, to `gathered`.

        All ranks call this with the same `num_bytes`; one that passes None as `gathered` only sends. Tensors are
        contiguous and on the CPU. Raises RankLost if another rank has ended or does not come in time.
        """
        sizes = (ctypes.c_int64 * len(num_bytes))(*num_bytes)
        place = None if gathered is None else gathered.data_ptr()
        self._check(self._functions.gather(self._address, local.data_ptr(), ctypes.addressof(sizes), place))

    def record(self, program: NativeProgram, rows: torch.Tensor) -> None:
        """Append to `program` the work of `all_reduce` for the rows of `rows`, contiguous.

        Call `check` after each run.
        """
        program.add(self._functions.record, self._address, rows.data_ptr(), rows.shape[1], ELEMENTS[rows.dtype])

    def check(self) -> None:
        """Raise RankLost if a rank was lost in the run of a program, whose results are then of no use."""
        self._check(self._view.failed)

    def close(self) -> None:
        """Close the handles of the peers' processes; no method may be called afterwards."""
        for peer in self._view.peers[: self._view.size]:
            _close(peer)

    def _add(self, tensor: torch.Tensor, first: int, end: int, sums: torch.Tensor) -> None:
        given, count, element = tensor.data_ptr(), tensor.numel(), ELEMENTS[tensor.dtype]
        self._check(self._functions.add(self._address, given, count, element, first, end, sums.data_ptr()))

    def _check(self, failed: int) -> None:
        if failed == GONE:
            raise RankLost("another rank has ended")
        if failed:
            raise RankLost(f"another rank has not come within {self._view.patience_ns / 1e9:g} s")


def share(ranks: Exchange, patience_s: float) -> SharedSums | None:
    """Set up memory that all ranks share, and return this rank's end; or None on every rank.

    None if the ranks are on several machines, or one lacks compiled kernels. Call on all ranks. `patience_s` is the
    longest wait for a peer, in seconds.
    """
    can_share = hasattr(os, "memfd_create") and ranks.size <= MOST_RANKS and wanted_variants()
    functions = load(_Functions) if can_share else None
    num_bytes = 0 if functions is None else functions.num_bytes(ranks.size, SLOT_BYTES)
    with ExitStack() as made:
        told = _made(num_bytes, made) if num_bytes and ranks.rank == LEADER else b""
        told = ranks.exchange(told)[LEADER]
        memory = _opened(num_bytes, told) if num_bytes and told else None
        given = ranks.exchange(b"" if memory is None else str(os.getpid()).encode())
    peers = [] if memory is None else _watched(given, ranks.rank)
    can_all = all(ranks.exchange(b"1" if peers else b""))
    if functions is None or memory is None or not can_all:
        for peer in peers:
            _close(peer)
        return None
    return SharedSums(functions, memory, ranks.rank, peers, patience_s)


def _made(num_bytes: int, made: ExitStack) -> bytes:
    """Create the memory, which persists while mapped; return its announcement for the others, empty if creation
    failed.
    """
    try:
        descriptor = os.memfd_create("splitserve-ranks", os.MFD_CLOEXEC)
        made.callback(os.close, descriptor)
        os.posix_fallocate(descriptor, 0, num_bytes + NONCE_BYTES)
    except OSError:
        return b""
    nonce = secrets.token_bytes(NONCE_BYTES)
    os.pwrite(descriptor, nonce, num_bytes)
    return nonce + f"/proc/{os.getpid()}/fd/{descriptor}".encode()


def _opened(num_bytes: int, told: bytes) -> mmap.mmap | None:
    """Open the memory that rank 0 announced, if it is on this machine."""
    nonce, path = told[:NONCE_BYTES], told[NONCE_BYTES:].decode()
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_size != num_bytes + NONCE_BYTES:
            return None
        return mmap.mmap(descriptor, num_bytes) if os.pread(descriptor, NONCE_BYTES, num_bytes) == nonce else None
    finally:
        os.close(descriptor)


def _watched(process_ids: Sequence[bytes], rank: int) -> list[int]:
    """Return a pidfd for each rank, -1 for this one; an empty list if one is unavailable."""
    peers: list[int] = []
    try:
        for number, process_id in enumerate(process_ids):
            peers.append(-1 if number == rank else os.pidfd_open(int(process_id)))
    except (OSError, ValueError, AttributeError):
        for peer in peers:
            _close(peer)
        return []
    return peers


def _close(peer: int) -> None:
    if peer >= 0:
        os.close(peer)
