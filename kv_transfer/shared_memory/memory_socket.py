"""Pass a sender's memory over an abstract Unix socket, which has no file and ends with its process."""

import asyncio
import contextlib
import os
import secrets
import socket
import struct
from collections.abc import Callable
from typing import Final

from kv_transfer.shared_memory.notes import NAME_BYTES, SECRET_BYTES
from serving_core.net.descriptors import NONE_LEFT

MAX_VISITORS: Final = 16  # connections that have shown no secret; further ones are closed
SHAKE_S: Final = 2.0  # from accept to the secret
PAUSE_S: Final = 0.5  # before the next accept, when no file descriptor is left

_CREDENTIALS: Final = struct.Struct("3i")  # SO_PEERCRED: process, user, group

OnVisit = Callable[[socket.socket], None]
"""Takes and owns a connection that has shown its secret."""


class MemorySocket:
    """Accepts connections of the same user that show a secret. Each secret is valid once."""

    def __init__(self) -> None:
        """Listen. Raises OSError if the system has no abstract sockets or no file descriptor is left."""
        self.name: Final = secrets.token_bytes(NAME_BYTES)
        self._loop = asyncio.get_running_loop()
        self._expected: dict[bytes, OnVisit] = {}  # by secret
        self._visitors: dict[socket.socket, asyncio.TimerHandle] = {}
        self._pause: asyncio.TimerHandle | None = None
        self._socket = new_socket()
        try:
            self._socket.bind(address_of(self.name))
            self._socket.listen(MAX_VISITORS)
        except OSError:
            self._socket.close()
            raise
        self._loop.add_reader(self._socket, self._accept)

    def expect(self, on_visit: OnVisit) -> bytes:
        """Return a new secret; `on_visit` gets the connection that shows it, and owns the connection then."""
        secret = secrets.token_bytes(SECRET_BYTES)
        self._expected[secret] = on_visit
        return secret

    def forget(self, secret: bytes) -> None:
        """Make a secret invalid; do nothing if it was used or is unknown."""
        self._expected.pop(secret, None)

    def close(self) -> None:
        self._loop.remove_reader(self._socket)
        self._socket.close()
        if self._pause is not None:
            self._pause.cancel()
        for visitor in list(self._visitors):
            self._dismiss(visitor)

    def _accept(self) -> None:
        try:
            visitor, _ = self._socket.accept()
        except OSError as error:
            if error.errno in NONE_LEFT:  # the pending connection would wake the loop again and again
                self._loop.remove_reader(self._socket)
                self._pause = self._loop.call_later(PAUSE_S, self._loop.add_reader, self._socket, self._accept)
            return  # or the connection is gone already
        if len(self._visitors) >= MAX_VISITORS or not is_same_user(visitor):
            visitor.close()
            return
        visitor.setblocking(False)
        self._visitors[visitor] = self._loop.call_later(SHAKE_S, self._dismiss, visitor)
        self._loop.add_reader(visitor, self._shake, visitor)

    def _shake(self, visitor: socket.socket) -> None:
        secret = b""
        with contextlib.suppress(OSError):
            secret = visitor.recv(SECRET_BYTES + 1)
        on_visit = self._expected.pop(secret, None)
        if on_visit is None:
            self._dismiss(visitor)
            return
        self._let_go(visitor)
        on_visit(visitor)

    def _dismiss(self, visitor: socket.socket) -> None:
        self._let_go(visitor)
        visitor.close()

    def _let_go(self, visitor: socket.socket) -> None:
        self._visitors.pop(visitor).cancel()
        self._loop.remove_reader(visitor)


def new_socket() -> socket.socket:
    """Return a new non-blocking Unix socket that keeps message boundaries. Raises OSError without a file descriptor."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setblocking(False)
    return made


def address_of(name: bytes) -> str:
    """Return the abstract Unix address of the socket with this name."""
    return f"\0splitserve-kv-{name.hex()}"


def is_same_user(connection: socket.socket) -> bool:
    """Return whether the kernel says that the process at the other end runs as the same user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return bool(user == os.geteuid())
