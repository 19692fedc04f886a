"""Which format a chat template asks for, and what a model thinks, apart from its answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.text.answer_format import PLAIN, AnswerFormat, answer_format
from coordinator.text.calls.reader import Kind
from coordinator.text.reasoning import ThoughtCounter

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
    "none": [
        "",
        "<|im_start|>{{ message.role }}",
        "<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>",
        "<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>",
        "<tool_calls>\\n<tool_call>",
    ],
}


@pytest.mark.parametrize(("form", "template"), [(form, words) for form, all_of in WORDS.items() for words in all_of])
def test_a_template_tells_how_tools_are_called(form, template):
    assert answer_format("auto", "auto", template) == AnswerFormat(form, thinks=False)
    assert answer_format("none", "auto", template) == PLAIN
    assert answer_format("hermes", "auto", template).calls == "hermes"


def test_a_template_tells_whether_the_model_thinks():
    template = "{% set content = message.content.split('</think>')[-1] %}"
    assert answer_format("auto", "auto", template) == AnswerFormat("none", thinks=True)
    assert not answer_format("auto", "none", template).thinks
    assert answer_format("auto", "think", "").thinks


def read(pieces, prompt_end="<|assistant|>", calls="hermes", names=()):
    reader = AnswerFormat(calls, thinks=True).reader(prompt_end, names)
    told = {Kind.REASONING: "", Kind.TEXT: "", Kind.CALL: "", Kind.ARGUMENTS: ""}
    for piece in [each for text in pieces for each in reader.feed(text)] + reader.finish():
        told[piece.kind] += piece.text
    return tuple(told.values())


ANSWERS = [
    ("<think>\nHm.\n</think>\n\nYes. \n", "", ("Hm.\n", "Yes. \n", "", "")),
    ("\n<think></think>Yes", "", ("", "Yes", "", "")),
    ("Hm.\n</think>\n\nYes", "<|assistant|><think>\n", ("Hm.\n", "Yes", "", "")),
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
    assert read([answer], prompt_end, names={"f"}) == read(answer, prompt_end, names={"f"}) == expected


@given(data=st.data())
def test_however_an_answer_is_cut_its_thoughts_are_the_same(data):
    words = st.sampled_from(["<think>", "</think>", "<", "</", "think>", "\n", " ", "a", "😀"])
    answer = data.draw(st.lists(words, max_size=10).map("".join))
    cut = data.draw(st.integers(0, len(answer)))
    prompt_end = data.draw(st.sampled_from(["", "<think>\n"]))
    assert read([answer[:cut], answer[cut:]], prompt_end) == read(answer, prompt_end) == read([answer], prompt_end)


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
    reader = PLAIN.reader("<think>", ())
    assert [piece.text for piece in reader.feed("<think>a</think>")] == ["<think>a</think>"]
