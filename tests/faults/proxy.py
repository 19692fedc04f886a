"""A proxy on the way to one listener, over TCP or a Unix socket, which does to connections what networks do.

It stands in the data plane where a descriptor names its address, or where it has the path that a node has bound: such a
socket's file can be moved away under the node. In the fleet it is what a node dials.
"""

import asyncio
import contextlib
import math
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import Enum, auto

PIECE_BYTES = 64 * 1024
FLIPPED_BYTES = PIECE_BYTES // 2  # pieces from this size on: the middle of one lies in blocks, and not in a header
MAX_PIECES = 64  # on their way in one direction of one connection

TURN_S = 0.05  # between two connections that were held

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter
Pieces = asyncio.Queue[tuple[float, bytes]]
"""With the times when they are due; an empty one is the end."""


class End(Enum):
    """How a connection ends that the proxy ends."""

    CUT = auto()  # nothing passes any more, and nobody is told
    TRUNCATED = auto()  # closed in the middle of a piece
    RESET = auto()


@dataclass(frozen=True)
class Fault:
    """What is done to connections, from now on or from when they are made. By default nothing."""

    delay_s: float = 0.0  # each way
    bytes_per_s: float = math.inf  # of one connection, each way
    flip_every: int = 0  # so many large pieces towards the listener a bit flips in one; 0: never
    end: End | None = None
    after_bytes: int = 0  # that one connection has carried towards the listener: then it ends
    num_ends: int = 1  # connections that end, after which no other does
    num_held: int = 0  # connections that wait for each other, and then reach the listener in reverse order


class Proxy:
    """Addresses are tcp://HOST:PORT or ipc://PATH. `struck` is set when the proxy has done harm."""

    def __init__(self, back: str, fault: Fault) -> None:
        self.fault = fault
        self.address = ""
        self.num_connections = 0
        self.num_flipped = 0
        self.struck = asyncio.Event()
        self._back = back
        self._num_ended = 0
        self._num_large = 0
        self._held: list[asyncio.Event] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def listening(self, front: str = "tcp://127.0.0.1:0") -> AsyncIterator["Proxy"]:
        """Takes connections at `front` until the block is left, and then ends them all."""
        scheme, _, place = front.partition("://")
        if scheme == "ipc":
            server = await asyncio.start_unix_server(self._take, place)
            self.address = front
        else:
            host, _, port = place.rpartition(":")
            server = await asyncio.start_server(self._take, host, int(port))
            self.address = "tcp://{}:{}".format(*server.sockets[0].getsockname())
        try:
            yield self
        finally:
            server.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _take(self, reader: Reader, writer: Writer) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        self.num_connections += 1
        try:
            await self._hold()
            far_reader, far_writer = await _dial(self._back)
            try:
                await _Line(self, writer, far_writer).carry(reader, far_reader)
            finally:
                await close(far_writer)
        except OSError:  # of either end: the other one sees that it is over
            pass
        except asyncio.CancelledError:  # the proxy is closed, and asyncio's own callback wants no exception
            pass
        finally:
            await close(writer)
            self._tasks.discard(task)

    async def _hold(self) -> None:
        """Until it is this connection's turn: the last one to come goes first."""
        if len(self._held) + 1 < self.fault.num_held:
            turn = asyncio.Event()
            self._held.append(turn)
            await turn.wait()
        elif self._held:
            self.fault = Fault()
            self.struck.set()
            for number, turn in enumerate(reversed(self._held), start=1):
                asyncio.get_running_loop().call_later(number * TURN_S, turn.set)
            self._held.clear()

    def due_end(self, num_bytes: int) -> End | None:
        """For the lines' use: the end of one that has carried so much, which is counted."""
        fault = self.fault
        if fault.end is None or num_bytes < fault.after_bytes or self._num_ended >= fault.num_ends:
            return None
        self._num_ended += 1
        self.struck.set()
        return fault.end

    def maybe_flipped(self, piece: bytes) -> bytes:
        """For the lines' use: a piece as it arrives."""
        if self.fault.flip_every == 0 or len(piece) < FLIPPED_BYTES:
            return piece
        self._num_large += 1
        if self._num_large % self.fault.flip_every:
            return piece
        flipped = bytearray(piece)
        flipped[len(piece) // 2] ^= 1
        self.num_flipped += 1
        self.struck.set()
        return bytes(flipped)


class _Line:
    """One connection, from who dialled to who listens."""

    def __init__(self, proxy: Proxy, near: Writer, far: Writer) -> None:
        self._proxy = proxy
        self._near, self._far = near, far
        self._num_bytes = 0
        self._is_cut = False

    async def carry(self, near: Reader, far: Reader) -> None:
        """Returns when either end has closed, or the proxy has ended the connection and said so."""
        there, back = Pieces(MAX_PIECES), Pieces(MAX_PIECES)
        ways = [asyncio.create_task(way) for way in (self._there(there), self._back(back))]
        readers = [asyncio.create_task(self._read(*each)) for each in ((near, there), (far, back))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*ways, *readers):
                task.cancel()
            await asyncio.gather(*ways, *readers, return_exceptions=True)
        if self._is_cut:
            await asyncio.Event().wait()

    async def _there(self, pieces: Pieces) -> None:
        while piece := await self._next(pieces):
            self._num_bytes += len(piece)
            match self._proxy.due_end(self._num_bytes):
                case End.CUT:
                    self._is_cut = True
                    return
                case End.RESET:
                    _reset(self._near)
                    _reset(self._far)
                    return
                case End.TRUNCATED:
                    self._far.write(piece[: len(piece) // 2])
                    await self._far.drain()
                    return
            self._far.write(self._proxy.maybe_flipped(piece))
            await self._far.drain()

    async def _back(self, pieces: Pieces) -> None:
        while piece := await self._next(pieces):
            self._near.write(piece)
            await self._near.drain()

    async def _next(self, pieces: Pieces) -> bytes:
        """When it is due."""
        due_at, piece = await pieces.get()
        late_s = max(0.0, due_at - asyncio.get_running_loop().time())
        await asyncio.sleep(late_s + len(piece) / self._proxy.fault.bytes_per_s)
        return piece

    async def _read(self, reader: Reader, pieces: Pieces) -> None:
        piece = b"..."
        while piece:
            try:
                piece = await reader.read(PIECE_BYTES)
            except OSError:
                piece = b""
            await pieces.put((asyncio.get_running_loop().time() + self._proxy.fault.delay_s, piece))


async def close(writer: Writer) -> None:
    """Returns when the connection is closed, whatever has become of it before."""
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def _dial(address: str) -> tuple[Reader, Writer]:
    scheme, _, place = address.partition("://")
    if scheme == "ipc":
        return await asyncio.open_unix_connection(place)
    host, _, port = place.rpartition(":")
    return await asyncio.open_connection(host, int(port))


def _reset(writer: Writer) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
