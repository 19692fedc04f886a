"""Carry the signaling of the torch.distributed transport: addresses, and small bounded messages over TCP.

The token is a random secret of one Listener. It travels in descriptors, so that only their holders complete the
handshake.

    dialer to listener     the greeting     PROTOCOL and the listener's token; the reply is PROTOCOL
                           MESSAGE          sizes of frames that go through the pair's group, and a header
    listener to dialer     REPLY            a header
    either way             KEY              a value that the other end's group waits for while it is made

Each message but the greeting is a kind (one byte), a length (four bytes, big-endian), and the body.
"""

import asyncio
import hmac
import ipaddress
import re
import secrets
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from kv_transfer.descriptor import MAX_PORT, address_of_interface
from kv_transfer.results import TransferError
from kv_transfer.transports.transport import MAX_FRAMES
from kv_transfer.wire import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES
from serving_core.errors import SettingsError
from serving_core.net.ports import before_port

TOKEN_BYTES = 16

_BIND = re.compile(r"dist://(?:\[(?P<v6>[^\[\]/]+)\]|(?P<host>[^\[\]/:]+)):(?P<port>\*|\d{1,5})")
_DIAL = re.compile(r"dist://(?:\[(?P<v6>[^\[\]/]+)\]|(?P<host>[^\[\]/:]+)):(?P<port>\d{1,5})/(?P<token>[0-9a-f]{32})")


@dataclass(frozen=True, slots=True)
class DistAddress:
    """The address of one Listener of the torch.distributed transport: IP address, port and token."""

    ip: str
    port: int
    token: bytes

    def __str__(self) -> str:
        return f"dist://{before_port(self.ip)}:{self.port}/{self.token.hex()}"

    @classmethod
    def parse(cls, text: str) -> "DistAddress":
        """Return the address that `str` printed. Raises TransferError for all other text."""
        match = _DIAL.fullmatch(text)
        if match is None or not 1 <= int(match["port"]) <= MAX_PORT:
            raise TransferError("the descriptor's address cannot be dialled")
        ip = match["v6"] or match["host"]
        try:
            ipaddress.ip_address(ip)
        except ValueError as error:
            raise TransferError("the descriptor's address cannot be dialled") from error
        return cls(ip, int(match["port"]), bytes.fromhex(match["token"]))


def listen(bind: str) -> tuple[socket.socket, DistAddress]:
    """Listen on the endpoint `bind`, dist://HOST:PORT; return the socket and its address, with a new token.

    HOST is an address, a name or an interface; PORT may be * for any free one. The socket is non-blocking. Raises
    SettingsError if the endpoint cannot be used.
    """
    match = _BIND.fullmatch(bind)
    if match is None:
        raise SettingsError(f"cannot listen for KV blocks on {bind}: it must be dist://HOST:PORT")
    try:
        family, ip = _resolve(match["v6"] or match["host"])
        if ipaddress.ip_address(ip).is_unspecified:
            raise SettingsError(f"{bind} names no host that senders could dial: give an address or an interface")
        return _listen(family, ip, 0 if match["port"] == "*" else int(match["port"]))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SettingsError(f"cannot listen for KV blocks on {bind}: {reason}") from error


def _listen(family: socket.AddressFamily, ip: str, port: int) -> tuple[socket.socket, DistAddress]:
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((ip, port))
        listening.listen()
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    return listening, DistAddress(ip, listening.getsockname()[1], secrets.token_bytes(TOKEN_BYTES))


def _resolve(host: str) -> tuple[socket.AddressFamily, str]:
    if host == "*":
        return socket.AF_INET, "0.0.0.0"
    families = (socket.AF_INET, socket.AF_INET6)
    found = socket.getaddrinfo(address_of_interface(host) or host, None, type=socket.SOCK_STREAM)
    by_family = {family: str(place[0]) for family, _, _, _, place in reversed(found)}
    family = next(family for family in families if family in by_family)
    return family, by_family[family]


PROTOCOL = b"SplitServe dist 1\n"
TIMEOUT_S = 3.0  # for everything that a live peer does immediately
HANDSHAKE_TIMEOUT_S = 2.0
MAX_KEY_BYTES = 256
MAX_VALUE_BYTES = 4096
MAX_BODY_BYTES = 2 * MAX_HEADER_BYTES  # larger than MAX_HEADER_BYTES: the receiver refuses long headers itself
MAX_WAITING_BYTES = 2**20  # unread replies

_PREFIX = struct.Struct(">BI")


class Kind(IntEnum):
    """The kinds of messages that follow the greeting."""

    MESSAGE = 1
    REPLY = 2
    KEY = 3


class Stream:
    """One end of a signaling stream over TCP, which carries bounded messages.

    Methods raise OSError, TimeoutError, EOFError or TransferError when the stream breaks.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        opened: socket.socket = writer.get_extra_info("socket")
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # detects a silently cut link
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)  # after about half a minute
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)

    @classmethod
    async def dial(cls, address: DistAddress) -> "Stream":
        """Connect to a Listener, show its token, and return the stream once it has accepted."""
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection(address.ip, address.port)
            try:
                writer.write(PROTOCOL + address.token)
                if await reader.readexactly(len(PROTOCOL)) != PROTOCOL:
                    raise TransferError("the receiver speaks another protocol")
                return cls(reader, writer)
            except BaseException:
                writer.transport.abort()
                raise

    @classmethod
    async def take(cls, accepted: socket.socket, token: bytes) -> "Stream":
        """Check the greeting on an accepted socket, reply to it, and return the Listener's end of the stream.

        Raises TransferError if the greeting lacks this token.
        """
        reader, writer = await asyncio.open_connection(sock=accepted)
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                greeting = await reader.readexactly(len(PROTOCOL) + TOKEN_BYTES)
            if not hmac.compare_digest(greeting, PROTOCOL + token):
                raise TransferError("a greeting that makes no sense, or of somebody without a descriptor")
            writer.write(PROTOCOL)
            return cls(reader, writer)
        except BaseException:
            writer.transport.abort()
            raise

    @property
    def local_ip(self) -> str:
        """Return this end's IP address."""
        return str(self._writer.get_extra_info("sockname")[0])

    @property
    def is_clogged(self) -> bool:
        """Return whether more than MAX_WAITING_BYTES are queued that the other end has not read."""
        return self._writer.transport.get_write_buffer_size() > MAX_WAITING_BYTES

    async def read(self) -> tuple[int, bytes]:
        """Return the kind and the body of the next message; waits for it without limit."""
        kind, num_bytes = _PREFIX.unpack(await self._reader.readexactly(_PREFIX.size))
        if num_bytes > MAX_BODY_BYTES:
            raise TransferError(f"{num_bytes} bytes were announced; at most {MAX_BODY_BYTES} are taken")
        async with asyncio.timeout(TIMEOUT_S):
            return kind, await self._reader.readexactly(num_bytes)

    def write(self, kind: Kind, *parts: bytes) -> None:
        """Queue a message whose body is the parts, concatenated; it is lost if the stream is broken."""
        if not self._writer.is_closing():
            self._writer.write(b"".join([_PREFIX.pack(kind, sum(map(len, parts))), *parts]))

    async def drain(self) -> None:
        """Wait until the other end has read enough that little is queued.

        Raises TimeoutError after TIMEOUT_S seconds, and OSError when the stream breaks.
        """
        async with asyncio.timeout(TIMEOUT_S):
            await self._writer.drain()

    def close(self) -> None:
        """Drop queued messages and close the connection."""
        self._writer.transport.abort()


def pack_sizes(sizes: Sequence[int]) -> bytes:
    """Return the sizes of frames, in bytes, as they precede the header in the body of a MESSAGE."""
    return struct.pack(f">B{len(sizes)}I", len(sizes), *sizes)


def unpack_message(body: bytes) -> tuple[list[int], memoryview]:
    """Return the frame sizes and the header in the body of a MESSAGE. Raises TransferError above a limit."""
    num_frames = body[0] if body else 0
    start = 1 + 4 * num_frames
    if not body or num_frames > MAX_FRAMES or len(body) < start:
        raise TransferError(f"a message of {num_frames} frames in {len(body)} bytes")
    sizes = [*struct.unpack_from(f">{num_frames}I", body, 1)]
    if sum(sizes) > MAX_PAYLOAD_BYTES:
        raise TransferError(f"frames of {sum(sizes)} bytes were announced; at most {MAX_PAYLOAD_BYTES} are taken")
    return sizes, memoryview(body)[start:]


def pack_key(key: str, value: bytes) -> bytes:
    """Return the body of a KEY message with this key and value."""
    return key.encode() + b"\0" + value


def unpack_key(body: bytes) -> tuple[str, bytes]:
    """Return the key and the value in the body of a KEY message. Raises TransferError above a limit."""
    key, separator, value = body.partition(b"\0")
    if not separator or len(key) > MAX_KEY_BYTES or len(value) > MAX_VALUE_BYTES or not key.isascii():
        raise TransferError("a key that makes no sense")
    return key.decode(), value
