"""Clients without a key that send gRPC ports as much as they can, frame by frame: what no client library does.

A flood's connections begin again whenever they are cut off.
"""

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Iterator

from hpack import Encoder

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING, CONTINUATION = 0, 1, 2, 3, 4, 6, 9
END_STREAM, END_HEADERS = 1, 4
GENERATE, CHECK, ATTACH = (
    "/splitserve.v1.Inference/Generate",
    "/grpc.health.v1.Health/Check",
    "/splitserve.v1.Fleet/Attach",
)
MANY = 200  # of what is sent at once
CUT_OFF_S = 0.05  # of a look at connections that take nothing


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame of HTTP/2: RFC 9113, 4.1."""
    return struct.pack("!I", len(payload))[1:] + struct.pack("!BBI", kind, flags, stream) + payload


def head(path: str, *others: tuple[str, str]) -> bytes:
    """The head of a gRPC call, which a decoder reads at any time."""
    usual = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost")]
    grpc = [("te", "trailers"), ("content-type", "application/grpc")]
    return Encoder().encode([(*pair, True) for pair in (*usual, *grpc, *others)])  # as sensitive: not kept


def greeting() -> bytes:
    """What a client says first."""
    return PREFACE + frame(SETTINGS, 0, 0)


def _calls(path: str, after: int | None = None) -> Iterator[bytes]:
    """Heads of calls without an end, each followed by a frame of this kind."""
    tails = {None: (b"", 0), RST_STREAM: (struct.pack("!I", 8), 0), DATA: (b"\0" * 5, END_STREAM)}
    payload, flags = tails[after]
    first = 1
    while True:
        streams = range(first, first + 2 * MANY, 2)
        first = streams.stop
        yield b"".join(
            frame(HEADERS, END_HEADERS, stream, head_of_path)
            + (b"" if after is None else frame(after, flags, stream, payload))
            for head_of_path in (head(path),)
            for stream in streams
        )


def _endless_head(part: bytes) -> Iterator[bytes]:
    yield frame(HEADERS, 0, 1, head(GENERATE))
    while True:
        yield frame(CONTINUATION, 0, 1, part) * 16


def _repeated(one: bytes) -> Iterator[bytes]:
    while True:
        yield one * 10 * MANY


KINDS = {
    "calls without requests": lambda: _calls(GENERATE),
    "health checks without requests": lambda: _calls(CHECK),
    "calls": lambda: _calls(GENERATE, DATA),
    "calls that are cancelled at once": lambda: _calls(GENERATE, RST_STREAM),
    "nodes without requests": lambda: _calls(ATTACH),
    "heads without end": lambda: _endless_head(b"\0\1a\1b" * 3200),
    "empty parts of a head": lambda: _endless_head(b""),
    "a header without end": lambda: _endless_head(b"\0\1a\x7f\x81\xff\xff\xff\x03" + b"v" * 16_000),
    "pings": lambda: _repeated(frame(PING, 0, 0, b"12345678")),
    "settings": lambda: _repeated(frame(SETTINGS, 0, 0)),
    "priorities": lambda: _repeated(frame(PRIORITY, 0, 1, b"\0\0\0\0\1")),
}


class Flood:
    """A thread with so many connections at a time, for as long as the context lasts."""

    def __init__(self, port: int, kind: str, *, num_connections: int = 4) -> None:
        self.num_dialed = 0
        self._port = port
        self._kind = kind
        self._num_connections = num_connections
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Flood":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        open_now: dict[socket.socket, _Connection] = {}
        try:
            while not self._stopping.is_set():
                while len(open_now) < self._num_connections:
                    connection = _Connection(self._port, KINDS[self._kind]())
                    open_now[connection.socket] = connection
                    self.num_dialed += 1
                _, ready, _ = select.select([], list(open_now), [], CUT_OFF_S)
                for each in ready:
                    if not open_now[each].send():
                        open_now.pop(each)
                        each.close()
        finally:
            for each in open_now:
                each.close()


class _Connection:
    def __init__(self, port: int, parts: Iterator[bytes]) -> None:
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.socket.connect_ex(("127.0.0.1", port))
        self._parts = parts
        self._unsent = greeting()

    def send(self) -> bool:
        """Send as much as goes; return whether the connection is there."""
        try:
            with contextlib.suppress(BlockingIOError):
                if not self.socket.recv(2**16):
                    return False
            self._unsent = self._unsent[self.socket.send(self._unsent) :] or next(self._parts)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True
