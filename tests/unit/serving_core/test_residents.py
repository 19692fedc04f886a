"""Who stands where on a node, oldest first."""

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_core.prefix import BlockNames
from serving_core.requests import Request, SamplingParams
from serving_core.residents import Resident, Residents, Stage

EPOCHS = count(1)


def resident(age, stage):
    request = Request("r", next(EPOCHS), [1], 1, SamplingParams(max_tokens=1))
    return Resident(request, age, BlockNames(bytes(32), 4), stage, 0.0)


moves = st.lists(st.tuples(st.integers(0, 9), st.sampled_from([None, *Stage])), max_size=60)


@given(moves, st.lists(st.sampled_from(Stage), unique=True))
def test_those_in_some_stages_are_all_that_say_so_oldest_first(moves, stages):
    """An age and a stage: one of that age comes, goes there if it is here already, or goes altogether."""
    residents, here = Residents(), {}
    for age, stage in moves:
        if stage is None:
            if age in here:
                residents.remove(here.pop(age))
        elif age in here:
            residents.enter(here[age], stage)
        else:
            here[age] = resident(age, stage)
            residents.add(here[age])
        residents.check_integrity()
    expected = [here[age] for age in sorted(here) if here[age].stage in stages]
    assert list(residents.in_stage(*stages)) == expected
    assert residents.count(*stages) == len(expected)


def test_who_moves_on_meanwhile_is_still_among_them():
    residents = Residents()
    for age in range(3):
        residents.add(resident(age, Stage.QUEUED if age else Stage.READING))
    for stages in ([Stage.QUEUED], [Stage.QUEUED, Stage.READING]):
        seen = []
        for each in residents.in_stage(*stages):
            residents.enter(each, Stage.WRITING)
            seen.append(each.age)
        assert seen == list(range(3 - len(seen), 3))
        for each in list(residents):
            residents.enter(each, Stage.QUEUED if each.age else Stage.READING)


def test_a_stage_that_was_changed_behind_its_back_is_found():
    residents = Residents()
    residents.add(resident(1, Stage.QUEUED))
    next(iter(residents)).stage = Stage.READING
    with pytest.raises(AssertionError):
        residents.check_integrity()
