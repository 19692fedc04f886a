"""What an answer that is held to a form may have besides, by the byte-level tokenizer of the tests: whatever the
grammar lets come is read as a call of a tool that there is, or is of the form."""

import asyncio
import itertools
import json
import random
import re

import jsonschema
import pytest

from coordinator.api.http.tools import calls_schema
from coordinator.text.answer_format import READERS, AnswerFormat
from coordinator.text.calls.markup import TOKEN
from coordinator.text.calls.reader import MAX_CALLS, Kind
from coordinator.text.calls.rules import keeps_schemas
from coordinator.text.constraints import Leeway
from coordinator.text.reasoning import THINK
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
    "openai": ['<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'],
    "deepseek_v3": [
        "<｜tool▁calls▁begin｜>"
        + "\n".join(
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{{}}\n```<｜tool▁call▁end｜>"
            for name in NAMES
        )
        + "<｜tool▁calls▁end｜>"
    ],
    "deepseek_v31": [
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ],
    "deepseek_v32": [
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">x\n'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="b" string="false">[1]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="g-2">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
    ],
    "deepseek_v41": [
        '<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n</｜DSML｜ invoke>\n</｜DSML｜ calls>',
    ],
    "glm45": [
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x y</arg_value>\n</tool_call>\n<tool_call>g-2\n</tool_call>",
    ],
    "glm47": ["<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call><tool_call>f</tool_call>"],
    "kimi_k2": [
        "<|tool_calls_section_begin|>"
        '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
        "<|tool_call_begin|>functions.g-2:12<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
    ],
    "kimi_k3": [
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="string"<|sep|>x'
        '<|close|>argument<|sep|><|open|>argument key="b" type="number"<|sep|>2<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>",
        '<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|>",
    ],
    "gemma4": ['<|tool_call>call:f{a:<|"|>x}<|"|>,b:[1,{c:null}]}<tool_call|><|tool_call>call:g-2{}<tool_call|>'],
    "qwen3_xml": [
        "<tool_call>\n<function=f>\n<parameter=a>\nx\ny\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=g-2>\n</function>\n</tool_call>"
    ],
}
NO_CALLS = {
    "hermes": ["<tool_call>", '<tool_call>{"name": "h", "arguments": {}}</tool_call>', "<tool_call>{}</tool_call>"],
    "llama3": ['{"name": "h", "parameters": {}}', '{"name": "f", "arguments": {}}', "<|python_tag|>"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS] []", "[TOOL_CALLS]h{}", "[TOOL_CALLS]f[]"],
    "pythonic": ["[]", "[h()]", "[f(1)]", "[f(if=1)]", r'[f(a="\x")]', "[f(a=01)]"],
    "openai": ["<|channel|>commentary to=functions.h <|constrain|>json<|message|>{}", "<|channel|>"],
    "deepseek_v3": ["<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"],
    "deepseek_v31": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>h<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ],
    "deepseek_v32": ["<｜DSML｜function_calls>\n</｜DSML｜function_calls>"],
    "deepseek_v41": ['<｜DSML｜ calls>\n<｜DSML｜ invoke name="h">\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'],
    "glm45": ["<tool_call>f</tool_call>", "<tool_call>h\n</tool_call>"],
    "glm47": ["<tool_call>h</tool_call>", "<tool_call>f<arg_key>a</arg_key></tool_call>"],
    "kimi_k2": ["<|tool_calls_section_begin|><|tool_calls_section_end|>"],
    "kimi_k3": ["<|open|>tools<|sep|><|close|>tools<|sep|>"],
    "gemma4": ["<|tool_call>call:h{}<tool_call|>", "<|tool_call>call:f{a}<tool_call|>"],
    "qwen3_xml": ["<tool_call>\n</tool_call>", "<function=f>\n</function>"],
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


# ---- answers that have to be calls, in the format of a family ----

ORDER = {
    "type": "object",
    "properties": {
        "note": {"type": "string"},
        "size": {"enum": ["small", "large"]},
        "count": {"$ref": "#/$defs/count"},
        "tags": {"type": ["array", "null"], "items": {"type": "string"}},
        "place": {"type": "object", "properties": {"at": {"type": "boolean"}, "in": {"type": "string"}}},
    },
    "required": ["size", "count"],
    "additionalProperties": False,
    "$defs": {"count": {"enum": [1, 2, 3, 9]}},
}
ORDERED = {"note": 'a "b"\n<c>', "size": "small", "count": 3, "tags": ["x"], "place": {"at": True, "in": "b"}}
WRONG = [{"size": "huge", "count": 3}, {"size": "small", "count": 30}, {"size": "small"}]
OWN = [name for name in READERS if keeps_schemas(name, ["f"], [json.dumps(ORDER)])]


IN_JSON = {
    "hermes": '<tool_call>{{"name": "{name}", "arguments": {told}}}</tool_call>',
    "llama3": '{{"name": "{name}", "parameters": {told}}}',
    "mistral": "[TOOL_CALLS]{name}[ARGS]{told}",
    "openai": "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{told}",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{told}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{told}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{told}"
    "<|tool_call_end|><|tool_calls_section_end|>",
}
DSML = (
    '<｜DSML｜{0}>\n<｜DSML｜{1}invoke name="{{name}}">\n{{told}}</｜DSML｜{1}invoke>\n</｜DSML｜{0}>',
    '<｜DSML｜{1}parameter name="{{key}}" string="{{is_text}}">{{value}}</｜DSML｜{1}parameter>\n',
)
IN_PARAMETERS = {  # a call, and a parameter
    "kimi_k3": (
        '<|open|>tools<|sep|><|open|>call tool="{name}" index="1"<|sep|>{told}<|close|>call<|sep|>'
        "<|close|>tools<|sep|>",
        '<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>',
    ),
    "glm45": (
        "<tool_call>{name}\n{told}</tool_call>",
        "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
    ),
    "glm47": ("<tool_call>{name}{told}</tool_call>", "<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"),
    "qwen3_xml": (
        "<tool_call>\n<function={name}>\n{told}</function>\n</tool_call>",
        "<parameter={key}>\n{value}\n</parameter>\n",
    ),
    "deepseek_v32": [each.format("function_calls", "") for each in DSML],
    "deepseek_v4": [each.format("tool_calls", "") for each in DSML],
    "deepseek_v41": [each.format(" calls", " ") for each in DSML],
}
KINDS = {str: "string", int: "number", list: "array", dict: "object"}


def gemmas(value):
    """A value as Gemma writes it."""
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            return "{" + ",".join(f"{key}:{gemmas(each)}" for key, each in value.items()) + "}"
        case list():
            return "[" + ",".join(map(gemmas, value)) + "]"
    return json.dumps(value)


def written(calls, name, arguments):
    """A call as a model of this format writes it."""
    if calls == "pythonic":
        return f"[{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"
    if calls == "gemma4":
        return f"<|tool_call>call:{name}{gemmas(arguments)}<tool_call|>"
    if calls in IN_JSON:
        return IN_JSON[calls].format(name=name, told=json.dumps(arguments))
    call, parameter = IN_PARAMETERS[calls]
    told = [
        parameter.format(
            key=key,
            value=value if isinstance(value, str) else json.dumps(value),
            kind=KINDS[type(value)],
            is_text=str(isinstance(value, str)).lower(),
        )
        for key, value in arguments.items()
    ]
    return call.format(name=name, told="".join(told))


def forced(guide, calls, schema, *, is_strict=True, thinks=False, prompt_end="", most_calls=MAX_CALLS):
    """What lets come the calls of a tool that have to come."""
    whole = json.dumps(calls_schema({"f": schema, "get.weather": {"type": "object"}}, is_parallel=most_calls > 1))
    loose = ("1",) if is_strict else ("0", "1")
    tools = (("f", ""), ("get.weather", ""))
    leeway = Leeway(thinks, THINK, calls, tools, most_calls, loose, must_call=True)
    return guide(leeway, prompt_end, json_schema=whole)


def read_forced(text, calls, schema, *, thinks=False, prompt_end=""):
    reader = AnswerFormat(calls, thinks=thinks).reader(prompt_end, {"f": schema, "get.weather": {}}, READERS[calls])
    pieces = [piece for char in text for piece in reader.feed(char)] + reader.finish()
    called = [piece.text for piece in pieces if piece.kind is Kind.CALL]
    told = "".join(piece.text for piece in pieces if piece.kind is Kind.ARGUMENTS)
    others = "".join(piece.text for piece in pieces if piece.kind is Kind.TEXT)
    return called, told, others


@pytest.mark.parametrize("calls", OWN)
def test_a_call_that_has_to_come_is_in_the_models_own_format_and_keeps_to_its_schema(guide, calls):
    held = forced(guide, calls, ORDER)
    for arguments in ORDERED, {"size": "large", "count": 9}:
        text = written(calls, "f", arguments)
        assert may_be(held.another(), text), text
        called, told, others = read_forced(text, calls, ORDER)
        assert (called, json.loads(told), others) == (["f"], arguments, "")
    for arguments in WRONG:
        assert not may_be(held.another(), written(calls, "f", arguments)), arguments
    for text in "", "Hello", written(calls, "h", {}), written(calls, "f", {}):
        assert not may_be(held.another(), text), text
    assert may_be(held.another(), written(calls, "get.weather", {"any": 1}))


@pytest.mark.parametrize("calls", [name for name in OWN if name != "openai"])
def test_thoughts_come_before_a_call_that_has_to_come(guide, calls):
    text = written(calls, "f", ORDERED)
    for prompt_end, thoughts in ("", "<think>Hm.</think>\n"), ("<think>", "Hm.</think>"), ("", ""), ("</think>", ""):
        held = forced(guide, calls, ORDER, thinks=True, prompt_end=prompt_end)
        assert may_be(held.another(), thoughts + text), thoughts
        assert not may_be(held.another(), thoughts + "Hello")
        called, told, _ = read_forced(thoughts + text, calls, ORDER, thinks=True, prompt_end=prompt_end)
        assert (called, json.loads(told)) == (["f"], ORDERED)


def test_thoughts_in_a_channel_come_before_a_call(guide):
    tools = (("f", ""), ("get.weather", ""))
    whole = json.dumps(calls_schema({"f": ORDER, "get.weather": {"type": "object"}}, is_parallel=True))
    leeway = Leeway(True, "openai_gptoss", "openai", tools, loose=("1",), must_call=True)
    thoughts = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    text = written("openai", "f", ORDERED)
    for answer in text, thoughts + text:
        assert may_be(guide(leeway, json_schema=whole), answer)
    assert not may_be(guide(leeway, json_schema=whole), thoughts)
    form = Leeway(True, "openai_gptoss", "openai")
    for answer in (
        '{"a": "x"}',
        '<|channel|>final<|message|>{"a": "x"}',
        thoughts + '<|channel|>final<|message|>{"a": "x"}',
    ):
        assert may_be(guide(form), answer), answer


@pytest.mark.parametrize("calls", OWN)
def test_several_calls_or_one(guide, calls):
    texts = {"llama3": "; ", "mistral": "", "hermes": "\n", "qwen3_xml": "\n", "glm45": "\n", "glm47": "", "gemma4": ""}
    if calls not in texts:
        return  # which have a section around them: test_no_more_calls_than_may_be
    text = texts[calls].join([written(calls, "f", ORDERED)] * 2)
    assert may_be(forced(guide, calls, ORDER), text)
    assert not may_be(forced(guide, calls, ORDER, most_calls=1), text)


@pytest.mark.parametrize("calls", ["qwen3_xml", "glm47", "kimi_k3", "deepseek_v32"])
def test_what_parameters_do_not_keep_to(guide, calls):
    """A strict tool is not called so, of another it is left out."""
    for beyond in (
        {"properties": {"size": {"type": "string", "pattern": "^a+$"}}},
        {"properties": {"size": {"type": "string"}}, "minProperties": 1},
        {"properties": {"size": {"type": "string"}}, "additionalProperties": {"type": "integer"}},
        {"properties": {"<size>": {"type": "string"}}},
    ):
        schema = {"type": "object", **beyond}
        assert not keeps_schemas(calls, ["f"], [json.dumps(schema)])
        with pytest.raises(RequestError, match="cannot be enforced: "):
            forced(guide, calls, schema)
        assert may_be(forced(guide, calls, schema, is_strict=False), written(calls, "f", {"size": "b"}))
    for calls_in_json in "hermes", "kimi_k2":
        assert keeps_schemas(calls_in_json, ["f"], [json.dumps(schema)])
    for broken in {"properties": []}, {"properties": {}, "required": ["size"]}, {"properties": {}, "required": "size"}:
        assert not keeps_schemas(calls, ["f"], [json.dumps(broken)])
    assert not keeps_schemas("none", ["f"], [])


@pytest.mark.parametrize("calls", ["pythonic", "gemma4"])
def test_what_literals_do_not_keep_to(guide, calls):
    for beyond in (
        {"properties": {"size": {"type": "string", "pattern": "^a+$"}}},
        {"properties": {"size": {"type": "integer", "minimum": 1}}},
        {"properties": {"a": {"properties": {"b": {"oneOf": [{}]}}}}},
        {"properties": {"a:": {}}},
        {"properties": {}, "required": ["size"]},
    ):
        assert not keeps_schemas(calls, ["f"], [json.dumps(beyond)]), beyond
    assert keeps_schemas(calls, ["f"], [json.dumps(ORDER)])
    assert keeps_schemas(calls, ["a-b"], []) == (calls == "gemma4")


@pytest.mark.parametrize("calls", OWN)
def test_whatever_comes_of_a_call_that_has_to_come_meets_its_schema(guide, calls):
    rng, num_read = random.Random(11), 0
    held = forced(guide, calls, ORDER)
    for _ in range(effort(15, 40, 80)):
        drawn = walk(held.another(), rng, closing='"}])><', share=0.7, most_tokens=600)
        if drawn is None:
            continue
        text = drawn.decode(errors="replace")
        called, told, others = read_forced(text, calls, ORDER)
        assert others.strip() == "", text
        if called == ["f"]:
            jsonschema.validate(json.loads(told), ORDER)
        num_read += len(called)
    assert num_read > 0, "nothing was tried"


@pytest.mark.parametrize("calls", OWN)
def test_tags_of_a_family_that_are_special_tokens(tmp_path, calls):
    """Calls have them as these alone."""
    write_tokenizer(tmp_path)
    found = TOKEN.findall(written(calls, "f", {"size": "small"}))
    tags = [tag for tag in dict.fromkeys(found) if "｜" in tag or tag.startswith(("<|", "<tool", "</tool", "["))]
    tokens = {str(token): {"content": tag, "special": True} for token, tag in enumerate(tags, 260)}
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "added_tokens_decoder": tokens}))
    structures, grammars = Structures(tmp_path, (EOS,)), Grammars(tmp_path, (EOS,))

    def make(leeway, prompt_end, **params):
        return grammars.guide_of(asyncio.run(structures.grammar(SamplingParams(**params), leeway, prompt_end)))

    def encoded(text):
        parts = re.split("(" + "|".join(map(re.escape, tags)) + ")", text) if tags else [text]
        return [token for part in parts for token in ([260 + tags.index(part)] if part in tags else part.encode())]

    held = forced(make, calls, ORDER)
    text = written(calls, "f", ORDERED)
    mask = held.another().allowed(encoded(text))
    assert mask[EOS // 8] >> EOS % 8 & 1
    if tags:
        with pytest.raises(RequestError, match="does not allow"):
            held.another().allowed(list(text.encode()))
