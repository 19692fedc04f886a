"""Forms that ask for characters which no token of a model spells: an answer never comes to where no token may."""

import asyncio
import json
import random
import re
import sys

import pytest

from coordinator.text.constraints import class_of, unspelled_bytes, unspelled_in
from coordinator.text.structures import Structures
from protos.inference_pb2 import Choice, SamplingParams
from serving_core.errors import RequestError
from serving_core.grammars import Grammars
from tests.tiny_models import EOS, byte_vocabulary, write_tokenizer
from tests.unit.coordinator.grammar_kit import tokens_in

ESCAPE = r"\\u\{(\w+)\}"  # of Rust's regular expressions, for which Python's have the character
LACKING = (0x04, 0x1D, 0xE2, 0xF1)  # as the demo model's tokens lack the first two and the last


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose tokens have all bytes but these, with others in their places."""
    folder = tmp_path_factory.mktemp("lacking")
    write_tokenizer(folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"] = {
        f"zz{byte}" if byte in LACKING else text: byte for text, byte in byte_vocabulary().items()
    }
    path.write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture(scope="module")
def structures(folder):
    return Structures(folder, (EOS,))


def grammar(structures, **params):
    return asyncio.run(structures.grammar(SamplingParams(**params)))


@pytest.mark.parametrize(
    ("params", "char"),
    [
        ({"choice": Choice(choices=["a\x1db", "c"])}, "U+001D"),
        ({"grammar": r'root ::= "c" | "a\x1db"'}, "U+001D"),
        ({"grammar": r'start: "a\u001db" | "c"'}, "U+001D"),
        ({"json_schema": json.dumps({"enum": ["a", ["€"]]})}, "U+20AC"),
        ({"json_schema": json.dumps({"const": {"\U00050000": 1}})}, "U+50000"),
        ({"json_schema": json.dumps({"type": "object", "properties": {"a": {}, "€": {}}})}, "U+20AC"),
    ],
)
def test_a_text_is_refused_by_its_character(structures, params, char):
    with pytest.raises(RequestError, match=re.escape(f"cannot be enforced: no token of the model has {char}")):
        grammar(structures, **params)


@pytest.mark.parametrize("regex", [r"a?\x1d", "€{2}", r"[\u{50000}-\u{50009}]b", r"\x04|\x1d"])
def test_a_regular_expression_of_nothing_else_is_refused(structures, regex):
    with pytest.raises(RequestError, match="regex cannot be enforced: "):
        grammar(structures, regex=regex)


@pytest.mark.parametrize(
    "regex", [r"a(\x1d|b)c", r"[\x1c-\x1e]{3}", "(x€|y)*", r"[\u{1f600}-\u{1f60f}\u{50000}]a", r"(a\x1d|a)(b|\x04)?"]
)
def test_every_answer_to_a_regular_expression_comes_to_an_end(structures, folder, regex):
    given, chooser = grammar(structures, regex=regex), random.Random(regex)
    for _ in range(20):
        guide, answer = Grammars(folder, (EOS,)).guide_of(given), []
        while len(answer) < 12:
            token_id = chooser.choice(tokens_in(guide.allowed(answer)))
            if token_id == EOS:
                break
            answer.append(token_id)
        text = bytes(answer).decode()
        assert token_id != EOS or re.fullmatch(re.sub(ESCAPE, _char, regex), text), text


def _char(found):
    return re.escape(chr(int(found[1], 16)))


def test_what_need_not_be_spelled_is_no_hindrance(structures):
    described = {"type": "object", "description": "€", "properties": {"a": {"title": "\x1d"}}}
    for params in ({"json_schema": json.dumps(described)}, {"grammar": r"root ::= [^\x1d€]+"}, {"regex": ".*"}):
        assert grammar(structures, **params)


def test_bytes_that_text_has_none_of_are_not_missed():
    """Of all of Unicode, by Python's own UTF-8."""
    chars = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
    assert unspelled_bytes(char.encode() for char in chars) == frozenset()
    assert unspelled_bytes([b"a"]) == {byte for char in chars for byte in char.encode()} - {ord("a")}


@pytest.mark.parametrize("byte", [0x00, 0x7F, 0xC2, 0xDF, 0xE0, 0xED, 0xEF, 0xF0, 0xF4])
def test_a_class_has_the_characters_that_begin_with_a_byte(byte):
    members = re.compile(f"[{re.sub(ESCAPE, _char, class_of(frozenset({byte})))}]")
    for code in range(sys.maxunicode + 1):
        if not 0xD800 <= code < 0xE000:
            assert (members.match(chr(code)) is not None) == (chr(code).encode()[0] == byte), hex(code)


def test_the_first_character_is_named():
    assert unspelled_in("a\x04\x1d", frozenset({0x1D, 0x04})) == "U+0004"
    assert unspelled_in("\ud800", frozenset({0x1D})) == ""
