"""Store the KV blocks that one rank's pool evicts, in host memory and in a file (KV offload).

Blocks are copied out of the pool at once, so that the pool can overwrite them; a thread of the store writes them to the
file from a bounded buffer. The same thread reads blocks back, a few at a time, and the event loop copies them into the
pool. Each block has a checksum, which stays in memory: a block that differs from what was written counts as missing.

The file takes up its space at the start and has no name, so that nothing of it remains when the process ends.
"""

import asyncio
import logging
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from engine.cache.kv_pool import PagedKVPool
from serving_core.errors import SettingsError
from serving_core.node.tiers import Copies
from serving_core.process.memory import available_bytes
from serving_core.units import size_of

OFFLOADED_BYTES: Final = 128 * 2**20  # most bytes copied to host memory at once: heartbeats wait meanwhile
STAGED_BYTES: Final = 256 * 2**20  # most bytes that wait to be written to the file
CHUNK_BYTES: Final = 4 * 2**20  # bytes read at a time
PROBED_BLOCKS: Final = 8

logger = logging.getLogger(__name__)

Rows = npt.NDArray[np.uint8]
"""[num_blocks, bytes of a block]: for each layer K, then V."""


class TierStore:
    """Stores the blocks that one rank offloads, by slot: in host memory the first slots, in a file the others.

    Owned by one event loop.
    """

    def __init__(self, pool: PagedKVPool, num_host: int, num_disk: int, folder: str = "") -> None:
        """Allocate num_host slots in memory and num_disk in a file.

        `folder` holds the file; empty: the folder for temporary files. Raises SettingsError if there is too little
        memory or disk space.
        """
        self._pool = pool
        self._num_host = num_host
        self._row_bytes = pool.layout.block_bytes
        self._host = _host_rows(num_host, self._row_bytes)
        self._fd = _open_file(num_disk * self._row_bytes, folder) if num_disk else -1
        self._checksums: dict[int, int] = {}  # by slot that holds a block
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-tier")
        self._num_staged = 0  # blocks that wait for the thread
        self._loads: dict[int, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()  # loads run one after the other, since each is timed
        self.on_lost: Callable[[Sequence[int]], None] | None = None
        """Called with slots that hold nothing, since their copies failed."""
        self.num_unwritten = 0  # blocks whose copies failed
        self.write_s = 0.0  # seconds of copies and of the thread's writes

    def offload(self, copies: Copies) -> None:
        """Copy blocks of the pool into slots, and host slots to disk slots, as `copies` lists them.

        The pool's blocks may be overwritten when this returns; disk slots are written later by a thread. Copies for
        which space or time is lacking are left out: `on_lost` gets their slots.
        """
        started_at = time.perf_counter()
        if copies.demotions:
            self._demote(copies.demotions)
        pairs = list(zip(copies.block_ids, copies.slots, strict=True))
        most = max(1, OFFLOADED_BYTES // self._row_bytes)
        if in_host := self._last([pair for pair in pairs if pair[1] < self._num_host], most):
            block_ids, slots = (list(each) for each in zip(*in_host, strict=True))
            self._copy_out(block_ids, self._host, slots)
            self._checksums |= {slot: _checksum(self._host[slot]) for slot in slots}
        on_disk = self._staged([pair for pair in pairs if pair[1] >= self._num_host])
        if on_disk:
            block_ids, slots = (list(each) for each in zip(*on_disk, strict=True))
            rows = np.empty((len(slots), self._row_bytes), np.uint8)
            self._copy_out(block_ids, rows, slice(None))
            self._checksums |= dict(zip(slots, map(_checksum, rows), strict=True))
            self._write_later(rows, slots)
        self.write_s += time.perf_counter() - started_at

    def load(
        self, load_id: int, slots: Sequence[int], block_ids: Sequence[int], on_loaded: Callable[[int, int], None]
    ) -> None:
        """Begin to copy slots into blocks of the pool that nobody else uses, one after the other.

        When done, calls on_loaded with the load's id and the number of leading blocks loaded, which is less than all if
        a slot is missing or damaged. Not called after `cancel`.
        """
        reading = self._load(load_id, list(slots), list(block_ids), on_loaded)
        self._loads[load_id] = asyncio.get_running_loop().create_task(reading)

    def cancel(self, load_id: int) -> None:
        """Stop this load, if it runs: no more of its blocks are written, and on_loaded is not called."""
        if task := self._loads.pop(load_id, None):
            task.cancel()

    def probe(self) -> tuple[float, float]:
        """Return the measured seconds to load one block from host memory and from the file; 0 for a tier without slots.

        Overwrites slots, so call it before anything else.
        """
        num_disk = 0 if self._fd < 0 else os.fstat(self._fd).st_size // self._row_bytes
        return self._probe(range(min(self._num_host, PROBED_BLOCKS))), self._probe(
            range(self._num_host, self._num_host + min(num_disk, PROBED_BLOCKS))
        )

    def close(self) -> None:
        """Cancel all loads, end the thread, and delete the file."""
        for load_id in list(self._loads):
            self.cancel(load_id)
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # ---- offload ----

    def _demote(self, demotions: list[tuple[int, int]]) -> None:
        for _, slot in demotions:
            self._checksums.pop(slot, None)
        whole = [pair for pair in demotions if pair[0] in self._checksums]
        self._lose([slot for source, slot in demotions if source not in self._checksums])
        if staged := self._staged(whole):
            sources, slots = (list(each) for each in zip(*staged, strict=True))
            self._checksums |= {slot: self._checksums[source] for source, slot in staged}
            self._write_later(self._host[sources], slots)

    def _staged(self, pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return as many of the last pairs as may wait for the thread."""
        return self._last(pairs, max(1, STAGED_BYTES // self._row_bytes) - self._num_staged)

    def _last(self, pairs: list[tuple[int, int]], most: int) -> list[tuple[int, int]]:
        """Return the last `most` pairs, and report the others as lost.

        The pool evicts the least recently used blocks first, and the end of a prefix, which is useless without its
        beginning, before its start.
        """
        num_lost = max(0, len(pairs) - most)
        self._lose([slot for _, slot in pairs[:num_lost]])
        return pairs[num_lost:]

    def _lose(self, slots: Sequence[int]) -> None:
        """Report slots that could not be written."""
        for slot in slots:
            self._checksums.pop(slot, None)
        self.num_unwritten += len(slots)
        if slots and self.on_lost is not None:
            self.on_lost(slots)

    def _write_later(self, rows: Rows, slots: list[int]) -> None:
        self._num_staged += len(slots)
        writing = asyncio.get_running_loop().run_in_executor(self._thread, self._write, rows, slots)
        writing.add_done_callback(partial(self._written, slots))

    def _written(self, slots: list[int], writing: "asyncio.Future[tuple[int, float]]") -> None:
        self._num_staged -= len(slots)
        if writing.cancelled():
            return
        num_written, write_s = writing.result()
        self.write_s += write_s
        self._lose(slots[num_written:])

    def _write(self, rows: Rows, slots: Sequence[int]) -> tuple[int, float]:
        """Write rows to the file, in the thread; return the number of leading rows written and the seconds it took."""
        started_at = time.perf_counter()
        for index, (row, slot) in enumerate(zip(rows, slots, strict=True)):
            view, offset = row.data, self._offset(slot)
            try:
                while view:
                    num_bytes = os.pwrite(self._fd, view, offset)
                    view, offset = view[num_bytes:], offset + num_bytes
            except OSError as error:
                logger.warning("the file of the KV tier cannot be written to: %s", error.strerror)
                return index, time.perf_counter() - started_at
        return len(slots), time.perf_counter() - started_at

    def _copy_out(self, block_ids: Sequence[int], rows: Rows, places: list[int] | slice) -> None:
        start = 0
        for layer in self._pool.layout.layers:
            caches = self._pool.read(layer, block_ids)
            for cache, num_bytes in zip(caches, self._pool.layout.cache_bytes(layer), strict=True):
                if num_bytes:
                    part = np.frombuffer(cache, np.uint8).reshape(len(block_ids), num_bytes)
                    rows[places, start : start + num_bytes] = part
                start += num_bytes

    # ---- load ----

    async def _load(
        self, load_id: int, slots: list[int], block_ids: list[int], on_loaded: Callable[[int, int], None]
    ) -> None:
        num_good, step = 0, max(1, CHUNK_BYTES // self._row_bytes)
        loop = asyncio.get_running_loop()
        try:
            async with self._turn:
                for first in range(0, len(slots), step):
                    chunk = slots[first : first + step]
                    checksums = [self._checksums.get(slot) for slot in chunk]
                    rows = await loop.run_in_executor(self._thread, self._read, chunk, checksums)
                    self._put(block_ids[first : first + len(rows)], rows)
                    num_good += len(rows)
                    if len(rows) < len(chunk):
                        break
        except Exception:
            logger.exception("blocks could not be read back")
        self._loads.pop(load_id, None)
        on_loaded(load_id, num_good)

    def _read(self, slots: Sequence[int], checksums: Sequence[int | None]) -> Rows:
        """Read slots, in the thread; return the leading rows whose checksums match."""
        rows = np.empty((len(slots), self._row_bytes), np.uint8)
        for index, (slot, checksum) in enumerate(zip(slots, checksums, strict=True)):
            row = rows[index]
            if checksum is None or not self._fetch(slot, row) or _checksum(row) != checksum:
                return rows[:index]
        return rows

    def _fetch(self, slot: int, row: Rows) -> bool:
        """Read one slot into `row`; return whether the row is complete."""
        if slot < self._num_host:
            row[:] = self._host[slot]
            return True
        view, offset = row.data, self._offset(slot)
        try:
            while view:
                if not (num_bytes := os.preadv(self._fd, [view], offset)):
                    return False
                view, offset = view[num_bytes:], offset + num_bytes
        except OSError as error:
            logger.warning("the file of the KV tier cannot be read: %s", error.strerror)
            return False
        return True

    def _put(self, block_ids: Sequence[int], rows: Rows) -> None:
        if not block_ids:
            return
        start = 0
        for layer in self._pool.layout.layers:
            caches = []
            for num_bytes in self._pool.layout.cache_bytes(layer):
                caches.append(memoryview(rows[:, start : start + num_bytes].tobytes()))
                start += num_bytes
            self._pool.write(layer, block_ids, *caches)

    def _offset(self, slot: int) -> int:
        return (slot - self._num_host) * self._row_bytes

    def _probe(self, slots: range) -> float:
        if not slots:
            return 0.0
        rows = np.zeros((len(slots), self._row_bytes), np.uint8)
        if slots.start < self._num_host:
            self._host[slots.start : slots.stop] = rows
        else:
            self._write(rows, slots)
            os.fsync(self._fd)
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)  # else the probe would measure the page cache
        checksum = _checksum(rows[0])
        started_at = time.perf_counter()
        self._read(slots, [checksum] * len(slots))
        return (time.perf_counter() - started_at) / len(slots)


def _checksum(row: Rows) -> int:
    return xxh3_64_intdigest(row.data)


def _host_rows(num_rows: int, row_bytes: int) -> Rows:
    num_bytes, available = num_rows * row_bytes, available_bytes()
    if num_bytes > available:
        raise SettingsError(
            f"--kv-host-bytes asks for {size_of(num_bytes)}, and {size_of(available)} of memory are free"
        )
    return np.empty((num_rows, row_bytes), np.uint8)


def _open_file(num_bytes: int, folder: str) -> int:
    """Open a file of num_bytes without a name, accessible only to its owner."""
    try:
        fd, path = tempfile.mkstemp(prefix="splitserve-kv-", dir=folder or None)
    except OSError as error:
        raise SettingsError(f"--kv-disk-path: no file can be made there: {error.strerror}") from error
    os.unlink(path)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        os.close(fd)
        raise SettingsError(f"--kv-disk-bytes asks for a file of {size_of(num_bytes)}: {error.strerror}") from error
    return fd
