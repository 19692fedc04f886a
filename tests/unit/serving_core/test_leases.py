"""What blocks are called that a node computes itself or gets from another one."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from serving_core.layout import KVLayout
from serving_core.node.blocks import BlockAllocator
from serving_core.node.leases import MAX_CHECKPOINT_SHARE, MIN_CHECKPOINT_TOKENS, Leases
from serving_core.node.prefix import CHUNK, EITHER, MAX_NUMERICS_IDS, MIXED_NUMERICS, STEP, BlockNames, child_name
from serving_core.node.requests import DecodePlace, NodeRequest, RequestState
from serving_core.requests import Request, SamplingParams

LAYOUT = KVLayout.uniform(num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32")
ROOT = bytes(32)
HERE, THERE = b"-origin-", b"another-"
READ_HERE, WRITTEN_HERE = HERE + CHUNK, HERE + STEP
READ_THERE, WRITTEN_THERE = THERE + CHUNK, THERE + STEP
TOKENS = list(range(40))
MIGRATES = SimpleNamespace(migration=object())


class House:
    """One pool."""

    def __init__(self, caching=True, is_batch_invariant=False):
        self.allocator = BlockAllocator(400, caching=caching)
        self.leases = Leases(self.allocator, LAYOUT, HERE, is_batch_invariant=is_batch_invariant)

    def take(self, num_tokens, stage=RequestState.PREFILLING):
        request = Request("r", 1, TOKENS[:num_tokens], num_tokens, SamplingParams(max_tokens=40))
        node_request = NodeRequest(request, 1, BlockNames(ROOT, 4), stage)
        assert self.leases.take(node_request, 40, num_cacheable=num_tokens, num_spare=0)
        return node_request

    def compute(self, node_request, stage, until):
        """As many steps as it takes, of one token for an answer."""
        node_request.state = stage
        while node_request.num_computed < until:
            node_request.num_computed = until if stage is RequestState.PREFILLING else node_request.num_computed + 1
            node_request.request.token_ids = TOKENS[: max(until, node_request.num_computed)]
            self.leases.publish(node_request)

    def copy(self, node_request, num_tokens, made):
        node_request.num_computed = num_tokens
        self.leases.copied(node_request, made)
        node_request.state = RequestState.RUNNING
        self.leases.publish(node_request)

    def found(self, num_tokens=40):
        """Who made the leading blocks that the pool has of TOKENS."""
        node_request = self.take(num_tokens)
        numerics_ids = list(node_request.names.numerics_ids)
        self.leases.give_back(node_request)
        return numerics_ids


@pytest.fixture
def house():
    return House()


def test_a_block_is_of_steps_if_only_its_last_token_is(house):
    node_request = house.take(11)
    house.compute(node_request, RequestState.PREFILLING, 11)
    assert house.leases.numerics_ids_of(node_request) == [READ_HERE] * 3  # the third is not full yet
    house.compute(node_request, RequestState.RUNNING, 20)
    expected = [READ_HERE, READ_HERE, WRITTEN_HERE, WRITTEN_HERE, WRITTEN_HERE]
    assert node_request.names.numerics_ids == house.leases.numerics_ids_of(node_request) == house.found() == expected
    name = ROOT
    for index, numerics_id in enumerate(expected):
        name = child_name(name, numerics_id, TOKENS[4 * index : 4 * index + 4])
        assert name in house.allocator.blocks_by_name


def test_where_bits_have_no_history_blocks_of_steps_are_called_like_those_of_chunks():
    house = House(is_batch_invariant=True)
    assert house.leases.numerics_ids == [HERE + EITHER, MIXED_NUMERICS]
    read = house.take(20)
    house.compute(read, RequestState.PREFILLING, 20)
    written = house.take(4)
    house.compute(written, RequestState.RUNNING, 21)
    assert written.names.names == read.names.names
    assert house.leases.numerics_ids_of(written) == [HERE + EITHER] * 6


def test_what_reads_on_behind_an_answer_is_called_after_it(house):
    house.compute(house.take(8), RequestState.RUNNING, 16)
    again = house.take(24)
    assert again.num_computed == 16
    house.compute(again, RequestState.PREFILLING, 24)
    assert house.found() == [WRITTEN_HERE] * 4 + [READ_HERE] * 2


@pytest.mark.parametrize("made", [[(READ_THERE, 3)], [(WRITTEN_THERE, 1), (MIXED_NUMERICS, 1), (READ_HERE, 1)]])
def test_copies_keep_their_names(house, made):
    node_request = house.take(12)
    house.copy(node_request, 12, made)
    assert house.found() == [numerics_id for numerics_id, num_blocks in made for _ in range(num_blocks)]
    assert house.leases.numerics_ids[:2] == [READ_HERE, WRITTEN_HERE]
    assert house.leases.numerics_ids[-1] == MIXED_NUMERICS


def test_copies_behind_the_same_blocks_keep_their_names(house):
    house.copy(house.take(8), 8, [(READ_THERE, 2)])
    node_request = house.take(16)
    assert node_request.names.numerics_ids == [READ_THERE] * 2
    house.copy(node_request, 16, [(READ_THERE, 4)])
    assert house.found() == [READ_THERE] * 4


def test_copies_behind_other_blocks_are_grafts_and_are_found_again(house):
    house.compute(house.take(8), RequestState.PREFILLING, 8)
    node_request = house.take(18)
    house.copy(node_request, 18, [(READ_THERE, 5)])
    assert house.found() == [READ_HERE] * 2 + [MIXED_NUMERICS] * 2
    house.compute(node_request, RequestState.RUNNING, 24)
    assert house.found() == [READ_HERE] * 2 + [MIXED_NUMERICS] * 3 + [
        WRITTEN_HERE
    ]  # part of the fifth has come with the copies


@pytest.mark.parametrize(("numerics", "numerics_id"), [(HERE, WRITTEN_HERE), (THERE, MIXED_NUMERICS)])
def test_what_another_kind_of_node_began_has_no_one_maker(house, numerics, numerics_id):
    node_request = house.take(6)
    house.copy(node_request, 6, [(numerics + CHUNK, 2)])
    assert house.leases.numerics_ids_of(node_request)[1] == numerics_id
    house.compute(node_request, RequestState.RUNNING, 12)
    assert house.found() == [numerics + CHUNK, numerics_id, WRITTEN_HERE]


@pytest.mark.parametrize("made", [[], [(READ_THERE, 2)], [(READ_THERE, 2**31)]])
def test_copies_of_which_it_is_not_told_who_made_them_are_grafts(house, made):
    house.copy(house.take(12), 12, made)
    assert house.found() == [MIXED_NUMERICS] * 3


def test_a_node_tells_so_many_makers_apart_and_no_more(house):
    for number in range(MAX_NUMERICS_IDS):
        node_request = house.take(3)
        node_request.request.token_ids = TOKENS[:4]
        house.copy(node_request, 4, [(b"%08dc" % number, 1)])
    assert len(house.leases.numerics_ids) == MAX_NUMERICS_IDS
    assert node_request.names.numerics_ids == [MIXED_NUMERICS]
    assert house.found(4) == [b"00000000c"]


def test_what_is_given_back_and_read_again_is_called_anew(house):
    node_request = house.take(6)
    house.copy(node_request, 6, [(READ_THERE, 2)])
    house.leases.give_back(node_request)
    assert house.leases.take(node_request, 40, num_cacheable=4, num_spare=0)
    house.compute(node_request, RequestState.PREFILLING, 8)
    assert node_request.names.numerics_ids == [READ_THERE, READ_HERE]


def test_without_caching_nothing_has_a_name():
    house = House(caching=False)
    node_request = house.take(8)
    house.compute(node_request, RequestState.PREFILLING, 9)
    assert house.leases.numerics_ids_of(node_request) == []
    house.copy(house.take(12), 12, [(READ_THERE, 3)])
    assert house.found() == []


def test_a_state_leads_the_blocks_of_a_request():
    layout = replace(LAYOUT, state_bytes=LAYOUT.block_bytes + 1)
    allocator = BlockAllocator(9, caching=False)
    leases = Leases(allocator, layout, HERE, is_batch_invariant=False)
    node_request = NodeRequest(
        Request("r", 1, TOKENS[:9], 9, SamplingParams(max_tokens=9)), 1, BlockNames(ROOT, 4), RequestState.PREFILLING
    )
    assert not leases.take(node_request, 32, num_cacheable=9, num_spare=0), "two blocks of state and eight of KV"
    assert leases.take(node_request, 9, num_cacheable=9, num_spare=0)
    assert len(node_request.lease.block_ids) == 2 + 3
    assert leases.num_tokens_held(node_request) == 12
    assert leases.num_missing(node_request, 13) == 1
    node_request.num_computed = 9
    assert leases.final_blocks(node_request) == [], "each step changes the state"
    assert leases.filled_blocks(node_request) == list(node_request.lease.block_ids)
    leases.give_back(node_request)
    assert allocator.num_free == 9


class Stateful:
    """One pool of a model with a fixed state."""

    def __init__(self, num_blocks=120, num_state_blocks=3):
        self.layout = replace(LAYOUT, state_bytes=num_state_blocks * LAYOUT.block_bytes - 1)
        self.allocator = BlockAllocator(num_blocks)
        self.leases = Leases(self.allocator, self.layout, HERE, is_batch_invariant=False)

    def begin(self, prompt):
        request = Request("r", 1, list(prompt), len(prompt), SamplingParams(max_tokens=1))
        node_request = NodeRequest(request, 1, BlockNames(ROOT, 4), RequestState.PREFILLING)
        num_free, num_cacheable = self.allocator.num_free, len(prompt) - 1
        num_needed = self.leases.num_needed(node_request, len(prompt) + 1, num_cacheable=num_cacheable)
        assert self.leases.take(node_request, len(prompt) + 1, num_cacheable=num_cacheable, num_spare=0)
        assert self.allocator.num_free == num_free - num_needed
        return node_request

    def step(self, node_request):
        """Return the state blocks that a step reads and those that it writes."""
        work = node_request.work(node_request.num_to_checkpoint)
        written = list(work.block_ids[:3])
        read = list(work.state_ids or written)
        node_request.num_computed += work.num_tokens
        self.leases.publish_all([node_request])
        self.allocator.check_integrity()
        return read, written

    def run(self, prompt):
        """Compute a prompt; return the ends of its steps, and the tokens that were found."""
        node_request = self.begin(prompt)
        ends = []
        while node_request.num_to_compute:
            self.step(node_request)
            ends.append(node_request.num_computed)
        found = self.leases.num_cached_tokens(node_request)
        self.leases.give_back(node_request)
        assert self.allocator.num_free == self.allocator.num_blocks
        return ends, found


def prompt_of(first, length=90):
    return [first, *range(1, length)]


def test_a_prompt_goes_on_behind_a_checkpoint_that_it_does_not_change():
    house = Stateful()
    first = house.begin(prompt_of(0))
    assert first.checkpoint_ends == (88,)
    read, written = house.step(first)
    assert read == written
    assert house.step(first)[0] == written, "the step behind a checkpoint reads what is in it"
    house.leases.give_back(first)
    again = house.begin(prompt_of(0))
    assert again.num_computed == 88
    read, others = house.step(again)
    assert read == written
    assert not set(read) & set(others)
    house.leases.give_back(again)
    assert house.allocator.num_free == 120


def test_checkpoints_are_where_prompts_end_and_where_they_part():
    house = Stateful()
    longer = [*prompt_of(0, 80), *[7] * 80]
    assert house.run(prompt_of(0)) == ([88, 90], 0)
    assert house.run(longer) == ([80, 156, 160], 0), "its beginning was found without a state"
    assert house.run([*prompt_of(0, 81), *[8] * 80]) == ([160, 161], 80)
    assert house.run(longer[:-1]) == ([159], 156)


def test_few_tokens_are_not_worth_a_checkpoint():
    house = Stateful()
    assert MIN_CHECKPOINT_TOKENS == 64
    assert house.run(prompt_of(0, 64)) == ([64], 0)
    assert house.run(prompt_of(0, 65)) == ([64, 65], 0)
    assert house.run(prompt_of(0, 100)) == ([100], 64)
    assert house.run(prompt_of(0, 129)) == ([128, 129], 64)


def test_the_checkpoint_that_was_used_longest_ago_goes_first():
    house = Stateful(num_blocks=400, num_state_blocks=12)
    most = int(400 * MAX_CHECKPOINT_SHARE) // 12
    for first in range(most):
        assert house.run(prompt_of(first, 65))[1] == 0
    assert house.run(prompt_of(0, 65))[1] == 64
    house.run(prompt_of(most, 65))
    assert [house.run(prompt_of(first, 65))[1] for first in (0, 2, most)] == [64, 64, 64]
    assert house.run(prompt_of(1, 65))[1] == 0


def test_a_prefix_without_its_state_is_computed_again():
    house = Stateful(num_blocks=60)
    assert house.run(prompt_of(0)) == ([88, 90], 0)
    assert house.run(prompt_of(0)) == ([90], 88)
    house.allocator.allocate(60 - 22 - 3 + 1).release()  # evicts a block of the state, which was held least long
    assert house.run(prompt_of(0)) == ([88, 90], 0)
    assert house.run(prompt_of(0)) == ([90], 88)


def test_a_prompt_that_fills_the_pool_begins_anew():
    house = Stateful(num_blocks=43)
    assert house.run(prompt_of(0)) == ([88, 90], 0)
    assert house.run(prompt_of(0, 155))[1] == 0, "with the checkpoint it needed 44 blocks"
    assert house.run(prompt_of(0)) == ([88, 90], 0)


def test_a_prompt_for_another_node_computes_its_last_token_behind_a_checkpoint():
    """Computed again, when its first token is known: only a step moves the state to the blocks that are sent."""
    house = Stateful()
    for ends in ([84, 88], [88]):
        request = Request("r", 1, prompt_of(0, 88), 88, SamplingParams(max_tokens=9))
        node_request = NodeRequest(request, 1, BlockNames(ROOT, 4), RequestState.PREFILLING)
        node_request.decode_place = DecodePlace.ELSEWHERE
        request.token_ids.append(5)
        assert house.leases.take(node_request, 88, num_cacheable=88, num_spare=0)
        found = []
        while node_request.num_to_compute:
            house.step(node_request)
            found.append(node_request.num_computed)
        assert found == ends
        assert node_request.state_source is None
        house.leases.give_back(node_request)


def decoding(house, prompt, num_tokens):
    """A sequence behind so many tokens of its output, with the steps that read from a checkpoint."""
    node_request, read_from = house.begin(prompt), []
    while node_request.num_to_compute:
        house.step(node_request)
    node_request.state = RequestState.RUNNING
    for token in range(num_tokens):
        node_request.request.token_ids.append(token)
        if missing := house.leases.num_missing(node_request, node_request.num_computed + 1):
            house.leases.grow(node_request, missing)
        work, written = node_request.work(1), list(node_request.lease.block_ids[:3])
        if house.leases.is_checkpoint_due(node_request, work.start):
            work = house.leases.take_checkpoint(node_request, work)
            assert list(work.state_ids) == written, "where the step before has left the state"
            assert not set(written) & set(work.block_ids[:3])
            read_from.append(work.start)
        node_request.num_computed += 1
        house.leases.publish_all([node_request])
        house.allocator.check_integrity()
    return node_request, read_from


def test_a_later_turn_goes_on_behind_the_output_of_the_turn_before():
    house = Stateful(num_blocks=200)
    node_request, taken = decoding(house, prompt_of(0), 200)
    assert taken == [152, 216, 280], "64 tokens apart, the first behind the prompt's own at 88"
    turn, beside = node_request.request.token_ids[:290], [*prompt_of(0), *[8] * 9]
    house.leases.give_back(node_request)
    assert house.run([*turn, *range(9)]) == ([299], 280)
    assert house.run([*turn[:230], *[9] * 9])[1] == 88, "an earlier one of the output is gone"
    assert house.run(beside)[1] == 88, "that of the prompt is not"


def test_the_output_behind_a_prompt_from_another_node_takes_checkpoints():
    house = Stateful(num_blocks=200)
    node_request, _ = decoding(house, prompt_of(0, 12), 0)
    house.leases.copied(node_request, [])
    assert node_request.names.numerics_ids == [MIXED_NUMERICS] * 3
    node_request.request.token_ids += [5] * 52
    node_request.num_computed = 64
    house.leases.grow(node_request, house.leases.num_missing(node_request, 65))
    turn = [*node_request.request.token_ids, 1]
    house.leases.take_checkpoint(node_request, node_request.work(0))
    house.leases.give_back(node_request)
    assert house.run(turn) == ([65], 64)


@pytest.mark.parametrize(
    ("change", "due"),
    [
        ({}, True),
        ({"state": RequestState.FROZEN}, False),
        ({"distributed": object()}, False),
        ({"outgoing": MIGRATES}, False),
    ],
)
def test_a_sequence_that_goes_elsewhere_takes_no_checkpoint(change, due):
    house = Stateful()
    node_request, _ = decoding(house, prompt_of(0), 62)
    for name, value in change.items():
        setattr(node_request, name, value)
    assert house.leases.is_checkpoint_due(node_request, 152) is due
    assert not house.leases.is_checkpoint_due(node_request, 153)
    assert not house.leases.is_checkpoint_due(node_request, 148)


def test_no_checkpoint_is_taken_where_blocks_are_short():
    house = Stateful(num_blocks=31)
    node_request = house.begin(prompt_of(0))
    house.step(node_request)
    assert node_request.state_source is None
    house.leases.give_back(node_request)
    assert house.allocator.num_free == 31
