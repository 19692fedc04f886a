"""The load generator against servers that record what they do: everything it says must agree with their records.

The gate runs the generator in the test's own process, but for tests about its process; the nightly runs all with both.
"""

import asyncio
import io
import json
import os
from dataclasses import fields, replace

import httpx2
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve_bench.errors import BenchError
from splitserve_bench.serve.backends import read_answer
from splitserve_bench.serve.generator import (
    Order,
    describe,
    failure_line,
    order_line,
    outcome_line,
    progress_line,
    read_line,
    read_plan,
    run_load,
)
from splitserve_bench.serve.metrics import Limits, summarize, tpot_s, with_limits
from splitserve_bench.serve.records import Outcome, PlannedRequest, Progress, Reply, Target, pack_request, returns_at_s
from tests.effort import few
from tests.unit.splitserve_bench.bench_serve_kit import failed
from tests.unit.splitserve_bench.load_servers import (
    BREAK,
    CROWDED,
    DROP,
    EXPECTED,
    FAIL,
    HANG,
    LOST,
    MAX_MODEL_LEN,
    MODEL,
    NO_NODE,
    REFUSE,
    REFUSE_ONCE,
    RETRY_AFTER_S,
    SERVERS,
    SHORT,
    TIMELINE,
    VOCAB_SIZE,
    Script,
    grpc_server,
    http_server,
)
from tests.unit.splitserve_bench.stand_ins import run_load_here

LONG_S = 60.0  # longer than anything here takes


@pytest.fixture(params=SERVERS)
def serving(request):
    return SERVERS[request.param]


of_one_server = pytest.mark.parametrize("serving", few(SERVERS), indirect=True)


def plan(count, *, gap_s=0.0, prompt_tokens=5, output_tokens=6):
    return [PlannedRequest(i, i * gap_s, (i, *range(1, prompt_tokens)), output_tokens) for i in range(count)]


def sender(run):
    """Return `run_load` or its stand-in, with defaults."""

    async def send(
        target,
        planned,
        *,
        max_concurrency=None,
        request_timeout_s=LONG_S,
        obey_retry_after=0,
        on_progress=lambda _: None,
        on_outcome=None,
    ):
        order = Order(target, max_concurrency, request_timeout_s, obey_retry_after)
        return await run(order, planned, on_progress, on_outcome)

    return send


SENDERS = {"here": sender(run_load_here), "process": sender(run_load)}
send_from_process = SENDERS["process"]


@pytest.fixture(params=few(SENDERS))
def send(request):
    return SENDERS[request.param]


@of_one_server
async def test_what_is_planned_is_what_the_server_gets(serving):
    script = Script()
    planned = [PlannedRequest(i, 0.0, (i, 70_000 + i, 0), 1 + i) for i in (3, 1, 2)]
    async with serving(script) as target:
        outcomes = await send_from_process(target, planned)
    assert [outcome.index for outcome in outcomes] == [3, 1, 2]
    for request, outcome in zip(planned, outcomes, strict=True):
        asked = script.seen[request.index].asked
        assert asked["prompt"] == list(request.prompt)
        assert asked["max_tokens"] == request.output_tokens
        assert asked["ignore_eos"] is True
        assert asked["temperature"] == 0
        assert asked["repetition_penalty"] == 1  # which a model's folder may recommend otherwise
        assert outcome.error == ""
        assert outcome.num_prompt_tokens == 3
        assert outcome.num_output_tokens == sum(outcome.arrival_tokens) == request.output_tokens


async def test_times_agree_with_the_servers_own_records(send, serving):
    async def hold(key):
        await asyncio.sleep(0.02 * (key % 3))

    script = Script(hold=hold)
    async with serving(script) as target:
        outcomes = await send(target, plan(8), max_concurrency=1)
    seen = [script.seen[key] for key in range(8)]
    assert script.order == list(range(8))
    for key, outcome in enumerate(outcomes):
        assert outcome.scheduled_s <= outcome.sent_s <= outcome.arrivals_s[0]
        assert list(outcome.arrivals_s) == sorted(outcome.arrivals_s)
        assert outcome.arrivals_s[-1] <= outcome.ended_s
        # It was sent before the server had it, and each token came after the server sent it.
        wrote_s = [moment_s - seen[key].received_s for moment_s in seen[key].wrote_s]
        assert len(wrote_s) == len(outcome.arrivals_s)
        came_s = [moment_s - outcome.sent_s for moment_s in outcome.arrivals_s]
        assert all(came >= wrote - 1e-5 for came, wrote in zip(came_s, wrote_s, strict=True))
        # One at a time: all of it lies between the end of the one before and the beginning of the one behind.
        if 0 < key < 7:
            between_s = seen[key + 1].received_s - seen[key - 1].wrote_s[-1]
            assert outcome.ended_s - outcome.sent_s <= between_s + 1e-5


async def test_attainment_and_goodput(send, serving):
    fast_s = []

    async def hold(key):
        """The last two requests take twice as long as any other can have taken."""
        if key >= 6:
            loop = asyncio.get_running_loop()
            if not fast_s:
                starts = [script.seen[each].received_s for each in range(7)]
                fast_s.append(max(later - earlier for earlier, later in zip(starts[:-2], starts[2:], strict=True)))
            end_s = loop.time() + 2 * fast_s[0]
            while (left_s := end_s - loop.time()) > 0:
                await asyncio.sleep(left_s)

    script = Script({0: REFUSE}, hold=hold)
    async with serving(script) as target:
        outcomes = await send(target, plan(8), max_concurrency=1)
    summary = summarize(outcomes[1:6] + outcomes[6:] + outcomes[:1], Limits(ttft_s=1.5 * fast_s[0]))
    assert [outcome.index for outcome in summary.outcomes] == [1, 2, 3, 4, 5, 6, 7, 0]
    assert (summary.num_good, summary.num_completed, summary.num_refused) == (5, 7, 1)
    assert summary.attainment == 5 / 8
    assert summary.request_goodput_per_s == pytest.approx(5 / max(outcome.ended_s for outcome in outcomes))
    assert (summary.misses.ttft, summary.misses.refused) == (2, 1)


@pytest.mark.parametrize(
    ("serving", "more"),
    [(http_server, {"with_token_ids": True}), (http_server, {"is_own": True}), (grpc_server, {})],
    ids=["token ids", "usage in each event", "gRPC"],
)
async def test_several_tokens_at_once_are_counted(send, serving, more):
    script = Script(tokens_at_once=4)
    async with serving(script, **more) as target:
        (outcome,) = await send(target, plan(1, output_tokens=10))
    assert outcome.arrival_tokens == (4, 4, 2)
    assert outcome.num_output_tokens == 10


async def test_events_without_a_count_are_one_token_each(send):
    async with http_server(Script(tokens_at_once=4)) as target:
        (outcome,) = await send(target, plan(1, output_tokens=10))
    assert outcome.arrival_tokens == (1, 1, 1)
    assert outcome.num_output_tokens == 10
    assert outcome.error == ""


def streamed(events):
    headers = {"content-type": "text/event-stream"}
    return httpx2.Response(200, headers=headers, content=events, request=httpx2.Request("POST", "http://a"))


SILENT_ENDS = {
    "which is the fourth token": ([1.0, 1.5, 2.0], (1.0, 1.5, 2.0, 3.0), 2.0 / 3),
    "which is no token": ([1.0, 1.5, 2.0, 2.5], (1.0, 1.5, 2.0, 2.5), 1.5 / 3),
}


@pytest.mark.parametrize(("written_s", "arrivals_s", "each_s"), SILENT_ENDS.values(), ids=SILENT_ENDS.keys())
async def test_usage_tells_whether_an_end_without_text_is_a_token(written_s, arrivals_s, each_s):
    """A token that has no text, as the end of a text, came when the answer's end did, and not when usage followed."""
    words = [(moment_s, {"choices": [{"text": "x", "finish_reason": None}]}) for moment_s in written_s]
    end = {"choices": [{"text": "", "finish_reason": "length"}], "usage": None}
    usage = {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 4}}
    now_s = 0.0

    async def events():
        nonlocal now_s
        for moment_s, event in [*words, (3.0, end), (9.0, usage)]:
            now_s = moment_s
            yield b"data: " + json.dumps(event).encode() + b"\n\n"

    reply = Reply(PlannedRequest(0, 0.0, (1, 2), 4), lambda: now_s)
    await read_answer(streamed(events()), reply)
    reply.check_complete()
    outcome = reply.outcome()
    assert (outcome.arrivals_s, outcome.arrival_tokens) == (arrivals_s, (1, 1, 1, 1))
    assert outcome.num_output_tokens == 4
    assert tpot_s(outcome) == pytest.approx(each_s)


LIMITED = {
    "gRPC": (grpc_server, {}, [{"ttft_ms": 500.0, "tpot_ms": 40.0}, {"tpot_ms": 30.0}, {}]),
    "our HTTP": (http_server, {"is_own": True}, [{"ttft_ms": 500.0, "tpot_ms": 40.0}, {"tpot_ms": 30.0}, {}]),
    "another server": (http_server, {}, [{}, {}, {}]),
}


@pytest.mark.parametrize(("serving", "more", "expected"), LIMITED.values(), ids=LIMITED.keys())
async def test_each_request_tells_its_limits_to_our_servers_alone(send, serving, more, expected):
    limits = [(500.0, 40.0), (None, 30.0), (None, None)]
    planned = [PlannedRequest(i, 0.0, (i, 1), 2, *each) for i, each in enumerate(limits)]
    script = Script()
    async with serving(script, **more) as target:
        await send(target, planned)
    asked = [script.seen[i].asked for i in range(3)]
    assert [{name: each[name] for name in each if name in ("ttft_ms", "tpot_ms")} for each in asked] == expected


def test_what_a_server_would_not_take_for_a_limit_is_not_told():
    limits = [Limits(0.5, 0.04, 9.0), Limits(0.0, None), Limits(3600.1, 3600.0)]
    sent = with_limits(plan(3), lambda each: limits[each.index])
    assert [(each.ttft_ms, each.tpot_ms) for each in sent] == [(500, 40), (None, None), (None, 3_600_000)]
    assert [replace(each, ttft_ms=None, tpot_ms=None) for each in sent] == plan(3)


FAULTS = {
    REFUSE: "the queue is full",
    FAIL: "it broke",
    DROP: "",
    BREAK: "a node was lost",
    CROWDED: "no room came",
    SHORT: "5 tokens instead of 6",
    NO_NODE: NO_NODE,
    LOST: LOST,
}


async def test_whatever_is_not_complete_is_a_miss(send, serving):
    kinds = list(FAULTS)
    script = Script(dict(enumerate(kinds)))
    async with serving(script) as target:
        outcomes = await send(target, plan(len(kinds) + 1))
    for kind, outcome in zip(kinds, outcomes, strict=False):
        assert outcome.error, kind
        assert FAULTS[kind] in outcome.error
        assert len(outcome.error) <= 300
        assert outcome.is_refused == (kind in (REFUSE, NO_NODE))
        assert outcome.retry_after_s == (RETRY_AFTER_S if kind == REFUSE else None)
        if kind == REFUSE:
            assert outcome.timeline == (EXPECTED if serving is grpc_server else None)
        assert outcome.num_output_tokens == {DROP: 1, BREAK: 1, CROWDED: 1, SHORT: 5}.get(kind, 0)
    assert outcomes[-1].error == ""
    summary = summarize(outcomes, Limits())
    assert summary.attainment == 1 / len(outcomes)
    assert script.num_live == 0


async def test_who_is_told_when_to_come_back_comes_back_then(send, serving):
    """With the same content, as often as was asked for, and whatever it is told then. It has no place meanwhile."""
    script = Script({0: REFUSE_ONCE, 1: REFUSE, 2: NO_NODE})
    async with serving(script) as target:
        outcomes = await send(target, plan(4), obey_retry_after=1, max_concurrency=1)
    assert [outcome.index for outcome in outcomes] == [0, 0, 1, 1, 2, 3]
    assert [outcome.num_refusals_before for outcome in outcomes] == [0, 1, 0, 1, 0, 0]
    assert [outcome.is_refused for outcome in outcomes] == [True, False, True, True, True, False]
    first, again, *_ = outcomes
    assert again.scheduled_s == pytest.approx(first.ended_s + RETRY_AFTER_S)
    assert again.sent_s >= again.scheduled_s
    assert again.error == ""
    assert len(script.asked) == len(outcomes)
    asked = [each for each in script.asked if each["prompt"][0] == 0]
    assert asked[0] == asked[1]
    assert sorted(script.order[:4]) == [0, 1, 2, 3]  # the others did not wait for those that were to come back


def test_who_would_have_to_wait_too_long_does_not_come_back():
    refused = failed(0, 2.0, 2.5, is_refused=True, retry_after_s=7.0)
    assert returns_at_s(refused, 1, 7.0) == 9.5
    assert returns_at_s(refused, 1, 6.9) is None
    assert returns_at_s(refused, 0, 7.0) is None
    assert returns_at_s(replace(refused, num_refusals_before=2), 2, 7.0) is None
    assert returns_at_s(replace(refused, retry_after_s=None), 1, 7.0) is None
    assert returns_at_s(replace(refused, is_refused=False), 1, 7.0) is None


async def test_an_answer_that_is_too_late_is_a_miss_and_ends_on_the_server_too(send, serving):
    script = Script({0: HANG, 1: HANG})
    async with serving(script) as target:
        outcomes = await send(target, plan(2), request_timeout_s=2.5)  # enough for the server to have the request
        while script.num_live:
            await asyncio.sleep(0.01)
    assert all("2.5 s" in outcome.error or "deadline" in outcome.error for outcome in outcomes)
    assert all(outcome.ended_s - outcome.sent_s >= 2.49 for outcome in outcomes)  # timers may ring a little early
    assert not any(outcome.is_refused for outcome in outcomes)
    assert script.seen[0].was_left
    assert script.seen[1].was_left


async def test_max_concurrency_is_honoured(send, serving):
    script = Script()
    async with serving(script) as target:
        outcomes = await send(target, plan(20), max_concurrency=3)
    assert 1 <= script.most_live <= 3
    assert all(outcome.error == "" for outcome in outcomes)
    assert all(outcome.scheduled_s == 0 for outcome in outcomes)  # the wait for a place shows in sent_s


async def test_an_open_loop_does_not_wait_for_answers(send, serving):
    release = asyncio.Event()

    async def hold(key):
        if script.num_live == 10:  # in whatever order they have come
            release.set()
        await release.wait()

    script = Script(hold=hold)
    async with serving(script) as target:
        outcomes = await send(target, plan(10, gap_s=0.01))
    assert script.most_live == 10
    assert all(outcome.error == "" for outcome in outcomes)
    assert all(outcome.sent_s >= outcome.scheduled_s == index * 0.01 for index, outcome in enumerate(outcomes))


async def test_progress_and_outcomes_are_told_as_they_come(send, serving):
    progress, told = [], []
    async with serving(Script({1: FAIL})) as target:
        outcomes = await send(target, plan(3), on_progress=progress.append, on_outcome=told.append)
    last = progress[-1]
    assert (last.num_planned, last.num_sent, last.num_completed, last.num_failed) == (3, 3, 2, 1)
    assert (last.num_in_flight, last.num_output_tokens) == (0, 12)
    assert sorted(told, key=lambda outcome: outcome.index) == outcomes


async def test_timelines(send, serving):
    more = {"is_own": True} if serving is http_server else {}
    async with serving(Script(), **more) as target:
        (outcome,) = await send(target, plan(1))
    assert {name: value for name, value in outcome.timeline.items() if value} == TIMELINE
    assert outcome.num_cached_tokens == 1
    assert outcome.arrival_tokens == (1,) * 6


async def test_other_servers_are_not_asked_for_timelines(send):
    script = Script()
    async with http_server(script) as target:
        (outcome,) = await send(target, plan(1))
    assert outcome.timeline is None
    known = {
        "prompt",
        "max_tokens",
        "temperature",
        "repetition_penalty",
        "ignore_eos",
        "stream",
        "stream_options",
        "model",
    }
    assert set(script.seen[0].asked) == known
    assert script.seen[0].asked["stream_options"] == {"include_usage": True}


async def test_more_fields_in_the_body(send):
    script = Script()
    async with http_server(script) as target:
        await send(Target("openai", target.address, extra_body={"top_k": 3}), plan(1))
    assert script.seen[0].asked["top_k"] == 3
    assert "model" not in script.seen[0].asked


@pytest.mark.parametrize("server", [http_server, grpc_server], ids=["http", "grpc"])
async def test_limits_go_with_every_request_of_either_backend(send, server):
    script = Script()
    async with server(script) as target:
        limits = {"slo_class": "chat", "tpot_ms": 40, "priority": -1}
        await send(Target(target.backend, target.address, extra_body=limits), plan(2))
        assert [{name: seen.asked[name] for name in limits} for seen in script.seen.values()] == [limits] * 2


async def test_the_key_is_sent(send, serving):
    script = Script()
    async with serving(script) as target:
        await send(Target(target.backend, target.address, api_key="known"), plan(2))
    assert {headers["authorization"] for headers in script.headers} == {"Bearer known"}


async def test_an_empty_load(send, serving):
    async with serving(Script()) as target:
        assert await send(target, []) == []


@pytest.mark.parametrize(("backend", "address"), [("splitserve", "127.0.0.1:1"), ("openai", "http://127.0.0.1:1")])
async def test_no_server(send, backend, address):
    target = Target(backend, address)
    with pytest.raises(BenchError, match=r"no server answers at .*127\.0\.0\.1:1"):
        await send(target, plan(1))
    with pytest.raises(BenchError, match=r"no server answers at .*127\.0\.0\.1:1"):
        await describe(target)


async def test_describe(serving):
    async with serving(Script()) as target:
        served = await describe(target)
    vocab_size = None if serving is http_server else VOCAB_SIZE
    assert (served.model, served.max_model_len, served.vocab_size) == (MODEL, MAX_MODEL_LEN, vocab_size)


async def test_describe_of_a_model_that_is_not_served():
    async with http_server(Script()) as target:
        with pytest.raises(BenchError, match="does not serve 'other' but scripted"):
            await describe(Target("openai", target.address, model="other"))


@of_one_server
async def test_cancelling_leaves_no_process_and_no_request(serving):
    script = Script({0: HANG, 1: HANG})
    before = {child.pid for child in psutil.Process(os.getpid()).children(recursive=True)}
    async with serving(script) as target:
        load = asyncio.create_task(send_from_process(target, plan(2)))
        while script.num_live < 2:
            await asyncio.sleep(0.01)
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        assert {child.pid for child in psutil.Process(os.getpid()).children(recursive=True)} <= before
        while script.num_live:
            await asyncio.sleep(0.01)


@pytest.fixture
def generator():
    """The process of a load that runs, once it has sent something."""
    before = set(psutil.Process(os.getpid()).children())

    def find():
        (process,) = set(psutil.Process(os.getpid()).children()) - before
        return process

    return find


@of_one_server
async def test_a_generator_that_dies_before_a_request_has_come_back_is_an_error(serving, generator):
    async with serving(Script({0: REFUSE})) as target:
        refused = asyncio.Event()
        options = {"obey_retry_after": 9, "on_outcome": lambda _: refused.set()}
        load = asyncio.create_task(send_from_process(target, plan(1), **options))
        await refused.wait()
        generator().kill()
        with pytest.raises(BenchError, match="ended without the outcomes of 1 requests"):
            await load


@of_one_server
async def test_a_generator_that_dies_is_an_error(serving, generator):
    script = Script({0: HANG})
    async with serving(script) as target:
        load = asyncio.create_task(send_from_process(target, plan(1)))
        while not script.num_live:
            await asyncio.sleep(0.01)
        generator().kill()
        with pytest.raises(BenchError, match="ended without the outcomes of 1 requests"):
            await load


@pytest.mark.nightly
async def test_a_generator_that_says_nothing_any_more_is_ended(serving, generator, monkeypatch):
    script, processes = Script({0: HANG}), []

    def on_progress(_):
        if script.num_live and not processes:
            processes.append(generator())
            processes[0].suspend()
            monkeypatch.setattr("splitserve_bench.serve.generator.SILENCE_S", 2.0)  # a busy one is not silent

    async with serving(script) as target:
        with pytest.raises(BenchError, match=r"said nothing for 2 s"):
            await send_from_process(target, plan(1), on_progress=on_progress)
        assert not processes[0].is_running()


async def test_connections_are_used_again(send):
    """One at a time, they need no more than were made to warm up; more are made for all at once."""
    script = Script()
    async with http_server(script) as target:
        await send(target, plan(40), max_concurrency=1)
        assert script.num_connections <= 5  # not one for each request
        outcomes = await send(target, plan(70))
    assert all(outcome.error == "" for outcome in outcomes)


async def test_a_short_answer_fails_where_nobody_counts_its_tokens_too(send):
    async with http_server(Script({1: SHORT}), with_usage=False) as target:
        whole, short = await send(target, plan(2))
    assert (whole.error, whole.num_output_tokens, whole.num_cached_tokens) == ("", 6, None)
    assert short.error.startswith("the output stopped before it had 6 tokens")


# ---- what the generator is told and tells ----


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
    order = Order(target, max_concurrency, timeout_s, num_requests=len(planned))
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
    sent = order_line(Order(Target("openai", "x"), None, 1.0, num_requests=3)) + b"".join(map(pack_request, planned))
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
