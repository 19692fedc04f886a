"""Transport messages within one process: a network is an object, addresses are names in it."""

import asyncio
from collections.abc import Hashable, Sequence

from kv_transfer.payload import HOST, Payload
from kv_transfer.transports.transport import OnLost, OnMessage, OnReply


class LoopbackNetwork:
    """A network within one process: its Listeners by address."""

    def __init__(self) -> None:
        self.listeners: dict[str, LoopbackListener] = {}

    def listener(self, address: str) -> "LoopbackListener":
        assert address not in self.listeners, "an address is taken twice"
        self.listeners[address] = LoopbackListener(self, address)
        return self.listeners[address]

    def dialer(self) -> "LoopbackDialer":
        """Return a new dialer, which reaches this network's listeners."""
        return LoopbackDialer(self)


class LoopbackListener:
    """A Listener within one process; its peers are the dialers themselves."""

    payload: Payload = HOST
    num_shared_bytes = 0

    def __init__(self, network: LoopbackNetwork, address: str) -> None:
        self.address = address
        self._network = network
        self._dialers: dict[LoopbackDialer, None] = {}  # that have sent a message

    def allow(self, keys: Sequence[bytes]) -> list[bytes]:
        return []

    def start(self, on_message: OnMessage) -> None:
        self._on_message = on_message

    def reply(self, peer: Hashable, header: bytes) -> None:
        assert isinstance(peer, LoopbackDialer)
        asyncio.get_running_loop().call_soon(peer.take_reply, header)

    async def close(self) -> None:
        self._network.listeners.pop(self.address, None)
        for dialer in self._dialers:
            asyncio.get_running_loop().call_soon(dialer.lose, self.address)
        self._dialers.clear()

    def take_message(self, dialer: "LoopbackDialer", header: bytes, frames: Sequence[memoryview]) -> None:
        self._dialers[dialer] = None
        self._on_message(dialer, memoryview(header), list(frames))


class LoopbackDialer:
    """A Dialer within one process, which passes its own frames to the listener in the loop's next turn."""

    payload: Payload = HOST
    key = b""
    num_shared_bytes = 0

    def __init__(self, network: LoopbackNetwork) -> None:
        self._network = network
        self._is_closed = False

    def start(self, on_reply: OnReply, on_lost: OnLost) -> None:
        self._on_reply = on_reply
        self._on_lost = on_lost

    def connect(self, address: str) -> None:
        if address not in self._network.listeners:
            asyncio.get_running_loop().call_soon(self.lose, address)

    def send(self, address: str, header: bytes, frames: Sequence[memoryview] = ()) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        released: asyncio.Future[None] = loop.create_future()
        loop.call_soon(self._deliver, address, header, frames, released)
        return released

    def hang_up(self, address: str) -> None:
        asyncio.get_running_loop().call_soon(self.lose, address)

    async def close(self) -> None:
        self._is_closed = True
        await asyncio.sleep(0)  # queued messages are dropped and their frames released in this turn

    def take_reply(self, header: bytes) -> None:
        if not self._is_closed:
            self._on_reply(memoryview(header))

    def lose(self, address: str) -> None:
        """Report a receiver as lost, as a broken network would, unless this dialer is closed. For tests."""
        if not self._is_closed:
            self._on_lost(address)

    def _deliver(
        self, address: str, header: bytes, frames: Sequence[memoryview], released: asyncio.Future[None]
    ) -> None:
        listener = self._network.listeners.get(address)
        try:
            if listener is None:
                self.lose(address)
            elif not self._is_closed:
                listener.take_message(self, header, frames)
        finally:
            released.set_result(None)
