"""The proxy does what it is told to, seen by plain sockets; and no byte of a transfer that goes through it is wrong."""

import asyncio
import contextlib

import pytest

from kv_transfer.receiver import KVReceiver, Received
from kv_transfer.sender import KVSender, Sent
from kv_transfer.transports.zmq import ZmqDialer, ZmqListener
from tests.effort import few
from tests.faults.proxy import PIECE_BYTES, End, Fault, Proxy, close
from tests.unit.kv_transfer.transfer_kit import BIG_LAYOUT, ByteStore, Once, check_arrived, grant, run

NUM_BLOCKS = 24  # 16 MB
TEXT = bytes(range(256)) * 1024  # 256 KiB
NUM_BYTES = 100_000  # of it, of which not all comes back where a connection ends
DEADLINE_S = 200.0


@pytest.fixture(params=["tcp", "ipc"])
def fronts(request, tmp_path):
    """Where to listen, and where the proxy does."""
    if request.param == "tcp":
        return "tcp://127.0.0.1:0", "tcp://127.0.0.1:0"
    return f"ipc://{tmp_path}/back", f"ipc://{tmp_path}/front"


@contextlib.asynccontextmanager
async def _through(fronts, fault, on_connection):
    """A server behind a proxy; how to dial it."""
    back, front = fronts
    if back.startswith("tcp"):
        server = await asyncio.start_server(on_connection, "127.0.0.1", 0)
        back = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    else:
        server = await asyncio.start_unix_server(on_connection, back.removeprefix("ipc://"))
    async with server, Proxy(back, fault).listening(front) as proxy:
        place = proxy.address.partition("://")[2]
        if front.startswith("tcp"):
            host, _, port = place.rpartition(":")
            yield proxy, lambda: asyncio.open_connection(host, int(port))
        else:
            yield proxy, lambda: asyncio.open_unix_connection(place)


async def _echo(reader, writer):
    with contextlib.suppress(OSError):
        while piece := await reader.read(PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
    await close(writer)


async def _send(dial, text=TEXT):
    """What comes back, up to the end of the connection; and whether it was reset."""
    reader, writer = await dial()
    heard = b""
    try:
        writer.write(text)
        while len(heard) < len(text) and (piece := await reader.read(PIECE_BYTES)):
            heard += piece
    except OSError:
        return heard, True
    finally:
        await close(writer)
    return heard, False


@pytest.mark.parametrize("fault", [Fault(), Fault(delay_s=0.05), Fault(bytes_per_s=2**21)], ids=["none", "far", "slow"])
def test_what_is_not_harmed_comes_as_it_was(fronts, fault):
    async def scenario():
        began_at = asyncio.get_running_loop().time()
        async with _through(fronts, fault, _echo) as (proxy, dial):
            assert await _send(dial) == (TEXT, False)
            assert not proxy.struck.is_set()
        least_s = max(2 * fault.delay_s, len(TEXT) / fault.bytes_per_s)
        assert asyncio.get_running_loop().time() - began_at >= least_s

    run(scenario())


@pytest.mark.parametrize("end", [End.TRUNCATED, End.RESET])
def test_a_connection_ends_in_the_middle_and_the_next_one_passes(fronts, end):
    async def scenario():
        async with _through(fronts, Fault(end=end, after_bytes=NUM_BYTES), _echo) as (proxy, dial):
            heard, was_reset = await _send(dial, TEXT[:NUM_BYTES])  # what was left unread would make any end a reset
            assert TEXT.startswith(heard)
            assert len(heard) < NUM_BYTES
            if fronts[0].startswith("tcp"):
                assert was_reset == (end is End.RESET)
            assert proxy.struck.is_set()
            assert await _send(dial) == (TEXT, False)

    run(scenario())


def test_a_cut_connection_is_silent(fronts):
    async def scenario():
        async with _through(fronts, Fault(end=End.CUT, after_bytes=100_000), _echo) as (proxy, dial):
            silent = asyncio.create_task(_send(dial))
            await proxy.struck.wait()
            assert await _send(dial) == (TEXT, False)
            assert not silent.done()
            silent.cancel()
            await asyncio.wait([silent])

    run(scenario())


def test_bits_flip_one_in_so_many_large_pieces(fronts):
    async def scenario():
        async with _through(fronts, Fault(flip_every=1), _echo) as (proxy, dial):
            heard, _ = await _send(dial)
            flips = [mine ^ theirs for mine, theirs in zip(TEXT, heard, strict=True) if mine != theirs]
            assert flips == [1] * proxy.num_flipped
            assert flips

    run(scenario())


def test_connections_that_are_held_arrive_in_reverse_order(fronts):
    order = []

    async def note(reader, writer):
        order.append(await reader.read(1))
        writer.write(order[-1])
        await close(writer)

    async def scenario():
        async with _through(fronts, Fault(num_held=3), note) as (proxy, dial):
            sends = []
            for number, text in enumerate([b"a", b"b", b"c"], start=1):
                sends.append(asyncio.create_task(_send(dial, text)))
                while proxy.num_connections < number:
                    await asyncio.sleep(0.001)
            assert await asyncio.gather(*sends) == [(b"a", False), (b"b", False), (b"c", False)]
            assert order == [b"c", b"b", b"a"]

    run(scenario())


# ---- KV transfers through it ----

FAULTS = {
    "far and slow": Fault(delay_s=0.02, bytes_per_s=20e6),
    "cut": Fault(end=End.CUT, after_bytes=3_000_000),
    "truncated": Fault(end=End.TRUNCATED, after_bytes=3_000_000),
    "reset": Fault(end=End.RESET, after_bytes=3_000_000),
    "flipped": Fault(flip_every=50),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
@pytest.mark.parametrize("kind", few(["tcp", "ipc"]))
def test_a_transfer_arrives_whole_or_fails(kind, fault, tmp_path):
    """One harm each, which is made good within the transfer: what was lost or flipped is sent again."""
    source, target = ByteStore(BIG_LAYOUT, NUM_BLOCKS, seed=1), ByteStore(BIG_LAYOUT, NUM_BLOCKS)
    endpoint = "tcp://127.0.0.1:*" if kind == "tcp" else f"ipc://{tmp_path}/node"

    async def scenario():
        receiver = KVReceiver(ZmqListener(endpoint), target)
        sender = KVSender(ZmqDialer(), source, deadline_s=DEADLINE_S)
        front = "tcp://127.0.0.1:0" if kind == "tcp" else f"ipc://{tmp_path}/front"
        back, _, key = receiver.address.rpartition("#")
        async with Proxy(back, fault).listening(front) as proxy:
            sent, received = Once(), Once()
            block_ids = list(range(NUM_BLOCKS))
            descriptor = grant(receiver, block_ids, received, address=f"{proxy.address}#{key}", ttl_s=DEADLINE_S)
            sender.start(descriptor.encode(), sent).finish(block_ids, b"tail")
            results = await sent.result(), await received.result()
            assert isinstance(results[0], Sent), results
            assert isinstance(results[1], Received), results
            check_arrived(source, block_ids, target, block_ids, results)
            assert proxy.struck.is_set() == (fault.end is not None or fault.flip_every > 0)
            assert receiver.num_corrupt_blocks > 0 or fault.flip_every == 0
            await sender.close()
            await receiver.close()

    run(scenario())
