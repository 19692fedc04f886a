"""What the load generator is told and tells."""

import io
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve_bench.serve.generator import (
    Order,
    failure_line,
    order_line,
    outcome_line,
    progress_line,
    read_line,
    read_plan,
)
from splitserve_bench.serve.records import Outcome, PlannedRequest, Progress, Target, pack_request

seconds = st.floats(0, 1e6, allow_nan=False)
counts = st.integers(0, 2**31)
requests = st.builds(
    PlannedRequest, index=counts, send_at_s=seconds, prompt=st.lists(st.integers(0, 2**32 - 1)).map(tuple),
    output_tokens=counts, ttft_ms=st.none() | seconds, tpot_ms=st.none() | seconds,
    text=st.text(), ignore_eos=st.booleans(),
)  # fmt: skip
targets = st.builds(
    Target,
    backend=st.sampled_from(["splitserve", "openai"]),
    address=st.text(),
    api_key=st.none() | st.text(),
    extra_body=st.dictionaries(st.text(), st.integers(-5, 5) | st.text()),
)


@given(targets, st.none() | st.integers(1, 99), seconds, st.lists(requests, max_size=5))
def test_a_plan_arrives_as_it_was(target, max_concurrency, timeout_s, planned):
    order = Order(target, len(planned), max_concurrency, timeout_s)
    arrived, ordered = read_plan(io.BytesIO(order_line(order) + b"".join(map(pack_request, planned))))
    assert arrived == order
    for before, after in zip(planned, ordered, strict=True):
        values = [
            {each.name: getattr(request, each.name) for each in fields(PlannedRequest)} for request in (before, after)
        ]
        assert values[1] | {"prompt": tuple(after.prompt)} == values[0]


@given(st.data())
def test_a_plan_that_is_cut_off_is_not_taken_for_one(data):
    planned = [PlannedRequest(index, 0.0, (1, 2, 3), 4) for index in range(3)]
    sent = order_line(Order(Target("openai", "x"), 3, None, 1.0)) + b"".join(map(pack_request, planned))
    with pytest.raises(EOFError):
        read_plan(io.BytesIO(sent[: data.draw(st.integers(0, len(sent) - 1))]))


outcomes = st.builds(
    Outcome,
    index=counts,
    scheduled_s=seconds,
    sent_s=seconds,
    num_prompt_tokens=counts,
    num_output_tokens=counts,
    arrivals_s=st.lists(seconds).map(tuple),
    arrival_tokens=st.lists(counts).map(tuple),
    ended_s=seconds,
    error=st.text(),
    is_refused=st.booleans(),
    retry_after_s=st.none() | seconds,
    timeline=st.none() | st.dictionaries(st.text(), seconds),
    num_cached_tokens=st.none() | counts,
)


@given(outcomes)
def test_an_outcome_arrives_as_it_was(outcome):
    line = outcome_line(outcome)
    assert line.index(b"\n") == len(line) - 1
    arrived = read_line(line)
    assert arrived.arrivals_s == pytest.approx(outcome.arrivals_s, rel=0, abs=1e-9)
    for name in set(Outcome.__slots__) - {"arrivals_s"}:
        assert getattr(arrived, name) == getattr(outcome, name)


def test_progress_and_failures_arrive_as_they_were():
    progress = Progress(9, 7, 3, 1, 55, 1.25)
    assert read_line(progress_line(progress)) == progress
    assert progress.num_in_flight == 3
    assert read_line(failure_line("no\nserver")) == "no\nserver"
