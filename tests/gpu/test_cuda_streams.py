"""The engine's thread and the event loop's have streams of their own on a device: neither waits for the other."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine.cache.kv_pool import PagedKVPool
from engine.stepper import StepStream, take_own_stream
from kv_transfer.transports.tensor_payload import TensorPayload, TensorStore, device_checksum
from serving_core.layout import KVLayout

CUDA = torch.device("cuda", 0)
LAYOUT = KVLayout.uniform(2, 4, 16, 8, "bfloat16")
NUM_BLOCKS = 8
LONG = 2_000_000_000  # cycles: about a second
PAYLOAD = TensorPayload()


@pytest.fixture
def loop():
    """Runs what an event loop's thread would."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(take_own_stream, CUDA).result()
        yield lambda function: thread.submit(function).result()
    torch.cuda.synchronize()


@pytest.fixture
def pool():
    return PagedKVPool(LAYOUT, NUM_BLOCKS, CUDA)


def caches(num_blocks, seed):
    generator = torch.Generator().manual_seed(seed)
    sizes = [num_blocks * each for each in LAYOUT.cache_bytes(0)]
    return [torch.randint(256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]


def fallen_asleep():
    """The stream that is the current one is busy from now on; gives what says that it is not any more."""
    torch.cuda._sleep(LONG)
    event = torch.cuda.Event()
    event.record()
    return event


BLOCKS = {"neighbours": [2, 3, 4], "any": [6, 0, 3]}
HEADS = {"all": range(4), "some": range(1, 3)}


@pytest.mark.parametrize("block_ids", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_blocks_are_written_and_read_beside_a_step(pool, loop, block_ids, heads):
    part = pool.heads(heads)
    sizes = [len(block_ids) * each for each in part.layout.cache_bytes(1)]
    given = [memoryview(each[:size].numpy()) for each, size in zip(caches(3, seed=1), sizes, strict=True)]

    def move():
        part.write(1, block_ids, *given)
        return [bytes(each) for each in part.read(1, block_ids)]

    loop(move)  # the first time, kernels are loaded, which may take a device that does nothing
    steps = fallen_asleep()
    assert loop(move) == [bytes(each) for each in given]
    assert not steps.query(), "it was awaited"


@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_a_write_is_over_when_it_returns(pool, loop, heads):
    part = pool.heads(heads)
    given = [memoryview(bytes(each)) for each in part.layout.cache_bytes(0)]

    def write():
        busy = fallen_asleep()
        part.write(0, [5], *given)
        return busy.query()

    assert loop(write)


@pytest.mark.parametrize("block_ids", BLOCKS.values(), ids=BLOCKS)
def test_tensors_are_checked_and_written_beside_a_step(pool, loop, block_ids):
    store, given = TensorStore(pool), caches(3, seed=2)

    def move():
        for layer in LAYOUT.layers:
            store.write(layer, block_ids, *(each.to(CUDA) for each in given))
        views = [cache for layer in LAYOUT.layers for cache in store.read(layer, block_ids)]
        return PAYLOAD.checksums(views)

    loop(move)
    steps = fallen_asleep()
    assert loop(move) == [device_checksum(*given)] * 2
    assert not steps.query(), "it was awaited"


def test_layers_are_told_of_when_they_are_computed():
    told = []
    with StepStream(CUDA).step(told.append) as layers:
        layers.on_queued(8)
        torch.cuda.synchronize()
        asleep = fallen_asleep()
        layers.on_queued(16)
        assert told == [8]
        layers.on_queued(24)
        assert told == [8]
        layers.await_all_but_last()
        assert told == [8, 16]
        assert asleep.query()
    assert told == [8, 16, 24]


def test_a_step_that_fails_is_over_too():
    def fail():
        with StepStream(CUDA).step():
            steps.append(fallen_asleep())
            raise ValueError("it fails")

    steps = []
    with pytest.raises(ValueError, match="it fails"):
        fail()
    assert steps[0].query()


def test_what_the_loop_builds_for_a_step_is_of_its_stream(loop):
    stream = StepStream(CUDA)

    def current_within():
        with stream.taken():
            return torch.cuda.current_stream(CUDA)

    assert loop(current_within) == torch.cuda.current_stream(CUDA)
    assert loop(lambda: torch.cuda.current_stream(CUDA)) != torch.cuda.current_stream(CUDA)


def test_a_cpu_queues_nothing():
    told = []
    with StepStream(torch.device("cpu")).step(told.append) as layers:
        layers.on_queued(8)
        assert told == [8]
        layers.on_queued(16)
    assert told == [8, 16]
    with StepStream(torch.device("cpu")).step() as layers:
        assert layers.on_queued is None
