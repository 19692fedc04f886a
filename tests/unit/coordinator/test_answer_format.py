"""Which format a chat template asks for, what a model thinks, and calls of tools in an answer's text."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.text.answer_format import OPENINGS, PLAIN, READERS, TAGS, AnswerFormat, answer_format
from coordinator.text.calls.json_calls import ListReader, NamedReader
from coordinator.text.calls.markup import TOKEN
from coordinator.text.calls.pythonic import parse_call
from coordinator.text.calls.reader import MAX_CALLS, MAX_HELD_CHARS, MAX_UNTOLD_CHARS, Kind
from coordinator.text.reasoning import ThoughtCounter
from coordinator.text.tokenizer import read_tokenizer
from tests.tiny_models import write_tokenizer

# What the templates of models have, in their own words.
WORDS = {
    "hermes": [
        'return a json object within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{"name": <function-name>, ',
    ],
    "llama3": [
        "{{- '<|python_tag|>' + tool_call.name }}",
        'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.',
    ],
    "mistral": ['{{- "[TOOL_CALLS] [" }}'],
    "pythonic": ["[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]"],
    "qwen3_xml": ["<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>"],
    "glm45": ["<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>"],
    "glm47": ["<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key>"],
    "kimi_k2": ["{{- '<|tool_calls_section_begin|>' -}}"],
    "kimi_k3": ['<|open|>message role="assistant"<|sep|>'],
    "deepseek_v3": ["'<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['name'] + '\\n' + '```json'"],
    "deepseek_v31": ["'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['name'] + '<｜tool▁sep｜>'"],
    "deepseek_v32": ["<｜DSML｜function_calls>"],
    "deepseek_v4": ["<｜DSML｜tool_calls>"],
    "deepseek_v41": ["<｜DSML｜ calls>"],
    "gemma4": ["{{- '<|tool_call>call:' + function['name'] + '{' -}}"],
    "none": ["", "<|im_start|>{{ message.role }}", "<tool_calls>\\n<tool_call>"],
}


@pytest.mark.parametrize(("form", "template"), [(form, words) for form, all_of in WORDS.items() for words in all_of])
def test_a_template_tells_how_tools_are_called(form, template):
    expected = AnswerFormat("hermes", shows_tools=True) if form == "none" and template else AnswerFormat(form)
    assert answer_format("auto", "auto", template) == expected
    assert not answer_format("none", "auto", template).has_calls
    assert answer_format("hermes", "auto", template).calls == "hermes"


def test_a_template_tells_whether_the_model_thinks():
    template = "{% set content = message.content.split('</think>')[-1] %}"
    assert answer_format("auto", "auto", template) == AnswerFormat("hermes", thinks=True, shows_tools=True)
    assert not answer_format("auto", "none", template).thinks
    assert answer_format("auto", "think", "").thinks


def test_harmony_is_known_by_its_channels_and_thinks_in_one_of_them():
    found = answer_format("auto", "none", "<|start|>assistant<|channel|>final<|message|>")
    assert found == AnswerFormat("openai", thinks=True, reasoning="openai_gptoss")


@pytest.mark.parametrize(("name", "words"), [("mistral", "[/THINK]"), ("gemma4", "<channel|>"), ("think", "</think>")])
def test_the_tags_of_thoughts_are_those_of_the_template(name, words):
    found = answer_format("none", "auto", f"{{{{ x }}}}{words}")
    assert found.thinks
    assert found.reasoning == name
    assert answer_format("none", name, "") == AnswerFormat(thinks=True, reasoning=name)


@pytest.mark.parametrize(
    ("vllms", "ours"), [("qwen3_coder", "qwen3_xml"), ("llama3_json", "llama3"), ("llama4_pythonic", "pythonic")]
)
def test_parsers_have_the_names_of_vllm_too(vllms, ours):
    assert answer_format(vllms, "deepseek_r1", "") == AnswerFormat(ours, thinks=True)


@pytest.mark.parametrize("form", READERS)
def test_special_tokens_that_calls_consist_of_stay_in_the_text(tmp_path, form):
    begun = {"llama3": "<|python_tag|>", "pythonic": "<|python_start|>", "openai": "<|channel|><|message|>"}
    words = [*TOKEN.findall(begun.get(form) or OPENINGS[form]), "<other>"]
    write_tokenizer(tmp_path)
    tokens = {str(token): {"content": word, "special": True} for token, word in enumerate(words, 260)}
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "added_tokens_decoder": tokens}))
    tokenizer = read_tokenizer(tmp_path)
    tokenizer.keep(AnswerFormat(form).tags)
    kept = tokenizer.detokenizer(skip_special_tokens=True)
    assert "".join(kept.add(token) for token in range(260, 260 + len(words))) + kept.flush() == "".join(words[:-1])


def read_thoughts(pieces, prompt_end="<|assistant|>", calls="hermes", tools=None):
    reader = AnswerFormat(calls, thinks=True).reader(prompt_end, tools or {})
    told = {Kind.REASONING: "", Kind.TEXT: "", Kind.CALL: "", Kind.ARGUMENTS: ""}
    for piece in [each for text in pieces for each in reader.feed(text)] + reader.finish():
        told[piece.kind] += piece.text
    return tuple(told.values())


ANSWERS = [
    ("<think>\nHm.\n</think>\n\nYes. \n", "", ("Hm.", "Yes. \n", "", "")),
    ("\n<think></think>Yes", "", ("", "Yes", "", "")),
    ("Hm.\n</think>\n\nYes", "<|assistant|><think>\n", ("Hm.", "Yes", "", "")),
    ("Hm.\n" + " " * 100 + "</think>Yes", "<think>", ("Hm.\n" + " " * 36, "Yes", "", "")),
    ("<think>Hm. \n", "", ("Hm. \n", "", "", "")),
    ("Yes", "<|assistant|><think>\n\n</think>\n\n", ("", "Yes", "", "")),
    ("Yes <think>no</think>", "", ("", "Yes <think>no</think>", "", "")),
    ("<think>Hm. </thin", "", ("Hm. </thin", "", "", "")),
    ("<thi", "", ("", "<thi", "", "")),
    (" \n", "", ("", " \n", "", "")),
    (" " * 100 + "<think>x", "", ("", " " * 100 + "<think>x", "", "")),
    ('<think>{"name": "f"}<tool_call></think>\n<tool_call>{"name": "f"}</tool_call>', "",
     ('{"name": "f"}<tool_call>', "", "f", "{}")),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "prompt_end", "expected"), ANSWERS)
def test_thoughts_and_the_answer_behind_them(answer, prompt_end, expected):
    assert (
        read_thoughts([answer], prompt_end, tools={"f": {}})
        == read_thoughts(answer, prompt_end, tools={"f": {}})
        == expected
    )


@given(data=st.data())
def test_however_an_answer_is_cut_its_thoughts_are_the_same(data):
    words = st.sampled_from(["<think>", "</think>", "<", "</", "think>", "\n", " ", "a", "😀"])
    answer = data.draw(st.lists(words, max_size=10).map("".join))
    cut = data.draw(st.integers(0, len(answer)))
    prompt_end = data.draw(st.sampled_from(["", "<think>\n"]))
    assert (
        read_thoughts([answer[:cut], answer[cut:]], prompt_end)
        == read_thoughts(answer, prompt_end)
        == read_thoughts([answer], prompt_end)
    )


@pytest.mark.parametrize(
    ("answer", "has_begun", "num_tokens"),
    [
        ("<think>Hm. ½</think>\n\nYes </think>", False, len(b"<think>Hm. \xc2\xbd</think>")),
        ("Hm.</think>Yes", True, len("Hm.</think>")),
        ("\n<think>Hm.", False, len("\n<think>Hm.")),
        ("Yes <think>no</think>", False, 0),
        ("<thi", False, 0),
        ("", True, 0),
    ],
)
def test_the_tokens_of_thoughts_are_counted_with_their_tags(answer, has_begun, num_tokens):
    counter = ThoughtCounter(lambda token_id: bytes([token_id]), has_begun=has_begun)
    for token_id in answer.encode():  # each byte is a token
        counter.add([token_id])
    assert counter.num_tokens == num_tokens


def test_a_model_that_does_not_think_has_its_tags_in_the_text():
    reader = PLAIN.reader("<think>", {})
    assert [piece.text for piece in reader.feed("<think>a</think>")] == ["<think>a</think>"]


# ---- calls of tools ----

ALL_READERS = {**READERS, "list": ListReader, "named": NamedReader}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = {"f": {}, "weather": CITY, "a.b": {}}
PARIS = {"city": "Paris"}


def read_calls(form, *pieces):
    """The text, and the calls with their arguments as they are written."""
    reader, text, calls = ALL_READERS[form](TOOLS if form != "named" else {"f": {}}, is_forced=form == "named"), "", []
    for told in [*map(reader.feed, pieces), reader.finish()]:
        for piece in told:
            match piece.kind:
                case Kind.TEXT:
                    text += piece.text
                case Kind.CALL:
                    calls.append([piece.text, ""])
                case Kind.ARGUMENTS:
                    calls[-1][1] += piece.text
    return text, calls


HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
LLAMA3 = '{"name": "weather", "parameters": {"city": "Paris"}}'

TEXTS = [
    # ---- hermes
    ("hermes", HERMES, "", [("weather", PARIS)]),
    ("hermes", f"Let me see.\n\n{HERMES}\n{HERMES}\n", "Let me see.", [("weather", PARIS)] * 2),
    ("hermes", f"{HERMES}\nDone. ", "\nDone.", [("weather", PARIS)]),
    ("hermes", '<tool_call>{"arguments": {"city": "Paris"}, "name": "weather"}</tool_call>', "", [("weather", PARIS)]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>', "", [("f", PARIS)]),
    ("hermes", '<tool_call>{"id": [1, {"x": "}"}], "name": "f"}</tool_call>', "", [("f", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\"}</tool_call>{"}}</tool_call>', "",
     [("f", {"a": '"}</tool_call>{'})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": {"b": [{}]}}</tool_call> and', " and",
     [("f", {"a": {"b": [{}]}})]),  # the last bracket was forgotten
    ("hermes", '<tool_call>{"name": "f"}<tool_call>{"name": "f"}', "", [("f", {})] * 2),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}} And so on.', " And so on.", [("f", {})]),
    ("hermes", '<tool_call>{"name": "f"} < b\n' + HERMES, " < b", [("f", {}), ("weather", PARIS)]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {} {"name": "f"}\n{"name": "a.b"}</tool_call> So.', " So.",
     [("f", {}), ("f", {}), ("a.b", {})]),
    ("hermes", '<tool_call>{"name": "f"}\n{"x": 1} y\n</tool_call> z', '\n{"x": 1} y z', [("f", {})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}}]</tool_call>', "", [("f", {})]),
    # ---- llama3
    ("llama3", LLAMA3, "", [("weather", PARIS)]),
    ("llama3", f"<|python_tag|>{LLAMA3}; {LLAMA3}\n", "", [("weather", PARIS)] * 2),
    ("llama3", '\n{"type": "function", "name": "f", "parameters": {}}', "", [("f", {})]),
    ("llama3", f"{LLAMA3} Done.", " Done.", [("weather", PARIS)]),
    ("llama3", '{"name": "f", "parameters": {} Done.', "Done.", [("f", {})]),
    ("llama3", '{"name": "f" Done.', "Done.", [("f", {})]),
    # ---- mistral
    ("mistral", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "f", "arguments": {}}]',
     "", [("weather", PARIS), ("f", {})]),
    ("mistral", 'So: [TOOL_CALLS]weather{"city": "Paris"}[TOOL_CALLS]f[ARGS]{}', "So:",
     [("weather", PARIS), ("f", {})]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}', "", [("f", {"a": 1})]),
    ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {"a": 1}}', "", [("f", {"a": 1})]),
    ("mistral", '[TOOL_CALLS] {"name": "f"}{"name": "a.b"} Done.', " Done.", [("f", {}), ("a.b", {})]),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {} Done.', "Done.", [("f", {})]),
    ("mistral", '[TOOL_CALLS] [{"name": "f"}] {"x": 1}[TOOL_CALLS]f{}', ' {"x": 1}', [("f", {}), ("f", {})]),
    # ---- pythonic
    ("pythonic", "[weather(city='Paris')]", "", [("weather", PARIS)]),
    ("pythonic", ' [weather(city="Paris"), f(a=-1.5, b=[1, (2,)], c={"k": None}, d=true, e=")]")]\n', "",
     [("weather", PARIS), ("f", {"a": -1.5, "b": [1, [2]], "c": {"k": None}, "d": True, "e": ")]"})]),
    ("pythonic", "<|python_tag|>[a.b()] Done.", " Done.", [("a.b", {})]),
    # ---- tags of families
    ("openai", '<|channel|>analysis<|message|><|end|><|start|>assistant<|channel|>final<|message|>So <|end|> it is.',
     "So <|end|> it is.", []),
    ("openai", ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>'
     '<|start|>assistant<|channel|>commentary<|message|>And <|end|>', "And ", [("weather", PARIS)]),
    ("openai", "Hello, <|channel|>", "Hello, <|channel|>", []),
    ("deepseek_v3", 'So: <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n'
     '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```'
     '<｜tool▁call▁end｜><｜tool▁calls▁end｜>', "So: ", [("weather", PARIS), ("f", {})]),
    ("deepseek_v31", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": "<｜tool▁call▁end｜>"}'
     '<｜tool▁call▁end｜><｜tool▁calls▁end｜> So.', " So.", [("f", {"a": "<｜tool▁call▁end｜>"})]),
    *(
        (form, f'\n\n<｜DSML｜{gap}{calls}>\n<｜DSML｜{gap}invoke name="weather">\n<｜DSML｜{gap}parameter name="city" '
         f'string="true">Paris</｜DSML｜{gap}parameter>\n</｜DSML｜{gap}invoke>\n<｜DSML｜{gap}invoke name="f">\n'
         f'<｜DSML｜{gap}parameter name="a" string="false">[1, "x"]</｜DSML｜{gap}parameter>\n</｜DSML｜{gap}invoke>\n'
         f'</｜DSML｜{gap}{calls}>', "", [("weather", PARIS), ("f", {"a": [1, "x"]})])
        for form, calls, gap in [("deepseek_v32", "function_calls", ""), ("deepseek_v4", "tool_calls", ""),
                                 ("deepseek_v41", "calls", " ")]
    ),
    ("gemma4", '<|tool_call>call:f{a b:{c:[1,<|"|>}"<|"|>,[]],d:{}},e:no word,f:true}<tool_call|> So.', " So.",
     [("f", {"a b": {"c": [1, '}"', []], "d": {}}, "e": "no word", "f": True})]),
    ("gemma4", '<|tool_call>call:f{,a:1,,b:[,2,],}<tool_call|>', "", [("f", {"a": 1, "b": [2]})]),
    *(
        (form, f"<tool_call>weather{gap}<arg_key>city</arg_key>{gap}<arg_value>Paris</arg_value>{gap}</tool_call>"
         f"{gap}<tool_call>f{gap}</tool_call>", "", [("weather", PARIS), ("f", {})])
        for form, gap in [("glm45", "\n"), ("glm47", "")]
    ),
    ("glm47", "The tag <tool_call> begins it", "The tag <tool_call> begins it", []),
    ("glm47", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value> and <arg_key>b</arg_key>"
     "<arg_value>{'x': None}</arg_value></tool_call>", "",
     [("f", {"a": "1</arg_value> and <arg_key>b</arg_key><arg_value>{'x': None}"})]),
    ("kimi_k2", '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": {}}'
     '<|tool_call_end|><|tool_calls_section_end|>', "", [("f", {"a": {}})]),
    ("kimi_k3", 'Hi.<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument '
     'key="a&lt;" type="number"<|sep|>1<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
     '<|close|>message<|sep|>', "Hi.", [("f", {"a<": 1})]),
    ("qwen3_xml", "So.\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
     "</tool_call>\n<tool_call>\n<function=f>\n<parameter=a>\n[1]\n</parameter>\n<parameter=b>\n</parameter> x\n"
     "</parameter>\n</function>\n</tool_call>", "So.", [("weather", PARIS), ("f", {"a": [1], "b": "</parameter> x"})]),
    ("qwen3_xml", "The tag <tool_call> begins", "The tag <tool_call> begins", []),
    # ---- answers that are held to calls
    ("list", '[{"name": "weather", "parameters": {"city": "Paris"}}, {"name": "f", "parameters": {}}]', "",
     [("weather", PARIS), ("f", {})]),
    ("named", ' {"city": "Paris"}', "", [("f", PARIS)]),
]  # fmt: skip


@pytest.mark.parametrize("form", ALL_READERS)
def test_calls_and_the_text_around_them(form):
    for _, text, expected, calls in (each for each in TEXTS if each[0] == form):
        told, found = read_calls(form, text)
        assert (told, [(name, json.loads(arguments)) for name, arguments in found]) == (expected, calls)
        assert read_calls(form, *text) == (told, found)


NO_CALLS = [
    "",
    " \n",
    "Hello, wörld! 😀 \n",
    "a < b <tool_cal",
    '<tool_call>\n{"nom": "f"}</tool_call>',
    "<tool_call>weather</tool_call> ",
    '{"name": "Mary", "parameters": {"age": 3}}',
    '{"answer": 42}',
    "[1] says: [weather] and [2]",
    "[weather('Paris')]",
    "[weather(city=paris)]",
    "[unheard_of(a=1)]",
    "[TOOL_CALLS] [] ",
    "[TOOL_CALLS]I do not know{ ",
    "<|python_tag|>print(1)",
]


@pytest.mark.parametrize("form", READERS)
def test_what_is_no_call_is_text_to_the_letter(form):
    calls_of_glm = "<tool_call>weather</tool_call> "
    for text in NO_CALLS if not form.startswith("glm") else [each for each in NO_CALLS if each != calls_of_glm]:
        assert read_calls(form, *text) == read_calls(form, text) == (text, [])


FRAGMENTS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", '{"name": "f", "arguments": ', '{"name":"f"}',
     '{"a": "}]\\"{"}', "{}", "}", "{", "[", "]", "(", ")", '"', "'", "\\", ",", ";", ":", " ", "\n", "f", "f(a=1)",
     "weather", "city=", "x", "😀", "null", '"parameters": ', "[ARGS]",
     "<function=f>", "<parameter=a>", "</parameter>", "</function>", "<arg_key>", "</arg_key>", "<arg_value>",
     "</arg_value>", '<|"|>', "<|tool_call>call:f{", "<tool_call|>", "a:", "<|channel|>", "<|message|>", "<|end|>",
     "<|start|>", "<|open|>", "<|close|>", "<|sep|>", "response", "<｜DSML｜", "</｜DSML｜", "invoke", "parameter",
     ' name="f"', ">",
     "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "```"]
)  # fmt: skip


@pytest.mark.parametrize("form", ALL_READERS)
@given(data=st.data())
def test_however_a_text_is_cut_the_calls_are_the_same(form, data):
    sample = st.sampled_from([text for each, text, *_ in TEXTS if each == form])
    text = data.draw(sample | st.lists(sample | FRAGMENTS, max_size=12).map("".join))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read_calls(form, *pieces) == read_calls(form, *text) == read_calls(form, text)


BEGUN = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "', '{"a": "'),
    ("llama3", '{"name": "f", "parameters": {"a": "', '{"a": "'),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": "', '{"a": "'),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": "', '{"a": "'),
    ("kimi_k2", '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": "',
     '{"a": "'),
    ("openai", ' to=functions.f<|channel|>commentary json<|message|>{"a": "', '{"a": "'),
    ("gemma4", '<|tool_call>call:f{a:<|"|>', '{"a": "'),
    ("qwen3_xml", "<tool_call>\n<function=weather>\n<parameter=city>\n", '{"city": "'),
    ("glm47", "<tool_call>weather<arg_key>city</arg_key><arg_value>", '{"city": "'),
]  # fmt: skip


@pytest.mark.parametrize(("form", "begin", "arguments"), BEGUN)
def test_a_call_that_is_cut_short_is_none_and_long_arguments_come_as_they_are_written(form, begin, arguments):
    for end in range(len(begin) - len('{"name": "f"}'), len(begin)):
        text, calls = read_calls(form, begin[:end])
        assert calls == []
        assert text in ("", begin[:end])
    for text in "Par", "x" * MAX_UNTOLD_CHARS:
        reader = READERS[form](TOOLS)
        told = [(piece.kind, piece.text) for piece in reader.feed(begin + text)]
        if len(text) < MAX_UNTOLD_CHARS:
            assert told == reader.finish() == []
        else:
            assert told == [(Kind.CALL, told[0][1]), (Kind.ARGUMENTS, arguments + text)]
            assert [(piece.kind, piece.text) for piece in reader.feed("yz")] == [(Kind.ARGUMENTS, "yz")]
            assert reader.finish() == []


@pytest.mark.parametrize(("form", "begin", "arguments"), BEGUN)
def test_a_call_that_has_to_come_is_told_from_its_beginning(form, begin, arguments):
    told = READERS[form](TOOLS, is_forced=True).feed(begin + "Par")
    assert [piece.kind for piece in told] == [Kind.CALL, Kind.ARGUMENTS]
    assert told[1].text == arguments + "Par"


def test_a_tag_with_nothing_behind_it_is_no_text():
    for form, tag in TAGS.items():
        assert read_calls(form, f"Hm.{tag}") == ("Hm.", [])
    assert read_calls("hermes", "<tool_call>{") == ("", [])


def test_calls_beyond_the_limit_are_text():
    text, calls = read_calls("hermes", HERMES * (MAX_CALLS + 1))
    assert (len(calls), text) == (MAX_CALLS, HERMES)


@pytest.mark.parametrize(
    ("form", "begin"),
    [
        ("hermes", '<tool_call>{"name": "'),
        ("llama3", '{"x": ['),
        ("mistral", '[TOOL_CALLS] [{"name": "'),
        ("pythonic", "[f(a='"),
    ],
)
def test_what_is_held_has_a_limit_and_then_is_text(form, begin):
    reader, text = READERS[form](TOOLS), begin + "x" * MAX_HELD_CHARS
    told = "".join(piece.text for piece in reader.feed(text))
    assert text.startswith(told)
    assert told
    assert told + "".join(piece.text for piece in [*reader.feed("'}"), *reader.finish()]) == text + "'}"


NO_LITERALS = ["**{}", "a=f()", "a=x", "a=1+1", "a=b'x'", "a={1, 2}", "a=...", "a=1j", "a=1e999", "a='\\ud800'", "a=[",
     "a={[]: 1}", "a={**x}", "a=f'{x}'", "a=" + "-" * 30_000 + "1", "a=" + "(" * 30_000, "a=" + "+".join("1" * 30_000),
     "a=" + "[" * 100 + "]" * 99, "a=" + "9" * 5000, "a=\x00"]  # fmt: skip


def test_python_that_is_more_than_literals_is_no_call():
    for arguments in NO_LITERALS:
        assert parse_call(f"f({arguments})") is None


def test_escapes_that_python_does_not_know_stand_for_themselves():
    assert parse_call(r"f(path='C:\dir')") == ("f", '{"path": "C:\\\\dir"}')
