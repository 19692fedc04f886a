"""The seam between the corridor and whatever moves its messages.

A transport is a Dialer at the sending node and a Listener at the receiving one. A message is a header and frames of
raw bytes, of which only the sending side has any. A transport may lose messages, and tells when a connection broke;
it may not be trusted with their order or their bytes. Everything here is called on the event loop, and calls back
on it.
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
    """The sending node's end: one connection to each receiver, made on demand."""

    @property
    def payload(self) -> Payload:
        """Handles the buffers that can be sent as frames."""
        ...

    @property
    def key(self) -> bytes:
        """What Listeners that ask for keys know it by; empty where the transport has none."""
        ...

    @property
    def num_shared_bytes(self) -> int:
        """Bytes of blocks that went through memory which both processes share, over all connections."""
        ...

    def start(self, on_reply: OnReply, on_lost: OnLost) -> None:
        """Called once, before anything else."""

    def connect(self, address: str) -> None:
        """Dials ahead of the first send. Raises TransferError when the address cannot be used."""

    def send(self, address: str, header: bytes, frames: Sequence[Buffer] = ()) -> asyncio.Future[None]:
        """Queues a message, dialling if need be. The future is done when the frames may be reused, sent or lost;
        it never fails."""
        ...

    def hang_up(self, address: str) -> None:
        """Breaks the connection to a receiver, if there is one, and tells on_lost. What is on its way may be lost."""

    async def close(self) -> None:
        """Drops what is queued; returns when every frame may be reused."""


class Listener(Protocol):
    """The receiving node's end."""

    @property
    def payload(self) -> Payload:
        """Handles the buffers that frames arrive in."""
        ...

    @property
    def num_shared_bytes(self) -> int:
        """Bytes of blocks that came through memory which both processes share, over all connections."""
        ...

    @property
    def address(self) -> str:
        """Where Dialers find it."""
        ...

    def allow(self, keys: Sequence[bytes]) -> list[bytes]:
        """Lets in the Dialers of these keys, where not everybody may come in; gives those that were not before."""
        ...

    def start(self, on_message: OnMessage) -> None:
        """Called once, before anything but `allow`."""

    def reply(self, peer: Hashable, header: bytes) -> None:
        """Sends a header to the peer of a message; lost when the peer is gone."""

    async def close(self) -> None:
        """Ends every connection."""
