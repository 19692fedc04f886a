"""What the coordinator is told of the blocks that a node holds, in how many messages."""

import pytest

from serving_core.node.blocks import BlockAllocator
from serving_core.node.prefix import hint_of
from serving_node import outputs
from serving_node.outputs import CacheReport

MAX_HINTS = 100


@pytest.fixture(autouse=True)
def short_messages(monkeypatch):
    monkeypatch.setattr(outputs, "MAX_HINTS", MAX_HINTS)


class Coordinator:
    """Hears a report, and looks after every message whether the node could hold so much."""

    def __init__(self, num_blocks, caching=True):
        self.allocator = BlockAllocator(num_blocks, caching=caching)
        self.report = CacheReport(self.allocator, None, [b"maker"], self.hear)
        self.hints = set()
        self.messages = []

    def hear(self, cache_changed):
        removed, stored = set(cache_changed.removed), set(cache_changed.stored)
        assert max(len(removed), len(stored)) <= MAX_HINTS
        self.hints = (self.hints - removed) | stored
        assert len(self.hints) <= self.allocator.num_blocks
        self.messages.append((len(removed), len(stored)))

    def fill(self, first):
        """The whole pool, with names of this number and the next ones."""
        num_blocks = self.allocator.num_blocks
        names = [number.to_bytes(8, "little").ljust(32) for number in range(first, first + num_blocks)]
        lease = self.allocator.allocate(num_blocks)
        lease.publish(names)
        lease.release()
        self.report.report()
        assert self.hints == set(map(hint_of, names))


def test_what_has_gone_and_what_is_new_is_one_message():
    coordinator = Coordinator(3)
    coordinator.fill(0)
    coordinator.fill(3)
    assert coordinator.messages == [(0, 3), (3, 3)]
    coordinator.report.report()
    assert len(coordinator.messages) == 2


def test_what_is_too_much_for_one_message_goes_before_more_comes():
    coordinator = Coordinator(MAX_HINTS + 1)
    coordinator.fill(0)
    coordinator.fill(MAX_HINTS + 1)
    assert coordinator.messages == [(0, MAX_HINTS), (0, 1), (MAX_HINTS, 0), (1, MAX_HINTS), (0, 1)]


def test_the_first_report_of_an_empty_pool_says_that_blocks_are_shared():
    coordinator = Coordinator(3)
    for _ in range(2):
        coordinator.report.report()
    assert coordinator.messages == [(0, 0)]
    coordinator.report.forget()
    coordinator.report.report()
    assert coordinator.messages == [(0, 0)] * 2


def test_a_pool_without_caching_reports_nothing():
    coordinator = Coordinator(3, caching=False)
    coordinator.report.report()
    assert coordinator.messages == []
