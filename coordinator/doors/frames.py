"""Messages over a byte stream between a door and control: the length of each, in 4 bytes, then its bytes. A fraction of
what gRPC takes for a message, of which there are two for each step of a node."""

import asyncio
from typing import Final

MAX_FRAME_BYTES: Final = 2**28
HEAD_BYTES: Final = 4


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The next message; None at the end. Raises ConnectionError where it breaks off or cannot be one."""
    head = b""
    try:
        head = await reader.readexactly(HEAD_BYTES)
        num_bytes = int.from_bytes(head)
        if num_bytes > MAX_FRAME_BYTES:
            raise ConnectionError(f"a message of {num_bytes} bytes, the limit is {MAX_FRAME_BYTES}")
        return await reader.readexactly(num_bytes)
    except asyncio.IncompleteReadError as error:
        if not head and not error.partial:
            return None
        raise ConnectionError("a message broke off") from error


def framed(message: bytes) -> bytes:
    """What to write so that the other side reads it."""
    return len(message).to_bytes(HEAD_BYTES) + message
