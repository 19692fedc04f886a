"""Transport messages by torch.distributed: one two-rank process group for each communicating pair, made on demand.

Headers, replies and frame sizes go over a signaling stream (dist_stream), frames through the group of the pair
(torch_pair). If either breaks or times out, both are dropped, and the next message makes them anew (torch_link). Frames
are 1-D uint8 tensors on the device.
"""

import asyncio
import logging
import socket
from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence

import torch

from kv_transfer.payload import Payload
from kv_transfer.results import TransferError
from kv_transfer.transports.dist_stream import DistAddress, Stream, listen
from kv_transfer.transports.tensor_payload import TensorPayload
from kv_transfer.transports.torch_link import BROKEN, Message, ReceivingLink, SendingLink, reason
from kv_transfer.transports.torch_pair import check_device
from kv_transfer.transports.transport import OnLost, OnMessage, OnReply
from serving_core.net.backoff import Reminder
from serving_core.net.descriptors import connections_within

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 256  # of one Dialer; above, the least recently used one is closed
MAX_PEERS = 256  # of one Listener; further peers are refused
CONNECTION_DESCRIPTORS = 8  # a stream, and the descriptors of a two-rank group
MAX_GREETING = 64  # unauthenticated connections; above, the oldest is closed
ACCEPT_PAUSE_S = 0.1


class TorchDistListener:
    """The Listener of torch.distributed, on dist://HOST:PORT.

    HOST is an address, a name or an interface; PORT may be * for any free one.
    """

    num_shared_bytes = 0

    def __init__(self, bind: str, device: torch.device) -> None:
        """Begin to listen on the endpoint `bind`. Raises SettingsError if the endpoint or the device cannot be used."""
        check_device(device)
        self.payload: Payload = TensorPayload(device)
        self._device = device
        self._socket, self._address = listen(bind)
        self._greeting: OrderedDict[asyncio.Task[None], None] = OrderedDict()  # oldest first
        self._peers: dict[ReceivingLink, None] = {}
        self._ending: set[asyncio.Task[None]] = set()  # including peers that are gone already
        self._pause: asyncio.TimerHandle | None = None
        self._reminder = Reminder()

    @property
    def address(self) -> str:
        return str(self._address)

    def allow(self, keys: Sequence[bytes]) -> list[bytes]:
        return []

    def start(self, on_message: OnMessage) -> None:
        self._on_message = on_message
        self._listen()

    def reply(self, peer: Hashable, header: bytes) -> None:
        assert isinstance(peer, ReceivingLink)
        peer.reply(header)

    async def close(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        if self._socket.fileno() >= 0:  # not closed yet
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
        greeting = list(self._greeting)
        for task in greeting:
            task.cancel()
        for peer in self._peers:
            peer.stop()
        await _all_done([*greeting, *self._ending])

    def _listen(self) -> None:
        self._pause = None
        asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            accepted, _ = self._socket.accept()
        except (BlockingIOError, ConnectionError):  # the connection is gone already
            return
        except OSError as error:  # such as no file descriptor left
            self._warn(f"no connection is taken for a while: {error}")
            loop.remove_reader(self._socket)
            self._pause = loop.call_later(ACCEPT_PAUSE_S, self._listen)
            return
        task = loop.create_task(self._greet(accepted))
        self._greeting[task] = None
        task.add_done_callback(lambda task: self._forget(task, accepted))
        if len(self._greeting) > MAX_GREETING:
            next(iter(self._greeting)).cancel()

    def _forget(self, task: asyncio.Task[None], accepted: socket.socket) -> None:
        del self._greeting[task]
        if task.cancelled():  # perhaps before it started
            accepted.close()

    async def _greet(self, accepted: socket.socket) -> None:
        try:
            if len(self._peers) >= (most := connections_within(MAX_PEERS, descriptors_each=CONNECTION_DESCRIPTORS)):
                raise TransferError(f"{most} senders are connected already")
            accepted.setblocking(False)
            self._welcome(await Stream.take(accepted, self._address.token))
        except BROKEN as error:
            self._warn(f"a connection was turned away: {reason(error)}")
            accepted.close()

    def _warn(self, sentence: str) -> None:
        """Log a warning at limited rate, since strangers can cause it at will."""
        if self._reminder.is_due(sentence, asyncio.get_running_loop().time()):
            logger.warning(sentence)

    def _welcome(self, stream: Stream) -> None:
        peer = ReceivingLink(stream, self._device, self._on_message, lambda: self._peers.pop(peer))
        self._peers[peer] = None
        self._ending.add(peer.ended)
        peer.ended.add_done_callback(self._ending.discard)


class TorchDistDialer:
    """The Dialer of torch.distributed: sends to TorchDistListeners."""

    key = b""
    num_shared_bytes = 0

    def __init__(self, device: torch.device) -> None:
        """Create a dialer for frames on this device. Raises SettingsError if the device cannot be used."""
        check_device(device)
        self.payload: Payload = TensorPayload(device)
        self._device = device
        self._max_connections = connections_within(MAX_CONNECTIONS, descriptors_each=CONNECTION_DESCRIPTORS)
        self._links: OrderedDict[str, SendingLink] = OrderedDict()  # least recently used first
        self._ending: set[asyncio.Task[None]] = set()  # including links that are lost already

    def start(self, on_reply: OnReply, on_lost: OnLost) -> None:
        self._on_reply = on_reply
        self._on_lost = on_lost

    def connect(self, address: str) -> None:
        self._link(address)

    def send(self, address: str, header: bytes, frames: Sequence[torch.Tensor] = ()) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        message = Message(header, frames, loop.create_future())
        try:
            self._link(address).send(message)
        except TransferError as error:
            logger.warning("a receiver cannot be dialled: %s", error)
            message.release()
            loop.call_soon(self._on_lost, address)
        return message.released

    def hang_up(self, address: str) -> None:
        if (link := self._links.get(address)) is not None:
            logger.warning("a receiver is silent: it is dialled again")
            self._lose(address, link)

    async def close(self) -> None:
        links = list(self._links.values())
        self._links.clear()
        for link in links:
            link.stop()
        await _all_done(self._ending)

    def _link(self, address: str) -> SendingLink:
        if address not in self._links:
            self._links[address] = self._dial(address)
        self._links.move_to_end(address)
        return self._links[address]

    def _dial(self, address: str) -> SendingLink:
        parsed = DistAddress.parse(address)
        if len(self._links) >= self._max_connections:
            self._lose(*next(iter(self._links.items())))
        link = SendingLink(parsed, self._device, self._on_reply, lambda: self._lose(address, link))
        self._ending.add(link.ended)
        link.ended.add_done_callback(self._ending.discard)
        return link

    def _lose(self, address: str, link: SendingLink) -> None:
        if self._links.get(address) is link:
            del self._links[address]
            link.stop()
            asyncio.get_running_loop().call_soon(self._on_lost, address)


async def _all_done(tasks: Collection[asyncio.Task[None]]) -> None:
    """Wait for tasks, each of which ends by its own deadline."""
    if tasks:
        await asyncio.wait(list(tasks))
