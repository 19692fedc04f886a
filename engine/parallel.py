"""Communicate between the ranks of one node: sums and gathers, over torch.distributed or within a single rank; and
divide the residual stream over ranks (sequence parallelism).

All ranks call the same methods in the same order with tensors of the same shape. A call raises RankLost if a peer is
gone or does not answer within the group's timeout (with NCCL it may end the process); afterwards the group cannot be
used.
"""

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from typing import Final, ParamSpec, Protocol, TypeVar

import psutil
import torch
import torch.distributed.nn.functional  # here: its defaults bind the group that exists when torch.compile imports it
from torch import distributed
from torch.distributed import ProcessGroup, Store, TCPStore  # type: ignore[attr-defined]
from torch.nn import functional

from engine.forward_batch import ForwardBatch
from engine.native.shared_sums import SharedSums, share
from serving_core.errors import RankLost, SettingsError
from serving_core.node.needs import MOST_INVARIANT_RANKS
from serving_core.sharding import ranks_text, share_of

MOST_EXCHANGED_BYTES: Final = 16 * 1024
MOST_SAID_BYTES: Final = 2000  # of one rank's failure message
LENGTH_BYTES: Final = 4
LEADER: Final = 0

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class RankGroup(Protocol):
    """The ranks of a node, or of one of its stages, including this process."""

    @property
    def rank(self) -> int:
        """Return this process's rank, from 0 (the leader) to size - 1."""

    @property
    def size(self) -> int:
        """Return the number of ranks."""

    @property
    def adds_alike(self) -> bool:
        """Return whether the bits of a summed element do not depend on the other elements of the same call."""

    @property
    def shared(self) -> SharedSums | None:
        """Return the memory through which the ranks sum; None for a single rank, or without shared memory."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace the tensor, in place and on every rank, by its elementwise sum over the ranks."""

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor [T, size] over the ranks, in rank order; return this rank's rows of the sum.

        Those are the rows share_of(T, rank, size); no rank's may be empty. The input may be overwritten.
        """

    def all_gather(self, local: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Return, on every rank, a tensor of num_rows rows: the `local` rows of all ranks, in rank order.

        The rows of each rank are share_of(num_rows, rank, size).
        """

    def gather_columns(self, local: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        """Return the ranks' `local` tensors [rows, widths[rank]] side by side on rank 0; None on the others."""

    def exchange(self, data: bytes) -> list[bytes]:
        """Send `data` to every rank; return the bytes of each rank, in rank order.

        Raises ValueError above MOST_EXCHANGED_BYTES.
        """

    def close(self) -> None:
        """Leave the group. Call before the process ends."""


def needs_peers(call: Callable[P, R]) -> Callable[P, R]:
    """Decorate `call`, which talks to other ranks, so that it raises RankLost where torch raises RuntimeError.

    torch.OutOfMemoryError stays as it is: it is an error of this rank.
    """

    @wraps(call)
    def told(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise  # an error of this rank
        except RuntimeError as error:
            raise RankLost(str(error)) from error

    return told


class _Alone:
    """A group of one rank."""

    rank = LEADER
    size = 1
    adds_alike = True
    shared = None

    def all_reduce(self, tensor: torch.Tensor) -> None:
        pass

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, local: torch.Tensor, num_rows: int) -> torch.Tensor:
        return local

    def gather_columns(self, local: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        return local

    def exchange(self, data: bytes) -> list[bytes]:
        return [_bounded(data)]

    def close(self) -> None:
        pass


class _Joined:
    """A process group of torch.distributed, by default of all ranks."""

    def __init__(
        self, rank: int, size: int, device: torch.device, timeout: timedelta, group: ProcessGroup | None = None
    ) -> None:
        """Create the group's end. Call on all of its ranks."""
        self.rank = rank
        self.size = size
        self._device = device
        self._timeout = timeout
        self._group = group
        self._stages: list[_Joined] = []
        self._shared = share(self, timeout.total_seconds()) if device.type == "cpu" else None

    @property
    def shared(self) -> SharedSums | None:
        return self._shared

    @property
    def adds_alike(self) -> bool:
        return self._shared is not None or self.size <= MOST_INVARIANT_RANKS

    @needs_peers
    def all_reduce(self, tensor: torch.Tensor) -> None:
        if self._shared is not None and self._shared.takes(tensor):
            self._shared.all_reduce(tensor)
        else:
            distributed.all_reduce(tensor, group=self._group)

    @needs_peers
    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._shared is not None and self._shared.takes(tensor):
            return self._shared.reduce_scatter(tensor, share_of(len(tensor), self.rank, self.size))
        given = torch.split(tensor, self._shares(len(tensor)))
        parts = [given[rank] if rank == self.rank else torch.empty_like(given[self.rank]) for rank in range(self.size)]
        self._swap(given, parts)
        # In rank order, and into new memory, so that the input can be freed.
        total, other = (parts[1], parts[0]) if self.rank == LEADER else (parts[0], parts[1])
        for part in (other, *parts[2:]):
            total += part
        return total

    @needs_peers
    def all_gather(self, local: torch.Tensor, num_rows: int) -> torch.Tensor:
        rows = local.new_empty(num_rows, local.shape[1])
        if self._shared is not None and local.is_contiguous():
            row_bytes = rows.element_size() * rows.shape[1]
            self._shared.gather(local, [row_bytes * count for count in self._shares(num_rows)], rows)
            return rows
        parts = torch.split(rows, self._shares(num_rows))
        parts[self.rank].copy_(local)
        self._swap([local] * self.size, parts)
        return rows

    def _shares(self, num_rows: int) -> list[int]:
        return [len(share_of(num_rows, rank, self.size)) for rank in range(self.size)]

    def _swap(self, given: Sequence[torch.Tensor], taken: Sequence[torch.Tensor]) -> None:
        """Send each other rank its tensor of `given`, and receive that rank's into `taken`.

        Collectives of the backends require equal shares, and gloo's reduce_scatter sums all rows on every rank.
        """
        both = ((distributed.isend, given), (distributed.irecv, taken))
        operations = [
            distributed.P2POp(operation, tensors[peer], group=self._group, group_peer=peer)
            for peer in range(self.size)
            if peer != self.rank
            for operation, tensors in both
        ]
        for work in distributed.batch_isend_irecv(operations):
            work.wait()

    @needs_peers
    def gather_columns(self, local: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        widest, num_rows = max(widths), local.shape[0]
        if num_rows == 0:
            return local.new_empty(0, sum(widths)) if self.rank == LEADER else None
        if self._shared is not None:
            return self._gather_shared(self._shared, local.contiguous(), widths)
        padded = functional.pad(local, (0, widest - local.shape[1])).contiguous()
        if self.rank != LEADER:
            distributed.gather(padded, group=self._group, group_dst=LEADER)
            return None
        parts = list(padded.new_empty(self.size, num_rows, widest))
        distributed.gather(padded, parts, group=self._group, group_dst=LEADER)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def _gather_shared(self, shared: SharedSums, local: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        counts = [local.shape[0] * width for width in widths]
        gathered = local.new_empty(sum(counts)) if self.rank == LEADER else None
        shared.gather(local, [count * local.element_size() for count in counts], gathered)
        if gathered is None:
            return None
        return torch.cat(
            [part.view(-1, width) for part, width in zip(torch.split(gathered, counts), widths, strict=True)], 1
        )

    @needs_peers
    def exchange(self, data: bytes) -> list[bytes]:
        framed = len(_bounded(data)).to_bytes(LENGTH_BYTES, "little") + data.ljust(MOST_EXCHANGED_BYTES, b"\0")
        ours = torch.tensor(list(framed), dtype=torch.uint8, device="cpu")  # by gloo, since NCCL may have failed
        given = list(ours.new_empty(self.size, len(framed)))
        distributed.all_gather(given, ours, group=self._group)
        return [_unframed(bytes(part.tolist())) for part in given]

    def stage(self, num_stages: int) -> RankGroup:
        """Return the group of this rank's stage, as stage_group does."""
        tp_size = self.size // num_stages
        if tp_size == 1:
            return alone()
        stages = [list(range(first, first + tp_size)) for first in range(0, self.size, tp_size)]
        # Every rank creates all groups
        groups = [distributed.new_group(ranks, timeout=self._timeout) for ranks in stages]
        own = groups[self.rank // tp_size]
        self._stages.append(_Joined(self.rank % tp_size, tp_size, self._device, self._timeout, own))
        return self._stages[-1]

    def close(self) -> None:
        for group in (self, *self._stages):
            if group._shared is not None:
                group._shared.close()
            group._group = None  # the group would outlive this object, with its threads
        distributed.destroy_process_group()


def on_all_ranks(
    group: RankGroup, failure: type[Exception], make: Callable[[], T], let_go: Callable[[T], None] | None = None
) -> T:
    """Call `make` on every rank and return its result; if it raises `failure` on one rank, raise `failure` on all.

    The error has the message of the first rank that failed. Ranks where `make` succeeded pass its result to `let_go`
    first. Other exceptions are raised on their rank alone.
    """
    said, made = b"", None
    try:
        made = make()
    except failure as error:
        if group.size == 1:
            raise
        said = (str(error) or type(error).__name__).encode()[:MOST_SAID_BYTES]
    if sentences := [each.decode(errors="replace") for each in group.exchange(said) if each]:
        if made is not None and let_go is not None:
            let_go(made)
        raise failure(sentences[0])
    assert made is not None
    return made


def alone() -> RankGroup:
    """Return a group of one rank: sums and gathers return their input."""
    return _Alone()


def stage_group(node: RankGroup, num_stages: int) -> RankGroup:
    """Return the group of the ranks that compute the same pipeline stage as this rank.

    The ranks of `node` are numbered stage by stage. Call on all of them; there must be more than one. The group is
    closed with the node's group.
    """
    assert isinstance(node, _Joined), "one rank has no stages"
    return node.stage(num_stages)


def choose_device(name: str) -> torch.device:
    """Return the device that --device names: `auto` (CUDA if there is any), `cpu` or `cuda`.

    LOCAL_RANK picks among several CUDA devices. Raises SettingsError if the device is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SettingsError("--device cuda: there is no CUDA device here")
    local_rank = _number(os.environ, "LOCAL_RANK", 0)
    if local_rank >= torch.cuda.device_count():
        raise SettingsError(f"LOCAL_RANK is {local_rank}, and there are {torch.cuda.device_count()} CUDA devices here")
    return torch.device("cuda", local_rank)


def join(device: torch.device, tp_size: int, timeout_s: float, pp_size: int = 1) -> RankGroup:
    """Join the torch.distributed group of this node's ranks; return when all ranks have joined.

    The group has pp_size stages of tp_size ranks. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe it, as
    torchrun sets them; a group of one rank needs none. timeout_s bounds the join and every later call. Raises
    SettingsError if the variables are missing or contradict the sizes, or if the ranks do not meet in time.
    """
    world_size = _number(os.environ, "WORLD_SIZE", 1)
    if world_size != tp_size * pp_size:
        raise SettingsError(f"WORLD_SIZE is {world_size}, and {ranks_text(tp_size, pp_size)}")
    if world_size == 1:
        return alone()
    rank = _number(os.environ, "RANK")
    if rank >= world_size:
        raise SettingsError(f"RANK is {rank}, and WORLD_SIZE is {world_size}")
    address, port = os.environ.get("MASTER_ADDR", ""), _number(os.environ, "MASTER_PORT")
    if not address:
        raise SettingsError("MASTER_ADDR is '', and must be the address of rank 0")
    timeout = timedelta(seconds=timeout_s)
    try:
        _stay_on_the_way_to(address, port)
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=_store(address, port, rank, world_size, timeout),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise SettingsError(f"rank {rank} did not meet the other ranks at {address}:{port}: {error}") from error
    return _Joined(rank, world_size, device, timeout)


def _store(address: str, port: int, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return the store through which the ranks meet. Rank 0 serves it, at that address only, unless torchrun already
    does.
    """
    if rank != LEADER or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return TCPStore(address, port, world_size, False, timeout)
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((address, port), family=family)
    return TCPStore(
        address, port, world_size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _stay_on_the_way_to(address: str, port: int) -> None:
    """Make gloo and NCCL listen on the interface that leads to rank 0 (loopback if rank 0 is on this machine)."""
    family, kind, protocol, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)
        our_address = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(our_address == known.address for known in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = environment.get(name)
    if value is None and default is not None:
        return default
    if value is None or not value.isdecimal():
        raise SettingsError(f"{name} is {value!r}, and must be a whole number")
    return int(value)


def _bounded(data: bytes) -> bytes:
    if len(data) > MOST_EXCHANGED_BYTES:
        raise ValueError(f"{len(data)} bytes to exchange, and {MOST_EXCHANGED_BYTES} are the most")
    return data


def _unframed(framed: bytes) -> bytes:
    length = int.from_bytes(framed[:LENGTH_BYTES], "little")
    return framed[LENGTH_BYTES : LENGTH_BYTES + length]


@dataclass(frozen=True, slots=True)
class Residual:
    """The residual stream of one pass: whole on every rank or, divided, a part of its rows on each (arXiv 2205.05198).

    The sums of a row and their dtype are the same either way.
    """

    group: RankGroup
    num_rows: int
    is_divided: bool

    @property
    def own(self) -> range:
        """Return the numbers of the rows that this rank holds: all of them unless the stream is divided."""
        whole = range(self.num_rows)
        return share_of(self.num_rows, self.group.rank, self.group.size) if self.is_divided else whole

    def summed(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum `partial` [T, E] over the ranks; return the rows of the sum that this rank holds.

        `partial` must not be used afterwards.
        """
        if self.is_divided:
            return self.group.reduce_scatter(partial)
        self.group.all_reduce(partial)
        return partial

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """Return all rows [T, E] on every rank, given this rank's own rows x."""
        return self.group.all_gather(x, self.num_rows) if self.is_divided else x

    def kept(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of x [T, E] that this rank holds: a copy if the stream is divided, else x."""
        return x[self.own.start : self.own.stop].clone() if self.is_divided else x

    def picked(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows [S, E] whose numbers are `rows` on every rank, given this rank's own rows x."""
        if not self.is_divided:
            return x.index_select(0, rows)
        at = rows - self.own.start
        elsewhere = (at < 0) | (at >= len(self.own))
        picked = x.index_select(0, at.masked_fill_(elsewhere, 0)).masked_fill_(elsewhere.unsqueeze(1), 0)
        self.group.all_reduce(picked)
        return picked


def residual_of(batch: ForwardBatch, group: RankGroup, min_tokens: int) -> Residual:
    """Return the residual stream of a batch, divided over the group's ranks or whole.

    It is divided if there are several ranks and the batch has prefill, at least min_tokens tokens and a row for each
    rank. min_tokens 0 never divides.
    """
    num_rows = len(batch.token_ids)
    is_large = 0 < min_tokens <= num_rows and num_rows >= group.size
    return Residual(group, num_rows, group.size > 1 and is_large and batch.longest_query > 1)
