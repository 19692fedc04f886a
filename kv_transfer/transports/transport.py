"""Define the interface between KV transfer and the transport that carries its messages.

A transport is a Dialer at the sending node and a Listener at the receiving node. A message is a header and frames of
raw bytes; replies have no frames. A transport may lose messages, and reports a broken connection. Callers must not rely
on the order or the integrity of messages. All methods and callbacks run on the event loop.
"""

import asyncio
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

from kv_transfer.payload import Buffer, Payload

MAX_FRAMES = 64  # in one message

OnReply = Callable[[memoryview], None]
"""Takes the header of a reply."""

OnLost = Callable[[str], None]
"""Takes the address of a receiver whose connection broke or could not be made."""

OnMessage = Callable[[Hashable, memoryview, list[Buffer]], None]
"""Takes the peer that a reply would go to, the header, and the frames, which are valid during the call."""


class Dialer(Protocol):
    """The sending end of a transport: one connection to each receiver, made on demand."""

    @property
    def payload(self) -> Payload:
        """Return the Payload that handles the buffers which can be sent as frames."""
        ...

    @property
    def key(self) -> bytes:
        """Return the public key that Listeners must allow; empty if the transport has no keys."""
        ...

    @property
    def num_shared_bytes(self) -> int:
        """Return how many bytes of blocks were sent through shared memory, over all connections."""
        ...

    def start(self, on_reply: OnReply, on_lost: OnLost) -> None:
        """Set the callbacks for replies and for lost receivers. Call once, before any other method."""

    def connect(self, address: str) -> None:
        """Begin to connect to a receiver, before the first send. Raises TransferError if the address cannot be used."""

    def send(self, address: str, header: bytes, frames: Sequence[Buffer] = ()) -> asyncio.Future[None]:
        """Queue a message for a receiver, and dial if there is no connection.

        The future completes when the frames may be reused, whether they were sent or lost; it never fails.
        """
        ...

    def hang_up(self, address: str) -> None:
        """Break the connection to a receiver, if there is one, and call on_lost. Messages in flight may be lost."""

    async def close(self) -> None:
        """Drop queued messages and close all connections; return when every frame may be reused."""


class Listener(Protocol):
    """The receiving end of a transport."""

    @property
    def payload(self) -> Payload:
        """Return the Payload that handles the buffers in which frames arrive."""
        ...

    @property
    def num_shared_bytes(self) -> int:
        """Return how many bytes of blocks were received through shared memory, over all connections."""
        ...

    @property
    def address(self) -> str:
        """Return the address at which Dialers reach this Listener."""
        ...

    def allow(self, keys: Sequence[bytes]) -> list[bytes]:
        """Allow the Dialers with these public keys to connect; return those that were not allowed before.

        Does nothing and returns none if the transport has no keys.
        """
        ...

    def start(self, on_message: OnMessage) -> None:
        """Set the callback for messages. Call once, before any method but `allow`."""

    def reply(self, peer: Hashable, header: bytes) -> None:
        """Send a header to the peer of a message; it is lost if the peer is gone."""

    async def close(self) -> None:
        """Stop listening, and close every connection."""
