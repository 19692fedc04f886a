"""Connect rank 0 of a node with one follower: length-prefixed protobuf messages over TCP.

gRPC would add too much to each decode step.
"""

import asyncio
from typing import Final, Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from serving_core.errors import RankLost

MAX_MESSAGE_BYTES: Final = 64 * 2**20  # twice a step of 1024 requests of 2**17 tokens in blocks of 16
LENGTH_BYTES: Final = 4
CONNECT_DEADLINE_S: Final = 10.0

M = TypeVar("M", bound=Message)


class RankStream(Generic[M]):
    """Hold one end of a stream; M is the type of messages from the other end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, receives: type[M]) -> None:
        self._reader = reader
        self._writer = writer
        self._receives = receives

    def send(self, message: Message) -> None:
        """Queue a message. Raises RankLost if the other end has left MAX_MESSAGE_BYTES unread."""
        packed = message.SerializeToString()
        if self._writer.transport.get_write_buffer_size() + len(packed) > MAX_MESSAGE_BYTES:
            raise RankLost(f"a rank has left {MAX_MESSAGE_BYTES} bytes unread")
        self._writer.write(len(packed).to_bytes(LENGTH_BYTES, "big") + packed)

    async def receive(self) -> M:
        """Return the next message. Raises RankLost if the stream has ended or a message is invalid."""
        try:
            length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "big")
            if length > MAX_MESSAGE_BYTES:
                raise RankLost(f"a message of {length} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
            return self._receives.FromString(await self._reader.readexactly(length))
        except (OSError, asyncio.IncompleteReadError) as error:
            raise RankLost("the stream between two ranks has ended") from error
        except DecodeError as error:
            raise RankLost("a message between two ranks cannot be read") from error

    def close(self) -> None:
        self._writer.close()


async def dial(host: str, port: int, receives: type[M]) -> RankStream[M]:
    """Connect to rank 0. Raises RankLost if rank 0 does not respond in time."""
    try:
        async with asyncio.timeout(CONNECT_DEADLINE_S):
            reader, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError) as error:
        raise RankLost("rank 0 does not answer") from error
    return RankStream(reader, writer, receives)
