"""Logprobs, usage and errors in OpenAI's words, against hand-written JSON."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from coordinator.api.http.errors import error_object, error_response, renamed, status_of
from coordinator.api.http.generating import written
from coordinator.api.http.logprobs import TextOffsets, TokenNames, chat_logprobs, completion_logprobs
from coordinator.api.http.requests import CHAT_NAMES, COMPLETION_NAMES, ParsedRequest
from coordinator.api.http.responses import (
    ChatFormatter,
    CompletionFormatter,
    Envelope,
    Output,
    Usage,
    timeline_object,
)
from coordinator.api.http.tools import Offer
from coordinator.api.statuses import CODES
from coordinator.control.instructions import Chunk
from coordinator.text.answer_format import AnswerFormat
from coordinator.text.tokenizer import Tokenizer, read_tokenizer
from protos.inference_pb2 import (
    FINISH_REASON_LENGTH,
    Complete,
    GenerateRequest,
    SamplingParams,
    Timeline,
    TokenLogprobs,
    TopLogprob,
)
from serving_core.errors import RequestError
from serving_core.json_fields import json_line
from tests.tiny_models import EOS, write_fake_model
from tests.unit.coordinator.http_kit import choices_of
from tests.unit.coordinator.later import openai


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return read_tokenizer(write_fake_model(tmp_path_factory.mktemp("model")))


def sampled(token_id, logprob, *top):
    tops = [TopLogprob(token_id=each, logprob=value) for each, value in top]
    return TokenLogprobs(token_id=token_id, logprob=logprob, top=tops)


ITEMS = [
    sampled(ord("a"), -0.5, (ord("b"), -0.25), (ord("a"), -0.5)),
    sampled(0xC3, -1.0, (0xC3, -1.0)),
    sampled(0xBC, float("-inf")),
    sampled(EOS, -2.0, (ord("z"), -1.5)),
]


def test_logprobs_of_chat(tokenizer):
    a = {"token": "a", "logprob": -0.5, "bytes": [97]}
    half = {"token": "\ufffd", "logprob": -1.0, "bytes": [0xC3]}
    assert chat_logprobs(ITEMS, TokenNames(tokenizer.token_bytes), tells_sampled=False) == {
        "content": [
            {**a, "top_logprobs": [{"token": "b", "logprob": -0.25, "bytes": [98]}, a]},
            {**half, "top_logprobs": [half]},
            {"token": "\ufffd", "logprob": -9999.0, "bytes": [0xBC], "top_logprobs": []},
            {
                "token": "<|eos|>",
                "logprob": -2.0,
                "bytes": list(b"<|eos|>"),
                "top_logprobs": [{"token": "z", "logprob": -1.5, "bytes": [122]}],
            },
        ],
        "refusal": None,
    }


def test_logprobs_of_named_tokens_in_chat_have_the_sampled_one_too(tokenizer):
    told = chat_logprobs(ITEMS, TokenNames(tokenizer.token_bytes), tells_sampled=True)["content"]
    top = [[(each["token"], each["logprob"]) for each in entry["top_logprobs"]] for entry in told]
    assert top == [
        [("b", -0.25), ("a", -0.5)],
        [("\ufffd", -1.0)],
        [("\ufffd", -9999.0)],
        [("z", -1.5), ("<|eos|>", -2.0)],
    ]


def test_logprobs_of_completions(tokenizer):
    assert completion_logprobs(ITEMS, [0, 1, 1, 2], TokenNames(tokenizer.token_bytes)) == {
        "tokens": ["a", "bytes:\\xc3", "bytes:\\xbc", "<|eos|>"],
        "token_logprobs": [-0.5, -1.0, -9999.0, -2.0],
        "top_logprobs": [
            {"b": -0.25, "a": -0.5},
            {"bytes:\\xc3": -1.0},
            {"bytes:\\xbc": -9999.0},
            {"z": -1.5, "<|eos|>": -2.0},
        ],
        "text_offset": [0, 1, 1, 2],
    }


def test_of_two_tokens_with_one_text_the_more_likely_stays():
    item = sampled(1, -3.0, (2, -0.5), (3, -0.75), (4, -1.0))
    texts = {1: b"s", 2: b"x", 3: b"y", 4: b"x"}
    [top] = completion_logprobs([item], [0], TokenNames(texts.__getitem__))["top_logprobs"]
    assert list(top.items()) == [("x", -0.5), ("y", -0.75), ("s", -3.0)]


def test_tokens_may_be_named_by_their_ids(tokenizer):
    names = TokenNames(tokenizer.token_bytes, as_ids=True)
    told = completion_logprobs(ITEMS[:2], [0, 1], names, [7])
    assert told["tokens"] == ["token_id:7", "token_id:97", "token_id:195"]
    assert told["top_logprobs"] == [None, {"token_id:98": -0.25, "token_id:97": -0.5}, {"token_id:195": -1.0}]
    [entry] = chat_logprobs(ITEMS[:1], names, tells_sampled=False)["content"]
    assert (entry["token"], entry["bytes"]) == ("token_id:97", [97])
    assert [top["token"] for top in entry["top_logprobs"]] == ["token_id:98", "token_id:97"]


def test_offsets_count_characters_over_chunks(tokenizer):
    offsets = TextOffsets(tokenizer.detokenizer(skip_special_tokens=True))
    assert offsets.add([ord("a"), 0xC3]) == [0, 1]
    assert offsets.add([0xBC, EOS, ord("b")]) == [1, 2, 2]


def test_a_sentencepiece_token_keeps_its_space():
    vocabulary = {"<unk>": 0, "\u2581Hi": 1, "you": 2, "<0xC3>": 3, "\u2581": 4}
    plain = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    plain.pre_tokenizer = pre_tokenizers.Metaspace()
    plain.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    token_bytes = Tokenizer(plain, None).token_bytes
    assert [token_bytes(token_id) for token_id in range(1, 6)] == [b" Hi", b"you", b"\xc3", b" ", b""]


def test_usage_adds_up():
    usage = Usage(5)
    usage.add_tokens(2)
    usage.add_tokens(1)
    usage.set_cached(0, 4)
    usage.set_cached(0, 4)
    assert usage.to_json() == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_a_timeline_has_every_field():
    timeline = timeline_object(Timeline(prefill_s=0.5, decode_node="d"))
    assert timeline.keys() == {field.name for field in Timeline.DESCRIPTOR.fields}
    assert (timeline["prefill_s"], timeline["decode_s"], timeline["decode_node"]) == (0.5, 0.0, "d")


# ---- what OpenAI's own client accepts when it is strict ----

CHUNK = Chunk(0, [ord("a"), 0xC3, 0xBC, EOS], "aü", ITEMS)
COMPLETE = Complete(finish_reason=FINISH_REASON_LENGTH)


@pytest.mark.parametrize("with_extras", [False, True])
@pytest.mark.parametrize("form_class", [ChatFormatter, CompletionFormatter])
def test_a_whole_response_is_of_openais_type(tokenizer, form_class, with_extras):
    asked = ParsedRequest((GenerateRequest(),), return_token_ids=with_extras, include_timeline=with_extras)
    form = form_class(asked, tokenizer)
    answered = form.new_output([1, 2])
    answered.add(CHUNK)
    answered.complete = COMPLETE
    response = Envelope(form, "r", "m").whole([form.whole(0, answered)], Usage(2), **form.envelope_extras([1, 2]))
    response_class = openai.types.chat.ChatCompletion if form_class is ChatFormatter else openai.types.Completion
    response_class.model_validate_json(json.dumps(response), strict=True)


def test_every_event_of_a_chat_is_of_openais_type(tokenizer):
    form = ChatFormatter(ParsedRequest((GenerateRequest(),)), tokenizer)
    envelope = Envelope(form, "r", "m")
    for choice in (form.opening(0), *choices_of(form, CHUNK), *form.closing(0, COMPLETE)):
        openai.types.chat.ChatCompletionChunk.model_validate_json(
            json.dumps(envelope.event([choice], usage=None)), strict=True
        )
    last = envelope.event([], usage=Usage(2).to_json())
    openai.types.chat.ChatCompletionChunk.model_validate_json(json.dumps(last), strict=True)


def test_what_an_answer_is_made_to_be_is_content_whatever_its_words_look_like(tokenizer):
    text = '{"a": "<think>b</think><tool_call>{}</tool_call>"}'
    params = SamplingParams(json_object=True)
    asked = ParsedRequest((GenerateRequest(sampling_params=params),), offer=Offer(frozenset({"f"})))
    form = ChatFormatter(asked, tokenizer, AnswerFormat("hermes", thinks=True))
    answered = form.new_output([1, 2])
    answered.add(Chunk(0, [], text))
    answered.complete = COMPLETE
    assert form.whole(0, answered)["message"]["content"] == text


def test_thoughts_are_left_out_where_they_are_not_wanted(tokenizer):
    for includes_thoughts in (True, False):
        asked = ParsedRequest((GenerateRequest(),), includes_thoughts=includes_thoughts)
        form = ChatFormatter(asked, tokenizer, AnswerFormat(thinks=True))
        answered = form.new_output([1, 2])
        answered.add(Chunk(0, [], "<think>Hm.</think>Yes."))
        answered.complete = COMPLETE
        message = form.whole(0, answered)["message"]
        assert (message["content"], message.get("reasoning_content")) == ("Yes.", "Hm." if includes_thoughts else None)
        assert bool(form.pieces(0, [1, 2], Chunk(0, [], "<think>Hm."))) == includes_thoughts


@pytest.mark.parametrize(
    ("matched", "stop_reason"),
    [({"matched_token_id": EOS}, None), ({"matched_token_id": 7}, 7), ({"matched_stop_str": "x"}, "x"), ({}, None)],
)
def test_the_models_own_end_is_no_stop_reason(tokenizer, matched, stop_reason):
    form = ChatFormatter(
        ParsedRequest((GenerateRequest(sampling_params=SamplingParams(stop_token_ids=[7])),)), tokenizer
    )
    complete = Complete(finish_reason=FINISH_REASON_LENGTH, **matched)
    assert form.closing(0, complete)[-1]["stop_reason"] == stop_reason


# ---- errors ----

STATUSES = {
    "BAD_PARAM": 400,
    "PROMPT_TOO_LONG": 400,
    "MALFORMED_REQUEST": 400,
    "UNAUTHENTICATED": 401,
    "MODEL_NOT_FOUND": 404,
    "NODE_NOT_FOUND": 404,
    "DUPLICATE_REQUEST_ID": 409,
    "ABORTED": 409,
    "QUEUE_FULL": 429,
    "WOULD_BE_LATE": 429,
    "SLOW_READER": 429,
    "KV_CHECKSUM_MISMATCH": 500,
    "PAIRING_MISMATCH": 500,
    "NO_OTHER_NODE": 500,
    "DRAIN_ENDED": 500,
    "ENGINE_ERROR": 500,
    "NO_PREFILL_WORKER": 503,
    "NO_DECODE_WORKER": 503,
    "DRAINING": 503,
    "WORKER_LOST": 503,
    "DEADLINE_EXCEEDED": 504,
}
OPENAI_CODES = {
    "PROMPT_TOO_LONG": "context_length_exceeded",
    "MODEL_NOT_FOUND": "model_not_found",
    "UNAUTHENTICATED": "invalid_api_key",
    "QUEUE_FULL": "rate_limit_exceeded",
    "WOULD_BE_LATE": "rate_limit_exceeded",
}


def test_every_reason_has_a_status():
    assert {reason: status_of(RequestError(reason, "text")) for reason in CODES} == STATUSES


def test_the_error_object_and_its_headers():
    for reason, status in STATUSES.items():
        check_error(reason, status)


def check_error(reason, status):
    response = error_response(RequestError(reason, "what", field="top_p"))
    kind = "server_error" if status >= 500 else "invalid_request_error"
    kind = "requests" if status == 429 else kind
    code = OPENAI_CODES.get(reason, reason)
    overflow = "This model's maximum context length is exceeded: " if code == "context_length_exceeded" else ""
    expected = {"message": f"{overflow}what", "type": kind, "param": "top_p", "code": code, "reason": reason}
    assert (response.status_code, json.loads(response.body)) == (status, {"error": expected})
    is_for_later = status == 503 or reason in ("QUEUE_FULL", "WOULD_BE_LATE")
    assert response.headers.get("retry-after") == ("1" if is_for_later else None)
    is_for_never = reason in ("ABORTED", "DUPLICATE_REQUEST_ID", "SLOW_READER", "DEADLINE_EXCEEDED")
    assert response.headers.get("x-should-retry") == ("false" if is_for_never else None)


def test_errors_name_the_fields_that_the_client_knows():
    error = RequestError("BAD_PARAM", "input has token id 9", field="input")
    for names, field in ((COMPLETION_NAMES, "prompt"), (CHAT_NAMES, "messages")):
        told = error_object(renamed(error, names))["error"]
        assert (told["param"], told["message"]) == (field, f"{field} has token id 9")
    other = RequestError("BAD_PARAM", "seed is bad", field="seed")
    assert renamed(other, CHAT_NAMES) is other


@pytest.mark.parametrize(
    "document",
    [
        {"id": "é", "choices": [{"text": "a\u2028", "x": None}, {"text": "b"}], "usage": {"n": 1.5}},
        {"choices": []},
        {"a": 1},
    ],
)
def test_a_response_is_the_same_json_whether_it_is_written_at_once_or_choice_by_choice(document):
    ours = written(document)
    assert (ours.body, ours.media_type) == (json_line(document).encode(), "application/json")


def test_each_answer_echoes_the_prompt_of_its_own(tokenizer):
    asked = ParsedRequest(requests=tuple(GenerateRequest(text=text) for text in "ab"), num_sequences=2, echoes=True)
    form = CompletionFormatter(asked, tokenizer)
    end = Complete(finish_reason=FINISH_REASON_LENGTH)
    wholes = [form.whole(index, Output([ord("ab"[index // 2])], text="x", complete=end)) for index in range(4)]
    assert [whole["text"] for whole in wholes] == ["ax", "ax", "bx", "bx"]
