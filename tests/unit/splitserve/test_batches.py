"""Lines of a batch: which are taken, and what is written of each."""

import functools
import json
import math

import pytest

from serving_core.errors import SettingsError
from splitserve.batches import MAX_LINE_BYTES, BatchRequest, answered, batch_requests, failed

LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def lines(*changes):
    return [json.dumps({**LINE, **change}).encode() + b"\n" for change in changes]


def test_requests_are_taken_in_their_order_and_blank_lines_passed_over():
    given = [*lines({}), b"\n", *lines({"custom_id": "b", "url": "/v1/embeddings", "body": {}})]
    assert list(batch_requests(given)) == [
        BatchRequest("a", "/v1/completions", b'{"prompt":"x"}'),
        BatchRequest("b", "/v1/embeddings", b"{}"),
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"custom_id": None}, "line 2 needs a custom_id"),
        ({"custom_id": "first"}, "line 2 has the custom_id of line 1: 'first'"),
        ({"method": "GET"}, "line 2 must have the method POST, not 'GET'"),
        ({"url": "http://a/v1/completions"}, "line 2 needs a url such as /v1/chat/completions"),
        ({"url": "/v1/\ud800"}, "line 2 needs a url such as /v1/chat/completions"),
        ({"body": "x"}, "line 2 needs a body"),
        ({"body": {"stream": True}}, "line 2 asks for a stream"),
        ({"body": {"prompt": "x" * MAX_LINE_BYTES}}, "line 2 has more than 4.0 MiB, the most that is taken"),
    ],
)
def test_what_is_no_request_is_refused_with_its_line(change, message):
    with pytest.raises(SettingsError) as caught:
        list(batch_requests(lines({"custom_id": "first"}, change)))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("line", "message"),
    [(b"{", "is not JSON: "), (b"[1]", "is no JSON object"), (b"\xff\xfe{\x00", "is not JSON: .utf-8. ")],
)
def test_what_is_no_json_object_is_refused_with_its_line(line, message):
    with pytest.raises(SettingsError, match=f"^line 1 {message}"):
        list(batch_requests([line]))


def test_what_json_can_say_is_sent_and_what_it_cannot_is_the_problem_of_its_line():
    deep = b'{"custom_id": "deep", "url": "/v1", "body": {"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}"
    half, number, unread, good = batch_requests(
        [
            *lines({"custom_id": "\ud800", "body": {"prompt": "\udfff"}}),
            *lines({"custom_id": "number", "body": {"temperature": math.nan}}),
            deep,
            *lines({"body": {"prompt": "ü"}}),
        ]
    )
    assert (half.problem, json.loads(half.body)) == ("", {"prompt": "\udfff"})  # which the server refuses by its name
    assert number.problem.startswith("the body is no JSON that can be sent: ")
    assert (unread.custom_id, unread.problem) == (None, "line 3 is nested too deeply to be read")
    assert (good.problem, good.body) == ("", '{"prompt":"ü"}'.encode())
    for request in (half, number, unread):
        line = failed(request, "invalid_request", request.problem)
        assert json.loads(line.encode())["custom_id"] == request.custom_id


def test_an_answer_that_cannot_be_written_down_is_an_error_of_its_line():
    request = BatchRequest("a", "/v1/completions", b"{}")
    for body in ({"x": math.inf}, functools.reduce(lambda inner, _: [inner], range(2000), [])):
        told = json.loads(answered(request, 200, "7f", body))
        assert (told["response"], told["error"]["code"]) == (None, "invalid_response")
        assert told["error"]["message"].startswith("status 200, and no JSON that can be written down: ")


def test_a_line_is_one_for_every_reader_of_lines():
    text = "".join(map(chr, range(0x3000))) + "\ud800"
    line = answered(BatchRequest("a", "/v1/completions", b"{}"), 200, "7f", {"text": text})
    assert line.encode().decode().splitlines() == [line]
    assert json.loads(line)["response"]["body"] == {"text": text}


def test_what_became_of_a_request_is_a_line_as_openai_writes_it():
    request = BatchRequest("ä", "/v1/completions", b"{}")
    assert json.loads(answered(request, 200, "7f", {"text": "two\nlines"})) == {
        "id": "batch_req_7f",
        "custom_id": "ä",
        "response": {"status_code": 200, "request_id": "7f", "body": {"text": "two\nlines"}},
        "error": None,
    }
    assert json.loads(failed(request, "timeout", "too late"))["error"] == {"code": "timeout", "message": "too late"}
    assert "\n" not in answered(request, 200, "7f", {"text": "two\nlines"})
