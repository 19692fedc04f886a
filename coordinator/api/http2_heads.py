"""Reads what an HTTP/2 client sends as far as it tells who the client is: the heads of its calls. Pure.

Only as much is kept as a head may have. What is wrong beyond that is left to the server behind.

A client may wait for the SETTINGS of its server before its first call. So it gets some at once, before there is a
server, and its acknowledgement of those is left out of what passes on.
"""

import logging
from typing import Final, NamedTuple

from hpack import Decoder
from hpack.exceptions import HPACKError

logging.getLogger("hpack").setLevel(logging.WARNING)  # it would log whatever it reads, keys too

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # what every HTTP/2 client says first: RFC 9113, 3.4
MAX_HEAD_BYTES: Final = 2**14  # of a head, as it is sent and as it is read: what gRPC takes at most
MAX_OPEN_CALLS: Final = 100  # whose requests have not ended

EMPTY_SETTINGS: Final = b"\0\0\0\4\0\0\0\0\0"  # a whole frame, for the client

_FRAME_HEADER_BYTES: Final = 9
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _CONTINUATION = 0, 1, 3, 4, 9
_ACK: Final = 0x1
_END_STREAM, _END_HEADERS, _PADDED, _PRIORITY = 0x1, 0x4, 0x8, 0x20
_PRIORITY_BYTES: Final = 5


class BadHead(Exception):
    """The client does not speak HTTP/2, or its head or the calls that it has open are beyond a limit."""


class Read(NamedTuple):
    """What has come of some bytes."""

    passed: bytes  # what goes on to the server
    authorizations: list[str]  # values of `authorization` in the heads that ended


class HeadReader:
    """Of one connection."""

    def __init__(self) -> None:
        self.has_acknowledged = False  # EMPTY_SETTINGS
        self.num_frames = self.num_heads = 0
        self.has_preface = False
        self._decoder = Decoder(max_header_list_size=MAX_HEAD_BYTES)
        self._unread = bytearray()  # of the preface, or of a frame of which the rest has yet to come
        self._num_to_skip = 0  # bytes of a frame that tells nothing
        self._head: bytearray | None = None  # that has begun
        self._open: set[int] = set()  # calls whose requests have not ended
        self._trusts = False

    def trust(self) -> None:
        """Read no more heads: what remains to be found is the acknowledgement."""
        self._trusts = True

    def rest(self) -> bytes:
        """Return what has yet to pass, when nothing more is to be read."""
        return bytes(self._unread)

    @property
    def is_between_calls(self) -> bool:
        """Whether nothing is owed that has begun: no frame, no head and no request."""
        return self.has_preface and not (self._unread or self._num_to_skip or self._head is not None or self._open)

    def feed(self, data: bytes) -> Read:
        """Read what comes next. A head passes when it is whole. Raises BadHead."""
        self._unread += data
        preface = b""
        if not self.has_preface:
            if not PREFACE.startswith(self._unread[: len(PREFACE)]):
                raise BadHead("it does not speak HTTP/2")
            if len(self._unread) < len(PREFACE):
                return Read(b"", [])
            self.has_preface = True
            preface = PREFACE
            del self._unread[: len(PREFACE)]
        passed, found = self._read_frames()
        return Read(preface + passed, found)

    def _read_frames(self) -> Read:
        found: list[str] = []
        passed = bytearray()
        buffer, position = self._unread, 0
        while True:
            num_skipped = min(self._num_to_skip, len(buffer) - position)
            self._num_to_skip -= num_skipped
            passed += buffer[position : position + num_skipped]
            position += num_skipped
            if len(buffer) - position < _FRAME_HEADER_BYTES:
                break
            length = int.from_bytes(buffer[position : position + 3])
            kind, flags = buffer[position + 3], buffer[position + 4]
            stream = int.from_bytes(buffer[position + 5 : position + 9]) & 0x7FFFFFFF
            start = position + _FRAME_HEADER_BYTES
            if self._trusts:
                self._num_to_skip = length
            else:
                self._check_order(kind)
                if kind in (_HEADERS, _CONTINUATION):
                    self._check_size(length)
                    if len(buffer) - start < length:
                        break
                    found += self._add(kind, flags, bytes(buffer[start : start + length]))
                self._num_to_skip = length
                self._note_end(kind, flags, stream)
            self.num_frames += 1
            if kind == _SETTINGS and flags & _ACK and not self.has_acknowledged:
                self.has_acknowledged = True
            else:
                passed += buffer[position:start]
            position = start
        del buffer[:position]
        return Read(bytes(passed), found)

    def _check_order(self, kind: int) -> None:
        """A head that has begun comes to its end before anything else: RFC 9113, 6.10."""
        if (kind == _CONTINUATION) is not (self._head is not None):
            raise BadHead("its frames are out of order")

    def _check_size(self, length: int) -> None:
        num_bytes = length + len(self._head or b"")
        if num_bytes > MAX_HEAD_BYTES:
            raise BadHead(f"a head has {num_bytes} bytes or more, the limit is {MAX_HEAD_BYTES}")

    def _add(self, kind: int, flags: int, payload: bytes) -> list[str]:
        if kind == _HEADERS:
            self._head = bytearray(_fragment(flags, payload))
        else:
            assert self._head is not None, "it is checked"
            if not payload and not flags & _END_HEADERS:
                raise BadHead("a frame of a head is empty")
            self._head += payload
        if not flags & _END_HEADERS:
            return []
        head, self._head = bytes(self._head), None
        self.num_heads += 1
        try:
            pairs = self._decoder.decode(head, raw=True)
        except HPACKError as error:
            raise BadHead("a head cannot be read") from error
        return [bytes(value).decode("latin-1") for name, value in pairs if name == b"authorization"]

    def _note_end(self, kind: int, flags: int, stream: int) -> None:
        """Note whether the request of a call has ended, or is to come."""
        if kind == _RST_STREAM or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
            self._open.discard(stream)
        elif kind == _HEADERS:
            self._open.add(stream)
            if len(self._open) > MAX_OPEN_CALLS:
                raise BadHead(f"{len(self._open)} calls have begun and not ended, the limit is {MAX_OPEN_CALLS}")


def _fragment(flags: int, payload: bytes) -> bytes:
    """The part of a HEADERS frame that is of the head. Raises BadHead."""
    start, end = 0, len(payload)
    if flags & _PADDED:
        start, end = 1, end - (payload[0] if payload else 0)
    if flags & _PRIORITY:
        start += _PRIORITY_BYTES
    if start > end:
        raise BadHead("the padding of a head is longer than its frame")
    return payload[start:end]
