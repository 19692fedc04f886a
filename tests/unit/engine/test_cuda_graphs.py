"""Padded decode at fixed addresses, without CUDA: against the decoder itself, and what becomes of blocks in use."""

import logging
import random
from dataclasses import replace

import pytest
import torch

from engine.attention.paged import PortableAttention
from engine.attention.tiled import TiledAttention
from engine.build import build_engine, num_scratch_blocks
from engine.cuda_graphs import SIZES, CannotCapture, StaticDecode, checked_decode, sizes_for
from engine.forward_batch import build_batch
from engine.parallel import alone
from serving_core.errors import RankLost
from serving_core.requests import Share
from serving_core.settings import EngineSettings
from tests.tiny_models import VOCAB_SIZE, write_tiny_model
from tests.toy_scheduler import greedy, run_all
from tests.unit.engine.histories_kit import run_program

BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 4, 40, 60
CPU = torch.device("cpu")
MODELS = {
    "llama": ("llama", {}),
    "window": ("mistral", {"sliding_window": 11}),
    "head-norms-tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}


def itself(function):
    """A capture that replays by calling."""
    return function


@pytest.fixture
def load(written):
    """Return a function that loads an engine whose last block is scratch, and whose attention is portable."""

    def load(name="llama", **fields):
        family, config = MODELS[name]
        return load_from(written(write_tiny_model, family, **config), **fields)

    return load


def load_from(folder, **fields):
    settings = {"dtype": "float32", "block_size": BLOCK_SIZE, "num_kv_blocks": NUM_BLOCKS + 1, **fields}
    engine = build_engine(EngineSettings(model=str(folder), device="cpu", max_model_len=MAX_MODEL_LEN, **settings))
    engine.program, engine.attention = None, portable(engine)
    return engine


def portable(engine):
    return PortableAttention(engine.pool, engine.config.num_heads)


def tiled(engine):
    """Together with an engine that is batch-invariant, the bits of a row depend on no other."""
    return TiledAttention(engine.pool, engine.config.num_heads)


def static(engine, attention, capture=itself):
    return StaticDecode(engine.model, attention, NUM_BLOCKS, MAX_MODEL_LEN, capture)


def random_shares(num_requests, seed, most_tokens=MAX_MODEL_LEN):
    """Requests with one token each, at scattered blocks of their own."""
    draw = random.Random(seed)
    most_tokens = min(most_tokens, NUM_BLOCKS // num_requests * BLOCK_SIZE)
    lengths = [draw.randint(1, most_tokens) for _ in range(num_requests)]
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    order = draw.sample(range(NUM_BLOCKS), sum(counts))
    return [
        Share([draw.randrange(VOCAB_SIZE)], length - 1, [order.pop() for _ in range(count)], samples=True)
        for length, count in zip(lengths, counts, strict=True)
    ]


def batch_of(shares):
    return build_batch(shares, BLOCK_SIZE, CPU)


def fill_pool(engine, seed):
    generator = torch.Generator().manual_seed(seed)
    for caches in caches_of(engine):
        caches[:NUM_BLOCKS] = torch.randn(caches[:NUM_BLOCKS].shape, generator=generator)


def caches_of(engine):
    layers = range(engine.layout.num_layers)
    return [cache for layer in layers for cache in (engine.pool.keys(layer), engine.pool.values(layer))]


def requests_blocks(engine):
    """Copies of the blocks that requests own."""
    return [cache[:NUM_BLOCKS].clone() for cache in caches_of(engine)]


@torch.inference_mode()
def check(engine, attention, program, shares, seed, tolerance):
    batch = batch_of(shares)
    fill_pool(engine, seed)
    expected = engine.model(batch, attention)
    expected_blocks = requests_blocks(engine)
    fill_pool(engine, seed)
    assert program.plan(batch) is not None
    torch.testing.assert_close(run_program(program, batch), expected, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(requests_blocks(engine), expected_blocks, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_blocks_have_the_bits_of_the_modules(name, load):
    engine = load(name, batch_invariant=True)
    attention = tiled(engine)
    program = static(engine, attention)
    for seed, num_requests in enumerate((1, 3, 2, 5, 9, 1, 17, 4)):  # padding where a batch before had requests
        check(engine, attention, program, random_shares(num_requests, seed), seed, tolerance=0)


def test_the_portable_backend_agrees_whose_bits_depend_on_the_batch(load):
    engine = load()
    program = static(engine, portable(engine))
    for seed, num_requests in enumerate((40, 3, 11)):
        check(engine, portable(engine), program, random_shares(num_requests, seed), seed, tolerance=1e-3)


def test_a_step_writes_one_token_of_each_request_and_nothing_else(load):
    engine = load()
    fill_pool(engine, seed=0)
    before = requests_blocks(engine)
    program = static(engine, portable(engine))
    assert all(map(torch.equal, requests_blocks(engine), before))
    for num_requests in (7, 3, 5):
        before = requests_blocks(engine)
        batch = batch_of(random_shares(num_requests, num_requests))
        with torch.inference_mode():
            run_program(program, batch)
        for now, then in zip(requests_blocks(engine), before, strict=True):
            changed = (now != then).flatten(0, 1).flatten(1).any(1).nonzero().flatten()
            assert changed.tolist() == sorted(batch.slots.tolist())


def test_a_capture_is_told_the_largest_size_first_and_fixed_addresses(load):
    engine = load()
    seen = []

    class Watched(PortableAttention):
        def plan(self, batch, window):
            addresses = [tensor.data_ptr() for tensor in (batch.token_ids, batch.slots, batch.block_tables)]
            seen.append((len(batch.token_ids), batch.longest_query, batch.longest_context, *addresses))
            return super().plan(batch, window)

    def called_once(function):
        function()
        return function

    attention = Watched(engine.pool, engine.config.num_heads)
    program = static(engine, attention, called_once)
    captured = seen[1:]  # behind the probe
    assert [size for size, *_ in captured] == sorted(program.sizes, reverse=True)
    assert {tuple(rest) for _, *rest in captured} == {(1, MAX_MODEL_LEN, *captured[0][3:])}
    del seen[:]
    with torch.inference_mode():
        run_program(program, batch_of(random_shares(3, seed=1)))
    assert seen == [each for each in captured if each[0] == 4]


def test_sizes_are_bounded_by_the_blocks_that_requests_can_have():
    assert sizes_for(1) == (1,)
    assert sizes_for(3) == (1, 2, 4)
    assert sizes_for(40) == (1, 2, 4, 8, 16, 24, 32, 48)
    assert sizes_for(10**6) == SIZES


def test_other_batches_are_left_to_the_modules(load):
    engine = load()
    program = static(engine, portable(engine))
    one, chunk = Share([5], 3, [0], samples=True), Share([5, 6], 3, [1, 2], samples=True)
    silent = Share([5], 3, [1], samples=False)
    largest = program.sizes[-1]
    assert program.plan(batch_of([one])) is not None
    assert program.plan(batch_of([one] * largest)) is not None
    for shares in ([one] * (largest + 1), [chunk], [one, chunk], [one, silent], [chunk, silent]):
        assert program.plan(batch_of(shares)) is None
    long = batch_of([Share([5], MAX_MODEL_LEN, range(MAX_MODEL_LEN // BLOCK_SIZE + 1), samples=True)])
    assert program.plan(long) is None


def test_answers_are_those_of_the_modules(load):
    engine = load("window")
    engine.num_blocks = NUM_BLOCKS
    prompts = [list(range(start, start + length)) for start, length in ((0, 5), (40, 30), (100, 13))]
    joins_at = [0, 3, 6]  # steps with chunks among them go from module to module
    expected = run_all(engine, prompts, greedy(20, ignore_eos=True), chunk_tokens=16, joins_at=joins_at)
    engine.program = static(engine, engine.attention)
    assert run_all(engine, prompts, greedy(20, ignore_eos=True), chunk_tokens=16, joins_at=joins_at) == expected


def test_what_agrees_is_taken_and_the_pool_left_empty(load, caplog):
    engine = load()
    with caplog.at_level(logging.INFO):
        program = checked_decode(engine.model, portable(engine), NUM_BLOCKS, MAX_MODEL_LEN, itself, alone())
    assert program.sizes == sizes_for(NUM_BLOCKS)
    assert "of up to 48 requests" in caplog.text
    assert not any(map(torch.any, requests_blocks(engine)))


def refusing(function):
    raise CannotCapture("operation not permitted when stream is capturing")


def forgetful(function):
    """Of the smallest size the replay does nothing."""
    return (lambda: None) if function.args == (1,) else function


@pytest.mark.parametrize(
    ("capture", "reason"), [(refusing, "not permitted when stream is capturing"), (forgetful, "off by")]
)
def test_what_fails_or_disagrees_is_not_taken_and_a_line_says_why(capture, reason, load, caplog):
    engine = load()
    caplog.clear()
    assert checked_decode(engine.model, portable(engine), NUM_BLOCKS, MAX_MODEL_LEN, capture, alone()) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert reason in caplog.text
    assert not any(map(torch.any, requests_blocks(engine)))


class Told:
    """Another rank, which says this of the exchange of that number."""

    rank, size = 0, 2

    def __init__(self, said, number):
        self._said, self._left = said, number

    def exchange(self, data):
        self._left -= 1
        return [data, self._said if self._left == 0 else b""]


def test_what_another_rank_cannot_capture_is_not_taken_here(load, caplog):
    engine = load()
    captured = []

    def watched(function):
        captured.append(function)
        return function

    group = Told(b"out of memory there", number=3)
    assert checked_decode(engine.model, portable(engine), NUM_BLOCKS, MAX_MODEL_LEN, watched, group) is None
    assert len(captured) == 3, "what comes next would run on one rank alone"
    assert "out of memory there" in caplog.text


@pytest.mark.parametrize("group", [alone(), Told(b"", 0)], ids=["alone", "two ranks"])
def test_a_failure_is_that_of_the_only_rank_or_of_all(load, group):
    engine = load()

    def failing(function):
        raise torch.OutOfMemoryError("no memory")

    def check():
        return checked_decode(engine.model, portable(engine), NUM_BLOCKS, MAX_MODEL_LEN, failing, group)

    if group.size == 1:
        assert check() is None
    else:
        with pytest.raises(RankLost, match="rank 0: no memory"):
            check()


def test_what_disagrees_on_another_rank_is_not_taken_here(load, caplog):
    engine = load()
    last = len(sizes_for(NUM_BLOCKS)) + 1
    group = Told(b"off", number=last)
    assert checked_decode(engine.model, portable(engine), NUM_BLOCKS, MAX_MODEL_LEN, itself, group) is None
    group = Told(b"off", number=last + 1)
    assert checked_decode(engine.model, portable(engine), NUM_BLOCKS, MAX_MODEL_LEN, itself, group) is not None


def test_no_number_is_a_disagreement(load):
    engine = load()
    engine.model.norm.weight.data[0] = torch.nan
    assert checked_decode(engine.model, portable(engine), NUM_BLOCKS, MAX_MODEL_LEN, itself, alone()) is None


def test_a_batch_tells_its_longest_query_and_context_as_numbers():
    batch = batch_of([Share([1, 2, 3], 4, [0, 1], samples=True), Share([5], 11, [2, 3, 4], samples=True)])
    assert (batch.longest_query, batch.longest_context) == (3, 12)


def test_a_scratch_block_is_there_for_graphs_alone():
    cuda = torch.device("cuda")
    assert num_scratch_blocks(EngineSettings(), cuda) == 1
    assert num_scratch_blocks(EngineSettings(), CPU) == 0
    assert num_scratch_blocks(replace(EngineSettings(), pipeline_parallel_size=2), cuda) == 0
    assert num_scratch_blocks(replace(EngineSettings(), enforce_eager=True), cuda) == 0
    assert num_scratch_blocks(replace(EngineSettings(), batch_invariant=True), cuda) == 1
