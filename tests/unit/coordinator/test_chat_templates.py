"""Chat templates against transformers, rendered in this process."""

import asyncio
import json

import pytest

from coordinator.text.chat_template import RenderOptions
from coordinator.text.tokenizer import (
    read_tokenizer,
)
from serving_core.errors import ModelError, RequestError
from tests.tiny_models import EOS
from tests.unit.coordinator.later import transformers
from tests.unit.coordinator.tokenizer_kit import ENOUGH, edit_config

pytestmark = pytest.mark.usefixtures("programs_here")

MESSAGES = [
    {"role": "system", "content": 'You are <kind> & "quoted".\n'},
    {"role": "user", "content": "  Héllo 😀 <|eos|> {{ not a template }}"},
    {"role": "assistant", "content": ""},
    {"role": "user", "content": "again"},
]
TEMPLATES = {
    "chatml": """{% for message in messages %}
    {%- if loop.first and message.role != 'system' %}{{ '<|im_start|>system\\nhi<|im_end|>\\n' }}{% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' }}
{% endfor %}
{% if add_generation_prompt %}
    {{ '<|im_start|>assistant\\n' }}
{% endif %}""",
    "tools and loop controls": """{{ bos_token }}{% if tools is not none %}T{% endif %}{% if documents %}D{% endif -%}
{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}
{{ m | tojson }}{{ eos_token }}{% endfor %}""",
    "generation": """{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% generation %}
{{ m.content }}{% endgeneration %}{{ ns.n }}{% endfor %}{{ strftime_now('%Y') }}""",
}


@pytest.mark.parametrize("template", [None, *TEMPLATES])
@pytest.mark.parametrize("in_own_file", [True, False])
def test_chats_encode_as_in_transformers(folder, template, in_own_file):
    if template is not None and in_own_file:
        (folder / "chat_template.jinja").write_text(TEMPLATES[template])
    elif template is not None:
        edit_config(folder, chat_template=TEMPLATES[template])
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    expected = reference.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert asyncio.run(read_tokenizer(folder).encode_chat(MESSAGES, ENOUGH)) == expected


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"ü": {}}}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"ü": [1, "x"]}}}
CALLING = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "b", "tool_call_id": "c1"},
]
WITH_TOOLS = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}
{{- m.tool_call_id }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"""


def as_sent(messages):
    """As the API servers hand them on."""
    known = ("role", "content")
    return [
        {name: message[name] for name in known}
        | {"extra_json": json.dumps({name: value for name, value in message.items() if name not in known})}
        for message in messages
    ]


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [TOOLS, None])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False, "documents": [{"a": 1}]}])
def test_tools_calls_and_variables_as_in_transformers(folder, variables, tools, add_generation_prompt):
    edit_config(folder, chat_template=WITH_TOOLS)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    expected = reference.apply_chat_template(
        CALLING,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        tokenize=True,
        return_dict=False,
        **variables,
    )
    options = RenderOptions(
        tools_json=json.dumps(tools) if tools else "",
        template_kwargs_json=json.dumps(variables),
        add_generation_prompt=add_generation_prompt,
    )
    assert asyncio.run(read_tokenizer(folder).encode_chat(as_sent(CALLING), ENOUGH, options)) == expected


@pytest.mark.parametrize("template", [None, "chatml"])
@pytest.mark.parametrize("content", ["The answer", "The answer \n", "again", ""])
def test_a_message_goes_on_as_in_transformers(folder, template, content):
    if template is not None:
        edit_config(folder, chat_template=TEMPLATES[template])
    messages = [*MESSAGES, {"role": "assistant", "content": content}]
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    expected = reference.apply_chat_template(messages, continue_final_message=True, tokenize=True, return_dict=False)
    options = RenderOptions(add_generation_prompt=False, continue_final_message=True)
    assert asyncio.run(read_tokenizer(folder).encode_chat(messages, ENOUGH, options)) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools_json": "{}"}, "chat.tools_json must be JSON: a list"),
        ({"tools_json": "[" * 100_000}, "chat.tools_json must be JSON: a list"),
        ({"template_kwargs_json": "[]"}, "chat.template_kwargs_json must be JSON: an object"),
        (
            {"template_kwargs_json": '{"messages": []}'},
            "chat.template_kwargs_json has messages, which is a field of its own",
        ),
        (
            {"continue_final_message": True},
            "chat.continue_final_message is not possible: the chat template leaves the last message out",
        ),
    ],
)
def test_what_no_template_could_take(folder, options, message):
    edit_config(folder, chat_template="a")
    with pytest.raises(RequestError) as error:
        asyncio.run(read_tokenizer(folder).encode_chat(MESSAGES, ENOUGH, RenderOptions(**options)))
    assert (error.value.reason, str(error.value)) == ("BAD_PARAM", message)
    assert error.value.metadata["field"] == message.split()[0]


def test_the_servers_variables_give_way_to_those_of_requests(folder):
    edit_config(folder, chat_template="{{ a }}{{ b }}{{ bos_token }}")
    tokenizer = read_tokenizer(folder, template_kwargs_json='{"a": "1", "b": "2"}')
    for own, expected in (("", b"12"), ('{"b": "3"}', b"13")):
        token_ids = asyncio.run(tokenizer.encode_chat(MESSAGES, ENOUGH, RenderOptions(template_kwargs_json=own)))
        assert token_ids == [*expected, 256]


@pytest.mark.parametrize("in_files", [True, False])
def test_tools_take_a_template_of_their_own_where_there_is_one(folder, in_files):
    if in_files:
        (folder / "chat_template.jinja").write_text("a")
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text("b")
    else:
        edit_config(
            folder, chat_template=[{"name": n, "template": t} for n, t in (("tool_use", "b"), ("default", "a"))]
        )
    tokenizer = read_tokenizer(folder)
    assert sorted(tokenizer.template_words) == ["a", "b"]
    for tools_json, expected in (("", b"a"), ("[]", b"a"), ('[{"x": 1}]', b"b")):
        options = RenderOptions(tools_json=tools_json)
        assert asyncio.run(tokenizer.encode_chat(MESSAGES, ENOUGH, options)) == [*expected]


def test_a_template_may_come_from_another_file(folder, tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text("mine{{ eos_token }}")
    tokenizer = read_tokenizer(folder, chat_template=str(path))
    assert asyncio.run(tokenizer.encode_chat(MESSAGES, ENOUGH)) == [*b"mine", EOS]
    with pytest.raises(ModelError, match=r"nothing\.jinja cannot be read"):
        read_tokenizer(folder, chat_template=str(tmp_path / "nothing.jinja"))


def test_special_tokens_may_be_objects_or_in_a_file_of_their_own(folder):
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["eos_token"]
    config["bos_token"] = {"content": "<|bos|>", "lstrip": False}
    config["chat_template"] = [
        {"name": "tool_use", "template": "no"},
        {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"},
    ]
    path.write_text(json.dumps(config))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|eos|>"}))
    assert asyncio.run(read_tokenizer(folder).encode_chat([{"role": "user", "content": "a"}], ENOUGH)) == [256, 97, 257]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}", b"Be brief."),
        ("{% for m in messages if m.role in ('system', 'developer') %}{{ m.role }}{% endfor %}", b"developer"),
    ],
)
def test_what_a_developer_says_is_the_systems_to_a_template_that_knows_no_developers(folder, template, expected):
    edit_config(folder, chat_template=template)
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert asyncio.run(read_tokenizer(folder).encode_chat(messages, ENOUGH)) == [*expected]


def test_a_template_may_refuse(folder):
    edit_config(folder, chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate") as error:
        asyncio.run(read_tokenizer(folder).encode_chat(MESSAGES, ENOUGH))
    assert error.value.reason == "BAD_PARAM"


@pytest.mark.parametrize("attack", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"])
def test_a_template_runs_in_a_sandbox(folder, attack):
    edit_config(folder, chat_template=attack)
    with pytest.raises(RequestError, match=r"unsafe|safely"):
        asyncio.run(read_tokenizer(folder).encode_chat(MESSAGES, ENOUGH))


def failure_of(folder, template, content="a"):
    edit_config(folder, chat_template=template)
    tokenizer = read_tokenizer(folder)
    with pytest.raises(RequestError) as error:
        asyncio.run(tokenizer.encode_chat([{"role": "user", "content": content}], ENOUGH))
    return error.value.reason, str(error.value)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages[0].nothing.deeper }}", "'dict object' has no attribute 'nothing'"),
        ("{{ messages | unheard_of }}", "No filter named 'unheard_of'."),
        ("{{ [1] | map('{0}'.format) | list }}", "No filter named <function str.format>."),
        ("{% set x = 'x' * 10**7 %}{{ x }}", "its text has 10000000 characters, the limit is 8388608"),
        ("{{ '\\ud800' }}", "UnicodeEncodeError"),
    ],
)
def test_a_template_that_fails_is_no_fault_of_the_messages(folder, template, message):
    assert failure_of(folder, template) == ("ENGINE_ERROR", f"the model's chat template fails: {message}")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if a %}b{% endif %}" * 20_000, "has 440000 characters, the limit is 131072"),
        ("{% set a = 1 %}{% if a %}{% endif %}" * 3000, "has 15000 blocks, names and constants, the limit is 10000"),
        ("{% if a %}" * 900 + "{% endif %}" * 900, "cannot be read: maximum recursion depth exceeded"),
    ],
)
def test_a_template_that_would_take_long_to_compile_is_refused_at_once(folder, template, message):
    edit_config(folder, chat_template=template)
    with pytest.raises(ModelError, match=f"the chat template {message}"):
        read_tokenizer(folder)


def test_a_model_without_a_template_takes_no_chat(folder):
    edit_config(folder, chat_template=None)
    tokenizer = read_tokenizer(folder)
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        asyncio.run(tokenizer.encode_chat(MESSAGES, ENOUGH))
