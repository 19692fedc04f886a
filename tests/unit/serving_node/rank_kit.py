"""Rank 0 and its followers in one process, over real sockets."""

import asyncio
from contextlib import asynccontextmanager

from protos import inference_pb2
from serving_node.ranks.leading import Followers, Leader


@asynccontextmanager
async def crew(monkeypatch, num_followers, kv_addresses=None, kv_keys=None):
    """Followers as rank 0 sees them, and each follower's Leader, in order of rank."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    followers, meeting = Followers(num_followers), asyncio.get_running_loop().create_future()

    def tell(packed):
        meeting.set_result(packed)
        return [packed]

    gathering = asyncio.create_task(followers.gather(tell))
    leaders = []
    if num_followers:
        packed = await meeting
        for rank in range(1, num_followers + 1):
            load = inference_pb2.RankLoad(rank=rank, kv_pool_bytes=100 * rank)
            address = kv_addresses[rank] if kv_addresses else ""
            kv_key = kv_keys[rank] if kv_keys else b""
            leaders.append(await Leader.join(lambda data: [packed, data], address, kv_key, load))
    await gathering
    try:
        yield followers, leaders
    finally:
        for stream in [*followers.streams.values(), *(leader.stream for leader in leaders)]:
            stream.close()


class Died(Exception):
    """What `die` does in a test."""


def let_die_raise(monkeypatch, *modules):
    def die(why):
        raise Died(str(why))

    for module in modules:
        monkeypatch.setattr(f"{module}.die", die)
