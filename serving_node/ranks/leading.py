"""Lead the followers of a node from rank 0: it sends commands; they obey and report (protos/ranks.proto).

A follower's stream has length-prefixed protobuf messages over TCP: gRPC would add too much to each decode step.

The loss of any rank is the loss of the node: the other ranks' KV is useless without it, and the coordinator moves the
requests to another node. So the process ends at once, whatever its engine waits for.
"""

import asyncio
import hmac
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, NoReturn, TypeVar

from google.protobuf.message import DecodeError, Message

from protos import fleet_pb2, inference_pb2, ranks_pb2
from serving_core.errors import ModelError, RankLost
from serving_core.process.memory import resident_bytes
from serving_core.requests import Share, Work
from serving_core.tasks import first_to_end

logger = logging.getLogger(__name__)

LOAD_REPORT_S: Final = 1.0
SILENCE_S: Final = 5.0  # of a follower, after which it counts as lost
HELLO_DEADLINE_S: Final = 30.0
SECRET_BYTES: Final = 16
LOST_EXIT_CODE: Final = 3

Exchange = Callable[[bytes], list[bytes]]
"""Exchanges bytes between all ranks: RankGroup.exchange of engine/parallel.py."""

OnEvent = Callable[[int, ranks_pb2.RankEvent], None]
"""Takes a follower's rank and its report."""


MAX_MESSAGE_BYTES: Final = 64 * 2**20  # twice a step of 1024 requests of 2**17 tokens in blocks of 16
LENGTH_BYTES: Final = 4
CONNECT_DEADLINE_S: Final = 10.0

M = TypeVar("M", bound=Message)


class RankStream(Generic[M]):
    """One end of a stream of protobuf messages between two ranks; M is the type of messages from the other end."""

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
        """Wait for the next message and return it. Raises RankLost if the stream has ended or a message is invalid."""
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
    """Connect to rank 0 at `host` and `port`; return the stream, which receives messages of type `receives`.

    Raises RankLost if rank 0 does not respond within CONNECT_DEADLINE_S.
    """
    try:
        async with asyncio.timeout(CONNECT_DEADLINE_S):
            reader, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError) as error:
        raise RankLost("rank 0 does not answer") from error
    return RankStream(reader, writer, receives)


@dataclass(frozen=True, slots=True)
class Meeting:
    """The address of rank 0 and the secret to show there, which followers get within the process group."""

    host: str
    port: int
    secret: bytes

    def encode(self) -> bytes:
        return self.secret + self.port.to_bytes(2, "big") + self.host.encode()

    @classmethod
    def decode(cls, packed: bytes) -> "Meeting":
        port, host = packed[SECRET_BYTES : SECRET_BYTES + 2], packed[SECRET_BYTES + 2 :]
        return cls(host.decode(), int.from_bytes(port, "big"), packed[:SECRET_BYTES])


class Followers:
    """The other ranks of a node, which rank 0 commands; none for a single process."""

    def __init__(self, num_followers: int, *, silence_s: float = SILENCE_S) -> None:
        """Create the leader's side; a follower that says nothing for `silence_s` seconds is lost."""
        self.kv_addresses: dict[int, str] = {}  # of each follower's data plane
        self.kv_keys: dict[int, bytes] = {}  # which each follower shows at other nodes' data planes
        self.loads: dict[int, inference_pb2.RankLoad] = {}
        self.on_event: OnEvent | None = None
        self.on_loaded: Callable[[int, int], None] | None = None
        self.on_adapter_changed: Callable[[int, fleet_pb2.AdapterChanged], None] | None = None
        self._num_followers, self._silence_s = num_followers, silence_s
        self.streams: dict[int, RankStream[ranks_pb2.RankEvent]] = {}
        self._heard_at: dict[int, float] = {}
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._complete = asyncio.Event()

    def __len__(self) -> int:
        return self._num_followers

    async def gather(self, exchange: Exchange, host: str = "") -> None:
        """Listen, send the followers the address through `exchange`, and wait until all are connected.

        `host` is the address to listen on, by default MASTER_ADDR. Raises RankLost if the followers do not connect
        within HELLO_DEADLINE_S.
        """
        if not self._num_followers:
            return
        host = host or os.environ["MASTER_ADDR"]
        server = await asyncio.start_server(self._welcome, host, 0)
        try:
            port: int = server.sockets[0].getsockname()[1]
            exchange(Meeting(host, port, self._secret).encode())
            async with asyncio.timeout(HELLO_DEADLINE_S):
                await self._complete.wait()
        except TimeoutError as error:
            raise RankLost(f"{len(self.streams)} of {self._num_followers} followers came") from error
        finally:
            server.close()

    def send(self, **command: Any) -> None:
        """Send one command, named by its oneof field, to every follower."""
        for stream in self.streams.values():
            stream.send(ranks_pb2.RankCommand(**command))

    def announce(self, works: Sequence[Work]) -> None:
        """Send every follower the scheduled tokens of the next step of rank 0."""
        if self.streams:
            self.send(step=ranks_pb2.StepPlan(shares=[share_to_wire(work) for work in works]))

    async def watch(self) -> None:
        """Receive the followers' reports; end this process when a follower is lost or silent for too long."""
        try:
            await self.hear()
        except RankLost as error:
            die(error)

    async def hear(self) -> None:
        """Receive the followers' reports. Raises RankLost when one is lost."""
        self._heard_at = dict.fromkeys(self.streams, time.monotonic())
        await first_to_end(self._watch_silence(), *(self._read(*each) for each in self.streams.items()))

    def fail_step(self, error: Exception) -> None:
        """Handle a step that failed on rank 0 with this error.

        Unless all ranks have reached its end, the followers still wait in the middle of the step, and the process ends.
        """
        if self.streams and not isinstance(error, ModelError):
            die(error)

    def stop(self) -> None:
        """Command every follower to end its process."""
        self.send(stop=ranks_pb2.Stop())

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = RankStream(reader, writer, ranks_pb2.RankEvent)
        try:
            async with asyncio.timeout(HELLO_DEADLINE_S):
                hello = (await stream.receive()).hello
        except (RankLost, TimeoutError) as error:
            logger.warning("a stranger at the port of rank 0: %s", error)
            stream.close()
            return
        is_known = hmac.compare_digest(hello.secret, self._secret)
        if not is_known or not 1 <= hello.rank <= self._num_followers or hello.rank in self.streams:
            logger.warning("a stranger at the port of rank 0 was sent away")
            stream.close()
            return
        self.streams[hello.rank] = stream
        self.kv_addresses[hello.rank] = hello.kv_address
        self.kv_keys[hello.rank] = hello.kv_key
        if len(self.streams) == self._num_followers:
            self._complete.set()

    async def _read(self, rank: int, stream: RankStream[ranks_pb2.RankEvent]) -> None:
        assert self.on_event is not None
        while True:
            event = await stream.receive()
            self._heard_at[rank] = time.monotonic()
            if event.HasField("load"):
                self.loads[rank] = event.load
            elif event.HasField("loaded"):
                assert self.on_loaded is not None
                self.on_loaded(event.loaded.load_id, event.loaded.num_good)
            elif event.HasField("adapter_changed"):
                assert self.on_adapter_changed is not None
                self.on_adapter_changed(rank, event.adapter_changed)
            else:
                self.on_event(rank, event)

    async def _watch_silence(self) -> None:
        looked_at = time.monotonic()
        while True:
            await asyncio.sleep(LOAD_REPORT_S)
            now = time.monotonic()
            if now - looked_at > self._silence_s / 2:  # this process itself was suspended
                self._heard_at = dict.fromkeys(self._heard_at, now)
            looked_at = now
            for rank, heard_at in self._heard_at.items():
                if now - heard_at > self._silence_s:
                    raise RankLost(f"rank {rank} has said nothing for {now - heard_at:.1f} s")


class Leader:
    """Rank 0 as seen by a follower: a stream of its commands and to it."""

    def __init__(self, stream: RankStream[ranks_pb2.RankCommand], load: inference_pb2.RankLoad) -> None:
        self.stream = stream
        self._load = load

    @classmethod
    async def join(cls, exchange: Exchange, kv_address: str, kv_key: bytes, load: inference_pb2.RankLoad) -> "Leader":
        """Connect to rank 0, whose address `exchange` gives, and introduce this rank.

        kv_address and kv_key are those of this rank's data plane. `load` sets rank, kv_pool_bytes and weight_bytes.
        Raises RankLost.
        """
        meeting = Meeting.decode(exchange(b"")[0])
        stream = await dial(meeting.host, meeting.port, ranks_pb2.RankCommand)
        leader = cls(stream, load)
        hello = ranks_pb2.RankHello(rank=load.rank, secret=meeting.secret, kv_address=kv_address, kv_key=kv_key)
        leader.send(hello=hello)
        return leader

    def send(self, **event: Any) -> None:
        """Report one event to rank 0, named by its oneof field."""
        self.stream.send(ranks_pb2.RankEvent(**event))

    async def command(self) -> ranks_pb2.RankCommand:
        """Wait for the next command and return it. Raises RankLost."""
        return await self.stream.receive()

    async def report_load(self) -> None:
        """Send this process's memory use every LOAD_REPORT_S seconds, until cancelled."""
        while True:
            self._load.rss_bytes = resident_bytes()
            self.send(load=self._load)
            await asyncio.sleep(LOAD_REPORT_S)


def die(why: object) -> NoReturn:
    """End the process at once, with `why` in the log, after the loss of a rank.

    An engine that waits in a collective cannot be waited for.
    """
    end_at_once(f"this node has lost a rank and ends: {why}")


def end_at_once(last_words: str) -> NoReturn:
    """Log last_words and end this process at once with LOST_EXIT_CODE, whatever its engine does."""
    logger.critical(last_words)
    logging.shutdown()
    os._exit(LOST_EXIT_CODE)


def share_to_wire(work: Work) -> ranks_pb2.Share:
    share = work.share
    return ranks_pb2.Share(
        epoch=work.request.epoch,
        token_ids=share.token_ids,
        start=share.start,
        block_ids=share.block_ids,
        samples=share.samples,
        num_scored=share.num_scored,
        adapter=share.adapter,
        state_ids=share.state_ids,
    )


def share_from_wire(wire: ranks_pb2.Share) -> Share:
    blocks, states = list(wire.block_ids), tuple(wire.state_ids)
    return Share(list(wire.token_ids), wire.start, blocks, wire.samples, wire.num_scored, wire.adapter, states)
