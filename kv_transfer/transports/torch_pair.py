"""Make a process group for one pair of ranks, and move frames through it in threads.

The group is not the default group and has no store of its own: the signaling stream carries what its ends tell each
other, so no port is opened. Gloo moves host memory, NCCL moves memory between devices, and CUDA IPC between processes
on one device (cuda_ipc).

A group moves frames in one direction only, and on a device in its own stream. Two nodes that send to each other have
two groups: on one stream, the receive of each end could be queued behind its own send, which waits for the receive of
the other end.
"""

import asyncio
import atexit
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist

from kv_transfer.results import TransferError
from kv_transfer.transports import dist_stream
from kv_transfer.transports.cuda_ipc import DeviceGroup, are_on_one_device, wait_for_device
from serving_core.errors import SettingsError

logger = logging.getLogger(__name__)

RECEIVER_RANK, SENDER_RANK = 0, 1
MAX_KEYS = 64
EXIT_S = 5.0  # longer than messages in flight take, except for NCCL's connect
IDLE_S = 0.5  # after which an idle thread checks whether its process is ending
NCCL_TIMEOUT_S = 30.0  # to initialize NCCL and the device
NCCL_ERRORS, CLEAN_UP_ONLY = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"  # torch reads them when a group is made
TORCH_ERRORS = (RuntimeError, ValueError, MemoryError, TransferError)  # TransferError comes from the relayed store

Relay = Callable[[str, bytes], None]
"""Carries a key and its value to the store at the other end. Called on the event loop."""


def check_device(device: torch.device) -> None:
    """Raise SettingsError unless torch.distributed can move memory of this device: a CPU, or CUDA with NCCL."""
    if device.type not in ("cpu", "cuda"):
        raise SettingsError(f"torch.distributed moves KV blocks of cpu and cuda devices, not of {device.type}")
    if device.type == "cuda" and not dist.is_nccl_available():
        raise SettingsError("this torch has no NCCL, which moves the KV blocks of cuda devices")


class _Work(Protocol):
    """Define the used part of torch.distributed's Work."""

    def wait(self, timeout: timedelta, /) -> bool: ...


class _Group(Protocol):
    """Define the used part of ProcessGroupGloo, ProcessGroupNCCL and DeviceGroup."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> _Work: ...

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int, /) -> _Work: ...

    def abort(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Job:
    """Hold one message: its frames if they are sent, else their sizes."""

    sizes: Sequence[int]
    frames: list[torch.Tensor]
    done: "asyncio.Future[list[torch.Tensor] | None]"
    written: torch.cuda.Event | None = None  # recorded when the device has the frames to be sent
    works: list[_Work] = field(default_factory=list)


class Pair:
    """One end of a process group of two ranks, through which frames go from the sender to the receiver.

    Created and used on the event loop, which its threads never block. The caller bounds what is queued.
    """

    def __init__(self, rank: int, device: torch.device, local_ip: str, relay: Relay) -> None:
        """Begin to make the group, in a thread; the other end must do the same.

        `rank` is SENDER_RANK or RECEIVER_RANK, local_ip the address that gloo uses, and `relay` carries the group's
        values to the other end.
        """
        self._rank = rank
        self._device = device
        self._stream = _own_stream(device)
        self._reader = torch.cuda.current_stream(device) if device.type == "cuda" else None  # reads frames
        self._local_ip = local_ip
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = self._loop.create_future()  # completes when the group works
        self.ended: asyncio.Future[None] = self._loop.create_future()  # the group is gone, and no frame is used
        self.make_timeout_s = NCCL_TIMEOUT_S if device.type == "cuda" else 2 * dist_stream.TIMEOUT_S
        self._store = _RelayedStore(lambda key, value: self._tell(relay, key, value), self.make_timeout_s)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()  # jobs to begin; None wakes the thread
        self._begun: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()  # jobs to await; None ends the thread
        self._open: deque[_Job] = deque()  # jobs that are not done, in order
        self._is_stopping = False
        # While NCCL connects, only the other end unblocks a thread. A process must be able to end, but waits a
        # while: a thread that works while Python shuts down would abort the process.
        self._thread = threading.Thread(target=self._run, name="kv pair", daemon=device.type == "cuda")
        if self._thread.daemon:
            atexit.register(self._end_with_process)
        self._thread.start()

    def put(self, key: str, value: bytes) -> None:
        """Store a value that the other end relayed. Raises TransferError above MAX_KEYS values."""
        self._store.put(key, value)

    def send(self, frames: Sequence[torch.Tensor]) -> "asyncio.Future[list[torch.Tensor] | None]":
        """Queue 1-D uint8 frames as of the current stream; return a future that completes when they may be reused.

        Its value means nothing.
        """
        job = _Job([len(frame) for frame in frames], list(frames), self._loop.create_future())
        if self._stream is not None:
            job.written = torch.cuda.current_stream(self._device).record_event()
        return self._queue(job)

    def receive(self, sizes: Sequence[int]) -> "asyncio.Future[list[torch.Tensor] | None]":
        """Queue the receipt of frames of these sizes; return a future of the frames, views of one new tensor.

        The future gives None if the pair broke.
        """
        return self._queue(_Job(sizes, [], self._loop.create_future()))

    def stop(self) -> None:
        """Drop queued messages, and end the threads once messages in flight have arrived or failed."""
        self._is_stopping = True
        self._store.close()
        self._jobs.put(None)

    def _end_with_process(self) -> None:
        self.stop()
        self._thread.join(EXIT_S)

    def _queue(self, job: _Job) -> "asyncio.Future[list[torch.Tensor] | None]":
        if self.ended.done():
            job.done.set_result(None)
        else:
            self._open.append(job)
            self._jobs.put(job)
        return job.done

    def _finish(self) -> None:
        """Complete all futures; the thread calls this last."""
        self._thread.join()
        atexit.unregister(self._end_with_process)
        for job in self._open:
            job.frames.clear()
            if not job.done.done():
                job.done.set_result(None)
        self._open.clear()
        self.ended.set_result(None)

    def _resolve(self, job: _Job) -> None:
        """Complete the oldest job."""
        assert self._open.popleft() is job, "messages overtook each other"
        if not job.done.done():
            job.done.set_result(job.frames if self._rank == RECEIVER_RANK else [])

    def _set_ready(self) -> None:
        if not self.ready.done():
            self.ready.set_result(None)

    # ---- in the threads ----

    def _tell(self, callback: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _run(self) -> None:
        try:
            self._serve()
        except TORCH_ERRORS as error:
            self._break(error)
        finally:
            self._tell(self._finish)

    def _break(self, error: Exception) -> None:
        if not self._is_stopping:
            logger.warning("the group of a pair of ranks broke: %s", str(error).splitlines()[0])
        self._is_stopping = True
        self._jobs.put(None)

    def _serve(self) -> None:
        self._choose_device()
        group = self._make_group()
        waiter = threading.Thread(target=self._end_all, name="kv pair waits")
        waiter.start()
        try:
            self._prove(group)
            self._tell(self._set_ready)
            self._begin_all(group)
        finally:
            self._begun.put(None)
            waiter.join()
            for job in list(self._open):
                job.works.clear()  # works keep the gloo group alive, and the group the frames
            group.abort()  # ends NCCL's work on the device

    def _choose_device(self) -> None:
        if self._stream is not None:  # both are per thread
            torch.cuda.set_device(self._device)
            torch.cuda.set_stream(self._stream)

    def _make_group(self) -> _Group:
        if self._device.type == "cuda":
            if are_on_one_device(self._store, self._rank, self._device):
                return DeviceGroup(self._store, self._device, is_sender=self._rank == SENDER_RANK)
            nccl_options = dist.ProcessGroupNCCL.Options()
            nccl_options._timeout = timedelta(seconds=self.make_timeout_s)
            with _errors_end_groups():
                return cast("_Group", dist.ProcessGroupNCCL(self._store, self._rank, 2, nccl_options))
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the only way to name an interface
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._local_ip, lazy_init=False)]
        options._threads = 1
        options._timeout = timedelta(seconds=dist_stream.TIMEOUT_S)
        return cast("_Group", dist.ProcessGroupGloo(self._store, self._rank, 2, options))

    def _prove(self, group: _Group) -> None:
        """Move one byte: NCCL does not connect before."""
        probe = torch.zeros(1, dtype=torch.uint8, device=self._device)
        self._wait([self._post(group, probe, 0)], self.make_timeout_s)

    def _begin_all(self, group: _Group) -> None:
        tag = 0
        while (job := self._next()) is not None:
            tag = tag % (2**31 - 1) + 1
            self._begin(group, job, tag)
            self._begun.put(job)
            del job  # the thread must not hold released frames

    def _next(self) -> _Job | None:
        """Return the next job, or None if none is to be begun any more."""
        while not self._is_stopping and threading.main_thread().is_alive():
            with suppress(queue.Empty):
                return self._jobs.get(timeout=IDLE_S)
        return None

    def _end_all(self) -> None:
        """Wait for jobs in a separate thread, so that the next message begins meanwhile."""
        self._choose_device()
        try:
            while (job := self._begun.get()) is not None:
                self._end(job)
                del job
        except TORCH_ERRORS as error:
            self._break(error)

    def _begin(self, group: _Group, job: _Job, tag: int) -> None:
        if self._rank == RECEIVER_RANK:
            whole = torch.empty(sum(job.sizes), dtype=torch.uint8, device=self._device)
            if self._reader is not None:
                whole.record_stream(self._reader)
            job.frames.extend(torch.split(whole, list(job.sizes)))
        elif job.written is not None:
            job.written.wait(self._stream)
        job.works.extend(self._post(group, frame, tag) for frame in job.frames if len(frame))

    def _end(self, job: _Job) -> None:
        self._wait(job.works, dist_stream.TIMEOUT_S)
        job.works.clear()
        if self._rank == SENDER_RANK:
            job.frames.clear()
        self._tell(self._resolve, job)

    def _post(self, group: _Group, frame: torch.Tensor, tag: int) -> _Work:
        if self._rank == RECEIVER_RANK:
            return group.recv([frame], SENDER_RANK, tag)
        return group.send([frame], RECEIVER_RANK, tag)

    def _wait(self, works: Sequence[_Work], timeout_s: float) -> None:
        for work in works:
            work.wait(timedelta(seconds=timeout_s))
        if self._device.type == "cuda":  # on CUDA a wait for works only orders streams
            wait_for_device(self._device, timeout_s)


class _RelayedStore(dist.Store):  # type: ignore[name-defined, misc]  # known at run time only
    """Share values between both ends: a value set at one end is sent to the other. Torch calls it from its threads.

    torch's own stores share through a port or a file. Groups of two set, get, check, wait for and clone; whatever else
    torch might ask for raises RuntimeError, which ends the pair.
    """

    def __init__(self, tell: Relay, timeout_s: float) -> None:
        super().__init__()
        self._tell = tell
        self._timeout_s = timeout_s
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, key: str, value: bytes) -> None:
        """Store a value. Raises TransferError if there are too many keys."""
        with self._changed:
            self._values[key] = value
            if len(self._values) > MAX_KEYS:
                raise TransferError(f"more than {MAX_KEYS} keys to make one group")
            self._changed.notify_all()

    def close(self) -> None:
        """Wake all waits."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def set(self, key: str, value: bytes) -> None:
        self.put(key, value)
        self._tell(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def clone(self) -> "_RelayedStore":
        return self

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self.check(keys), self._timeout_s)
            if not self.check(keys):
                raise TransferError("the other end of a pair did not make its group")


@contextmanager
def _errors_end_groups() -> Iterator[None]:
    """Let an NCCL group made in the context end only itself if its other end dies.

    By torch's default the whole process ends, which is right only for the ranks of one node.
    """
    before = os.environ.get(NCCL_ERRORS)
    os.environ[NCCL_ERRORS] = CLEAN_UP_ONLY
    try:
        yield
    finally:
        if before is None:
            del os.environ[NCCL_ERRORS]
        else:
            os.environ[NCCL_ERRORS] = before


def _own_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
