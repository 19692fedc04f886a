"""Why the parsers of transformers' response templates do not read outputs here (docs/dependencies.md): cases in which
an output is lost, or streamed otherwise than whole. When one fails, that decision is to be looked at again."""

import pytest
from transformers.utils.chat_parsing import ResponseParser

from coordinator.text.answer_format import AnswerFormat
from tests.unit.coordinator.http_kit import weather_call

CALLS = {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True}
CUT = 'It rains.<tool_call>\n{"name": "weather", "arguments": {"city": "Par'


def template(**fields):
    return {"start_anchor": "<|assistant|>", "fields": {"content": {}, **fields}}


def parsed(spec, *pieces):
    """Return the message and the texts of its fields, of an output that comes in these pieces."""
    parser = ResponseParser(spec, prefix="")
    told = [event for piece in pieces for event in parser.feed(piece)]
    message, last = parser.finalize()
    texts = {}
    for event in told + last:
        if event["type"] == "region_chunk":
            texts[event["field"]] = texts.get(event["field"], "") + event["text"]
    return message, texts


def test_a_call_that_max_tokens_has_cut_loses_the_whole_message_there_and_keeps_its_text_here():
    with pytest.raises(ValueError, match="could not parse"):
        parsed(template(tool_calls=CALLS), CUT)
    reader = AnswerFormat("hermes").reader("", {"weather": {}})
    pieces = [*reader.feed(CUT), *reader.finish()]
    assert "".join(piece.text for piece in pieces).startswith("It rains.")


def test_a_call_that_is_no_json_ends_the_stream_in_the_middle():
    parser = ResponseParser(template(tool_calls=CALLS), prefix="")
    assert parser.feed("It rains.")[-1]["text"] == "It rains."
    with pytest.raises(ValueError, match="could not parse"):
        parser.feed("<tool_call>{'city'}</tool_call> And it snows.")


def test_a_pattern_that_looks_ahead_gives_another_message_in_pieces():
    spec = template(thinking={"open_pattern": "<a>(?!bc)", "close": "</a>"})
    whole, in_pieces = parsed(spec, "<a>bc"), parsed(spec, "<a>b", "c")
    assert whole[0] == {"content": "<a>bc"}
    assert in_pieces[0] == {"thinking": "bc"}


def test_arguments_come_when_the_call_has_ended():
    parser = ResponseParser(template(tool_calls=CALLS), prefix="")
    events = [event for char in weather_call('{"city": "Paris"}') for event in parser.feed(char)]
    valued = [event["type"] for event in events if "value" in event]
    assert valued == ["region_close"]
    assert all(event["dirty"] for event in events if event["type"] == "region_chunk")
