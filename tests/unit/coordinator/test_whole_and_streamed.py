"""Whole responses and streams say the same in every API, in the order in which the model wrote it: what was written is
known, and however it is cut into chunks, both are compared with that."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.api.http.anthropic_messages import MessagesCall
from coordinator.api.http.anthropic_messages_models import MessagesRequest
from coordinator.api.http.openai_responses import LOGPROBS, ResponsesCall
from coordinator.api.http.openai_responses_models import ResponsesRequest
from coordinator.api.http.request_models import ChatRequest, CompletionRequest
from coordinator.api.http.requests import parse_chat, parse_completion
from coordinator.api.http.responses import ChatFormatter, CompletionFormatter, Envelope, Usage
from coordinator.control.instructions import Chunk
from coordinator.text.answer_format import AnswerFormat
from coordinator.text.tokenizer import read_tokenizer
from protos.inference_pb2 import FINISH_REASON_STOP, Complete, TokenLogprobs
from tests.tiny_models import EOS, write_fake_model
from tests.unit.coordinator.http_kit import HI, WEATHER, choices_of, weather_call

FORMAT = AnswerFormat("hermes", thinks=True)
PROMPT = [1, 2]
END = Complete(finish_reason=FINISH_REASON_STOP)
TOOL = {"type": "function", **WEATHER["function"]}
ANTHROPICS_TOOL = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}
TEXT, CALL, THOUGHT = "text", "call", "thought"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return read_tokenizer(write_fake_model(tmp_path_factory.mktemp("model")))


@st.composite
def answers(draw):
    """Parts of an answer, and the chunks in which it comes: thoughts, then texts and calls in any order."""
    kinds = draw(st.lists(st.sampled_from([TEXT, CALL]), min_size=1, max_size=5))
    kinds = [kind for last, kind in itertools.pairwise([CALL, *kinds]) if CALL in (last, kind)]  # no two texts in a row
    parts = [(THOUGHT, "Hm.")] if draw(st.booleans()) else []
    parts += [
        (kind, f"1<<{index}." if kind == TEXT else json.dumps({"city": str(index)})) for index, kind in enumerate(kinds)
    ]
    written = "".join(
        {TEXT: text, CALL: weather_call(text), THOUGHT: f"<think>\n{text}\n</think>\n\n"}[kind] for kind, text in parts
    )
    most_cuts = draw(st.sampled_from([0, 2, 40]))
    cuts = sorted(draw(st.sets(st.integers(1, len(written)), max_size=most_cuts)))
    pieces = [written[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(written)])]
    return parts, [*map(chunk_of, filter(None, pieces)), Chunk(0, [EOS], logprobs=[scored(EOS)])]


def scored(token_id):
    return TokenLogprobs(token_id=token_id, logprob=-token_id / 8)


def chunk_of(text):
    token_ids = [*text.encode()]
    return Chunk(0, token_ids, text, [*map(scored, token_ids)])


def joined(parts, kind):
    return "".join(text for each, text in parts if each == kind)


def calls_of(parts):
    return [text for kind, text in parts if kind == CALL]


def whole_of(form, chunks):
    """The choice of a whole response."""
    answered = form.new_output(PROMPT)
    for chunk in chunks:
        answered.add(chunk)
    answered.complete = END
    return form.whole(0, answered)


def told_choices(form, chunks):
    """The choices of the events of a stream."""
    opening = form.opening(0)
    told = [] if opening is None else [opening]
    return [*told, *(each for chunk in chunks for each in choices_of(form, chunk, PROMPT)), *form.closing(0, END)]


@given(answers())
def test_a_completion(tokenizer, answer):
    _, chunks = answer
    written = "".join(chunk.text for chunk in chunks)

    def form():
        return CompletionFormatter(
            parse_completion(CompletionRequest.read({"prompt": "p", "logprobs": 0}), "r"), tokenizer
        )

    whole, events = whole_of(form(), chunks), told_choices(form(), chunks)
    assert whole["text"] == "".join(event["text"] for event in events) == written
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        told = [event["logprobs"][name] for event in events if event["logprobs"]]
        assert [*itertools.chain(*told)] == whole["logprobs"][name]
    assert whole["logprobs"]["token_logprobs"] == [-token_id / 8 for token_id in [*written.encode(), EOS]]
    assert events[-1]["finish_reason"] == whole["finish_reason"] == "stop"


@given(answers())
def test_a_chat(tokenizer, answer):
    parts, chunks = answer

    def form():
        fields = {"messages": [HI], "tools": [WEATHER], "logprobs": True}
        return ChatFormatter(parse_chat(ChatRequest.read(fields), "r", FORMAT), tokenizer, FORMAT)

    whole, events = whole_of(form(), chunks), told_choices(form(), chunks)
    message, deltas = whole["message"], [event["delta"] for event in events]
    for name, kind in (("content", TEXT), ("reasoning_content", THOUGHT), ("reasoning", THOUGHT)):
        streamed = "".join(delta.get(name) or "" for delta in deltas)
        assert (message.get(name) or "") == streamed == joined(parts, kind)
    streamed = []
    for part in itertools.chain(*(delta.get("tool_calls", ()) for delta in deltas)):
        if part["index"] == len(streamed):
            streamed.append({"name": part["function"]["name"], "arguments": ""})
        streamed[part["index"]]["arguments"] += part["function"]["arguments"]
    assert streamed == [{"name": "weather", "arguments": text} for text in calls_of(parts)]
    told = [each["function"] for each in message.get("tool_calls", [])]
    assert told == streamed
    order = [next(iter(delta)) for delta in deltas[1:] if delta]
    names = {TEXT: "content", THOUGHT: "reasoning_content", CALL: "tool_calls"}
    kinds = [kind for kind, _ in itertools.groupby(kind for kind, _ in parts)]
    assert [name for name, _ in itertools.groupby(order)] == [names[kind] for kind in kinds]
    logprobs = [each for event in events if event["logprobs"] for each in event["logprobs"]["content"]]
    assert logprobs == whole["logprobs"]["content"]
    assert events[-1]["finish_reason"] == whole["finish_reason"] == ("tool_calls" if told else "stop")


def translated(call, request, tokenizer, chunks):
    """A whole response, and the JSON of a stream's events."""
    form = ChatFormatter(call.parse(request, "r", FORMAT), tokenizer, FORMAT)
    envelope, usage = Envelope(form, "r", "m"), Usage(2).to_json()
    events = [envelope.event([choice], usage=usage) for choice in told_choices(form, chunks)]
    for event in events:
        call.read(event)
    whole, streamed = call.whole(), type(call)()
    form = ChatFormatter(streamed.parse(request, "r", FORMAT), tokenizer, FORMAT)
    sent = b"".join([*(streamed.event(event) for event in events), streamed.end()])
    lines = [line for line in sent.decode().splitlines() if line.startswith("data: ")]
    return whole, [json.loads(line.removeprefix("data: ")) for line in lines]


@given(answers(), st.sampled_from([[], [LOGPROBS]]))
def test_a_response(tokenizer, answer, include):
    parts, chunks = answer
    body = {"input": "hi", "tools": [TOOL], "include": include}
    for chunk in () if include else chunks:
        chunk.logprobs = ()  # which nodes tell where they are asked for
    whole, events = translated(ResponsesCall(), ResponsesRequest.read(body), tokenizer, chunks)
    assert events[-1]["response"] == whole
    items = {}
    for event in events:
        match event["type"].removeprefix("response."):
            case "output_item.added":
                items[event["output_index"]] = (event["item"]["type"], [], [])
            case "output_text.delta" | "reasoning_text.delta" | "function_call_arguments.delta":
                items[event["output_index"]][1].append(event["delta"])
                items[event["output_index"]][2].extend(event.get("logprobs", ()))
    names = {TEXT: "message", THOUGHT: "reasoning", CALL: "function_call"}
    written = [(names[kind], text) for kind, text in parts]
    assert [(kind, "".join(texts)) for kind, texts, _ in items.values()] == written
    for item, (kind, text), (_, _, logprobs) in zip(whole["output"], written, items.values(), strict=True):
        assert item["type"] == kind
        assert (item["arguments"] if kind == "function_call" else item["content"][0]["text"]) == text
        if kind == "message":
            told = item["content"][0]["logprobs"]
            assert told == logprobs
            assert "".join(each["token"] for each in told) == (text if include else "")
            assert [each["logprob"] for each in told] == [-ord(each["token"]) / 8 for each in told]


@given(answers())
def test_a_message(tokenizer, answer):
    parts, chunks = answer
    body = {"messages": [HI], "max_tokens": 500, "tools": [ANTHROPICS_TOOL]}
    whole, events = translated(MessagesCall(), MessagesRequest.read(body), tokenizer, chunks)
    blocks = {}
    for event in events:
        match event["type"]:
            case "content_block_start":
                blocks[event["index"]] = (event["content_block"]["type"], [])
            case "content_block_delta":
                delta = dict(event["delta"])
                del delta["type"]
                blocks[event["index"]][1].extend(delta.values())
    names = {TEXT: "text", THOUGHT: "thinking", CALL: "tool_use"}
    written = [(names[kind], text) for kind, text in parts]
    assert [(kind, "".join(texts)) for kind, texts in blocks.values()] == written
    told = [(block["type"], block.get("text") or block.get("thinking") or block["input"]) for block in whole["content"]]
    assert told == [(kind, json.loads(text) if kind == "tool_use" else text) for kind, text in written]
