"""The requests of a node by their states, oldest first."""

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving_core.node.prefix import BlockNames
from serving_core.node.requests import (
    TRANSITIONS,
    DecodePlace,
    Incoming,
    NodeRequest,
    NodeRequests,
    Outgoing,
    RequestEvent,
    RequestState,
)
from serving_core.requests import Request, SamplingParams

EPOCHS = count(1)
STARTS = RequestState.WAITING, RequestState.WAITING_FOR_BLOCKS


def node_request(age, state):
    request = Request("r", next(EPOCHS), [1], 1, SamplingParams(max_tokens=1))
    incoming = Incoming(0.0) if state is RequestState.WAITING_FOR_BLOCKS else None
    return NodeRequest(request, age, BlockNames(bytes(32), 4), state, incoming=incoming)


changes = st.lists(st.tuples(st.integers(0, 9), st.sampled_from([None, *STARTS, *RequestEvent])), max_size=80)


@given(changes, st.lists(st.sampled_from(RequestState), unique=True))
def test_the_requests_of_some_states_are_all_that_are_in_them_oldest_first(changes, states):
    """An age and a change: a request of that age comes in a first state, meets an event, or goes altogether."""
    node_requests, here = NodeRequests(), {}
    for age, change in changes:
        if change is None or change in STARTS:
            if age in here:
                node_requests.remove(here.pop(age))
            if change in STARTS:
                here[age] = node_request(age, change)
                node_requests.add(here[age])
        elif age in here and (here[age].state, change) in TRANSITIONS:
            node_requests.apply(here[age], change)
        elif age in here:
            state = here[age].state
            with pytest.raises(KeyError):
                node_requests.apply(here[age], change)
            assert here[age].state is state
        node_requests.check_integrity()
    expected = [here[age] for age in sorted(here) if here[age].state in states]
    assert list(node_requests.in_state(*states)) == expected
    assert node_requests.count(*states) == len(expected)


def test_a_request_that_changes_its_state_meanwhile_is_still_among_them():
    node_requests = NodeRequests()
    for age in range(3):
        node_requests.add(node_request(age, RequestState.WAITING))
    node_requests.apply(next(iter(node_requests)), RequestEvent.STARTED)
    for states, event in (
        ([RequestState.WAITING], RequestEvent.STARTED),
        ([RequestState.WAITING, RequestState.PREFILLING], RequestEvent.SAMPLED),
    ):
        expected, seen = [each.age for each in node_requests.in_state(*states)], []
        for each in node_requests.in_state(*states):
            node_requests.apply(each, event)
            seen.append(each.age)
        assert seen == expected
    assert node_requests.count(RequestState.RUNNING) == 3


def test_every_state_is_reached_and_left():
    reached = {state for state, _ in TRANSITIONS.values()}
    assert reached.union(STARTS) == {state for state, _ in TRANSITIONS} == set(RequestState)


@pytest.mark.parametrize("is_sending", [False, True])
def test_what_goes_to_another_node_is_kept_while_a_rank_reads_it(is_sending):
    node_requests, request = NodeRequests(), node_request(1, RequestState.WAITING)
    request.decode_place, request.outgoing = DecodePlace.HERE_AFTER_ALL, Outgoing(is_sending=is_sending)
    node_requests.add(request)
    for event in (RequestEvent.STARTED, RequestEvent.PREFILL_ENDED, RequestEvent.TAKEN_OVER):
        node_requests.apply(request, event)
    assert request.decode_place is DecodePlace.HERE
    assert (request.outgoing is not None) == is_sending


def test_a_state_that_was_changed_behind_its_back_is_found():
    node_requests = NodeRequests()
    node_requests.add(node_request(1, RequestState.WAITING))
    next(iter(node_requests)).state = RequestState.PREFILLING
    with pytest.raises(AssertionError):
        node_requests.check_integrity()
