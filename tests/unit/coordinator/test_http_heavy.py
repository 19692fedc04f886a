"""Heavy calls: the event loop goes on while they are checked, and what nobody waits for is not done."""

import asyncio
import functools
import gc
import json
import logging
import time

import pytest

from coordinator.api.http import app
from coordinator.api.http.body import MAX_VALUES
from coordinator.text import structures
from coordinator.text.program import Program
from coordinator.text.tokenizer import LONG_TEXT_CHARS, NUM_THREADS
from protos.inference_pb2 import GetLoadsRequest
from tests.effort import effort
from tests.scripted_nodes import begin, begin_to_write, first_message, run, step, transfer
from tests.tiny_models import VOCAB_SIZE
from tests.unit.coordinator.http_kit import JSON, LENGTH, http_cluster, in_module_loop, post, until

MAX_STALL_S = 0.25  # of the event loop's own processor time, which other processes do not lengthen
MAX_STALL = 0.8  # of the time in which the largest body is read as JSON, on machines where that is more
MIB = 2**20


async def longest_turn_s(call):
    """The most processor time that the event loop's thread takes between two turns of a task, which it may have each
    millisecond, while a call runs."""
    longest_s = 0.0
    while not call.done():
        before_s = time.thread_time()
        await asyncio.sleep(0.001)
        longest_s = max(longest_s, time.thread_time() - before_s)
    return longest_s


def filled(before, item, after):
    """A body of nearly 4 MiB."""
    return before + item * ((4 * MIB - len(before) - len(after)) // len(item)) + after


def numbered(before, item, count, after):
    """A body with so many items, each of which has its number."""
    return before + b",".join(item % number for number in range(count)) + after


@functools.cache
def biases():
    return numbered(b'{"prompt":"a","logit_bias":{', b'"%d":1', 350_000, b"}}")


HEAVY = {  # by what is much: whom it is sent to, and what makes the body, which takes its time
    "biases": ("/v1/completions", biases),
    "messages": (
        "/v1/chat/completions",
        lambda: filled(b'{"messages":[', b'{"role":"user","content":"x"},', b"{}]}"),
    ),
    "few messages of many parts": (
        "/v1/chat/completions",
        lambda: b'{"messages":[{"role":"user","content":[' + b'{"type":"text","text":"a"},' * 10_000 + b'"a"]}]}',
    ),
    "token ids": ("/v1/completions", lambda: filled(b'{"prompt":[', b"1,", b"1]}")),
    "as many token ids as may be": ("/v1/completions", lambda: b'{"prompt":[' + b"1," * (MAX_VALUES - 1) + b"1]}"),
    "many prompts": ("/v1/completions", lambda: filled(b'{"prompt":["', b'a","', b'"]}')),
    "unknown fields": ("/v1/completions", lambda: numbered(b'{"prompt":"a",', b'"f%d":1', 60_000, b"}")),
    "a text": ("/v1/completions", lambda: filled(b'{"prompt":"', b"a", b'"}')),
    "a text to list": ("/tokenize", lambda: filled(b'{"prompt":"', b"a", b'"}')),
    "a text to list in full": ("/tokenize", lambda: b'{"return_token_strs":true,"prompt":"' + b"a" * 2**17 + b'"}'),
    "tokens": ("/detokenize", lambda: filled(b'{"tokens":[', b"1,", b"1]}")),
}


@pytest.mark.parametrize("kind", HEAVY)
@in_module_loop
async def test_no_call_keeps_the_event_loop_for_long(client, kind):
    path, make_body = HEAVY[kind]
    gc.disable()  # what the tests before have left is not this call's
    try:
        call = asyncio.create_task(client.post(path, content=make_body(), headers=JSON))
        stall_s = await longest_turn_s(call)
    finally:
        gc.enable()
    reply = await call
    assert reply.status_code in (200, 400, 503), reply.text[:200]
    assert stall_s < max_stall_s()


@functools.cache
def max_stall_s():
    body = biases()
    before_s = time.thread_time()
    json.loads(body)
    return max(MAX_STALL_S, MAX_STALL * (time.thread_time() - before_s))


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("/tokenize", {"prompt": "a" * (2**17 + 1)}, "prompt has at least 131073 tokens, the limit is 131072"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a" * 2**17}]}, "messages has at least 131076 tokens"),
        ("/tokenize", {"prompt": "a" * 3 * MIB}, "prompt has at least 1"),
        ("/detokenize", {"tokens": [97] * (2**17 + 1)}, "tokens has 131073 entries, the limit is 131072"),
        ("/v1/completions", {"prompt": "a" * 3 * MIB}, "the prompt has at least 24576 tokens; with one output token"),
    ],
)
@in_module_loop
async def test_what_is_too_long_to_be_tokenized(client, path, fields, message):
    reply = await client.post(path, json=fields)
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]


@in_module_loop
async def test_a_token_that_there_is_not_has_no_text(client):
    assert (await client.post("/detokenize", json={"tokens": [97, VOCAB_SIZE - 1]})).status_code == 200
    reply = await client.post("/detokenize", json={"tokens": [97, VOCAB_SIZE]})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tokens")
    assert f"tokens has token id {VOCAB_SIZE}; the vocabulary ends at" in reply.json()["error"]["message"]


@in_module_loop
async def test_what_is_as_long_as_may_be_is_tokenized_there_and_back(client):
    text = "ab" * (app.MAX_LISTED_TOKENS // 2)
    token_ids = (await client.post("/tokenize", json={"prompt": text})).json()["tokens"]
    assert token_ids == [*text.encode()]
    assert (await client.post("/detokenize", json={"tokens": token_ids})).json()["prompt"] == text


async def keep_threads_busy(gate):
    """Give all threads for long texts something to do; the gate keeps them there."""
    [threads] = gate.executors
    for _ in range(NUM_THREADS):
        threads.submit(int)
    await until(lambda: gate.num_begun == NUM_THREADS)


NUM_STREAMS, LONG_PROMPT = effort(8, 8, 64), "ab" * 16_000


async def start_streams(c):
    """Start streams, each with its first token; return their calls and attempts."""
    streams = {}
    for number in range(NUM_STREAMS):
        call = c.generate("hi", request_id=str(number), max_tokens=50)
        attempt = await begin_to_write(c)
        assert (await first_message(call)).chunk.token_ids == [ord("a")]
        streams[call] = attempt
    return streams


async def write_on(c, streams, index):
    """Have every stream get one more token."""
    for attempt in streams.values():
        await step(c.nodes["d0"], attempt, index, "b")
    for call in streams:
        assert (await first_message(call)).chunk.token_ids == [ord("b")]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_streams_go_on_while_a_prompt_of_32k_tokens_is_encoded(tmp_path, gate, path):
    async def scenario():
        async with http_cluster(tmp_path, nodes=(), max_model_len=40_000) as (c, client):
            for name in ("p0", "d0"):
                await c.attach(name, max_model_len=40_000, num_blocks=20_000)
            streams = await start_streams(c)
            call = post(client, path, **FIELDS_OF[path])
            await until(lambda: gate.num_submitted > 0)  # the tokenizer has the text, and gets nowhere
            await write_on(c, streams, 1)
            assert not call.done()
            gate.open()
            begun = asyncio.create_task(begin(c))
            stall_s = await longest_turn_s(begun)
            attempt, job = begun.result()
            assert len(job.token_ids) >= len(LONG_PROMPT)
            await write_on(c, streams, 2)
            await transfer(c, attempt, "a")
            await step(c.nodes["d0"], attempt, 1, "b", LENGTH)
            assert (await call).status_code == 200
            assert stall_s < MAX_STALL_S

    run(scenario())


FIELDS_OF = {
    "/v1/completions": {"prompt": LONG_PROMPT},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG_PROMPT}]},
}


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_who_leaves_the_queue_of_long_texts_is_not_waited_for(tmp_path, caplog, gate, path):
    caplog.set_level(logging.DEBUG, logger="coordinator.api.http.middleware")
    body = {"prompt": "a" * (LONG_TEXT_CHARS + 1), "tokens": [97] * (LONG_TEXT_CHARS + 1)}

    async def scenario():
        async with http_cluster(tmp_path, nodes=()) as (_, client):
            await keep_threads_busy(gate)
            call = asyncio.create_task(client.post(path, content=json.dumps(body), headers=JSON))
            await until(lambda: gate.num_submitted > NUM_THREADS)
            call.cancel()
            await until(lambda: "the client has left" in caplog.messages)
            gate.open()

    run(scenario())


def test_a_text_that_waits_too_long_is_given_up_with_the_limit(tmp_path, gate):
    async def scenario():
        async with http_cluster(tmp_path, request_timeout_s=0.2) as (_, client):
            await keep_threads_busy(gate)
            for path, what in (("/tokenize", "the result was"), ("/v1/completions", "the prompt was")):
                reply = await client.post(path, json={"prompt": "a" * (LONG_TEXT_CHARS + 1)})
                assert reply.status_code == 504
                assert reply.json()["error"]["message"] == f"{what} not ready within 0.2 s"
            assert gate.num_begun == NUM_THREADS
            gate.open()

    run(scenario())


class NeverDone(Program):
    async def ask(self, question, asker=""):
        await asyncio.Event().wait()


def test_a_grammar_that_is_not_compiled_in_time_is_not_the_tokenizers_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(structures, "Program", NeverDone)

    async def scenario():
        async with http_cluster(tmp_path, request_timeout_s=0.2) as (_, client):
            reply = await client.post("/v1/completions", json={"prompt": "a", "structured_outputs": {"regex": "a"}})
            assert reply.status_code == 504
            assert reply.json()["error"]["message"] == "the prompt and the grammar were not ready within 0.2 s"

    run(scenario())


def test_no_answer_of_a_call_begins_before_its_last_prompt_is_tokenized(tmp_path, gate):
    """Nobody would read it meanwhile."""

    async def scenario():
        async with http_cluster(tmp_path) as (c, client):
            body = {"prompt": ["a", "b" * (LONG_TEXT_CHARS + 1)], "truncate_prompt_tokens": 3, "max_tokens": 2}
            call = asyncio.create_task(client.post("/v1/completions", json=body))
            await until(lambda: gate.num_begun == 1)
            assert (await c.stub.GetLoads(GetLoadsRequest())).num_live_requests == 0
            gate.open()
            attempts = [(await begin(c))[0] for _ in range(2)]
            for attempt in attempts:
                await transfer(c, attempt, "a")
                await step(c.nodes["d0"], attempt, 1, "b", LENGTH)
            assert [choice["text"] for choice in (await call).json()["choices"]] == ["ab", "ab"]

    run(scenario())
