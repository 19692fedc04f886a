"""Which blocks the KV offload holds, and where, beside a plain list of what ought to be there."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_core.node.tiers import TierIndex, TierRates


def names(*numbers):
    return [bytes([number]) for number in numbers]


def put(index, *numbers):
    for number in numbers:
        index.put(bytes([number]), number)


def copied(index):
    copies = index.take_copies()
    return (copies.demotions, dict(zip(copies.block_ids, copies.slots, strict=True))) if copies else None


def test_host_memory_first_then_the_file_then_nowhere():
    index = TierIndex(2, 1)
    put(index, 1, 2)
    _, slots = copied(index)
    assert sorted(slots.values()) == [0, 1]
    put(index, 3)
    assert copied(index) == ([(slots[1], 2)], {3: slots[1]})  # the oldest one leaves host memory for the file
    assert index.num_held == (2, 1)
    put(index, 4)
    assert copied(index) == ([(slots[2], 2)], {4: slots[2]})
    assert index.run(names(1)) == []
    assert index.run(names(2, 3, 4, 1, 4)) == names(2, 3, 4)
    assert copied(index) is None


def test_more_at_once_than_there_is_room_for():
    """What is still in the pool alone goes to the file directly, and what there is no slot for is not copied."""
    index = TierIndex(1, 1)
    put(index, 1, 2, 3)
    assert copied(index) == ([], {2: 1, 3: 0})
    assert index.take_changes() == (names(2, 3), [])


def test_of_those_that_come_to_one_slot_of_the_file_together_the_last_one_is_copied():
    """Whatever is left out of such copies, nothing may be written under another name."""
    index = TierIndex(3, 1)
    put(index, 1, 2, 3)
    _, slots = copied(index)
    put(index, 4, 5, 6)
    assert copied(index) == ([(slots[3], 3)], {4: slots[1], 5: slots[2], 6: slots[3]})
    assert index.run(names(3, 4, 5, 6)) == names(3, 4, 5, 6)


def test_what_is_there_is_not_copied_again_and_counts_as_used():
    index = TierIndex(2, 0)
    put(index, 1, 2)
    copied(index)
    put(index, 1)
    assert copied(index) is None
    put(index, 3)
    assert index.run(names(1, 3)) == names(1, 3)
    assert b"\x02" not in index


def test_what_is_pinned_stays():
    index = TierIndex(2, 1)
    put(index, 1, 2, 3)
    assert copied(index) is not None
    index.pin(names(1, 2, 3))
    put(index, 4)
    assert copied(index) is None
    assert b"\x04" not in index
    index.unpin(names(1, 2, 3))
    put(index, 4)
    assert copied(index) is not None


def test_nothing_fits_without_slots():
    index = TierIndex(0, 0)
    put(index, 1)
    assert copied(index) is None
    assert index.take_names() == []


def test_what_is_not_there_any_more_is_forgotten():
    index = TierIndex(0, 2)
    put(index, 1, 2)
    index.forget(b"\x01")
    index.forget(b"\x07")
    assert copied(index)[1].keys() == {2}
    assert index.take_changes() == (names(2), [])
    index.check_integrity()


def test_what_could_not_be_written_is_not_there_unless_it_is_being_read():
    index = TierIndex(1, 2)
    put(index, 1)
    copied(index)
    put(index, 2, 3)
    _, slots = copied(index)
    index.pin(names(2))
    index.lose([slots[2], slots[3], 99])
    assert (index.run(names(1)), index.run(names(2)), index.run(names(3))) == (names(1), names(2), [])
    put(index, 3)
    assert copied(index)[1].keys() == {3}  # as it was never there
    index.check_integrity()


def test_what_another_reads_too_keeps_its_slot():
    """A damaged block that two read: the slot is not given to another name before the second one has found it so."""
    index = TierIndex(0, 2)
    put(index, 1, 2)
    copied(index)
    for _ in range(2):
        index.pin(names(1))
    index.forget(b"\x01")
    put(index, 3)
    assert b"\x01" in index
    index.unpin(names(1))
    index.forget(b"\x01")
    assert b"\x01" not in index


@given(
    num_host=st.integers(0, 4),
    num_disk=st.integers(0, 4),
    steps=st.lists(st.tuples(st.sampled_from(["put", "pin", "unpin", "copy", "forget", "lose"]), st.integers(0, 12))),
)
def test_each_slot_holds_what_its_name_says(num_host, num_disk, steps):
    """Blocks hold their own names, and slots are copied as the index says: nothing is ever somebody else's."""
    index, slots, pinned, known = TierIndex(num_host, num_disk), {}, [], set()
    for action, number in [*steps, ("copy", 0)]:
        name = bytes([number])
        if action == "put":
            index.put(name, number)
        elif action == "pin" and name in index:
            index.pin([name])
            pinned.append(name)
        elif action == "unpin" and pinned:
            index.unpin([pinned.pop()])
        elif action == "forget" and name not in pinned:
            index.forget(name)
        elif action == "lose":
            index.lose([number])
        elif action == "copy":
            if copies := index.take_copies():
                targets = [target for _, target in copies.demotions] + copies.slots
                assert len(set(targets)) == len(targets)
                for source, target in copies.demotions:
                    slots[target] = slots[source]
                slots |= dict(zip(copies.slots, (bytes([block]) for block in copies.block_ids), strict=True))
            held = index.run(names(*(each for each in range(13) if bytes([each]) in index)))
            assert [slots[slot] for slot in index.slots_of(held)] == held
        stored, removed = index.take_changes()
        known = (known - set(removed)) | set(stored)
        assert known == {each for each in names(*range(13)) if each in index}
        assert all(each in index for each in pinned)
        in_host, on_disk = index.num_held
        assert in_host <= num_host
        assert on_disk <= num_disk
        index.check_integrity()


def test_rates_follow_what_is_measured():
    rates = TierRates(2, 0.001, 0.1)
    assert rates.expected_s([0, 1, 2]) == pytest.approx(0.102)
    for _ in range(40):
        rates.add([2, 3], 0.02)
    assert rates.expected_s([2]) == pytest.approx(0.01, rel=0.01)
    assert rates.expected_s([0]) == 0.001
    TierRates(0, 0.0, 0.0).add([1], 1.0)  # nothing was known, and nothing is


def test_what_is_not_read_for_its_rate_is_tried_again_some_time():
    """Else one slow read could be the last one."""
    rates = TierRates(2, 0.001, 0.1)
    rates.add([0], 0.041)
    assert rates.expected_s([0]) == pytest.approx(0.011)
    for _ in range(100):
        rates.left([0, 2])
    assert 0.001 < rates.expected_s([0]) < 0.002
    assert rates.expected_s([2]) == 0.1
    faster = TierRates(2, 0.001, 0.1)
    faster.add([0], 0.0005)
    expected_s = faster.expected_s([0])
    faster.left([0])
    assert faster.expected_s([0]) == expected_s < 0.001
