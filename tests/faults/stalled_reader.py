"""A gRPC client by the letter of HTTP/2, whose windows are 0 and stay so: whatever it is sent cannot leave the server.

No client library does that: all of them read ahead.
"""

import asyncio
import contextlib
import struct

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes, Settings

from protos.inference_pb2 import GenerateRequest

PATH = "/splitserve.v1.Inference/Generate"


class StalledReader:
    """One connection, which answers pings and takes no data."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._http = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self._http.local_settings = Settings(client=True, initial_values={SettingCodes.INITIAL_WINDOW_SIZE: 0})
        self._http.initiate_connection()
        self._flush()
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def dial(cls, port: int) -> "StalledReader":
        """Connects to a server of this machine."""
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    def ask(self, message: GenerateRequest) -> None:
        """Begins a call whose answer will not be read."""
        stream_id = self._http.get_next_available_stream_id()
        self._http.send_headers(
            stream_id,
            [
                (":method", "POST"),
                (":scheme", "http"),
                (":path", PATH),
                (":authority", "localhost"),
                ("te", "trailers"),
                ("content-type", "application/grpc"),
            ],
        )
        packed = message.SerializeToString()
        self._http.send_data(stream_id, struct.pack("!BI", 0, len(packed)) + packed, end_stream=True)
        self._flush()

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.wait([self._reading])
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def _read(self) -> None:
        while data := await self._reader.read(65536):
            self._http.receive_data(data)
            self._flush()

    def _flush(self) -> None:
        self._writer.write(self._http.data_to_send())
