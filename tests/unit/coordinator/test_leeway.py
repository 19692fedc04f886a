"""What an answer that is held to a form may have besides, by the byte-level tokenizer of the tests: whatever the
grammar lets come is read as a call of a tool that there is, or is of the form."""

import asyncio
import itertools
import json
import random

import jsonschema
import pytest

from coordinator.text.answer_format import AnswerFormat
from coordinator.text.calls.reader import Kind
from coordinator.text.constraints import Leeway
from coordinator.text.structures import Structures, may_begin_blank
from protos.inference_pb2 import Choice, SamplingParams
from serving_core.errors import RequestError
from serving_core.grammars import Grammars
from tests.effort import effort
from tests.tiny_models import EOS, write_tokenizer
from tests.unit.coordinator.grammar_kit import may_be, walk

NAMES = ("f", "get.weather", "g-2")
TOOLS = tuple((name, "") for name in NAMES)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["<tool_call>", "[TOOL_CALLS]", "x"]}},
    "required": ["a"],
    "additionalProperties": False,
}
CALLS = {
    "hermes": [
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        '<tool_call>{"name":"f","arguments":{}}</tool_call>\n<tool_call>{"name":"g-2","arguments":{}}</tool_call>',
    ],
    "llama3": [
        '{"name": "f", "parameters": {"a": [1, {}]}}',
        '<|python_tag|>{"name": "g-2", "parameters": {}}; {"name": "f", "parameters": {}}',
    ],
    "mistral": [
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g-2", "arguments": {}}]',
        '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]get.weather[ARGS]{}',
    ],
    "pythonic": [
        '[f(city="Paris", days=[1, -2.5], if_="", it={"a": None, \'b\': True}), get.weather()]',
        "[get.weather(a='it\"s')]",
    ],
}
NO_CALLS = {
    "hermes": ["<tool_call>", '<tool_call>{"name": "h", "arguments": {}}</tool_call>', "<tool_call>{}</tool_call>"],
    "llama3": ['{"name": "h", "parameters": {}}', '{"name": "f", "arguments": {}}', "<|python_tag|>"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS] []", "[TOOL_CALLS]h{}", "[TOOL_CALLS]f[]"],
    "pythonic": ["[]", "[h()]", "[f(1)]", "[f(if=1)]", r'[f(a="\x")]', "[f(a=01)]"],
}


@pytest.fixture(scope="module")
def structures(tokenizer_folder):
    return Structures(tokenizer_folder, (EOS,))


@pytest.fixture(scope="module")
def guide(structures, tokenizer_folder):
    grammars = Grammars(tokenizer_folder, (EOS,))

    def make(leeway, prompt_end="", **params):
        params = params or {"json_schema": json.dumps(SCHEMA)}
        return grammars.guide_of(asyncio.run(structures.grammar(SamplingParams(**params), leeway, prompt_end)))

    return make


def read(text, calls, *, thinks=False, prompt_end="", **params):
    """What each kind of piece says, and the arguments of each call."""
    keeps_blanks = may_begin_blank(SamplingParams(**params))
    reader = AnswerFormat(calls, thinks=thinks).reader(
        prompt_end, {name: {} for name in NAMES} if calls != "none" else {}, is_held=True, keeps_blanks=keeps_blanks
    )
    told = {Kind.REASONING: "", Kind.TEXT: ""}
    called = []
    for piece in itertools.chain(*map(reader.feed, text), reader.finish()):
        match piece.kind:
            case Kind.CALL:
                called.append([piece.text, ""])
            case Kind.ARGUMENTS:
                called[-1][1] += piece.text
            case _:
                told[piece.kind] += piece.text
    return *told.values(), [(name, json.loads(arguments)) for name, arguments in called]


@pytest.mark.parametrize("calls", CALLS)
def test_either_calls_or_the_form(guide, calls):
    for text in CALLS[calls]:
        assert may_be(guide(Leeway(calls=calls, tools=TOOLS)), text), text
        assert not may_be(guide(Leeway()), text), text
        thoughts, words, called = read(text, calls)
        assert (thoughts, words) == ("", "")
        assert called, text
    for text in NO_CALLS[calls]:
        assert not may_be(guide(Leeway(calls=calls, tools=TOOLS)), text), text
    for value in SCHEMA["properties"]["a"]["enum"]:
        text = json.dumps({"a": value})
        assert may_be(guide(Leeway(calls=calls, tools=TOOLS)), text), text
        assert read(text, calls) == ("", text, [])


@pytest.mark.parametrize("calls", CALLS)
def test_a_form_that_looks_like_calls_is_read_as_one_where_the_tool_has_arguments(guide, calls):
    held, number = Leeway(calls=calls, tools=TOOLS), {"type": "integer"}
    schema = {"properties": {"name": {"type": "string"}, "parameters": number, "why": number}, "required": ["name"]}
    params = {"json_schema": json.dumps({"type": "object", **schema, "additionalProperties": False})}
    for text in '{"name": "f"}', '{"name": "f", "parameters": 1}', '{"name": "g-2", "why": 2}', '{"name": "x"}':
        assert may_be(guide(held, **params), text), text
        assert read(text, calls) == ("", text, []), text
    for text in CALLS[calls]:
        assert may_be(guide(held, **params), text), text
        assert read(text, calls)[2], text


@pytest.mark.parametrize("calls", CALLS)
def test_whatever_comes_is_read_as_what_it_is(guide, calls):
    rng, num_called, num_told = random.Random(7), 0, 0
    for _ in range(effort(30, 80, 80)):
        drawn = walk(guide(Leeway(calls=calls, tools=TOOLS)), rng, closing="\"'}])>", share=0.6, most_tokens=300)
        text = None if drawn is None else drawn.decode(errors="replace")
        if text is None:
            continue
        _, words, called = read(text, calls)
        if called:
            num_called += 1
            assert words == "", text
            assert all(name in NAMES and isinstance(arguments, dict) for name, arguments in called), text
        else:
            num_told += 1
            jsonschema.validate(json.loads(words), SCHEMA)
    assert min(num_called, num_told) > effort(2, 5, 5), "hardly anything was tried"


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"choice": Choice(choices=["[TOOL", " <tool_"])}, "[TOOL"),
        ({"choice": Choice(choices=["[TOOL", " <tool_"])}, " <tool_"),
        ({"regex": "(?s:.*)"}, "a <tool_call>"),
        ({"grammar": 'start: calls\ncalls: "form"'}, "form"),
    ],
)
@pytest.mark.parametrize("calls", CALLS)
def test_whatever_the_form(guide, calls, params, text):
    leeway = Leeway(calls=calls, tools=TOOLS)
    assert may_be(guide(leeway, **params), text)
    assert may_be(guide(leeway, **params), CALLS[calls][0])
    assert read(text, calls) == ("", text, [])


@pytest.mark.parametrize("calls", CALLS)
def test_no_more_calls_than_may_be(guide, calls):
    leeway = Leeway(calls=calls, tools=TOOLS, most_calls=1)
    for text in CALLS[calls]:
        *_, called = read(text, calls)
        assert may_be(guide(leeway), text) == (len(called) == 1), text


def test_a_tool_that_no_python_names_is_not_called_in_pythons_words(guide):
    leeway = Leeway(calls="pythonic", tools=(("g-2", ""), ("for", "")))
    assert may_be(guide(leeway), '{"a": "x"}')
    assert not may_be(guide(leeway), "[for()]")


@pytest.mark.parametrize("calls", ["hermes", "llama3", "mistral"])
def test_arguments_are_held_to_the_schema_of_a_strict_tool(guide, calls):
    tree = {"properties": {"left": {"$ref": "#"}, "n": {"type": "integer"}}, "additionalProperties": False}
    tools = [
        ("@f", json.dumps({"type": "object", **tree})),
        ("@object", ""),
        *((f"g{index}", "") for index in range(12)),
    ]
    held = Leeway(calls=calls, tools=tuple(tools))

    def texts(name, arguments):
        told = "parameters" if calls == "llama3" else "arguments"
        call = json.dumps({"name": name, told: arguments})
        named = f"[TOOL_CALLS]{name}{json.dumps(arguments)}"
        whole = {"hermes": f"<tool_call>{call}</tool_call>", "llama3": call, "mistral": f"[TOOL_CALLS][{call}]"}[calls]
        return [whole, named] if calls == "mistral" else [whole]

    for arguments, is_right in ({}, True), ({"left": {"n": 1}}, True), ({"left": {"n": "x"}}, False), ({"m": 1}, False):
        assert {may_be(guide(held), text) for text in texts("@f", arguments)} == {is_right}
        assert {may_be(guide(held), text) for text in texts("@object", arguments)} == {True}
        assert {may_be(guide(held), text) for text in texts("g11", arguments)} == {True}


def test_what_cannot_be_enforced_of_a_strict_tool_names_the_tools(structures):
    params = SamplingParams(json_schema=json.dumps(SCHEMA))
    leeway = Leeway(calls="hermes", tools=(("f", '{"not": {}}'),))
    with pytest.raises(RequestError, match=r'^tools cannot be enforced: .*"not"') as error:
        asyncio.run(structures.grammar(params, leeway))
    assert error.value.metadata["field"] == "tools"
    with pytest.raises(RequestError, match=r"^regex cannot be enforced: "):
        asyncio.run(structures.grammar(SamplingParams(regex="("), leeway))


THOUGHTS = [
    ("", '{"a": "x"}', ("", '{"a": "x"}', [])),
    ("", '<think>\nHm {"a"\n</think>\n\n{"a": "x"}', ('Hm {"a"', '{"a": "x"}', [])),
    ("", f"<think>Hm</think>{CALLS['hermes'][0]}", ("Hm", "", [("f", {"a": 1})])),
    ("<think>\n", 'Hm </thin\n</think>\n\n{"a": "x"}', ("Hm </thin", '{"a": "x"}', [])),
    ("<think>", '</think>{"a": "x"}', ("", '{"a": "x"}', [])),
    ("<think>\n\n</think>\n\n", '{"a": "x"}', ("", '{"a": "x"}', [])),
]
NO_THOUGHTS = [
    ("", "<think>Hm"),
    ("", "<think>Hm</think>"),
    ("", 'Hm</think>{"a": "x"}'),
    ("", '<think>Hm</think></think>{"a": "x"}'),
    ("<think>\n", '{"a": "x"}'),
    ("<think>\n\n</think>\n\n", '<think>Hm</think>{"a": "x"}'),
]


@pytest.mark.parametrize(("prompt_end", "text", "told"), THOUGHTS)
def test_thoughts_come_before_the_form(guide, prompt_end, text, told):
    assert may_be(guide(Leeway(thinks=True, calls="hermes", tools=TOOLS), prompt_end), text)
    assert read(text, "hermes", thinks=True, prompt_end=prompt_end) == told


@pytest.mark.parametrize("prompt_end", ["", "<think>\n"])
@pytest.mark.parametrize(
    ("params", "answers", "others"),
    [
        ({"choice": Choice(choices=[" yes", "\u3000no", "b"])}, [" yes", "\u3000no", "b"], ["yes", "\n yes", "\nb"]),
        ({"regex": r"\n\na"}, ["\n\na"], ["a", "\na"]),
        ({"grammar": 'start: " "? "a"'}, ["a", " a"], ["\na"]),
        ({"choice": Choice(choices=["yes", "no"])}, ["yes"], [" "]),
    ],
)
def test_behind_thoughts_an_answer_has_the_blanks_of_its_form(guide, params, answers, others, prompt_end):
    leeway = Leeway(thinks=True, calls="hermes", tools=TOOLS)
    thoughts = ("" if prompt_end else "<think>") + "Hm</think>"
    for answer in answers:
        assert may_be(guide(leeway, prompt_end, **params), thoughts + answer), answer
        told = read(thoughts + answer, "hermes", thinks=True, prompt_end=prompt_end, **params)
        assert told == ("Hm", answer, [])
    for other in others:
        assert not may_be(guide(leeway, prompt_end, **params), thoughts + other), other
    called = f"{thoughts}\n\n{CALLS['hermes'][0]}"
    assert may_be(guide(leeway, prompt_end, **params), called)
    assert read(called, "hermes", thinks=True, prompt_end=prompt_end, **params) == ("Hm", "", [("f", {"a": 1})])


@pytest.mark.parametrize("regex", ["(?s:.*)", "(?s:.){0,9}", r"[\s\S]{1,50}", "[^x]*"])
def test_a_regular_expression_that_any_text_meets_is_no_thought(guide, regex):
    """However short the texts are that meet it, and thoughts are not."""
    leeway = Leeway(thinks=True)
    for thoughts in "", "<think>Let me think, x by x.</think>":
        for answer in "abc", "\n<thin", "a <think>":
            assert may_be(guide(leeway, regex=regex), thoughts + answer), (thoughts, answer)
            told = read(thoughts + answer, "none", thinks=True, regex=regex)
            assert told == (thoughts and "Let me think, x by x.", answer, [])
    for thought in "<think>", "<think>Hm", "\n<think>a":
        assert not may_be(guide(leeway, regex=regex), thought), thought
        assert may_be(guide(leeway, "</think>\n\n", regex=regex), thought)
        assert read(thought, "none", thinks=True, prompt_end="</think>\n\n", regex=regex) == ("", thought, [])


@pytest.mark.parametrize("calls", ["hermes", "mistral"])
def test_a_regular_expression_that_any_text_meets_is_no_call(guide, calls):
    held, regex = Leeway(calls=calls, tools=TOOLS), "(?s:.{1,300})"
    for text in CALLS[calls]:
        assert may_be(guide(held, regex=regex), text), text
    for text in NO_CALLS[calls]:
        assert not may_be(guide(held, regex=regex), text), text
    assert may_be(guide(held, regex=regex), f"a {CALLS[calls][0]}")


def test_a_form_that_no_text_has_is_refused_whatever_may_come_beside_it(structures):
    for leeway in Leeway(thinks=True), Leeway(calls="hermes", tools=TOOLS):
        for params in {"regex": r"[^\s\S]"}, {"grammar": "start: start"}:
            with pytest.raises(RequestError, match="cannot be enforced: the grammar goes no further"):
                asyncio.run(structures.grammar(SamplingParams(**params), leeway))


@pytest.mark.parametrize(("prompt_end", "text"), NO_THOUGHTS)
def test_what_are_no_thoughts_before_the_form(guide, prompt_end, text):
    assert not may_be(guide(Leeway(thinks=True), prompt_end), text)


def test_tags_that_are_special_tokens_come_as_these_alone(tmp_path):
    write_tokenizer(tmp_path)
    tags = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    tokens = {str(token): {"content": tag, "special": True} for token, tag in enumerate(tags, 260)}
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "added_tokens_decoder": tokens}))
    leeway = Leeway(thinks=True, calls="hermes", tools=TOOLS)
    params, structures = SamplingParams(json_schema=json.dumps(SCHEMA)), Structures(tmp_path, (EOS,))
    grammar, begun = (asyncio.run(structures.grammar(params, leeway, end)) for end in ("", "<think>\n"))
    form, call = list(b'{"a": "x"}'), list(b'{"name": "f", "arguments": {}}')
    for good in (form, [260, *b"Hm", 261, *form], [260, 261, *b"\n", 262, *call, 263]):
        mask = Grammars(tmp_path, (EOS,)).guide_of(grammar).allowed(good)
        assert mask[EOS // 8] >> EOS % 8 & 1
    for bad in (list(b"<th"), list(b"<tool"), [260, *b"Hm", *b"</think>", *b"{"], [262, *call, *b"<"]):
        with pytest.raises(RequestError, match="does not allow"):
            Grammars(tmp_path, (EOS,)).guide_of(grammar).allowed(bad)
    mask = Grammars(tmp_path, (EOS,)).guide_of(begun).allowed([*b"Hm", 261, *form])
    assert mask[EOS // 8] >> EOS % 8 & 1
    with pytest.raises(RequestError, match="does not allow"):
        Grammars(tmp_path, (EOS,)).guide_of(begun).allowed([260])
