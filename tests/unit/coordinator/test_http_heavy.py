"""Heavy calls: the event loop goes on while they are checked, and what nobody waits for is not done."""

import asyncio
import functools
import gc
import json
import logging
import threading
import time
from contextlib import asynccontextmanager

import pytest

from coordinator.doors.http import app
from coordinator.doors.http.fields import MAX_VALUES
from coordinator.text.tokenizer import LONG_TEXT_CHARS, NUM_THREADS
from protos.inference_pb2 import GetLoadsRequest
from tests.scripted_nodes import DEADLINE_S, begin, hand_over, run, step
from tests.unit.coordinator.test_http import LENGTH, http_cluster

JSON = {"content-type": "application/json"}
MAX_STALL_S = 0.25  # of the event loop's own processor time, which other processes do not lengthen
MAX_STALL = 0.8  # of the time in which the largest body is read as JSON, on machines where that is more
MIB = 2**20


async def longest_turn_s(call):
    """The most processor time that the event loop's thread takes between two turns of a task, while a call runs."""
    longest_s = 0.0
    while not call.done():
        before_s = time.thread_time()
        await asyncio.sleep(0)
        longest_s = max(longest_s, time.thread_time() - before_s)
    return longest_s


def filled(before, item, after):
    """A body of nearly 4 MiB."""
    return before + item * ((4 * MIB - len(before) - len(after)) // len(item)) + after


HEAVY = {
    "biases": (
        "/v1/completions",
        b'{"prompt":"a","logit_bias":{' + b",".join(b'"%d":1' % token for token in range(350_000)) + b"}}",
    ),
    "messages": ("/v1/chat/completions", filled(b'{"messages":[', b'{"role":"user","content":"x"},', b"{}]}")),
    "few messages of many parts": (
        "/v1/chat/completions",
        b'{"messages":[{"role":"user","content":[' + b'{"type":"text","text":"a"},' * 10_000 + b'"a"]}]}',
    ),
    "token ids": ("/v1/completions", filled(b'{"prompt":[', b"1,", b"1]}")),
    "as many token ids as may be": ("/v1/completions", b'{"prompt":[' + b"1," * (MAX_VALUES - 1) + b"1]}"),
    "many prompts": ("/v1/completions", filled(b'{"prompt":["', b'a","', b'"]}')),
    "unknown fields": (
        "/v1/completions",
        b'{"prompt":"a",' + b",".join(b'"f%d":1' % number for number in range(60_000)) + b"}",
    ),
    "a text": ("/v1/completions", filled(b'{"prompt":"', b"a", b'"}')),
    "a text to list": ("/tokenize", filled(b'{"prompt":"', b"a", b'"}')),
    "a text to list in full": ("/tokenize", b'{"return_token_strs":true,"prompt":"' + b"a" * 2**17 + b'"}'),
    "tokens": ("/detokenize", filled(b'{"tokens":[', b"1,", b"1]}")),
}


@pytest.mark.parametrize("kind", HEAVY)
def test_no_call_keeps_the_event_loop_for_long(tmp_path, kind):
    path, body = HEAVY[kind]

    async def scenario():
        async with http_cluster(tmp_path, nodes=()) as (_, client):
            call = asyncio.create_task(client.post(path, content=body, headers=JSON))
            stall_s = await longest_turn_s(call)
            reply = await call
            assert reply.status_code in (200, 400, 503), reply.text[:200]
            assert stall_s < max_stall_s()

    gc.disable()  # what the tests before have left is not this call's
    try:
        run(scenario())
    finally:
        gc.enable()


@functools.cache
def max_stall_s():
    before_s = time.thread_time()
    json.loads(HEAVY["biases"][1])
    return max(MAX_STALL_S, MAX_STALL * (time.thread_time() - before_s))


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("/tokenize", {"prompt": "a" * (2**17 + 1)}, "prompt has at least 131073 tokens, the limit is 131072"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a" * 2**17}]}, "messages has at least 131076 tokens"),
        ("/tokenize", {"prompt": "a" * 3 * MIB}, "prompt has at least 1"),
        ("/detokenize", {"tokens": [97] * (2**17 + 1)}, "tokens has 131073 entries, the limit is 131072"),
        ("/v1/completions", {"prompt": "a" * 3 * MIB}, "the prompt has at least 24576 tokens; with one token of"),
    ],
)
def test_what_is_too_long_to_be_tokenized(tmp_path, path, fields, message):
    async def scenario():
        async with http_cluster(tmp_path) as (_, client):
            reply = await client.post(path, json=fields)
            assert reply.status_code == 400
            assert message in reply.json()["error"]["message"]

    run(scenario())


def test_what_is_as_long_as_may_be_is_tokenized_there_and_back(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path, nodes=()) as (_, client):
            text = "ab" * (app.MAX_LISTED_TOKENS // 2)
            token_ids = (await client.post("/tokenize", json={"prompt": text})).json()["tokens"]
            assert token_ids == [*text.encode()]
            assert (await client.post("/detokenize", json={"tokens": token_ids})).json()["prompt"] == text

    run(scenario())


@asynccontextmanager
async def nobody_free(tokenizer):
    """All threads for long texts have something to do meanwhile."""
    free, begun = threading.Event(), []

    def wait():
        begun.append(None)
        free.wait(2 * DEADLINE_S)

    busy = [asyncio.create_task(tokenizer._in_turn(wait)) for _ in range(NUM_THREADS)]
    try:
        while len(begun) < NUM_THREADS:
            await asyncio.sleep(0.01)
        yield
    finally:
        free.set()
        await asyncio.gather(*busy)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_who_leaves_the_queue_of_long_texts_is_not_waited_for(tmp_path, caplog, path):
    caplog.set_level(logging.DEBUG, logger="coordinator.doors.http.door")
    body = {"prompt": "a" * (LONG_TEXT_CHARS + 1), "tokens": [97] * (LONG_TEXT_CHARS + 1)}

    async def scenario():
        async with http_cluster(tmp_path, nodes=()) as (c, client):
            tokenizer = c.server._model.tokenizer
            async with nobody_free(tokenizer), asyncio.timeout(DEADLINE_S):
                call = asyncio.create_task(client.post(path, content=json.dumps(body), headers=JSON))
                while tokenizer._threads._work_queue.empty():
                    await asyncio.sleep(0.01)
                call.cancel()
                while "the client has left" not in caplog.messages:
                    await asyncio.sleep(0.01)

    run(scenario())


def test_a_text_that_waits_too_long_is_given_up_with_the_limit(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path, request_timeout_s=0.2) as (c, client), nobody_free(c.server._model.tokenizer):
            for path, what in (("/tokenize", "the result was"), ("/v1/completions", "the prompt was")):
                reply = await client.post(path, json={"prompt": "a" * (LONG_TEXT_CHARS + 1)})
                assert reply.status_code == 504
                assert reply.json()["error"]["message"] == f"{what} not ready within 0.2 s"

    run(scenario())


def test_a_grammar_that_is_not_compiled_in_time_is_not_the_tokenizers_fault(tmp_path):
    free = threading.Event()

    async def scenario():
        async with http_cluster(tmp_path, request_timeout_s=0.2) as (c, client):
            c.server._model.structures._program._thread.submit(free.wait, 2 * DEADLINE_S)
            reply = await client.post("/v1/completions", json={"prompt": "a", "structured_outputs": {"regex": "a"}})
            free.set()
            assert reply.status_code == 504
            assert reply.json()["error"]["message"] == "the prompt and the grammar were not ready within 0.2 s"

    run(scenario())


def test_no_answer_of_a_call_begins_before_its_last_prompt_is_tokenized(tmp_path):
    """Nobody would read it meanwhile."""

    async def scenario():
        async with http_cluster(tmp_path) as (c, client):
            tokenizer = c.server._model.tokenizer
            async with nobody_free(tokenizer):
                body = {"prompt": ["a", "b" * (LONG_TEXT_CHARS + 1)], "truncate_prompt_tokens": 3, "max_tokens": 2}
                call = asyncio.create_task(client.post("/v1/completions", json=body))
                while tokenizer._threads._work_queue.empty():
                    await asyncio.sleep(0.01)
                assert (await c.stub.GetLoads(GetLoadsRequest())).num_live_requests == 0
            attempts = [(await begin(c))[0] for _ in range(2)]
            for attempt in attempts:
                await hand_over(c, attempt, "a")
                await step(c.nodes["d0"], attempt, 1, "b", LENGTH)
            assert [choice["text"] for choice in (await call).json()["choices"]] == ["ab", "ab"]

    run(scenario())
