"""Who stands where on a node, oldest first."""

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_core.node.prefix import BlockNames
from serving_core.node.requests import NodeRequest, NodeRequests, RequestState
from serving_core.requests import Request, SamplingParams

EPOCHS = count(1)


def node_request(age, stage):
    request = Request("r", next(EPOCHS), [1], 1, SamplingParams(max_tokens=1))
    return NodeRequest(request, age, BlockNames(bytes(32), 4), stage, 0.0)


moves = st.lists(st.tuples(st.integers(0, 9), st.sampled_from([None, *RequestState])), max_size=60)


@given(moves, st.lists(st.sampled_from(RequestState), unique=True))
def test_those_in_some_stages_are_all_that_say_so_oldest_first(moves, stages):
    """An age and a stage: one of that age comes, goes there if it is here already, or goes altogether."""
    node_requests, here = NodeRequests(), {}
    for age, stage in moves:
        if stage is None:
            if age in here:
                node_requests.remove(here.pop(age))
        elif age in here:
            node_requests.enter(here[age], stage)
        else:
            here[age] = node_request(age, stage)
            node_requests.add(here[age])
        node_requests.check_integrity()
    expected = [here[age] for age in sorted(here) if here[age].stage in stages]
    assert list(node_requests.in_stage(*stages)) == expected
    assert node_requests.count(*stages) == len(expected)


def test_who_moves_on_meanwhile_is_still_among_them():
    node_requests = NodeRequests()
    for age in range(3):
        node_requests.add(node_request(age, RequestState.WAITING if age else RequestState.PREFILLING))
    for stages in ([RequestState.WAITING], [RequestState.WAITING, RequestState.PREFILLING]):
        seen = []
        for each in node_requests.in_stage(*stages):
            node_requests.enter(each, RequestState.RUNNING)
            seen.append(each.age)
        assert seen == list(range(3 - len(seen), 3))
        for each in list(node_requests):
            node_requests.enter(each, RequestState.WAITING if each.age else RequestState.PREFILLING)


def test_a_stage_that_was_changed_behind_its_back_is_found():
    node_requests = NodeRequests()
    node_requests.add(node_request(1, RequestState.WAITING))
    next(iter(node_requests)).stage = RequestState.PREFILLING
    with pytest.raises(AssertionError):
        node_requests.check_integrity()
