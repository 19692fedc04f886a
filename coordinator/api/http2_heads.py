"""Parse the heads of HTTP/2 calls, to find the client's key. Performs no I/O.

The parser keeps at most the bytes that a head may have, and leaves all other checks to the server behind.

A client may wait for the server's SETTINGS before its first call. The client therefore gets an empty SETTINGS frame
before the server is connected, and its acknowledgement of that frame is not passed on.
"""

import logging
from typing import Final, NamedTuple

from hpack import Decoder
from hpack.exceptions import HPACKError

logging.getLogger("hpack").setLevel(logging.WARNING)  # it would log all heads, keys included

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # first bytes of every HTTP/2 client: RFC 9113, 3.4
MAX_HEAD_BYTES: Final = 2**14  # of a head, compressed and decompressed: gRPC's own limit
MAX_OPEN_CALLS: Final = 100  # calls whose requests have not ended

EMPTY_SETTINGS: Final = b"\0\0\0\4\0\0\0\0\0"  # a whole frame, for the client

_FRAME_HEADER_BYTES: Final = 9
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _CONTINUATION = 0, 1, 3, 4, 9
_ACK: Final = 0x1
_END_STREAM, _END_HEADERS, _PADDED, _PRIORITY = 0x1, 0x4, 0x8, 0x20
_PRIORITY_BYTES: Final = 5


class BadHead(Exception):
    """The client does not speak HTTP/2, or its head or its number of open calls exceeds a limit."""


class Read(NamedTuple):
    """Result of parsing some bytes."""

    passed: bytes  # bytes for the server
    authorizations: list[str]  # values of `authorization` in the heads that have ended


class HeadReader:
    """Parse the bytes that one client sends, and find the `authorization` headers of its calls."""

    def __init__(self) -> None:
        self.has_acknowledged = False  # EMPTY_SETTINGS
        self.num_frames = self.num_heads = 0
        self.has_preface = False
        self._decoder = Decoder(max_header_list_size=MAX_HEAD_BYTES)
        self._unread = bytearray()  # part of the preface or of an incomplete frame
        self._num_to_skip = 0  # remaining bytes of a frame that is not parsed
        self._head: bytearray | None = None  # incomplete head
        self._open: set[int] = set()  # calls whose requests have not ended
        self._trusts = False

    def trust(self) -> None:
        """Stop parsing heads; only the acknowledgement of the SETTINGS is still looked for."""
        self._trusts = True

    def rest(self) -> bytes:
        """Return the bytes of an incomplete frame or preface that `feed` has not passed on. For the end of parsing."""
        return bytes(self._unread)

    @property
    def is_between_calls(self) -> bool:
        """Return whether the preface has come, and no frame, head or request is incomplete."""
        return self.has_preface and not (self._unread or self._num_to_skip or self._head is not None or self._open)

    def feed(self, data: bytes) -> Read:
        """Parse the next bytes, and return the bytes to pass on and the `authorization` values of complete heads.

        A head is passed on when it is complete. Raises BadHead when the bytes are no HTTP/2, or exceed MAX_HEAD_BYTES
        in a head or MAX_OPEN_CALLS.
        """
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
        """Check that nothing but CONTINUATION frames follows an incomplete head: RFC 9113, 6.10."""
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
        """Note that the request of a call has begun or ended."""
        if kind == _RST_STREAM or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
            self._open.discard(stream)
        elif kind == _HEADERS:
            self._open.add(stream)
            if len(self._open) > MAX_OPEN_CALLS:
                raise BadHead(f"{len(self._open)} calls have begun and not ended, the limit is {MAX_OPEN_CALLS}")


def _fragment(flags: int, payload: bytes) -> bytes:
    """Return the header block fragment of a HEADERS frame. Raises BadHead when its padding is longer than it."""
    start, end = 0, len(payload)
    if flags & _PADDED:
        start, end = 1, end - (payload[0] if payload else 0)
    if flags & _PRIORITY:
        start += _PRIORITY_BYTES
    if start > end:
        raise BadHead("the padding of a head is longer than its frame")
    return payload[start:end]
