"""A node's scheduler with KV offload, over KV that tells whether what a step reads is that of its own tokens."""

import asyncio
import random
from types import SimpleNamespace

import numpy as np
import pytest

from engine.cache import tier_store
from kv_transfer.distributed_kv.remote_kv import open_remote_kv
from kv_transfer.distributed_kv.wire import TileRequest
from serving_core.node.costs import StepCosts
from serving_core.node.requests import RequestState
from serving_core.node.tiers import TierRates
from serving_node import kv_offload, scheduler
from serving_node.kv_offload import LOAD_DEADLINE_S, KVOffload, OffloadPlan
from tests.effort import few
from tests.toy_kv import answer_of
from tests.unit.serving_node.runner_kit import BLOCK_SIZE as RUNNER_BLOCK_SIZE
from tests.unit.serving_node.runner_kit import answer_on_paper, running, told
from tests.unit.serving_node.scheduler_kit import BLOCK_BYTES, BLOCK_SIZE, Node, prompt_of

ALWAYS = OffloadPlan(num_host=8, num_disk=16, host_s=0.001, disk_s=0.01, reads_always=True)
NUM_TILES = 3  # of 256 tokens, that a node holds for another one
MOST_BLOCKS = 256  # of four tokens


def ask(node, name, prompt, **job):
    """Reads and answers it here, alone."""
    request = node.local(name, prompt, salt="", **job)
    node.steps()
    return request


def test_what_the_pool_gave_up_is_read_back():
    node = Node(num_blocks=6, tier=ALWAYS)
    first, other = prompt_of(20), prompt_of(20, first=1)
    ask(node, "a", first)
    ask(node, "b", other)  # there is no room for both
    ask(node, "c", first)
    assert node.num_loads == 1
    assert node.tokens("c") == node.tokens("a") == answer_of(first, 4)
    load = node.load
    assert load.tier.num_hits == 4  # of 5 full blocks: the last token is computed in any case
    assert load.tier.read_bytes == 4 * BLOCK_BYTES
    assert load.tier.num_misses == 4 + 4  # of the first two prompts
    assert load.tier.num_damaged == load.tier.num_late == 0
    assert load.tier.host_bytes == 8 * BLOCK_BYTES
    assert load.num_cached_tokens == 16
    node.check_empty()


def test_nothing_is_read_back_into_blocks_that_an_older_one_waits_for():
    node = Node(num_blocks=12, tier=ALWAYS)
    first = prompt_of(20)
    ask(node, "a", first)
    ask(node, "b", prompt_of(44, first=1))
    node.writes("writes", 12, max_tokens=4, age=101)
    node.reserve("older", 33, age=102)  # 9 of 12 blocks, of which 8 are free
    node.loads_at_once = False
    node.local("younger", first, salt="", age=103)
    while not node.words("older"):
        assert [name for name, _, _ in node.step()] == ["writes"]
        assert not node.loads
    assert node.words("older") == ["reserved"]


def test_others_start_while_blocks_are_read():
    node = Node(num_blocks=12, tier=ALWAYS)
    first = prompt_of(20)
    ask(node, "a", first)
    ask(node, "b", prompt_of(44, first=1))
    node.loads_at_once = False
    node.local("c", first, salt="", max_tokens=2)
    assert node.begin() == []
    node.local("d", 5)
    assert node.begin() == [("d", 0, 5)]
    node.end()
    assert node.load.num_blocks_leaked == 0
    (load_id,) = node.loads
    node.load_ends(load_id)
    assert ("c", 16, 4) in node.step()
    node.steps()
    assert node.tokens("c") == answer_of(first, 2)
    node.check_empty()


@pytest.mark.parametrize("num_good", [0, 2])
def test_a_damaged_block_is_computed(num_good):
    node = Node(num_blocks=6, tier=ALWAYS)
    first = prompt_of(20)
    ask(node, "a", first)
    ask(node, "b", prompt_of(20, first=1))
    node.loads_at_once = False
    node.local("c", first, salt="")
    node.begin()
    (load_id,) = node.loads
    node.load_ends(load_id, num_good)
    node.loads_at_once = True
    assert node.step() == [("c", num_good * BLOCK_SIZE, 20 - num_good * BLOCK_SIZE)]
    node.steps()
    assert node.tokens("c") == answer_of(first, 4)
    assert (node.load.tier.num_hits, node.load.tier.num_damaged) == (num_good, 1)
    node.check_empty()


@pytest.mark.parametrize("is_told", [True, False])
def test_what_could_not_be_copied_is_copied_another_time(is_told):
    """Two prompts of 12 blocks that drive each other out, of which 4 can be copied at once. Where nobody tells, as of
    what another rank lacks, a read finds out, and then of all that it does not find."""
    node = Node(num_blocks=14, tier=OffloadPlan(num_host=40, host_s=0.001, reads_always=True))
    node.most_offloaded = 4
    node.tells_lost = is_told
    for turn in range(10):
        before = node.load.num_cached_tokens
        ask(node, str(turn), prompt_of(50, first=turn % 2))
    assert node.load.num_cached_tokens - before == 48
    assert (node.load.tier.num_damaged == 0) == is_told
    if is_told:
        assert node.load.tier.written_bytes == node.load.tier.host_bytes  # each block once
    node.check_empty()


def test_what_takes_too_long_is_computed():
    node = Node(num_blocks=6, tier=ALWAYS)
    first = prompt_of(20)
    ask(node, "a", first)
    ask(node, "b", prompt_of(20, first=1))
    node.loads_at_once = False
    node.local("c", first, salt="")
    node.begin()
    (load_id,) = node.loads
    assert node.scheduler.wake_at_s == node.now + LOAD_DEADLINE_S
    node.tick(node.now + LOAD_DEADLINE_S)
    assert not node.loads
    node.worker.loaded(load_id, 4)  # too late
    assert node.step() == [("c", 0, 20)]
    node.steps()
    assert node.tokens("c") == answer_of(first, 4)
    assert node.load.tier.num_late == 1
    node.check_empty()


@pytest.mark.parametrize(("token_s", "num_loads"), [(0.0001, 0), (0.1, 1)])
def test_only_what_is_read_faster_than_computed(token_s, num_loads):
    """Four blocks are 16 tokens, and take 0.04 s to be read."""
    tier = OffloadPlan(num_disk=16, disk_s=0.01)
    node = Node(num_blocks=6, tier=tier, costs=StepCosts(1 / token_s))
    node.worker.step_done = lambda works, tokens, step_s: type(node.worker).step_done(
        node.worker, works, tokens, 0.0
    )  # steps of which nothing is learnt
    ask(node, "a", prompt_of(20))
    ask(node, "b", prompt_of(20, first=1))
    ask(node, "c", prompt_of(20))
    assert node.num_loads == num_loads
    node.check_empty()


@pytest.fixture
def made(monkeypatch):
    """Collect the KV offloads of nodes that are made from now on, and their estimates of the time that reads take."""
    tiers, rates = [], []

    def noted(kind, instances):
        def make(*arguments):
            instances.append(kind(*arguments))
            return instances[-1]

        return make

    monkeypatch.setattr(scheduler, "KVOffload", noted(KVOffload, tiers))
    monkeypatch.setattr(kv_offload, "TierRates", noted(TierRates, rates))
    return SimpleNamespace(tiers=tiers, rates=rates)


def test_a_prompt_that_cannot_start_yet_finds_once_that_reading_does_not_pay(made):
    """What is not tried for long is tried again, and a prompt that waits is no trial with each step."""
    node = Node(num_blocks=6, tier=OffloadPlan(num_disk=16, disk_s=0.01), costs=StepCosts(1000.0))
    ask(node, "a", prompt_of(20))
    ask(node, "b", prompt_of(20, first=1))
    node.local("c", prompt_of(20), salt="")
    (tier,), (rates,), (node_request,) = (
        made.tiers,
        made.rates,
        node.scheduler.node_requests.in_state(RequestState.WAITING),
    )
    rates.add([0], 1.0)
    before_s = rates.expected_s([0])
    assert not tier.must_wait(node_request, 0, node.now)
    after_s = rates.expected_s([0])
    assert after_s < before_s
    for _ in range(100):
        assert not tier.must_wait(node_request, 0, node.now)
    assert rates.expected_s([0]) == after_s
    assert node.num_loads == 0


def test_a_load_that_waits_for_another_one_is_no_slower_for_it(made):
    """One is read behind the other, each block in 0.01 s as expected: what the second one waits is not its own."""
    node = Node(num_blocks=12, tier=OffloadPlan(num_disk=64, disk_s=0.01, reads_always=True))
    prompts = [prompt_of(20, first=first) for first in (0, 1)]
    for number, prompt in enumerate([*prompts, prompt_of(44, first=2)]):
        ask(node, f"before {number}", prompt)
    node.loads_at_once = False
    for number, prompt in enumerate(prompts):
        node.local(f"again {number}", prompt, salt="")
    node.begin()
    assert len(node.loads) == 2
    for load_id, load in list(node.loads.items()):
        node.now += 0.01 * len(load.slots)
        node.load_ends(load_id)
        assert made.rates[0].expected_s(load.slots) == pytest.approx(0.01 * len(load.slots))
    node.steps()
    node.check_empty()


def test_an_answer_that_was_put_back_reads_what_it_had():
    node = Node(num_blocks=10, tier=ALWAYS, role="decode")
    prompts = {name: prompt_of(14, first=index) for index, name in enumerate("abc")}
    for name, prompt in prompts.items():
        node.local(name, prompt, salt=name, max_tokens=20)
    node.steps()
    for name, prompt in prompts.items():
        assert node.tokens(name) == answer_of(prompt, 20)
    load = node.load
    assert load.num_preemptions > 0
    assert load.tier.num_hits > 0
    node.check_empty()


@pytest.mark.parametrize("how", ["cancelled", "detached"])
def test_one_that_ends_while_it_is_read_back_leaves_nothing(how):
    node = Node(num_blocks=6, tier=ALWAYS)
    ask(node, "a", prompt_of(20))
    ask(node, "b", prompt_of(20, first=1))
    node.loads_at_once = False
    request = node.local("c", prompt_of(20), salt="")
    node.begin()
    assert len(node.loads) == 1
    node.cancel(request) if how == "cancelled" else node.detached()
    assert node.words("c") == (["cancelled"] if how == "cancelled" else [])
    node.check_empty()


@pytest.mark.parametrize("seed", few(range(30)))
@pytest.mark.parametrize("is_batch_invariant", [False, True])
def test_never_a_wrong_token(seed, is_batch_invariant):
    """Prompts that begin alike, in a pool and a tier too small for them, with reads that end late, early or never."""
    rng = random.Random(seed)
    tier = OffloadPlan(rng.randint(0, 6), rng.randint(1, 10), 0.001, 0.001, reads_always=True)
    node = Node(num_blocks=14, budget=16, slots=3, tier=tier, is_batch_invariant=is_batch_invariant)
    node.loads_at_once = False
    node.most_offloaded = rng.choice([1, 3, 14])
    asked = {}
    for number in range(60):
        name, length = str(number), rng.randint(1, 30)
        prompt = prompt_of(40, first=rng.randint(0, 2))[:length]
        asked[name] = prompt
        node.local(name, prompt, salt="", max_tokens=rng.randint(1, 12))
        for _ in range(rng.randint(0, 4)):
            node.step()
            for load_id, load in list(node.loads.items()):
                if rng.random() < 0.5:
                    node.load_ends(load_id, rng.choice([None, None, None, rng.randint(0, len(load.slots))]))
        if rng.random() < 0.1:
            node.tick(node.now + LOAD_DEADLINE_S)
    node.loads_at_once = True
    for load_id in list(node.loads):
        node.load_ends(load_id)
    node.steps(most=2000)
    for name, prompt in asked.items():
        told = node.tokens(name)
        assert told == answer_of(prompt, len(told))
        assert told
    assert node.load.tier.num_hits > 0
    node.check_empty()


async def test_a_whole_node_whose_memory_takes_one_block_at_once(tmp_path, monkeypatch):
    """Two prompts of eight blocks that drive each other out of the pool: in the end all comes from the KV offload."""
    monkeypatch.setattr(tier_store, "OFFLOADED_BYTES", 1)
    prompts = [[(place * place + first) % 97 for place in range(8 * RUNNER_BLOCK_SIZE + 1)] for first in (1, 2)]
    async with running(tmp_path, num_blocks=10, num_tier_blocks=40) as node:
        for turn in range(24):
            before = node.load.num_cached_tokens
            node.local(str(turn), prompts[turn % 2], max_tokens=2)
            await node.idle()
            assert node.of(str(turn)) == told(answer_on_paper(prompts[turn % 2], 2))
        assert node.load.num_cached_tokens - before == 8 * RUNNER_BLOCK_SIZE
        assert node.load.tier.num_unwritten > 0
        assert node.load.tier.written_bytes == node.load.tier.host_bytes
        assert node.load.tier.num_damaged == 0


async def test_the_kv_offload_has_copies_of_what_was_in_blocks_that_host_others(tmp_path, tiny_model):
    engine = {"model": str(tiny_model), "device": "cpu", "dtype": "bfloat16"}
    sizes = {"num_blocks": MOST_BLOCKS, "num_tier_blocks": MOST_BLOCKS, "max_num_seqs": 4}
    prompt = [(7 * at * at + 3 * at) % 200 for at in range(900)]
    async with running(tmp_path, engine=engine, **sizes, max_num_batched_tokens=512, distributed_kv=True) as node:
        node.local("first", prompt, max_tokens=12)
        await node.idle()
        await asyncio.to_thread(_host_others, node)
        await node.until(lambda: not node.load.num_remote_kv_blocks)
        node.local("again", prompt, max_tokens=12)
        await node.idle()
        assert node.load.tier.num_hits > 0
        assert node.of("again") == node.of("first")
        await node.node.close()


def _host_others(node):
    """Another node's request has most of the pool, for a while."""
    random = np.random.default_rng(1)

    def read(layer, num_tiles):
        keys, values = layout.cache_bytes(layer)
        num_blocks = num_tiles * 256 // layout.block_size
        return memoryview(random.bytes(keys * num_blocks)), memoryview(random.bytes(values * num_blocks))

    offer, layout = node.node.hello().remote_kvs.holder, node.engine.layout
    sizes = node.engine.partial_attention()
    bytes_of = {"row_bytes": sizes.row_bytes, "partial_bytes": sizes.partial_bytes}
    remote_kv = open_remote_kv(
        offer.address, offer.key, NUM_TILES, layout.layers, read, tile_request=TileRequest(0), **bytes_of
    )
    assert remote_kv is not None
    assert remote_kv.num_tiles == NUM_TILES
    remote_kv.close()
