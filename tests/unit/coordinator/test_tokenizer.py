"""Encoding and chat templates against transformers."""

import asyncio
import json
import os
import signal
import threading

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from coordinator.text.chat_template import RenderOptions
from coordinator.text.tokenizer import (
    LONG_TEXT_CHARS,
    MIN_LONGEST_TOKEN_CHARS,
    NUM_THREADS,
    PIECE_CHARS,
    TokenLimit,
    read_tokenizer,
)
from serving_core.errors import ModelError, RequestError
from tests.tiny_models import ASSISTANT, BOS, EOS, VOCAB_SIZE, write_tokenizer

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


def limit(most):
    return TokenLimit(most, lambda fewest: RequestError("PROMPT_TOO_LONG", f"{fewest} or more"))


ENOUGH = limit(10**9)


@pytest.fixture
def folder(tmp_path):
    write_tokenizer(tmp_path)
    return tmp_path


def edit_config(folder, **changes):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_texts_encode_as_in_transformers(folder):
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer = read_tokenizer(folder)
    for text in ("a", "héllo wörld 😀", "<|user|>x", " lead and trail ", "long " * LONG_TEXT_CHARS):
        assert asyncio.run(tokenizer.encode(text, ENOUGH)) == reference(text)["input_ids"]


def test_the_texts_of_single_tokens(folder):
    tokenizer = read_tokenizer(folder)
    assert asyncio.run(tokenizer.token_texts([97, 0xC3, EOS, 10**6])) == ["a", "\ufffd", "<|eos|>", ""]


def test_the_event_loop_goes_on_while_many_tokens_become_texts(folder):
    async def scenario():
        token_ids = [97] * (2 * LONG_TEXT_CHARS)
        texts = asyncio.create_task(read_tokenizer(folder).token_texts(token_ids))
        await asyncio.sleep(0)
        assert not texts.done()
        assert await texts == ["a"] * len(token_ids)

    asyncio.run(scenario())


def test_a_hopeless_text_is_refused_before_any_of_it_is_encoded(folder):
    encoding = read_tokenizer(folder).encode("a" * 2**22, limit(8192))
    with pytest.raises(RequestError, match=f"{2**22 // MIN_LONGEST_TOKEN_CHARS} or more"):
        encoding.send(None)  # until it waits, which it never does


def test_a_text_that_is_probably_too_long_is_encoded_no_further_than_that_shows(folder):
    with pytest.raises(RequestError, match=f"{PIECE_CHARS - MIN_LONGEST_TOKEN_CHARS} or more"):
        asyncio.run(read_tokenizer(folder).encode("a" * 2**20, limit(10_000)))


def test_a_text_of_long_tokens_may_be_long(folder):
    text = "<|assistant|>" * 9_990
    assert len(text) > 10 * 10_000
    assert asyncio.run(read_tokenizer(folder).encode(text, limit(10_000))) == [ASSISTANT] * 9_990


def test_who_stops_waiting_leaves_the_queue_and_the_others_keep_their_order(folder):
    async def scenario():
        tokenizer, ended, free = read_tokenizer(folder), [], threading.Event()
        busy = [asyncio.create_task(tokenizer._in_turn(free.wait)) for _ in range(NUM_THREADS)]
        texts = {char: char * (LONG_TEXT_CHARS + 1) for char in "abc"}
        calls = {char: asyncio.create_task(tokenizer.encode(text, ENOUGH)) for char, text in texts.items()}
        for char, call in calls.items():
            call.add_done_callback(lambda _, char=char: ended.append(char))
        await asyncio.sleep(0)
        calls["b"].cancel()
        await asyncio.gather(calls["b"], return_exceptions=True)
        assert ended == ["b"]  # at once, while all threads are busy
        free.set()
        assert await calls["c"] == [ord("c")] * len(texts["c"])
        await asyncio.gather(*busy, *calls.values(), return_exceptions=True)
        assert sorted(ended) == ["a", "b", "c"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("template", "changes", "embeds", "expected", "num_end_tokens"),
    [
        (None, {}, True, [97], 0),
        (None, {"add_eos_token": True}, False, [97], 0),
        (None, {"add_eos_token": True}, True, [97, EOS], 1),
        ("<|bos|> $A", {"add_eos_token": True}, True, [BOS, 97, EOS], 1),
        ("$A <|eos|>", {"add_eos_token": True}, True, [97, EOS], 1),
        ("<|bos|> $A <|eos|> <|eos|>", {}, False, [BOS, 97, EOS, EOS], 2),
        (None, {"add_eos_token": True, "eos_token": None}, True, [97], 0),
        (None, {"add_eos_token": True, "eos_token": "of no vocabulary"}, True, [97, VOCAB_SIZE], 1),
    ],
)
def test_texts_to_be_embedded_end_as_the_folder_says(folder, template, changes, embeds, expected, num_end_tokens):
    if template:
        path = folder / "tokenizer.json"
        tokenizer = Tokenizer.from_file(str(path))
        special_tokens = [("<|bos|>", BOS), ("<|eos|>", EOS)]
        tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special_tokens)
        tokenizer.save(str(path))
    edit_config(folder, **changes)
    tokenizer = read_tokenizer(folder, embeds=embeds)
    assert asyncio.run(tokenizer.encode("a", ENOUGH)) == expected
    assert tokenizer.num_end_tokens == num_end_tokens


def test_the_tokenizers_own_special_tokens_are_added_and_its_limits_are_not(folder):
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 12}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "!",
    }  # fmt: skip
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|bos|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"<|bos|>": {"id": "<|bos|>", "ids": [256], "tokens": ["<|bos|>"]}},
    }
    path.write_text(json.dumps(content))
    assert asyncio.run(read_tokenizer(folder).encode("abcde", ENOUGH)) == [256, *b"abcde"]


@pytest.mark.parametrize("template", [None, *TEMPLATES])
@pytest.mark.parametrize("in_own_file", [True, False])
def test_chats_encode_as_in_transformers(folder, template, in_own_file):
    if template is not None and in_own_file:
        (folder / "chat_template.jinja").write_text(TEMPLATES[template])
    elif template is not None:
        edit_config(folder, chat_template=TEMPLATES[template])
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
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
    """As the doors hand them on."""
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
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
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
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
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
        ("{{ 'x' * 10**10 }}", "MemoryError"),
        ("{% set x = 'x' * 10**7 %}{{ x }}", "its text has 10000000 characters, the limit is 8388608"),
        ("{{ '\\ud800' }}", "UnicodeEncodeError"),
    ],
)
def test_a_template_that_fails_is_no_fault_of_the_messages(folder, template, message):
    assert failure_of(folder, template) == ("ENGINE_ERROR", f"the model's chat template fails: {message}")


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def test_a_template_without_end_is_ended_and_keeps_nobody_up(folder):
    edit_config(folder, chat_template="{% if messages[0].content == 'loop' %}" + ENDLESS + "{% endif %}a")

    async def scenario():
        tokenizer = read_tokenizer(folder)
        looping, ready = (
            asyncio.create_task(tokenizer.encode_chat([{"role": "user", "content": content}], ENOUGH))
            for content in ("loop", "b")
        )
        for _ in range(10):
            await asyncio.sleep(0.01)
        assert not looping.done()  # it has 2 s, and the event loop goes on meanwhile
        with pytest.raises(RequestError, match="fails: it takes more than 2 s") as error:
            await looping
        assert error.value.reason == "ENGINE_ERROR"
        assert await ready == [97]

    asyncio.run(scenario())


def test_a_process_that_has_ended_is_replaced(folder):
    async def scenario():
        tokenizer = read_tokenizer(folder)
        expected = await tokenizer.encode_chat(MESSAGES, ENOUGH)
        process = tokenizer._chat_template._program._process._process
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert await tokenizer.encode_chat(MESSAGES, ENOUGH) == expected

    asyncio.run(scenario())


def test_a_long_conversation_comes_through(folder):
    edit_config(folder, chat_template="{{ messages[0].content }}{{ messages[1].content }}")
    contents = ["ü\n" * 2**19, "\x00😀\u2028" * 2**10]  # more than a pipe holds
    messages = [{"role": "user", "content": content} for content in contents]
    assert asyncio.run(read_tokenizer(folder).encode_chat(messages, ENOUGH)) == [*"".join(contents).encode()]


def test_a_model_without_a_template_takes_no_chat(folder):
    edit_config(folder, chat_template=None)
    tokenizer = read_tokenizer(folder)
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        asyncio.run(tokenizer.encode_chat(MESSAGES, ENOUGH))


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("tokenizer.json", None, "there is no .*tokenizer.json"),
        ("tokenizer.json", "{", "tokenizer.json is not a tokenizer"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
        ("tokenizer_config.json", '{"chat_template": 1}', "chat_template in .* must be a string"),
        ("chat_template.jinja", "{% if %}", "the chat template is broken: .* line 1"),
        (
            "chat_template.jinja",
            "{{ " + "{" * 200 + "x }}",
            "the chat template cannot be read: maximum recursion depth",
        ),
        ("chat_template.jinja", "{{ " + "1" * 5000 + " }}", "the chat template cannot be read: Exceeds the limit"),
    ],
)
def test_broken_files_are_named(folder, file, content, problem):
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    with pytest.raises(ModelError, match=problem):
        read_tokenizer(folder)


def test_what_is_told_of_a_tokenizer_names_no_place(folder):
    places = {"name_or_path": "/home/x", "special_tokens_map_file": "/home/y", "auto_map": {"AutoTokenizer": "/home/z"}}
    edit_config(folder, **places, bos_token={"content": "<b>"}, model_max_length=7, tokenizer_class=None)
    told = json.loads(read_tokenizer(folder).info_json)
    assert "/home" not in json.dumps(told)
    assert (told["bos_token"], told["model_max_length"]) == ("<b>", 7)
