"""What the load generator is told and tells, and the events of HTTP answers, in any pieces."""

import io
from dataclasses import asdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve_bench.serve import wire
from splitserve_bench.serve.event_stream import MOST_LINE_BYTES, EventStream
from splitserve_bench.serve.generator import read_plan
from splitserve_bench.serve.records import Outcome, PlannedRequest
from splitserve_bench.serve.reply import RequestFailed
from splitserve_bench.serve.target import Progress, Target

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
    order = wire.Order(target, len(planned), max_concurrency, timeout_s)
    sent = wire.pack_order(order) + b"".join(map(wire.pack_request, planned))
    arrived, ordered = read_plan(io.BytesIO(sent))
    assert arrived == order
    back = [PlannedRequest(**(asdict(each) | {"prompt": tuple(each.prompt)})) for each in ordered]
    assert back == planned


@given(st.data())
def test_a_plan_that_is_cut_off_is_not_taken_for_one(data):
    planned = [PlannedRequest(index, 0.0, (1, 2, 3), 4) for index in range(3)]
    sent = wire.pack_order(wire.Order(Target("openai", "x"), 3, None, 1.0))
    sent += b"".join(map(wire.pack_request, planned))
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
    line = wire.outcome_line(outcome)
    assert line.index(b"\n") == len(line) - 1
    arrived = wire.read_line(line)
    assert arrived.arrivals_s == pytest.approx(outcome.arrivals_s, rel=0, abs=1e-9)
    for name in set(Outcome.__slots__) - {"arrivals_s"}:
        assert getattr(arrived, name) == getattr(outcome, name)


def test_progress_and_failures_arrive_as_they_were():
    progress = Progress(9, 7, 3, 1, 55, 1.25)
    assert wire.read_line(wire.progress_line(progress)) == progress
    assert progress.num_in_flight == 3
    assert wire.read_line(wire.failure_line("no\nserver")) == "no\nserver"


@given(
    st.lists(st.binary().map(lambda data: data.translate(None, b"\r\n").strip())),
    st.sampled_from([b"\n\n", b"\r\n\r\n"]),
    st.lists(st.integers(0, 400)),
)
def test_events_in_any_pieces(events, end, cuts):
    stream = b": hello" + end + b"".join(b"event: x\ndata: " + event + end for event in events)
    cuts = sorted({min(cut, len(stream)) for cut in cuts} | {0, len(stream)})
    reader = EventStream()
    pieces = [stream[start:stop] for start, stop in pairwise(cuts)]
    assert [event for piece in pieces for event in reader.feed(piece)] == events


def test_a_line_without_an_end_is_given_up():
    reader = EventStream()
    with pytest.raises(RequestFailed, match="a line of the answer"):
        reader.feed(b"x" * (MOST_LINE_BYTES + 1))
