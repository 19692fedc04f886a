"""Lines of a batch: which are taken, and what is written of each."""

import json

import pytest

from serving_core.errors import SettingsError
from splitserve.batches import MAX_LINE_BYTES, BatchRequest, answered, batch_requests, failed

LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def lines(*changes):
    return [json.dumps({**LINE, **change}).encode() + b"\n" for change in changes]


def test_requests_are_taken_in_their_order_and_blank_lines_passed_over():
    given = [*lines({}), b"\n", *lines({"custom_id": "b", "url": "/v1/embeddings", "body": {}})]
    assert list(batch_requests(given)) == [
        BatchRequest("a", "/v1/completions", {"prompt": "x"}),
        BatchRequest("b", "/v1/embeddings", {}),
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"custom_id": None}, "line 2 needs a custom_id"),
        ({"custom_id": "first"}, "line 2 has the custom_id of line 1: 'first'"),
        ({"method": "GET"}, "line 2 must have the method POST, not 'GET'"),
        ({"url": "http://a/v1/completions"}, "line 2 needs a url such as /v1/chat/completions"),
        ({"body": "x"}, "line 2 needs a body"),
        ({"body": {"stream": True}}, "line 2 asks for a stream"),
        ({"body": {"prompt": "x" * MAX_LINE_BYTES}}, "line 2 has more than 4.0 MiB, the most that is taken"),
    ],
)
def test_what_is_no_request_is_refused_with_its_line(change, message):
    with pytest.raises(SettingsError) as caught:
        list(batch_requests(lines({"custom_id": "first"}, change)))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(("line", "message"), [(b"{", "is not JSON: "), (b"[1]", "is no JSON object"), (b"\xff", "is")])
def test_what_is_no_json_object_is_refused_with_its_line(line, message):
    with pytest.raises(SettingsError, match=f"^line 1 {message}"):
        list(batch_requests([line]))


def test_what_became_of_a_request_is_a_line_as_openai_writes_it():
    request = BatchRequest("ä", "/v1/completions", {})
    assert json.loads(answered(request, 200, "7f", {"text": "two\nlines"})) == {
        "id": "batch_req_7f",
        "custom_id": "ä",
        "response": {"status_code": 200, "request_id": "7f", "body": {"text": "two\nlines"}},
        "error": None,
    }
    assert json.loads(failed(request, "timeout", "too late"))["error"] == {"code": "timeout", "message": "too late"}
    assert "\n" not in answered(request, 200, "7f", {"text": "two\nlines"})
