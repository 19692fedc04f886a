"""Calls that break off: the client against a real gRPC server whose calls end as the test tells it."""

import asyncio
import threading

import grpc
import pytest

from protos import inference_pb2
from protos.convert import MAX_TOKENS_HEADER, MODEL_HEADER
from splitserve import AsyncClient, Client
from splitserve.client import resuming
from splitserve.client.errors import Cancelled, ClientError, ServerFault, Unavailable
from splitserve.client.resuming import LONGEST_PAUSE_S, MAX_TRIES, Course
from tests.scripted_server import Script, chunk, complete, refusal, serving

DEADLINE_S = 60.0
DRAINING = refusal(grpc.StatusCode.UNAVAILABLE, "the server has stopped", "DRAINING")
TAKEN = ((MODEL_HEADER, "möd".encode()), (MAX_TOKENS_HEADER, "77"))


class Breaking(Script):
    """Plays its calls one after the other: messages, headers, and the status that one ends with."""

    def __init__(self, *calls):
        super().__init__()
        self.calls = list(calls)

    def Generate(self, request, context):
        self._note(request, context)
        for part in self.calls.pop(0):
            if isinstance(part, inference_pb2.GenerateResponse):
                yield part
            elif part is TAKEN:
                context.send_initial_metadata(TAKEN)
            else:
                context.abort_with_status(part)


@pytest.fixture
def asked(monkeypatch):
    """What comes of a script through a client that does not wait long before it asks again."""
    monkeypatch.setattr(resuming, "FIRST_PAUSE_S", 0.01)

    def run(script, **options):
        with serving(script) as target, Client(target) as client:
            return list(client.generate("hi", deadline_s=DEADLINE_S, **options))

    return run


def text_of(chunks):
    return "".join(item.text for item in chunks)


def test_an_answer_goes_on_behind_what_has_come_of_it(asked):
    script = Breaking(
        [TAKEN, chunk("h", 0, [104]), chunk("é", 1, [195, 169]), DRAINING],
        [chunk("llo", 3, [108, 108, 111]), complete(completion_tokens=6, resumed_tokens=3)],
    )
    chunks = asked(script, temperature=0.5, stop="x")
    assert text_of(chunks) == "héllo"
    assert [index for item in chunks for index, _ in enumerate(item.token_ids, item.first_token_index)] == [*range(6)]
    end = chunks[-1].completion
    assert (end.num_resumes, end.resumed_tokens, end.completion_tokens) == (1, 3, 6)
    first, second = script.requests
    assert not first.so_far
    [so_far] = second.so_far
    assert (list(so_far.token_ids), so_far.num_chars, so_far.has_ended) == ([104, 195, 169], 2, False)
    assert so_far.since_first_s > 0
    assert (second.model, second.sampling_params.max_tokens) == ("möd", 77)
    assert second.request_id == first.request_id != ""
    assert first.sampling_params.HasField("seed")
    assert second.call_number == 1
    second.ClearField("call_number")
    second.ClearField("so_far")
    second.ClearField("model")
    second.sampling_params.ClearField("max_tokens")
    assert second == first


def test_an_answer_that_was_taken_and_has_no_token_yet_is_asked_for_again(asked):
    script = Breaking([TAKEN, DRAINING], [chunk("ok", 0, [1]), complete()])
    chunks = asked(script)
    assert text_of(chunks) == "ok"
    # gRPC itself asks again where the headers and the end of a call are read at once.
    assert chunks[-1].completion.num_resumes in (0, 1)
    assert not script.requests[1].so_far


def test_of_two_answers_the_one_that_has_ended_is_not_asked_for_again(asked):
    script = Breaking(
        [chunk("a", 0, [97]), complete(1), DRAINING],
        [chunk("b", 1, [98]), complete(0)],
    )
    chunks = asked(script, n=2)
    assert [item.index for item in chunks if item.completion] == [1, 0]
    first, second = script.requests[1].so_far
    assert (list(first.token_ids), first.has_ended) == ([97], False)
    assert (list(second.token_ids), second.has_ended) == ([], True)


def test_a_call_that_breaks_off_behind_its_end_has_ended_well(asked):
    script = Breaking([chunk("a", 0, [97]), complete(), DRAINING])
    assert text_of(asked(script)) == "a"


def test_a_call_that_the_server_or_a_proxy_cancels_goes_on(asked):
    """It is not the client's own: a proxy resets the streams of a server that it has lost with CANCEL."""
    script = Breaking([chunk("a", 0, [97]), refusal(grpc.StatusCode.CANCELLED, "reset", "")], [complete()])
    chunks = asked(script)
    assert (text_of(chunks), chunks[-1].completion.num_resumes) == ("a", 1)


def test_a_call_may_break_off_again_and_again(asked):
    pieces = [(index, 97 + index) for index in range(4)]
    script = Breaking(*([chunk(chr(byte), index, [byte]), DRAINING] for index, byte in pieces), [complete()])
    chunks = asked(script)
    assert (text_of(chunks), chunks[-1].completion.num_resumes) == ("abcd", 4)
    assert [request.call_number for request in script.requests] == [0, 1, 2, 3, 4]
    assert [list(each.token_ids) for request in script.requests for each in request.so_far] == [
        [*b"a"],
        [*b"ab"],
        [*b"abc"],
        [*b"abcd"],
    ]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
        (grpc.StatusCode.INVALID_ARGUMENT, "PROMPT_TOO_LONG"),  # for the nodes that are back by then
    ],
)
def test_what_passes_is_waited_for_once_the_answer_has_begun(asked, code, reason):
    passing = refusal(code, "wait", reason)
    script = Breaking([chunk("a", 0, [97]), DRAINING], [passing], [passing], [chunk("b", 1, [98]), complete()])
    chunks = asked(script)
    assert (text_of(chunks), chunks[-1].completion.num_resumes) == ("ab", 1)
    script = Breaking([passing])
    with pytest.raises(ClientError, match="wait"):
        asked(script, request_id="r")
    assert len(script.requests) == 1


def test_an_id_that_the_client_drew_itself_is_its_own_where_the_server_has_it_already(asked):
    """gRPC has tried a call twice, the first time with more success than it knows."""
    duplicate = refusal(grpc.StatusCode.ALREADY_EXISTS, "live already", "DUPLICATE_REQUEST_ID")
    script = Breaking([duplicate], [chunk("a", 0, [97]), complete()])
    assert text_of(asked(script)) == "a"
    assert [request.call_number for request in script.requests] == [0, 1]
    with pytest.raises(ClientError, match="live already"):
        asked(Breaking([duplicate]), resume=False)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.UNAVAILABLE, "WORKER_LOST"),
        (grpc.StatusCode.UNAVAILABLE, "NO_DECODE_WORKER"),
        (grpc.StatusCode.INTERNAL, "ENGINE_ERROR"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "SLOW_READER"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
    ],
)
def test_what_is_no_break_ends_the_answer(asked, code, reason):
    script = Breaking([chunk("a", 0, [97]), refusal(code, "the sentence", reason)])
    with pytest.raises(ClientError, match="the sentence") as caught:
        asked(script)
    assert caught.value.reason == reason
    assert len(script.requests) == 1


def test_without_resume_a_break_is_unavailable_and_the_request_is_as_it_was_given(asked):
    script = Breaking([TAKEN, chunk("a", 0, [97]), DRAINING])
    with pytest.raises(Unavailable, match="stopped"):
        asked(script, resume=False)
    [request] = script.requests
    assert request == inference_pb2.GenerateRequest(text="hi", sampling_params={})


def test_a_server_that_begins_again_instead_is_found_out(asked):
    script = Breaking([chunk("a", 0, [97]), DRAINING], [chunk("a", 0, [97])])
    with pytest.raises(ServerFault, match="goes on at token 0 instead of 1"):
        asked(script)


def test_closing_the_client_ends_the_wait_for_the_server():
    script = Breaking([chunk("a", 0, [97]), refusal(grpc.StatusCode.UNAVAILABLE, "gone", "DRAINING", 50.0)])

    async def close_soon(client):
        await asyncio.sleep(0.2)
        await client.close()

    async def closed():
        client, closing = AsyncClient(target), set()
        async for _ in client.generate("hi", deadline_s=DEADLINE_S):
            closing.add(asyncio.create_task(close_soon(client)))

    with serving(script) as target, pytest.raises(Cancelled):
        asyncio.run(closed())
    script.calls = [[chunk("a", 0, [97]), refusal(grpc.StatusCode.UNAVAILABLE, "gone", "DRAINING", 50.0)]]
    with serving(script) as target:
        client = Client(target)
        timer = threading.Timer(0.2, client.close)

        def read():
            for _ in client.generate("hi", deadline_s=DEADLINE_S):
                timer.start()

        with pytest.raises(Cancelled):
            read()
        timer.join()


# ---- the pure part ----

GONE = Unavailable("gone", code=grpc.StatusCode.UNAVAILABLE)


def course(*, ends_s=1000.0, **params):
    request = inference_pb2.GenerateRequest(sampling_params=inference_pb2.SamplingParams(**params))
    return Course(request, ends_s=ends_s, resumes=True)


def pauses_until_it_gives_up(course, now=0.0):
    pauses = []
    try:
        while True:
            pauses.append(course.pause_after(GONE, now))
    except Unavailable:
        return pauses


def test_a_server_that_does_not_come_back_is_waited_for_with_growing_pauses_and_given_up():
    answering = course()
    answering.take(chunk("a", 0, [97]), 0.0)
    pauses = pauses_until_it_gives_up(answering)
    assert pauses[:5] == [0.2, 0.4, 0.8, 1.6, 3.2]
    assert set(pauses[5:]) == {LONGEST_PAUSE_S}
    assert len(pauses) == MAX_TRIES
    answering.take(chunk("b", 1, [98]), 60.0)
    assert pauses_until_it_gives_up(answering) == pauses


@pytest.mark.parametrize("reason", ["NO_PREFILL_WORKER", "NO_DECODE_WORKER"])
def test_the_nodes_of_a_server_that_is_back_may_come_later(reason):
    answering = course()
    answering.take(chunk("a", 0, [97]), 0.0)
    no_node = Unavailable("no node", code=grpc.StatusCode.UNAVAILABLE, reason=reason)
    with pytest.raises(Unavailable, match="no node"):
        answering.pause_after(no_node, 1.0)
    assert answering.pause_after(GONE, 1.0) == 0.2
    assert answering.pause_after(no_node, 1.5) == 0.4
    answering.take(chunk("b", 1, [98]), 2.0)
    with pytest.raises(Unavailable, match="no node"):
        answering.pause_after(no_node, 3.0)


def test_nobody_waits_beyond_the_deadline():
    answering = course(ends_s=10.0)
    answering.take(chunk("a", 0, [97]), 0.0)
    assert answering.pause_after(GONE, 9.7) == 0.2
    with pytest.raises(Unavailable):
        answering.pause_after(GONE, 9.9)
    assert answering.left_s(9.5) == 0.5


def test_a_call_that_no_server_has_taken_is_not_repeated():
    assert pauses_until_it_gives_up(course()) == []


def test_the_time_since_the_first_token_is_told():
    answering = course(n=2)
    answering.take(chunk("", 0, []), 3.0)
    answering.take(chunk("a", 0, [97]), 5.0)
    answering.take(chunk("b", 1, [98]), 6.0)
    first, second = answering.question(9.0).so_far
    assert (first.since_first_s, second.since_first_s) == (4.0, 0.0)


@pytest.mark.parametrize(
    ("params", "is_drawn"), [({}, True), ({"temperature": 0.7}, True), ({"temperature": 0.0}, False)]
)
def test_a_seed_is_drawn_where_one_matters(params, is_drawn):
    assert course(**params).question(0.0).sampling_params.HasField("seed") == is_drawn
    assert course(seed=5, **params).question(0.0).sampling_params.seed == 5


@pytest.mark.parametrize(
    "first_call",
    [
        [TAKEN, chunk("h", 0, [104]), chunk("llo", 3, [108, 108, 111]), complete(completion_tokens=6)],
        [TAKEN, chunk("h", 0, [104])],
    ],
    ids=["a chunk is lost", "the end is lost"],
)
def test_an_answer_of_which_a_message_was_lost_goes_on_behind_what_has_come(asked, first_call):
    script = Breaking(first_call, [chunk("éllo", 1, [195, 169, 108, 108, 111]), complete(completion_tokens=6)])
    assert text_of(asked(script, temperature=0)) == "héllo"
    [so_far] = script.requests[1].so_far
    assert list(so_far.token_ids) == [104]
    with pytest.raises(Unavailable, match="a message was lost on the way"):
        asked(Breaking(first_call), resume=False)
