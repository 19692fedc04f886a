"""A tokenizer that drops the blank before a text's first word: an answer that goes on with its prompt keeps it."""

import pytest

from tests import fleet_events as events
from tests import scripted_nodes
from tests.scripted_nodes import begin, run
from tests.tiny_models import write_fake_model
from tests.unit.coordinator.test_detokenizer import TOKENIZERS
from tests.unit.coordinator.test_http import http_cluster, post

LLAMA = TOKENIZERS["llama"]
HELLO, WORLD = LLAMA.token_to_id("▁hello"), LLAMA.token_to_id("world")
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def served(tmp_path, monkeypatch):
    def write(folder):
        write_fake_model(folder)
        LLAMA.save(str(folder / "tokenizer.json"))

    monkeypatch.setattr(scripted_nodes, "write_fake_model", write)
    (tmp_path / "own.jinja").write_text(TEMPLATE)
    return http_cluster(tmp_path, chat_template=str(tmp_path / "own.jinja"))


async def answered(c):
    """▁hello."""
    attempt, _ = await begin(c)
    await c.nodes["p0"].send(events.first_token(events.sampled(attempt, 0, HELLO, events.LENGTH, logprob=-0.5)))
    await c.nodes["d0"].answer_cancel(attempt)


@pytest.mark.parametrize(
    ("fields", "text", "offsets"),
    [
        ({}, " hello", None),
        ({"logprobs": 0}, " hello", [0]),
        ({"logprobs": 0, "echo": True}, "hello hello", [0, 5]),
    ],
)
def test_a_completion(served, fields, text, offsets):
    async def scenario():
        async with served as (c, client):
            call = post(client, prompt=[HELLO], max_tokens=1, **fields)
            await answered(c)
            [choice] = (await call).json()["choices"]
            assert choice["text"] == text
            assert offsets is None or choice["logprobs"]["text_offset"] == offsets

    run(scenario())


@pytest.mark.parametrize(("goes_on", "text"), [(False, "hello"), (True, " hello")])
def test_a_chat_begins_a_text_of_its_own_unless_it_continues_a_message(served, goes_on, text):
    async def scenario():
        async with served as (c, client):
            messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "world"}]
            fields = {"continue_final_message": True, "add_generation_prompt": False} if goes_on else {}
            call = post(client, "/v1/chat/completions", messages=messages, max_tokens=1, **fields)
            await answered(c)
            [choice] = (await call).json()["choices"]
            assert choice["message"]["content"] == text

    run(scenario())
