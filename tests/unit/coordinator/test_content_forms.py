"""The form in which chat templates take what messages say, a text or a list of parts, against transformers."""

import asyncio
import json

import pytest

from coordinator.api.http.anthropic_messages import MessagesCall
from coordinator.api.http.anthropic_messages_models import MessagesRequest
from coordinator.api.http.openai_responses import ResponsesCall
from coordinator.api.http.openai_responses_models import ResponsesRequest
from coordinator.api.prompts import tokenize
from coordinator.api.validation import check_chat
from coordinator.text.chat_template import RenderOptions
from coordinator.text.rendering import description
from coordinator.text.tokenizer import read_tokenizer
from protos.inference_pb2 import ChatInput, ChatMessage, GenerateRequest
from serving_core.errors import RequestError
from tests.unit.coordinator.later import transformers
from tests.unit.coordinator.tokenizer_kit import ENOUGH, edit_config

pytestmark = pytest.mark.usefixtures("programs_here")

PARTS_OF = "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text | trim }}{% endif %}{% endfor %}"
TEXT, PARTS = "text", "parts"
# Each with the form that it takes from the system, and from everybody else.
TEMPLATES = {
    "filters parts, as LLaVA": (
        "{% for m in messages %}{{ m.role.upper() }}: "
        "{% for part in m.content | selectattr('type', 'equalto', 'text') %}"
        "{{ part['text'] + ' ' }}{% endfor %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}",
        (PARTS, PARTS),
    ),
    "loops over parts, as Llama Guard": (
        "{% for m in messages %}{{ m.role }}: " + PARTS_OF + "{% endfor %}",
        (PARTS, PARTS),
    ),
    "asks for the first part, as Idefics": (
        "{% for m in messages %}{% if m.content[0].type == 'image' %}x{% endif %}" + PARTS_OF + "\n{% endfor %}",
        (PARTS, PARTS),
    ),
    "takes the system's words as a text": (
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content | trim }}{% else %}" + PARTS_OF
        + "{% endif %}|{% endfor %}",
        (TEXT, PARTS),
    ),
    "takes a text alone": (
        "{% for m in messages %}{{ m.role + ': ' + m.content | upper }}\n{% endfor %}",
        (TEXT, TEXT),
    ),
    "prints whatever comes": ("{% for m in messages %}{{ m.content | tojson }}{% endfor %}", (TEXT, TEXT)),
    "takes both": (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}" + PARTS_OF
        + "{% endif %}\n{% endfor %}",
        (TEXT, TEXT),
    ),
    "refuses a system": (
        "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}{{ raise_exception('no') }}{% endif %}"
        + PARTS_OF + "{% endfor %}",
        (PARTS, PARTS),
    ),
}  # fmt: skip
TURNS = [("user", "Who?"), ("assistant", "I, said the sparrow."), ("user", "  And <who> else? 😀")]


def in_form(form, text):
    return [{"type": "text", "text": text}] if form == PARTS else text


def reference(folder, messages, **options):
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)


def encoded(folder, messages, options=RenderOptions()):  # noqa: B008 - it is frozen
    return asyncio.run(read_tokenizer(folder).encode_chat(messages, ENOUGH, options))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("has_system", [True, False])
def test_a_template_gets_the_form_that_it_takes(folder, name, has_system):
    source, (of_system, of_others) = TEMPLATES[name]
    edit_config(folder, chat_template=source)
    turns = [("system", "Be brief."), *TURNS] if has_system and "refuses" not in name else TURNS
    forms = {"system": of_system}
    expected = reference(
        folder,
        [{"role": role, "content": in_form(forms.get(role, of_others), text)} for role, text in turns],
        add_generation_prompt=True,
    )
    assert encoded(folder, [{"role": role, "content": text} for role, text in turns]) == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_users_say_is_never_lost(folder, name):
    edit_config(folder, chat_template=TEMPLATES[name][0])
    said = ("What is the capital of France?", "Write a poem.", "17 + 25 = ?")
    prompts = {tuple(encoded(folder, [{"role": "user", "content": text}])) for text in said}
    assert len(prompts) == len(said)


@pytest.mark.parametrize("name", TEMPLATES)
def test_several_parts_stay_parts_where_the_template_takes_them(folder, name):
    source, (_, of_users) = TEMPLATES[name]
    edit_config(folder, chat_template=source)
    parts = [{"type": "text", "text": text} for text in ("One.", "Two.")]
    content = parts if of_users == PARTS or name == "takes both" else "One.\nTwo."
    expected = reference(folder, [{"role": "user", "content": content}], add_generation_prompt=True)
    chat = ChatInput(messages=[ChatMessage(role="user", content_parts=["One.", "Two."])])
    tokenizing = tokenize(read_tokenizer(folder), GenerateRequest(chat=chat), ENOUGH)
    assert asyncio.run(tokenizing) == expected


@pytest.mark.parametrize("name", TEMPLATES)
def test_parts_stay_parts_where_tools_are_shown_as_text(folder, name):
    """As with most templates that take parts, which know no tools."""
    source, (_, of_users) = TEMPLATES[name]
    edit_config(folder, chat_template=source)
    as_sent = {"content_parts": ["One.", "Two."]}
    called = json.dumps({"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]})
    messages = [
        {"role": "user", **as_sent},
        {"role": "assistant", "content_parts": ["Let me see.", "Hm."], "extra_json": called},
        {"role": "tool", "content_parts": ["1", "2"]},
        {"role": "assistant", **as_sent},
        {"role": "user", **as_sent},
    ]
    takes_parts = of_users == PARTS or name == "takes both"
    both = [{"type": "text", "text": text} for text in ("One.", "Two.")] if takes_parts else "One.\nTwo."
    calls = 'Let me see.\nHm.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    told = ["<tool_response>\n1\n2\n</tool_response>", both, both]
    contents = [both, *(in_form(of_users, text) if isinstance(text, str) else text for text in (calls, *told))]
    roles = ("user", "assistant", "user", "assistant", "user")
    expected = reference(
        folder,
        [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)],
        add_generation_prompt=True,
    )
    tokenizer = read_tokenizer(folder)
    tokenizer.show_tools("hermes")
    assert asyncio.run(tokenizer.encode_chat(messages, ENOUGH)) == expected


@pytest.mark.parametrize(
    ("name", "role"), [("loops over parts, as Llama Guard", "system"), ("refuses a system", "user")]
)
def test_tools_are_told_in_a_part(folder, name, role):
    edit_config(folder, chat_template=TEMPLATES[name][0])
    tokenizer = read_tokenizer(folder)
    tokenizer.show_tools("hermes")
    tool = {"type": "function", "function": {"name": "f"}}
    told = description([tool], "hermes")
    turns = [(role, ["One.", "Two."]), *([("user", ["Hi"])] if role == "system" else [])]
    parts = ["One.", f"Two.\n\n{told}"] if role == "system" else [f"{told}\n\nOne.", "Two."]
    expected = reference(
        folder,
        [
            {"role": each, "content": [{"type": "text", "text": text} for text in texts]}
            for each, texts in [(role, parts), *turns[1:]]
        ],
        add_generation_prompt=True,
    )
    messages = [{"role": each, "content_parts": texts} for each, texts in turns]
    assert (
        asyncio.run(tokenizer.encode_chat(messages, ENOUGH, RenderOptions(tools_json=json.dumps([tool])))) == expected
    )


@pytest.mark.parametrize("content", ["The answer", "The answer \n"])
def test_a_message_of_parts_goes_on_as_in_transformers(folder, content):
    edit_config(folder, chat_template=TEMPLATES["filters parts, as LLaVA"][0])
    turns = [*TURNS, ("assistant", content)]
    expected = reference(
        folder, [{"role": role, "content": in_form(PARTS, text)} for role, text in turns], continue_final_message=True
    )
    options = RenderOptions(add_generation_prompt=False, continue_final_message=True)
    assert encoded(folder, [{"role": role, "content": text} for role, text in turns], options) == expected


@pytest.mark.parametrize(
    ("chat", "field"),
    [
        ({"content_parts": ["a"] * 1025}, "chat.messages[0].content_parts"),
        ({"content": "a", "content_parts": ["b"]}, "chat.messages[0].content"),
    ],
)
def test_parts_that_are_refused(chat, field):
    with pytest.raises(RequestError) as error:
        check_chat(ChatInput(messages=[ChatMessage(role="user", **chat)]))
    assert error.value.metadata["field"] == field


@pytest.mark.parametrize(
    ("call", "model", "kind", "name"),
    [(MessagesCall, MessagesRequest, "text", "messages"), (ResponsesCall, ResponsesRequest, "input_text", "input")],
)
def test_parts_stay_parts_in_other_apis(call, model, kind, name):
    said = [{"type": kind, "text": text} for text in ("One.", "Two.")]
    turns = [{"role": "user", "content": said}, {"role": "user", "content": said[:1]}]
    [request] = call().parse(model.read({"model": "m", name: turns}), "id").requests
    told = [(message.content, list(message.content_parts)) for message in request.chat.messages]
    assert told == [("", ["One.", "Two."]), ("One.", [])]


# ---- a template that loses what users say ----


def errors_at_start(folder, caplog):
    asyncio.run(read_tokenizer(folder).check())
    return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.role }}{% endfor %}",
        "{% for m in messages %}{{ m.text }}{% endfor %}",
        "{{ messages | length }}",
    ],
)
def test_a_template_that_loses_what_users_say_is_named_at_start(folder, caplog, source):
    edit_config(folder, chat_template=source)
    [said] = errors_at_start(folder, caplog)
    assert said.startswith("the chat template (default) writes the same prompt whatever a user says")


def test_of_several_templates_the_one_that_loses_it_is_named(folder, caplog):
    named = {"default": TEMPLATES["takes both"][0], "tool_use": "{{ tools | length }}"}
    edit_config(folder, chat_template=[{"name": name, "template": text} for name, text in named.items()])
    [said] = errors_at_start(folder, caplog)
    assert said.startswith("the chat template (tool_use) writes the same")


@pytest.mark.parametrize("name", [None, *TEMPLATES])
def test_nothing_is_said_of_a_template_that_loses_nothing(folder, caplog, name):
    if name is not None:
        edit_config(folder, chat_template=TEMPLATES[name][0])
    assert errors_at_start(folder, caplog) == []


@pytest.mark.parametrize("source", ["{{ messages[0].nothing.deeper }}", "{{ raise_exception('no') }}"])
def test_a_template_that_fails_says_so_when_it_is_used(folder, caplog, source):
    edit_config(folder, chat_template=source)
    assert errors_at_start(folder, caplog) == []
    with pytest.raises(RequestError):
        encoded(folder, [{"role": "user", "content": "x"}])


# ---- where templates are found ----


@pytest.mark.parametrize("sub", ["chat_templates", "additional_chat_templates"])
def test_named_templates_beside_the_usual_one(folder, sub):
    edit_config(folder, chat_template="config")
    (folder / sub).mkdir()
    (folder / sub / "tool_use.jinja").write_text("b")
    (folder / "chat_template.jinja").write_text("a")
    tokenizer = read_tokenizer(folder)
    for tools_json, expected in (("", b"a"), ('[{"x": 1}]', b"b")):
        options = RenderOptions(tools_json=tools_json)
        assert asyncio.run(tokenizer.encode_chat([{"role": "user", "content": "x"}], ENOUGH, options)) == [*expected]


@pytest.mark.parametrize(
    ("of_config", "of_processor", "expected"),
    [
        (None, "{{ messages[0].content }}!", b"x!"),
        ("{{ messages[0].content }}?", "{{ messages[0].content }}!", b"x?"),
        (None, [{"name": "default", "template": "{{ messages[0].content }}!"}], b"x!"),
    ],
)
def test_the_template_of_a_model_that_sees_pictures_is_in_a_file_of_its_own(folder, of_config, of_processor, expected):
    edit_config(folder, chat_template=of_config)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": of_processor}))
    assert encoded(folder, [{"role": "user", "content": "x"}]) == [*expected]
