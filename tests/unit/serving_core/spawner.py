"""Serve numbered messages over gRPC, and start children meanwhile. `python -m tests.unit.serving_core.spawner` prints
how many children ended with which code, and how many messages of the streams were lost."""

import serving_core.net.grpc_environment  # isort: skip  # noqa: F401  # before gRPC

import asyncio
import json
import sys
from collections import Counter

import grpc
import uvloop

NUM_CHILDREN, NUM_STREAMS = 150, 4
INTERVAL_S = 0.005


async def count_up(_, context):
    for number in range(sys.maxsize):
        await context.write(number.to_bytes(8))
        await asyncio.sleep(INTERVAL_S)


async def count_lost(port):
    """Read until cancelled; return the number of messages that are missing before the last one."""
    expected = num_lost = 0
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            async for message in channel.unary_stream("/spawner/CountUp")(b""):
                number = int.from_bytes(message)
                num_lost += number - expected
                expected = number + 1
        except asyncio.CancelledError:
            return num_lost


async def main():
    server = grpc.aio.server()
    handler = grpc.unary_stream_rpc_method_handler(count_up)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("spawner", {"CountUp": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    streams = [asyncio.create_task(count_lost(port)) for _ in range(NUM_STREAMS)]
    await asyncio.sleep(0.1)
    codes = Counter()
    for _ in range(NUM_CHILDREN):
        child = await asyncio.create_subprocess_exec("true")
        codes[await child.wait()] += 1
    for stream in streams:
        stream.cancel()
    sys.stdout.write(json.dumps({"codes": codes, "num_lost": sum(await asyncio.gather(*streams))}))
    await server.stop(None)


if __name__ == "__main__":
    uvloop.run(main())
