"""ZeroMQ's sockets on the event loop."""

import asyncio
from collections.abc import Callable

import zmq


class Inbox:
    """Takes whole messages from one socket, one for each turn of the loop, and owns the socket."""

    def __init__(self, socket: "zmq.Socket[bytes]", on_message: Callable[[list[zmq.Frame]], None]) -> None:
        self._socket = socket
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._turn: asyncio.Handle | None = None
        self._loop.add_reader(self._descriptor, self._take_one)
        self.nudge()

    def nudge(self) -> None:
        """To be called after every other use of the socket: its descriptor announces a change only once, and to
        whoever looks first."""
        if self._turn is None:
            self._turn = self._loop.call_soon(self._take_one)

    def close(self) -> None:
        if self._turn is not None:
            self._turn.cancel()
        self._loop.remove_reader(self._descriptor)
        self._socket.close()

    def _take_one(self) -> None:
        if self._turn is not None:
            self._turn.cancel()  # of another turn, where the descriptor was faster; else this is it
            self._turn = None
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            self.nudge()
            self._on_message(parts)
