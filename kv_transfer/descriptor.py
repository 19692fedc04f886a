"""Define the transfer descriptor, which names where the KV blocks of one request may be written."""

import hashlib
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import psutil

from kv_transfer.plan import Grid, KVCopy, plan_nodes
from kv_transfer.results import TransferError
from kv_transfer.wire import (
    MAX_BLOCKS,
    MAX_EPOCH,
    MAX_LAYERS,
    TRANSFER_ID_BYTES,
    check_bytes,
    check_int,
    check_seconds,
    check_text,
    pack,
    unpack,
)
from serving_core.errors import SettingsError
from serving_core.layout import DTYPE_BYTES, KVLayout, Widths
from serving_core.net.ports import before_port
from serving_core.node.prefix import NAME_BYTES

KV_TRANSPORTS = ("zmq", "torch_dist")
MAX_PORT: Final = 65535
_SCHEMES = {"zmq": ("tcp", "ipc"), "torch_dist": ("dist",)}


def endpoint_of(kv_transport: str, kv_bind: str, rank: int) -> str:
    """Return the endpoint on which one rank of a node listens for KV blocks, such as tcp://127.0.0.1:5600.

    `kv_transport` is one of KV_TRANSPORTS, `kv_bind` the value of --kv-bind. With an empty `kv_bind` the endpoint is a
    free port on loopback. Otherwise each rank gets its own port (HOST:PORT + rank) or path (PATH.rank). IPv6 addresses
    are put in brackets, and the name of a network interface is replaced with its address. Raises SettingsError if the
    endpoint belongs to another transport, or its port is missing or above MAX_PORT.
    """
    schemes = _SCHEMES[kv_transport]
    if not kv_bind:
        return f"{schemes[0]}://127.0.0.1:*"
    scheme, _, place = kv_bind.partition("://")
    if scheme not in schemes or not place:
        known = " or ".join(f"{each}://..." for each in schemes)
        raise SettingsError(f"--kv-bind {kv_bind} is no endpoint of {kv_transport}: {known}")
    if scheme == "ipc":
        return f"{kv_bind}.{rank}" if rank else kv_bind
    host, _, port = place.rpartition(":")
    host = before_port(address_of_interface(host) or host)
    if port == "*":
        return f"{scheme}://{host}:*"
    if not port.isdecimal():
        raise SettingsError(f"--kv-bind {kv_bind} has no port: a number, or * for any free one")
    number = int(port) + rank if int(port) else 0
    if number > MAX_PORT:
        raise SettingsError(f"--kv-bind {kv_bind}: rank {rank} has the port {number}, over {MAX_PORT}")
    return f"{scheme}://{host}:{number}"


def address_of_interface(name: str) -> str | None:
    """Return an address of the network interface with this name; None if it has no usable one.

    The IPv4 address comes first, then an IPv6 address that is not link-local.
    """
    entries = [entry for entry in psutil.net_if_addrs().get(name, ()) if "%" not in entry.address]
    of_family = {entry.family: entry.address for entry in reversed(entries)}
    return of_family.get(socket.AF_INET) or of_family.get(socket.AF_INET6)


def host_of(endpoint: str) -> str | None:
    """Return the host that an endpoint listens on; None for an ipc endpoint, which only this machine can reach."""
    scheme, _, place = endpoint.partition("://")
    return None if scheme == "ipc" else place.rpartition(":")[0]


def holder_address_of(kv_transport: str, kv_bind: str) -> tuple[str, int]:
    """Return the host and the port at which a node serves distributed KV, given --kv-transport and --kv-bind.

    The port is MAX_TP above the port of `kv_bind`, behind the ports of all possible ranks, or 0 (any free port) if
    `kv_bind` has no port. Raises SettingsError if `kv_bind` is no endpoint of the transport, or if the port is above
    MAX_PORT.
    """
    endpoint = endpoint_of(kv_transport, kv_bind, 0)
    host, port = host_of(endpoint), endpoint.rpartition(":")[2]
    if host is None or port in ("*", "0"):
        return host or "127.0.0.1", 0
    if (number := int(port) + MAX_TP) > MAX_PORT:
        raise SettingsError(f"--kv-bind {kv_bind}: remote KV take the port {MAX_TP} above, {number}, over {MAX_PORT}")
    return host, number


VERSION = 8  # of descriptors and of the messages in the channels; both ends must have the same version
MAX_TP = 64
MAX_RANKS = 64  # of one node, over all stages
MAX_CHANNELS = 256
MAX_TOKENS = 2**32 - 1
MAX_TTL_S = 86400.0
MAX_ADDRESS_BYTES = 256
MAX_DESCRIPTOR_BYTES = 80 * 1024
MAX_DIMENSION = 2**16  # heads, widths and block_size, each
MAX_STATE_BYTES = 2**40


@dataclass(frozen=True, slots=True)
class Channel:
    """The part of a transfer between one prefill rank and one decode rank, as the sessions at both ends need it."""

    transfer_id: bytes
    epoch: int
    address: str
    layout: KVLayout  # of the heads and layers in the channel
    num_blocks: int
    num_cached_blocks: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class ChannelEnd:
    """The receiving end of one channel. Raises TransferError if a field is invalid."""

    transfer_id: bytes  # random, so that nobody can guess the id of another transfer
    address: str  # of the decode rank, for a Dialer of the same transport

    def __post_init__(self) -> None:
        check_bytes("transfer_id", self.transfer_id, TRANSFER_ID_BYTES, TRANSFER_ID_BYTES)
        check_text("address", self.address, MAX_ADDRESS_BYTES)


@dataclass(frozen=True, slots=True)
class TransferDescriptor:
    """One transfer: layout, parallelism of both nodes, sizes, and the receiving end of each channel.

    A descriptor carries no block ids: these stay with the receivers. Raises TransferError if a field is invalid.
    """

    epoch: int  # of the attempt; unique among the transfers of a node
    layout: KVLayout  # of the whole model
    prefill_tp: int
    decode_tp: int
    num_blocks: int
    num_cached_blocks: int  # leading blocks that the receivers already hold and that are not sent
    num_tokens: int  # tokens of the request that the decode node knows; the tail carries the tokens behind them
    ttl_s: float  # counted from the credit; afterwards the receivers refuse every message
    ends: tuple[ChannelEnd, ...]  # in the order of plan_nodes
    prefill_pp: int = 1
    decode_pp: int = 1
    behind: bytes = b""  # hash of the last cached block if the sender must hold the same block; else empty
    _channels: tuple[tuple[KVCopy, Channel], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_int("epoch", self.epoch, 0, MAX_EPOCH)
        _check_layout(self.layout)
        _check_grid("prefill", self.senders, self.layout.num_layers)
        _check_grid("decode", self.receivers, self.layout.num_layers)
        check_int("num_blocks", self.num_blocks, 1, MAX_BLOCKS)
        check_int("num_cached_blocks", self.num_cached_blocks, 0, self.num_blocks)
        check_int("num_tokens", self.num_tokens, 0, MAX_TOKENS)
        check_seconds("ttl_s", self.ttl_s, MAX_TTL_S)
        check_bytes("behind", self.behind, 0, NAME_BYTES)
        copies = plan_nodes(self.senders, self.receivers, self.layout.num_kv_heads, self.layout.layers)
        num_channels = len(copies)
        if num_channels > MAX_CHANNELS:
            raise TransferError(
                f"a plan of {num_channels} channels between two nodes; at most {MAX_CHANNELS} are allowed"
            )
        if len(self.ends) != num_channels:
            raise TransferError(f"{len(self.ends)} channel ends for a plan of {num_channels} channels")
        if len({end.transfer_id for end in self.ends}) != num_channels:
            raise TransferError("two channels have the same transfer id")
        channels = tuple((copy, self._channel(copy, end)) for copy, end in zip(copies, self.ends, strict=True))
        object.__setattr__(self, "_channels", channels)

    @classmethod
    def draw(
        cls,
        *,
        epoch: int,
        layout: KVLayout,
        prefill_tp: int,
        decode_tp: int,
        addresses: Sequence[str],
        num_blocks: int,
        num_cached_blocks: int,
        ttl_s: float,
        num_tokens: int = 0,
        prefill_pp: int = 1,
        decode_pp: int = 1,
        behind: bytes = b"",
        secret: bytes = b"",
    ) -> "TransferDescriptor":
        """Return a descriptor with new random transfer ids, one for each channel.

        With `secret` the ids derive from it and the epoch: all who have it make the same descriptor of an epoch.

        `addresses` holds the address of each decode rank, in rank order. The other arguments are fields of the
        descriptor. Raises TransferError if the number of addresses differs from the number of decode ranks, or if a
        size is out of range.
        """
        senders, receivers = Grid(prefill_tp, prefill_pp), Grid(decode_tp, decode_pp)
        _check_grid("prefill", senders, layout.num_layers)
        _check_grid("decode", receivers, layout.num_layers)
        num_ranks = decode_tp * decode_pp
        if len(addresses) != num_ranks:
            raise TransferError(f"{len(addresses)} addresses for {num_ranks} decode ranks")
        copies = plan_nodes(senders, receivers, layout.num_kv_heads, layout.layers)
        ends = tuple(
            ChannelEnd(_transfer_id(secret, epoch, index), addresses[copy.destination_rank])
            for index, copy in enumerate(copies)
        )
        sizes = (prefill_tp, decode_tp, num_blocks, num_cached_blocks, num_tokens)
        return cls(epoch, layout, *sizes, float(ttl_s), ends, prefill_pp, decode_pp, behind)

    @property
    def senders(self) -> Grid:
        """Return the grid of the prefill ranks: their numbers per stage and of stages."""
        return Grid(self.prefill_tp, self.prefill_pp)

    @property
    def receivers(self) -> Grid:
        """Return the grid of the decode ranks: their numbers per stage and of stages."""
        return Grid(self.decode_tp, self.decode_pp)

    def channels_from(self, prefill_rank: int) -> list[tuple[KVCopy, Channel]]:
        """Return the channels that begin at this prefill rank, each with the copy that it makes; perhaps none."""
        return [(copy, channel) for copy, channel in self._channels if copy.source_rank == prefill_rank]

    def channels_to(self, decode_rank: int) -> list[tuple[KVCopy, Channel]]:
        """Return the channels that end at this decode rank, each with the copy that it makes; at least one."""
        return [(copy, channel) for copy, channel in self._channels if copy.destination_rank == decode_rank]

    def encode(self) -> bytes:
        """Return the descriptor as msgpack of at most MAX_DESCRIPTOR_BYTES."""
        sizes = (self.senders, self.receivers, self.num_blocks, self.num_cached_blocks, self.num_tokens)
        ends = [(end.transfer_id, end.address) for end in self.ends]
        return pack([VERSION, self.epoch, _packed_layout(self.layout), *sizes, self.behind, self.ttl_s, ends])

    @classmethod
    def decode(cls, packed: bytes) -> "TransferDescriptor":
        """Return the descriptor that `encode` packed. Raises TransferError for all other bytes."""
        match unpack(packed, MAX_DESCRIPTOR_BYTES):
            case [8, epoch, [*layout], [p_tp, p_pp], [d_tp, d_pp], blocks, cached, tokens, behind, ttl_s, [*ends]]:
                sizes = (p_tp, d_tp, blocks, cached, tokens)
                return cls(epoch, _layout(layout), *sizes, ttl_s, tuple(map(_channel_end, ends)), p_pp, d_pp, behind)
            case _:
                raise TransferError(f"not a transfer descriptor of version {VERSION}")

    def _channel(self, copy: KVCopy, end: ChannelEnd) -> Channel:
        return Channel(
            transfer_id=end.transfer_id,
            epoch=self.epoch,
            address=end.address,
            layout=self.layout.with_layers(copy.layers).with_heads(len(copy.source_heads)),
            num_blocks=self.num_blocks,
            num_cached_blocks=self.num_cached_blocks,
            ttl_s=self.ttl_s,
        )


def _transfer_id(secret: bytes, epoch: int, index: int) -> bytes:
    if not secret:
        return secrets.token_bytes(TRANSFER_ID_BYTES)
    return hashlib.blake2b(f"{epoch} {index}".encode(), digest_size=TRANSFER_ID_BYTES, key=secret).digest()


def _channel_end(fields: object) -> ChannelEnd:
    match fields:
        case [bytes(transfer_id), str(address)]:
            return ChannelEnd(transfer_id, address)
        case _:
            raise TransferError("a channel end of unknown shape")


def _packed_layout(layout: KVLayout) -> list[Any]:
    """Return the layout as a msgpack-ready list in which neighboring layers of equal widths form one run."""
    runs = [[count, *widths] for count, widths in layout.runs]
    fields = [layout.first_layer, runs, layout.num_kv_heads, layout.block_size, layout.dtype]
    return [*fields, layout.state_bytes] if layout.state_bytes else fields


def _layout(fields: list[Any]) -> KVLayout:
    """Return the layout that `_packed_layout` packed. Raises TransferError for fields of another shape."""
    match fields:
        case [first_layer, [*runs], num_kv_heads, block_size, dtype, *state] if len(state) <= 1 and state != [0]:
            return KVLayout(first_layer, _widths(runs), num_kv_heads, block_size, dtype, *state)
        case _:
            raise TransferError("a KV layout of unknown shape")


def _widths(runs: list[Any]) -> tuple[Widths, ...]:
    widths: list[Widths] = []
    for run in runs:
        match run:
            case [count, keys, values]:
                check_int("number of neighbouring layers", count, 1, MAX_LAYERS)
                widths += [Widths(keys, values)] * count
                check_int("num_layers", len(widths), 1, MAX_LAYERS)
            case _:
                raise TransferError("widths of layers of unknown shape")
    return tuple(widths)


def _check_grid(name: str, grid: Grid, num_layers: int) -> None:
    check_int(f"{name}_tp", grid.tp, 1, MAX_TP)
    check_int(f"{name}_pp", grid.pp, 1, num_layers)
    check_int(f"number of {name} ranks", grid.tp * grid.pp, 1, MAX_RANKS)


def _check_layout(layout: KVLayout) -> None:
    check_int("num_layers", layout.num_layers, 1, MAX_LAYERS)
    check_int("first_layer", layout.first_layer, 0, MAX_LAYERS - layout.num_layers)
    for widths in layout.widths:
        check_int("width of K", widths.keys, 1, MAX_DIMENSION)
        check_int("width of V", widths.values, 0, MAX_DIMENSION)
    check_int("num_kv_heads", layout.num_kv_heads, 1, MAX_DIMENSION)
    check_int("block_size", layout.block_size, 1, MAX_DIMENSION)
    check_int("state_bytes", layout.state_bytes, 0, MAX_STATE_BYTES)
    if type(layout.dtype) is not str or layout.dtype not in DTYPE_BYTES:
        raise TransferError(f"the KV dtype must be one of {', '.join(DTYPE_BYTES)}")
