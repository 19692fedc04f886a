"""A coordinator with an HTTP API, and clients of it."""

import asyncio
import contextlib
import json
from types import SimpleNamespace

import httpx2
import pytest

from tests import fleet_events as events
from tests.scripted_nodes import DEADLINE_S, begin, begin_to_write, cluster, step, transfer
from tests.tiny_models import EOS
from tests.unit.coordinator.later import openai

LENGTH, STOP = events.LENGTH, events.STOP
KEY = "key-of-the-test"
HI = {"role": "user", "content": "hi"}
JSON = {"content-type": "application/json"}
in_module_loop = pytest.mark.asyncio(loop_scope="module")  # for tests of what a module shares

# ---- httpx ----


def url_of(c):
    """Return the address of the cluster's HTTP API."""
    return f"http://127.0.0.1:{c.server.http_port}"


def plain_client(**options):
    """Return a client of servers without TLS. It does not read the machine's certificates, which takes 20 ms."""
    return httpx2.AsyncClient(timeout=DEADLINE_S, verify=False, **options)


@contextlib.asynccontextmanager
async def http_cluster(folder, nodes=("p0", "d0"), **settings):
    """Serve with scripted nodes; yield the cluster and an HTTP client of it."""
    settings = {"http_port": 0, "served_model_name": "m", **settings}
    async with cluster(folder, nodes, **settings) as c, plain_client(base_url=url_of(c)) as client:
        yield c, client


def post(client, path="/v1/completions", headers=(), **fields):
    """Begin a call."""
    body = {"prompt": "hello", "max_tokens": 5} if path == "/v1/completions" else {"messages": [HI]}
    return asyncio.create_task(client.post(path, json=body | fields, headers={"x-request-id": "r", **dict(headers)}))


def post_broken_off(client, path="/v1/completions", **fields):
    """Begin a call whose response breaks off: what has come by then, as a client sees it that counts the chunks."""

    async def read(reply, told):
        async for text in reply.aiter_text():
            told.text += text

    async def call():
        body = {"prompt": "hello", "max_tokens": 5, "stream": True}
        async with client.stream("POST", path, json=body | fields) as reply:
            told = SimpleNamespace(headers=reply.headers, text="")
            with pytest.raises(httpx2.RemoteProtocolError, match="incomplete chunked read"):
                await read(reply, told)
        return told

    return asyncio.create_task(call())


def completion_bytes(**fields):
    """Return a call of /v1/completions as it is on the wire."""
    body = json.dumps({"prompt": "hello", **fields}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
    return head.format(len(body)).encode() + body


async def until(condition):
    """Return once the condition holds."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def ended(reader):
    """Read a connection to its end, a broken one too."""
    async with asyncio.timeout(DEADLINE_S):
        with contextlib.suppress(ConnectionError):
            return await reader.read()
    return b""


def events_of(reply):
    """Return the JSON of every event, without its time; [DONE] as it stands."""
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    lines = reply.text.split("\n\n")
    assert lines.pop() == ""
    found = []
    for line in lines:
        data = line.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
        if isinstance(found[-1], dict) and "error" not in found[-1]:
            assert found[-1].pop("created") > 1_700_000_000
    return found


def choices_of(form, chunk, prompt=(1, 2)):
    """Return the choices of the events for a chunk of the first output."""
    pieces = form.pieces(0, prompt, chunk)
    return [form.text_choice(0, each) if isinstance(each, str) else each for each in pieces]


def error_of(reply):
    """Return the status, the type and the code of an error in OpenAI's form."""
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code", "reason"}
    return reply.status_code, error["type"], error["code"]


async def answer_in_steps(c):
    """Have the nodes answer ab, ended by EOS."""
    attempt = await begin_to_write(c, "a", num_cached_tokens=4)
    await step(c.nodes["d0"], attempt, 1, "b")
    end = events.sampled(attempt, 2, EOS, STOP)
    await c.nodes["d0"].send(events.step_tokens(end))


async def fail_after_a_token(c):
    """Have the decode node fail behind the first token of the next answer."""
    attempt = await begin_to_write(c, "a")
    await c.nodes["d0"].send(events.failed(attempt, "ENGINE_ERROR"))


# ---- a model that thinks and calls tools, and OpenAI's client ----

TEMPLATE = """{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{% for m in messages -%}
<|{{ m.role }}|>{{ m.content }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{{ m.tool_call_id }}
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% if think %}<think>
{% else %}{# </think> #}{% endif %}{% endif %}"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
PARIS, ROME = '{"city": "Paris"}', '{"city": "Rome"}'


def weather_call(arguments):
    """Return a call of the tool as the model writes it."""
    return f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'


BOTH = f"<think>\nHm.\n</think>\n\nLet me see.\n{weather_call(PARIS)}\n{weather_call(ROME)}"


def template_cluster(folder, template=TEMPLATE, **settings):
    """Serve with scripted nodes and this chat template."""
    folder.mkdir(exist_ok=True)
    path = folder / "mine.jinja"
    path.write_text(template)
    return cluster(folder, http_port=0, served_model_name="m", chat_template=str(path), **settings)


@contextlib.asynccontextmanager
async def openai_cluster(folder, template=TEMPLATE, **settings):
    """Serve with scripted nodes; yield the cluster and OpenAI's client of it, which tries nothing again."""
    options = {"api_key": "none", "timeout": DEADLINE_S, "max_retries": 0}
    async with template_cluster(folder, template, **settings) as c, openai.AsyncOpenAI(
        base_url=f"{url_of(c)}/v1", http_client=openai.DefaultAsyncHttpxClient(verify=False), **options
    ) as client:  # fmt: skip
        yield c, client


async def answer(c, text, finish_reason=events.STOP, logprob=None):
    """Have the nodes answer one token for each character, and one that ends it; return the prompt's text."""
    attempt, job = await begin(c)
    await transfer(c, attempt, text[0], logprob=logprob)
    ids = [*text[1:].encode(), EOS if finish_reason == events.STOP else ord("!")]
    tokens = [events.sampled(attempt, index, token_id, logprob=logprob) for index, token_id in enumerate(ids, start=1)]
    tokens[-1].finish_reason = finish_reason
    for start in range(0, len(tokens), 7):
        await c.nodes["d0"].send(events.step_tokens(*tokens[start : start + 7]))
    return bytes(token_id for token_id in job.token_ids if token_id < 256).decode()
