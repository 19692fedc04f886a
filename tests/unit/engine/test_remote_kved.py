"""Tiles that other pools hold: the bits are those of one pool."""

from dataclasses import replace

import pytest
import torch

from engine.attention.distributed import PART_ROWS, TILE_KEYS, DistributedAttention, PartialAttention
from engine.attention.native import NativeAttention
from engine.build import build_engine
from engine.cache.kv_pool import PagedKVPool
from serving_core.requests import Request, SamplingParams, Work
from serving_core.settings import EngineSettings
from tests.tiny_models import write_tiny_model
from tests.unit.engine.native_kit import CPU, LAYER, Scene, few_variants, needs_library

pytestmark = needs_library

# Rows behind so many tiles of remote KV: single ones at the borders of tiles, chunks of a part and of many, over
# several tiles of their own.
CASES = [
    ((1100, 1), (1,)),
    ((1023, 1), (2, 1)),
    ((1024, 1), (1, 1, 2)),
    ((512, 2), (2,)),
    ((1000, PART_ROWS), (1, 1, 1)),
    ((1024, 300), (1, 2)),
    ((1024, 3 * PART_ROWS + 1), (4,)),
]


class PoolRemoteKV:
    """Tiles in another pool of this process."""

    address, is_silent = "here", False

    def __init__(self, attention, num_tiles, block_ids):
        self.partial, self.num_tiles, self._block_ids = PartialAttention(attention), num_tiles, block_ids

    def send_query(self, layer, query):
        self._answer = self.partial.partials(bytearray(query), layer, self._block_ids)

    def receive_partials(self, layer):
        return memoryview(self._answer).cast("B")

    def carry(self, layer, queries, partials):
        carried = self.partial.carry(bytearray(queries), partials, layer, self._block_ids)
        return memoryview(carried).cast("B")


def move_tiles(scene, variant, sizes):
    """Remote KV of a request's leading tiles, each in a pool of its own; its own blocks of them are overwritten."""
    layout, own = scene.pool.layout, scene.shares[0].block_ids
    blocks_each, remote_kvs, at = TILE_KEYS // layout.block_size, [], 0
    for num_tiles in sizes:
        moved = own[at : at + num_tiles * blocks_each]
        pool = PagedKVPool(layout, len(moved) + 3, CPU, scene.pool.compute_dtype)
        there = list(range(len(moved) + 2, 2, -1))  # in another order
        pool.write(LAYER, there, *scene.pool.read(LAYER, moved))
        remote_kvs.append(PoolRemoteKV(NativeAttention(pool, scene.num_heads, variant), num_tiles, there))
        at += len(moved)
    for block in own[:at]:
        for cache in (scene.pool.keys(LAYER), scene.pool.values(LAYER)):
            cache[block] = float("nan")
    return remote_kvs


# Heads of queries and of keys, and their size.
@pytest.mark.parametrize(
    ("dtype", "heads", "num_threads"),
    [
        pytest.param("float32", (9, 3, 64), 1, marks=pytest.mark.nightly),
        ("bfloat16", (4, 4, 80), 2),
        ("float32", (8, 1, 32), 3),
        pytest.param("bfloat16", (9, 3, 64), 1, marks=pytest.mark.nightly),
        pytest.param("float32", (4, 4, 80), 2, marks=pytest.mark.nightly),
        pytest.param("bfloat16", (8, 1, 32), 3, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("variant", few_variants())
def test_bits_are_those_of_one_pool(variant, dtype, heads, num_threads):
    torch.set_num_threads(num_threads)
    for size, remote_kvs in CASES:
        scene = Scene([size], *heads, 16, dtype)
        whole = NativeAttention(scene.pool, scene.num_heads, variant)
        expected = whole.attend(scene.query, LAYER, whole.plan(scene.batch, None))
        is_remote = DistributedAttention(
            NativeAttention(scene.pool, scene.num_heads, variant), move_tiles(scene, variant, remote_kvs)
        )
        plan = is_remote.plan(scene.batch, None)
        for _ in range(2):  # as for two layers
            assert torch.equal(is_remote.attend(scene.query, LAYER, plan), expected), (size, remote_kvs)


def test_rows_may_be_read_in_any_chunks():
    """Rows that go through the same remote KV one by one, as an answer's do, have the bits that they have in a
    chunk."""
    chunk = Scene([(1024, 70)], 9, 3, 64)
    variant = NativeAttention(chunk.pool, chunk.num_heads).variant
    is_remote = DistributedAttention(NativeAttention(chunk.pool, chunk.num_heads), move_tiles(chunk, variant, (1, 2)))
    together = is_remote.attend(chunk.query, LAYER, is_remote.plan(chunk.batch, None))
    [share] = chunk.shares
    for row in (0, 63, 69):
        batch = chunk.batch_of([replace(share, start=1024 + row, token_ids=[0])])
        alone = is_remote.attend(chunk.query[row : row + 1], LAYER, is_remote.plan(batch, None))
        assert torch.equal(alone[0], together[row])


class LostRemoteKV:
    num_tiles = 2

    def __init__(self, address="there", *, is_silent=False):
        self.address, self._times_out = address, is_silent
        self.is_silent = False
        self.num_asked = 0

    def send_query(self, layer, query):
        self.num_asked += 1
        self.is_silent = self._times_out
        raise ConnectionError("it is gone")

    def carry(self, layer, queries, partials):
        self.send_query(layer, queries)


def _engine(folder, dtype="float32"):
    return build_engine(
        EngineSettings(model=str(folder), num_kv_blocks=160, block_size=8, max_model_len=1200, dtype=dtype)
    )


def _request(name, length):
    sampling = SamplingParams(max_tokens=40, temperature=0, logprobs=3)
    return Request(name, 0, [(7 * place + len(name)) % 250 for place in range(length)], length, sampling)


def _answer(engine, request, block_ids, start, chunks, beside=None):
    """Reads in chunks from `start` on, then writes some tokens; gives all with their log-probabilities."""
    given = []
    for num_tokens in [*chunks, *[1] * 6]:
        works = [Work(request, start, num_tokens, block_ids)]
        if beside is not None:
            works.insert(len(given) % 2, Work(beside, len(beside.token_ids) - 1, 1, range(150, 160)))
        tokens = engine.step(works)
        sampling = [work.request for work in works if work.samples]
        own = [token for token, each in zip(tokens, sampling, strict=True) if each is request]
        given += own
        request.token_ids += [token.token_id for token in own]
        start += num_tokens
    return given


@pytest.fixture(scope="module")
def folder(written):
    return written(write_tiny_model, num_key_value_heads=2, max_position_embeddings=1200)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_gives_the_bits_of_one_pool(folder, dtype):
    """Two tiles of three are on another engine; the rest of the prompt is read in chunks, beside another request."""
    engine, holder = _engine(folder, dtype), _engine(folder, dtype)
    if not engine.holds_remote_kv:
        pytest.skip(f"the kernels of this CPU promise nothing for {dtype}")
    whole = _answer(engine, _request("a", 700), range(100), 0, [700])
    request, beside = _request("a", 700), _request("beside", 30)
    engine.step([Work(beside, 0, 30, range(150, 160))])
    engine.step([Work(request, 0, 512, range(100))])
    for layer in engine.layout.layers:
        holder.pool.write(layer, range(5, 69), *engine.pool.read(layer, range(64)))
        holder.pool.keys(layer)[69:] = engine.pool.keys(layer)[:64] = float("nan")
    request.remote_kvs = [PoolRemoteKV(holder.attention, 2, list(range(5, 69)))]
    is_remote = _answer(engine, request, [0] * 64 + list(range(100, 136)), 512, [100, 88], beside)
    assert is_remote == whole


@pytest.mark.parametrize("num_tokens", [1, 2 * PART_ROWS])
def test_who_loses_an_remote_kv_loses_nobody_else(folder, num_tokens):
    engine = _engine(folder)
    if not engine.holds_remote_kv:
        pytest.skip("the kernels of this CPU promise nothing for float32")
    request, other = _request("a", 700), _request("b", 30)
    [alone] = engine.step([Work(other, 0, 30, range(4))])
    request.remote_kvs = [LostRemoteKV()]
    work = Work(request, 700 - num_tokens, num_tokens, [0] * 64 + list(range(100, 136)))
    _, beside = engine.step([work, Work(other, 0, 30, range(4))])
    assert request.remote_kv_error == "it is gone"
    assert not other.remote_kv_error
    assert beside == alone


def test_for_a_node_that_is_silent_a_step_waits_once(folder):
    engine = _engine(folder)
    if not engine.holds_remote_kv:
        pytest.skip("the kernels of this CPU promise nothing for float32")
    remote_kvs = [LostRemoteKV(is_silent=True), LostRemoteKV(), LostRemoteKV("elsewhere"), LostRemoteKV("elsewhere")]
    requests = [_request(f"a{number}", 700) for number in range(4)]
    for request, remote_kv in zip(requests, remote_kvs, strict=True):
        request.remote_kvs = [remote_kv]
    block_ids = [0] * 64 + list(range(100, 136))
    engine.step([Work(request, 699, 1, block_ids) for request in requests])
    assert [remote_kv.num_asked for remote_kv in remote_kvs] == [1, 0, 1, 1]  # those elsewhere are lost, and not silent
    assert [request.remote_kv_error for request in requests] == [
        "it is gone",
        "there does not answer",
        "it is gone",
        "it is gone",
    ]
