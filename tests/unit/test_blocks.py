import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.blocks import BlockAllocator
from engine.errors import OutOfBlocks


class Leasing(RuleBasedStateMachine):
    """The allocator against a plain model: a list of lists of block ids, in any order of calls."""

    @initialize(num_blocks=st.integers(0, 12))
    def start(self, num_blocks):
        self.allocator = BlockAllocator(num_blocks)
        self.num_blocks = num_blocks
        self.leases = []
        self.tables = []

    @property
    def num_free(self):
        return self.num_blocks - sum(map(len, self.tables))

    @rule(count=st.integers(0, 14))
    def allocate(self, count):
        if count > self.num_free:
            with pytest.raises(OutOfBlocks, match=f"{count} blocks .* {self.num_free} of {self.num_blocks} are free"):
                self.allocator.allocate(count)
        else:
            self.leases.append(self.allocator.allocate(count))
            self.tables.append(list(self.leases[-1].block_ids))
            assert len(self.tables[-1]) == count

    @precondition(lambda self: self.leases)
    @rule(count=st.integers(0, 14), data=st.data())
    def grow(self, count, data):
        index = data.draw(st.integers(0, len(self.leases) - 1))
        lease, table = self.leases[index], self.tables[index]
        if count > self.num_free:
            with pytest.raises(OutOfBlocks):
                lease.grow(count)
            assert lease.block_ids == table
        else:
            lease.grow(count)
            assert lease.block_ids[: len(table)] == table  # what was in the table stays where it was
            assert len(lease.block_ids) == len(table) + count
            self.tables[index] = list(lease.block_ids)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data):
        index = data.draw(st.integers(0, len(self.leases) - 1))
        lease = self.leases.pop(index)
        self.tables.pop(index)
        lease.release()
        with pytest.raises(AssertionError, match="released twice"):
            lease.release()
        with pytest.raises(AssertionError, match="released lease was used"):
            lease.grow(1)

    @invariant()
    def every_block_has_one_owner(self):
        if not hasattr(self, "allocator"):
            return
        self.allocator.check_integrity()
        held = [block for table in self.tables for block in table]
        assert len(held) == len(set(held))
        assert set(held) <= set(range(self.num_blocks))
        assert self.allocator.num_free == self.num_free


TestLeasing = Leasing.TestCase


def test_lowest_ids_go_out_first():
    allocator = BlockAllocator(6)
    first, second = allocator.allocate(2), allocator.allocate(2)
    assert (first.block_ids, second.block_ids) == ([0, 1], [2, 3])
    first.release()
    assert allocator.allocate(3).block_ids == [0, 1, 4]


def test_integrity_check_sees_a_block_that_is_owned_twice():
    allocator = BlockAllocator(3)
    lease = allocator.allocate(2)
    lease.block_ids.append(2)
    with pytest.raises(AssertionError, match="owned twice"):
        allocator.check_integrity()
