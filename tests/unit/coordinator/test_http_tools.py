"""Tools and thoughts at the HTTP API, as openai's own client has them, with nodes that say what the model
writes."""

import asyncio
import json

import pytest

from serving_core.errors import RequestError, SettingsError
from serving_core.grammars import Grammars
from tests import fleet_events as events
from tests.scripted_nodes import begin, run, transfer
from tests.tiny_models import EOS
from tests.unit.coordinator.http_kit import (
    BOTH,
    HI,
    PARIS,
    ROME,
    WEATHER,
    answer,
    openai_cluster,
    weather_call,
)
from tests.unit.coordinator.later import openai

pytestmark = pytest.mark.usefixtures("programs_here")

FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": WEATHER["function"]["parameters"]}}


async def asked(c, client, text, finish_reason=events.STOP, **fields):
    """A whole answer, and the prompt."""
    fields = {"messages": [HI], "tools": [WEATHER], **fields}
    asking = asyncio.create_task(client.chat.completions.create(model="m", **fields))
    prompt = await answer(c, text, finish_reason)
    return await asking, prompt


def called(message):
    return [(each.type, each.function.name, each.function.arguments) for each in message.tool_calls or []]


def test_a_whole_answer_with_thoughts_text_and_calls(tmp_path):
    async def scenario():
        async with openai_cluster(tmp_path) as (c, client):
            reply, prompt = await asked(c, client, BOTH)
            assert json.dumps(WEATHER) in prompt
            [choice] = reply.choices
            assert choice.finish_reason == "tool_calls"
            assert (choice.message.reasoning_content, choice.message.content) == ("Hm.", "Let me see.")
            assert called(choice.message) == [("function", "weather", PARIS), ("function", "weather", ROME)]
            first, second = (each.id for each in choice.message.tool_calls)
            assert first.isalnum()
            assert (len(first), first != second) == (9, True)

            result = {"role": "tool", "tool_call_id": first, "content": "12 degrees"}
            messages = [HI, choice.message.model_dump(exclude={"reasoning_content"}), result]
            reply, prompt = await asked(c, client, "Cool.", messages=messages)
            told = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
            assert f"Let me see.{told}" in prompt
            assert f"12 degrees{first}" in prompt
            assert reply.choices[0].message.model_dump(exclude_none=True) == {"role": "assistant", "content": "Cool."}
            assert reply.choices[0].finish_reason == "stop"

    run(scenario())


def test_openais_stream_helper_adds_the_deltas_up(tmp_path):
    async def scenario():
        async with openai_cluster(tmp_path) as (c, client):

            async def ask():
                options = {"model": "m", "messages": [HI], "tools": [WEATHER]}
                async with client.chat.completions.stream(**options) as stream:
                    told = [event async for event in stream]
                    done = [event for event in told if event.type == "tool_calls.function.arguments.done"]
                    return [event.parsed_arguments for event in done], await stream.get_final_completion()

            asking = asyncio.create_task(ask())
            await answer(c, BOTH)
            done, reply = await asking
            assert done == [{"city": "Paris"}, {"city": "Rome"}]
            [choice] = reply.choices
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
            assert called(choice.message) == [("function", "weather", PARIS), ("function", "weather", ROME)]

    run(scenario())


def test_the_deltas_of_a_stream(tmp_path):
    async def scenario():
        async with openai_cluster(tmp_path) as (c, client):

            async def ask():
                stream = await client.chat.completions.create(
                    model="m", messages=[HI], tools=[WEATHER], stream=True, parallel_tool_calls=False
                )
                return [part async for part in stream]

            asking = asyncio.create_task(ask())
            await answer(c, BOTH)
            opening, *parts = await asking
            assert opening.choices[0].delta.model_dump(exclude_none=True) == {"role": "assistant", "content": ""}
            deltas = [part.choices[0].delta for part in parts]
            for name in ("reasoning", "reasoning_content"):
                assert "".join(getattr(delta, name, "") for delta in deltas) == "Hm."
            assert "".join(delta.content or "" for delta in deltas) == "Let me see."
            calls = [each for delta in deltas for each in delta.tool_calls or []]
            assert {each.index for each in calls} == {0}  # the second one was not asked for
            assert (calls[0].type, calls[0].function.name) == ("function", "weather")
            assert {(each.id, each.type, each.function.name) for each in calls[1:]} <= {(None, None, None)}
            assert "".join(each.function.arguments for each in calls) == PARIS
            assert [part.choices[0].finish_reason for part in parts[-2:]] == [None, "tool_calls"]

    run(scenario())


def test_what_is_no_call_stays_text_and_its_end_is_length(tmp_path):
    async def scenario():
        async with openai_cluster(tmp_path) as (c, client):
            reply, _ = await asked(c, client, weather_call(PARIS), tool_choice="none")
            assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (weather_call(PARIS), "stop")
            reply, _ = await asked(c, client, weather_call(PARIS)[:-20], events.LENGTH)
            [choice] = reply.choices
            assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("length", "", None)
            reply, _ = await asked(c, client, "\n\n<think", tools=None)
            assert reply.choices[0].message.content == "\n\n<think"

    run(scenario())


def test_an_answer_may_have_to_call(tmp_path):
    async def scenario():
        kwargs = '{"think": true}'
        async with openai_cluster(tmp_path, tool_call_parser="none", chat_template_kwargs=kwargs) as (
            c,
            client,
        ):
            text = f'[{{"name": "weather", "parameters": {PARIS}}}, {{"name": "weather", "parameters": {ROME}}}]'
            for form in (None, FORM):  # which is that of an answer without calls
                reply, _ = await asked(c, client, f"Hm.</think>\n{text}", tool_choice="required", response_format=form)
                [choice] = reply.choices
                assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
                assert choice.message.reasoning_content == "Hm."
                assert called(choice.message) == [("function", "weather", PARIS), ("function", "weather", ROME)]
            named = {"type": "function", "function": {"name": "weather"}}
            reply, _ = await asked(c, client, f"Hm.</think>{PARIS}", tool_choice=named)
            assert called(reply.choices[0].message) == [("function", "weather", PARIS)]
            cut = (("Hm.", named), ('</think>[{"', "required"), ('</think>[{"name": "wea', "required"))
            for text, tool_choice in cut:
                reply, _ = await asked(c, client, text, events.LENGTH, tool_choice=tool_choice)
                [choice] = reply.choices
                assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
                assert not choice.message.content

    run(scenario())


SET = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}}}


def test_what_is_enforced_of_a_tool_that_is_not_strict(tmp_path):
    """What can be of its schema; of one that is strict all, or it is refused."""
    one = {"type": "function", "function": {"name": "one"}}

    def tools(**strict):
        return [{"type": "function", "function": {"name": "one", "parameters": SET, **strict}}, WEATHER]

    async def scenario():
        async with openai_cluster(tmp_path) as (c, client):

            async def ask(choice, **strict):
                fields = {"messages": [HI], "tools": tools(**strict), "tool_choice": choice}
                await client.chat.completions.create(model="m", **fields)

            for choice, good, bad in (
                (
                    one,
                    '<tool_call>{"name":"one","arguments":{"a":[1,1]',
                    '<tool_call>{"name":"one","arguments":{"a":[""]',
                ),
                (one, '<tool_call>{"name":"one","arguments":{}}</tool_call>', '<tool_call>{"name":"weather"'),
                (
                    "required",
                    '<tool_call>{"name":"one","arguments":{"a":[1]',
                    '<tool_call>{"name":"weather","arguments":{}',
                ),
            ):
                with pytest.raises(openai.BadRequestError, match="uniqueItems") as caught:
                    await ask(choice, strict=True)
                assert caught.value.param == "tools"
                asking = asyncio.create_task(ask(choice))
                attempt, job = await begin(c)
                guide = Grammars(tmp_path, (EOS,)).guide_of(job.grammar)
                with pytest.raises(RequestError, match="does not allow"):
                    guide.another().allowed(list(bad.encode()))
                assert guide.another().allowed(list(good.encode()))
                await transfer(c, attempt, good[0])
                last = events.sampled(attempt, 1, EOS)
                last.finish_reason = events.STOP
                await c.nodes["d0"].send(events.step_tokens(last))
                await asking

    run(scenario())


def test_tools_beside_a_form(tmp_path):
    async def scenario():
        async with openai_cluster(tmp_path) as (c, client):
            text = json.dumps({"city": weather_call(PARIS)})
            reply, prompt = await asked(c, client, f"<think>Hm.</think>\n{text}", response_format=FORM)
            assert json.dumps(WEATHER) in prompt
            [choice] = reply.choices
            assert choice.finish_reason == "stop"
            assert (choice.message.reasoning_content, choice.message.content) == ("Hm.", text)
            assert choice.message.tool_calls is None
            reply, _ = await asked(c, client, weather_call(PARIS), response_format=FORM)
            [choice] = reply.choices
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
            assert called(choice.message) == [("function", "weather", PARIS)]

    run(scenario())


def test_the_prompt_may_have_begun_the_thoughts(tmp_path):
    async def scenario():
        async with openai_cluster(tmp_path, chat_template_kwargs='{"think": true}') as (c, client):
            reply, prompt = await asked(c, client, "Hm.\n</think>\n\nYes.", tools=None)
            assert prompt.endswith("<think>\n")
            message = reply.choices[0].message
            assert (message.reasoning, message.reasoning_content, message.content) == ("Hm.", "Hm.", "Yes.")
            extra = {"chat_template_kwargs": {"think": False}}
            reply, prompt = await asked(c, client, "Yes.", tools=None, extra_body=extra)
            assert not prompt.endswith("<think>\n")
            assert reply.choices[0].message.model_dump(exclude_none=True) == {"role": "assistant", "content": "Yes."}

    run(scenario())


def test_settings_win_over_the_templates_words(tmp_path):
    async def scenario():
        settings = {"tool_call_parser": "none", "reasoning_parser": "none"}
        async with openai_cluster(tmp_path, **settings) as (c, client):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model="m", messages=[HI], tools=[WEATHER])
            assert caught.value.param == "tools"
            reply, _ = await asked(c, client, BOTH, tools=None)
            assert reply.choices[0].message.content == BOTH

    run(scenario())


REFUSED_FIELDS = [
    (
        {"tool_choice": "required", "extra_body": {"structured_outputs": {"regex": "a"}}},
        "tool_choice",
        "cannot be had beside structured_outputs: one of them says what comes",
    ),
    (
        {"tool_choice": "any"},
        "tool_choice",
        "must be 'none', 'auto' or 'required', not \"any\"",
    ),
    (
        {"extra_body": {"chat_template_kwargs": {"tools": []}}},
        "chat_template_kwargs",
        "has tools, which is a field of its own",
    ),
    (
        {"extra_body": {"chat_template_kwargs": {"a": "x" * 2**16}}},
        "chat_template_kwargs",
        "has 65545 characters, the limit is 65536",
    ),
    (
        {"extra_body": {"add_generation_prompt": True, "continue_final_message": True}},
        "add_generation_prompt",
        "must be false where continue_final_message is true",
    ),
]


def test_refusals_in_the_words_of_the_endpoint(tmp_path):
    async def scenario():
        async with openai_cluster(tmp_path) as (_, client):
            for fields, param, message in REFUSED_FIELDS:
                with pytest.raises(openai.BadRequestError) as caught:
                    await client.chat.completions.create(model="m", messages=[HI], tools=[WEATHER], **fields)
                assert (caught.value.param, caught.value.body["message"]) == (param, f"{param} {message}")

    run(scenario())


def test_an_answer_goes_on_with_the_last_message_and_tokenize_shows_the_prompt(tmp_path):
    async def scenario():
        async with openai_cluster(tmp_path) as (c, client):
            messages = [HI, {"role": "assistant", "content": "It is "}]
            extra = {"continue_final_message": True}
            reply, prompt = await asked(c, client, "warm.", messages=messages, extra_body=extra, tools=None)
            assert prompt.endswith("It is ")
            assert reply.choices[0].message.content == "warm."
            server = client.with_options(base_url=f"http://127.0.0.1:{c.server.http_port}")
            for fields in (extra, {"add_generation_prompt": False}, {"tools": [WEATHER]}):
                body = {"messages": messages, **fields}
                listed = (await server.post("/tokenize", cast_to=object, body=body))["tokens"]
                text = bytes(token_id for token_id in listed if token_id < 256).decode()
                assert (json.dumps(WEATHER) in text) == ("tools" in fields)
                assert text.endswith("It is ")
                assert (listed[-1] == 259) == ("tools" in fields)  # <|assistant|>

    run(scenario())


NOT = {"type": "object", "properties": {"a": {"not": {}}}}
BY_FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": NOT}}
NAMED_FIELDS = [
    ({"response_format": BY_FORM}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_object", "schema": NOT}}, "response_format.schema"),
    ({"extra_body": {"structured_outputs": {"json": NOT}}}, "structured_outputs.json"),
    ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs.regex"),
    ({"extra_body": {"structured_outputs": {"grammar": "start: nowhere"}}}, "structured_outputs.grammar"),
    ({"extra_body": {"structured_outputs": {"choice": [""]}}}, "structured_outputs.choice"),
    ({"extra_body": {"structured_outputs": {"json": "{" * 2**18}}}, "structured_outputs.json"),
]


def test_what_cannot_be_enforced_is_told_of_the_field_that_the_client_sent(tmp_path):
    async def scenario():
        async with openai_cluster(tmp_path) as (_, client):
            for fields, param in NAMED_FIELDS:
                for create, prompt in (
                    (client.chat.completions.create, {"messages": [HI]}),
                    (client.completions.create, {"prompt": "hi"}),
                ):
                    given = {**fields, "extra_body": {**fields.get("extra_body", {})}}
                    if create == client.completions.create and "response_format" in given:
                        given["extra_body"]["response_format"] = given.pop("response_format")
                    with pytest.raises(openai.BadRequestError) as caught:
                        await create(model="m", **prompt, **given)
                    assert caught.value.param == param
                    assert caught.value.body["message"].startswith(f"{param} ")

    run(scenario())


def test_what_stands_beside_a_form_is_told_in_its_clients_words(tmp_path):
    async def scenario():
        async with openai_cluster(tmp_path) as (_, client):
            for beside, told in (
                ({"response_format": FORM}, "response_format.json_schema.schema"),
                ({"extra_body": {"structured_outputs": {"regex": "a"}}}, "structured_outputs.regex"),
            ):
                body = {**beside, "extra_body": {**beside.get("extra_body", {}), "min_tokens": 3}}
                with pytest.raises(openai.BadRequestError, match=f"min_tokens cannot be had with {told},") as caught:
                    await client.chat.completions.create(model="m", messages=[HI], **body)
                assert caught.value.param == "min_tokens"

    run(scenario())


@pytest.mark.parametrize("is_closed", [True, False])
def test_an_operator_says_what_objects_are_without_additional_properties(tmp_path, is_closed):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}

    async def scenario():
        settings = {} if is_closed else {"disable_additional_properties": False}
        async with openai_cluster(tmp_path, **settings) as (c, client):
            for fields, begun in (
                ({"response_format": form}, '{"b"'),
                ({"tools": [{**WEATHER, "function": {"name": "f", "parameters": schema}}], "tool_choice": "required"},
                 '<tool_call>{"name":"f","arguments":{"b"'),
            ):  # fmt: skip
                asking = asyncio.create_task(client.chat.completions.create(model="m", messages=[HI], **fields))
                _, job = await begin(c)
                guide = Grammars(tmp_path, (EOS,)).guide_of(job.grammar)
                if is_closed:
                    with pytest.raises(RequestError, match="does not allow"):
                        guide.allowed(list(begun.encode()))
                else:
                    assert any(guide.allowed(list(begun.encode())))
                asking.cancel()
                await asyncio.wait([asking])

    run(scenario())


# ---- chat templates that show no tools ----

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
)
SILENT = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
BY_TURNS = (
    "{% for m in messages if m.role != 'system' %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + CHATML
)


@pytest.mark.parametrize("template", [CHATML, NO_SYSTEM, SILENT, BY_TURNS])
@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "weather"}}])
def test_a_model_whose_template_shows_no_tools_is_told_of_them(tmp_path, template, choice):
    async def scenario():
        async with openai_cluster(tmp_path, template) as (c, client):
            reply, prompt = await asked(c, client, weather_call(PARIS), tool_choice=choice)
            assert json.dumps(WEATHER) in prompt
            assert prompt.count("<tool_call>") == 1
            assert ("<|im_start|>system" in prompt) == (template in (CHATML, BY_TURNS))
            assert prompt.index("weather") < prompt.index("hi<|im_end|>")
            assert [each[1:] for each in called(reply.choices[0].message)] == [("weather", PARIS)]

            message = reply.choices[0].message.model_dump()
            results = [{"role": "tool", "tool_call_id": "a", "content": each} for each in ("12 degrees", "rain")]
            again = {"role": "user", "content": "And now?"}
            _, prompt = await asked(c, client, "Cool.", messages=[HI, message, *results, again])
            assert f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call><|im_end|>' in prompt
            told = "<tool_response>\n12 degrees\n</tool_response>\n<tool_response>\nrain\n</tool_response>\nAnd now?"
            assert f"<|im_start|>user\n{told}<|im_end|>" in prompt

    run(scenario())


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", weather_call(PARIS)),
        ("llama3", f'{{"name": "weather", "parameters": {PARIS}}}'),
        ("mistral", f'[TOOL_CALLS] [{{"name": "weather", "arguments": {PARIS}}}]'),
        ("pythonic", "[weather(city='Paris')]"),
    ],
)
def test_the_model_is_told_the_form_in_which_its_calls_are_read(tmp_path, form, text):
    """Its own calls of before are in that form too, so that what it repeats is read as a call."""

    async def scenario():
        async with openai_cluster(tmp_path, CHATML, tool_call_parser=form) as (c, client):
            reply, _ = await asked(c, client, text)
            message = reply.choices[0].message
            [(_, name, arguments)] = called(message)
            assert (name, json.loads(arguments)) == ("weather", {"city": "Paris"})
            _, prompt = await asked(c, client, "Cool.", messages=[HI, message.model_dump(), HI])
            repeated = prompt.partition("<|im_start|>assistant\n")[2].partition("<|im_end|>")[0]
            reply, _ = await asked(c, client, repeated)
            assert json.loads(called(reply.choices[0].message)[0][2]) == {"city": "Paris"}

    run(scenario())


FAMILIES = [
    ("qwen3_coder", "qwen3", "<think>\nHm.\n</think>\n\nSo.\n<tool_call>\n<function=weather>\n<parameter=city>\n"
     "Paris\n</parameter>\n</function>\n</tool_call>"),
    ("openai", "auto", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>So."
     '<|end|><|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris"}'),
]  # fmt: skip


@pytest.mark.parametrize(("calls", "reasoning", "text"), FAMILIES)
@pytest.mark.parametrize("stream", [False, True])
def test_calls_and_thoughts_of_a_family(tmp_path, calls, reasoning, text, stream):
    template = "{{ tools | tojson }}" + CHATML

    async def scenario():
        parsers = {"tool_call_parser": calls, "reasoning_parser": reasoning}
        async with openai_cluster(tmp_path, template, **parsers) as (c, client):

            async def ask():
                options = {"model": "m", "messages": [HI], "tools": [WEATHER]}
                if not stream:
                    return (await client.chat.completions.create(**options)).choices[0]
                async with client.chat.completions.stream(**options) as events:
                    return (await events.get_final_completion()).choices[0]

            asking = asyncio.create_task(ask())
            await answer(c, text)
            choice = await asking
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", "So.")
            assert [each[1:] for each in called(choice.message)] == [("weather", PARIS)]
            if not stream:
                assert choice.message.reasoning == "Hm."

    run(scenario())


def test_a_format_that_the_coordinator_cannot_describe_needs_a_template_that_lists_tools(tmp_path):
    async def scenario():
        async with openai_cluster(tmp_path, CHATML, tool_call_parser="kimi_k2"):
            raise AssertionError("it must not start")

    with pytest.raises(SettingsError, match="--tool-call-parser kimi_k2 needs a chat template that lists the tools"):
        run(scenario())


def test_a_template_that_shows_nothing_of_tools_is_an_error_of_them(tmp_path):
    async def scenario():
        async with openai_cluster(tmp_path, "{{ messages | length }}") as (_, client):
            with pytest.raises(openai.BadRequestError, match="leaves them out") as caught:
                await client.chat.completions.create(model="m", messages=[HI], tools=[WEATHER])
            assert caught.value.param == "tools"

    run(scenario())


def test_a_template_with_calls_of_a_form_that_is_not_read_has_ours(tmp_path):
    template = "{% if tools %}<tool_calls>\n<tool_call>{{ tools }}{% endif %}" + CHATML

    async def scenario():
        async with openai_cluster(tmp_path, template) as (c, client):
            reply, prompt = await asked(c, client, weather_call(PARIS))
            assert "<tool_calls>" not in prompt
            assert json.dumps(WEATHER) in prompt
            assert [each[1:] for each in called(reply.choices[0].message)] == [("weather", PARIS)]

    run(scenario())


def test_an_operator_may_have_no_calls_but_those_that_are_forced(tmp_path):
    async def scenario():
        async with openai_cluster(tmp_path, CHATML, tool_call_parser="none") as (c, client):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model="m", messages=[HI], tools=[WEATHER])
            assert caught.value.param == "tools"
            _, prompt = await asked(c, client, f'[{{"name":"weather","parameters":{PARIS}}}]', tool_choice="required")
            assert json.dumps(WEATHER) in prompt

    run(scenario())
