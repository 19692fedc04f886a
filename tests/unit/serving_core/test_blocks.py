"""The block allocator against a model that recounts everything at each question."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from serving_core.errors import OutOfBlocks
from serving_core.node.blocks import BlockAllocator
from tests.effort import effort

paths = st.text("ab", max_size=6)


def names_of(path):
    """One block for each letter; a name is the way there: "ab" -> [b"a", b"ab"]."""
    return [path[: end + 1].encode() for end in range(len(path))]


class Leasing(RuleBasedStateMachine):
    """Any calls in any order, with the exact blocks that each lease must get."""

    @initialize(num_blocks=st.integers(0, 12), caching=st.booleans())
    def start(self, num_blocks, caching):
        self.allocator = BlockAllocator(num_blocks, caching=caching)
        self.num_blocks = num_blocks
        self.caching = caching
        self.leases = []
        self.tables = []
        self.paths = []  # what each lease's blocks hold
        self.block_of = {}
        self.copies = []  # name and block, of published blocks that another leased block has the name for
        self.cached = []  # the next to be evicted first
        self.known = set()  # what one who reads the changes knows

    @property
    def leased(self):
        return [block for table in self.tables for block in table]

    @property
    def free(self):
        return [block for block in range(self.num_blocks) if block not in self.leased + self.cached]

    def expect_fresh(self, count, held=()):
        fresh = [block for block in self.free if block not in held][:count]
        evicted = self.cached[: count - len(fresh)]
        self.cached = self.cached[len(evicted) :]
        self.block_of = {name: block for name, block in self.block_of.items() if block not in evicted}
        return fresh + sorted(evicted)

    @rule(count=st.integers(0, 14), path=paths)
    def allocate(self, count, path):
        names = names_of(path)[:count]
        held = [self.block_of.get(name) for name in names] + [None]
        held = held[: held.index(None)]
        num_needed = count - len(set(held) & set(self.leased))
        num_free = len(self.free) + len(self.cached)
        assert self.allocator.num_held(names) == len(held)
        assert self.allocator.num_needed(count, names) == num_needed
        if num_needed > num_free:
            with pytest.raises(OutOfBlocks, match=f"{num_needed} blocks .* {num_free} of {self.num_blocks} are free"):
                self.allocator.allocate(count, names)
            return
        self.cached = [block for block in self.cached if block not in held]
        table = held + self.expect_fresh(count - len(held), held)
        lease = self.allocator.allocate(count, names)
        assert (lease.block_ids, lease.num_cached, lease.num_published) == (table, len(held), len(held))
        assert self.allocator.num_free == num_free - num_needed
        self.leases.append(lease)
        self.tables.append(table)
        self.paths.append(path)

    @precondition(lambda self: self.leases)
    @rule(count=st.integers(0, 14), data=st.data())
    def grow(self, count, data):
        index = data.draw(st.integers(0, len(self.leases) - 1))
        lease, table = self.leases[index], self.tables[index]
        if count > len(self.free) + len(self.cached):
            with pytest.raises(OutOfBlocks):
                lease.grow(count)
        else:
            table += self.expect_fresh(count)
            lease.grow(count)
        assert lease.block_ids == table

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def publish(self, data):
        index = data.draw(st.integers(0, len(self.leases) - 1))
        lease, table = self.leases[index], self.tables[index]
        names = names_of(self.paths[index])[: data.draw(st.integers(0, len(table)))]
        for block, name in list(zip(table, names, strict=False))[lease.num_published :]:
            if not self.caching:
                continue
            if self.block_of.get(name) in self.leased:
                self.copies.append((name, block))
            else:
                self.cached = [other for other in self.cached if other != self.block_of.get(name)]
                self.block_of[name] = block
        expected = max(lease.num_published, len(names))
        lease.publish(names)
        assert lease.num_published == expected

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data):
        index = data.draw(st.integers(0, len(self.leases) - 1))
        lease, table = self.leases.pop(index), self.tables.pop(index)
        self.paths.pop(index)
        self.copies = [(name, block) for name, block in self.copies if block not in table]
        for name, block in [*self.block_of.items()][::-1]:
            copy = next((each for each in self.copies if each[0] == name), None)
            if copy is not None and block not in self.leased:
                self.copies.remove(copy)
                self.block_of[name] = copy[1]
        named = self.block_of.values()
        self.cached += [block for block in reversed(table) if block in named and block not in self.leased]
        lease.release()
        with pytest.raises(AssertionError, match="released twice"):
            lease.release()
        with pytest.raises(AssertionError, match="released lease was used"):
            lease.grow(1)
        with pytest.raises(AssertionError, match="released lease was used"):
            lease.publish([])

    @precondition(lambda self: any(not lease.num_published for lease in self.leases))
    @rule(data=st.data())
    def cut(self, data):
        """Blocks of which none has a name go from either end."""
        unnamed = [index for index, lease in enumerate(self.leases) if not lease.num_published]
        index = data.draw(st.sampled_from(unnamed))
        num_first = data.draw(st.integers(0, len(self.tables[index])))
        self.leases[index].shed(num_first)
        num_last = data.draw(st.integers(0, len(self.tables[index]) - num_first))
        self.leases[index].trim(num_last)
        self.tables[index] = self.tables[index][num_first:][: -num_last or None]
        assert self.leases[index].block_ids == self.tables[index]

    @rule()
    def read_changes(self):
        stored, removed = self.allocator.take_changes()
        assert len({*stored, *removed}) == len(stored) + len(removed)
        assert not self.known & set(stored)
        assert self.known >= set(removed)
        assert max(len(stored), len(removed)) <= self.num_blocks
        self.known = (self.known | set(stored)) - set(removed)
        assert self.known == set(self.block_of)

    @rule()
    def read_everything(self):
        names = self.allocator.take_names()
        assert sorted(names) == sorted(self.block_of)
        self.known = set(names)

    @invariant()
    def all_is_counted(self):
        if not hasattr(self, "allocator"):
            return
        self.allocator.check_integrity()
        assert self.allocator.num_free == len(self.free) + len(self.cached)
        assert self.allocator.num_cached == len(self.cached)
        assert self.allocator.blocks_by_name == self.block_of


TestLeasing = Leasing.TestCase


@settings(max_examples=effort(200, 500, 2000))
@given(
    st.lists(st.sampled_from(("a", "aa", "aaa", "ab")), min_size=3, max_size=3),
    st.permutations([0, 1, 2] * 3),
    st.lists(st.integers(0, 3), min_size=9, max_size=9),
)
def test_a_block_is_evicted_after_all_behind_it(prompts, steps, evicted):
    """Three prompts of few beginnings begin, publish and end in any order: a node with a block has all before it."""
    allocator = BlockAllocator(6)
    lives = [life_of(allocator, path) for path in prompts]
    for step, num_blocks in zip(steps, evicted, strict=True):
        next(lives[step])
        allocator.check_integrity()
        allocator.allocate(min(num_blocks, allocator.num_free)).release()
        held = allocator.blocks_by_name
        assert all(name[:-1] in held for name in held if name[:-1])


def life_of(allocator, path):
    """Allocate, publish and release the blocks of a path, a step at a time; nothing where they do not fit."""
    names = names_of(path)
    if allocator.num_needed(len(path), names) > allocator.num_free:
        while True:
            yield
    lease = allocator.allocate(len(path), names)
    yield
    lease.publish(names)
    yield
    lease.release()
    yield


def test_private_blocks_are_published_apart_and_replaced():
    allocator = BlockAllocator(8)
    cache(allocator, "ab")
    lease = allocator.allocate(5, names_of("ab"), num_private=2)
    assert (lease.block_ids, lease.num_cached) == ([2, 3, 0, 1, 4], 2)
    published = lease.publish_private([b"x", b"y"])
    assert (published.block_ids, lease.block_ids) == ([2, 3], [5, 6, 0, 1, 4])
    lease.publish([*names_of("ab"), b"abc"])
    allocator.check_integrity()
    allocator.drop([b"x", b"y"])
    assert allocator.blocks_by_name == {b"a": 0, b"ab": 1, b"x": 2, b"y": 3, b"abc": 4}, "a leased block has its name"
    published.release()
    assert (allocator.num_free, allocator.num_cached) == (3, 2)
    allocator.drop([b"x", b"y", b"unknown"])
    assert (allocator.num_free, allocator.num_cached) == (3, 0)
    with pytest.raises(AssertionError, match="a published block was trimmed"):
        lease.trim(1)
    with pytest.raises(OutOfBlocks):
        allocator.allocate(4)
    allocator.check_integrity()
    lease.release()
    assert allocator.num_free == 8


def cache(allocator, path):
    """Leaves the blocks of a path in the cache."""
    lease = allocator.allocate(len(path))
    lease.publish(names_of(path))
    lease.release()


def test_lowest_ids_go_out_first():
    allocator = BlockAllocator(6)
    first, second = allocator.allocate(2), allocator.allocate(2)
    assert (first.block_ids, second.block_ids) == ([0, 1], [2, 3])
    first.release()
    assert allocator.allocate(3).block_ids == [0, 1, 4]


def test_a_cached_block_is_leased_by_its_name_and_shared():
    allocator = BlockAllocator(4)
    cache(allocator, "aab")
    first = allocator.allocate(3, names_of("aaa"))
    assert (first.block_ids, first.num_cached) == ([0, 1, 3], 2)
    assert (allocator.num_free, allocator.num_cached) == (1, 1)
    second = allocator.allocate(2, names_of("aa"))
    assert second.block_ids == [0, 1]
    assert allocator.num_free == 1  # what is shared costs nothing
    first.release()
    assert (allocator.num_free, allocator.num_cached) == (2, 1)  # "aab"; "a" and "aa" are still in use
    assert allocator.allocate(2).block_ids == [3, 2]


def test_leasing_what_is_cached_costs_as_much_as_what_is_free():
    allocator = BlockAllocator(3)
    cache(allocator, "ab")
    assert allocator.num_free == 3
    assert allocator.num_needed(3, names_of("ab")) == 3
    lease = allocator.allocate(2, names_of("ab"))
    assert allocator.num_needed(3, names_of("ab")) == 1
    with pytest.raises(OutOfBlocks, match="2 blocks asked for, 1 of 3 are free"):
        allocator.allocate(4, names_of("ab"))
    assert lease.block_ids == [0, 1]
    allocator.check_integrity()


def test_the_least_recently_used_goes_first_and_a_tail_before_its_head():
    allocator = BlockAllocator(6)
    cache(allocator, "aaa")
    cache(allocator, "bbb")
    allocator.allocate(2, names_of("aa")).release()  # "aaa" itself was not in use again
    order = []
    allocator.take_changes()
    while len(order) < 6:
        allocator.allocate(1)
        order += allocator.take_changes()[1]
    assert order == [b"aaa", b"bbb", b"bb", b"b", b"aa", b"a"]


def test_a_name_goes_to_the_copy_that_is_still_leased():
    allocator = BlockAllocator(4)
    first, second, third = allocator.allocate(1), allocator.allocate(2), allocator.allocate(1)
    for lease, path in ((first, "a"), (second, "ab"), (third, "a")):
        lease.publish(names_of(path))
    allocator.take_changes()
    first.release()
    assert (allocator.num_cached, allocator.blocks_by_name) == (0, {b"a": 1, b"ab": 2})
    second.release()
    assert (allocator.num_cached, allocator.blocks_by_name) == (1, {b"a": 3, b"ab": 2})
    third.release()
    assert allocator.allocate(3).block_ids == [0, 1, 2]  # "ab" goes before "a"
    assert allocator.take_changes() == ([], [b"ab"])


def test_a_name_of_a_cached_block_goes_to_the_block_that_is_published_under_it():
    allocator = BlockAllocator(3)
    first, second = allocator.allocate(1), allocator.allocate(2)
    first.publish(names_of("a"))
    first.release()
    second.publish(names_of("ab"))
    assert (allocator.num_cached, allocator.blocks_by_name) == (0, {b"a": 1, b"ab": 2})
    assert allocator.allocate(1).block_ids == [0]


def test_the_first_block_keeps_a_name_and_the_second_stays_without():
    allocator = BlockAllocator(4)
    first, second = allocator.allocate(1), allocator.allocate(2)
    first.publish(names_of("a"))
    second.publish(names_of("ab"))
    assert allocator.allocate(2, names_of("ab")).block_ids == [0, 2]
    second.release()
    assert (allocator.num_free, allocator.num_cached) == (2, 0)  # block 1 is free like any other
    allocator.check_integrity()


def test_changes_are_netted_out():
    allocator = BlockAllocator(2)
    cache(allocator, "ab")
    assert allocator.take_changes() == ([b"a", b"ab"], [])
    cache(allocator, "b")  # "ab" is lost for it
    cache(allocator, "ab")  # and comes back at the cost of the rest
    assert allocator.take_changes() == ([], [])
    cache(allocator, "bb")
    assert allocator.take_changes() == ([b"b", b"bb"], [b"ab", b"a"])


def test_without_caching_nothing_gets_a_name():
    allocator = BlockAllocator(2, caching=False)
    cache(allocator, "ab")
    assert allocator.num_held(names_of("ab")) == allocator.num_cached == 0
    assert allocator.allocate(2, names_of("ab")).num_cached == 0
    assert allocator.take_changes() == ([], [])


def test_integrity_check_sees_a_block_that_is_owned_twice():
    allocator = BlockAllocator(3)
    lease = allocator.allocate(2)
    lease.block_ids.append(2)
    with pytest.raises(AssertionError, match="owned twice"):
        allocator.check_integrity()


def test_integrity_check_sees_a_block_that_is_shared_without_a_name():
    allocator = BlockAllocator(3)
    lease, other = allocator.allocate(2), allocator.allocate(1)
    other.block_ids.append(lease.block_ids[0])
    with pytest.raises(AssertionError, match="miscounted"):
        allocator.check_integrity()
    allocator._num_leases[lease.block_ids[0]] = 2
    with pytest.raises(AssertionError, match="without a name is shared"):
        allocator.check_integrity()
