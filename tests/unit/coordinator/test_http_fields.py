"""What fields do to the responses of the HTTP API, its smaller endpoints, and logprobs of prompts in OpenAI's
form (echo) and in vLLM's (prompt_logprobs)."""

import json

import pytest

from coordinator.api.http.logprobs import Echo, echo_of
from coordinator.api.http.requests import MAX_SCORED_PROMPTS
from coordinator.api.validation import MAX_PROMPT_LOGPROBS
from coordinator.text.tokenizer import read_tokenizer
from protos import inference_pb2
from tests import fleet_events as events
from tests.scripted_nodes import begin, begin_to_write, run, step, transfer
from tests.tiny_models import BOS, EOS, USER, write_fake_model
from tests.unit.coordinator.http_kit import HI, LENGTH, events_of, http_cluster, in_module_loop, post

pytestmark = pytest.mark.usefixtures("programs_here")

USAGE = {"include_usage": True, "continuous_usage_stats": True}


def usage(num_completion_tokens, num_prompt_tokens=6, num_cached_tokens=4):
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


def test_usage_in_every_event_begins_with_no_tokens_and_all_that_was_cached(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path) as (c, client):
            call = post(client, "/v1/chat/completions", stream=True, stream_options=USAGE)
            attempt = await begin_to_write(c, "a", num_cached_tokens=4)
            await step(c.nodes["d0"], attempt, 1, "b", LENGTH)
            opening, *others, done = events_of(await call)
            assert (opening["usage"], done) == (usage(0), "[DONE]")
            counts = [event["usage"]["completion_tokens"] for event in others]
            assert (counts == sorted(counts), counts[0] in (1, 2), counts[-1]) == (True, True, 2)
            assert [event["usage"] for event in others] == list(map(usage, counts))

    run(scenario())


def test_a_batch_has_one_answer_for_each_conversation(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path) as (c, client):
            messages = [[HI], [{"role": "user", "content": "hello"}]]
            call = post(client, "/v1/chat/completions/batch", messages=messages, max_tokens=2)
            first, job = await begin(c)
            second, other = await begin(c)
            assert (len(job.token_ids), len(other.token_ids)) == (6, 9)
            for attempt, text, num_cached in ((second, "xy", 3), (first, "ab", 2)):
                await transfer(c, attempt, text[0], num_cached_tokens=num_cached)
                await step(c.nodes["d0"], attempt, 1, text[1], LENGTH)
            reply = (await call).json()
            assert [(each["index"], each["message"]["content"]) for each in reply["choices"]] == [(0, "ab"), (1, "xy")]
            assert (reply["object"], reply["usage"]) == ("chat.completion", usage(4, 15, 5))

    run(scenario())


def test_keys_without_a_value_are_null_as_in_vllm(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path) as (c, client):
            call = post(client, max_tokens=1)
            attempt, _ = await begin(c)
            token = events.sampled(attempt, 0, ord("x"), LENGTH)
            await c.nodes["p0"].send(events.first_token(token))
            await c.nodes["d0"].answer_cancel(attempt)
            [choice] = (await call).json()["choices"]
            nulls = ("logprobs", "prompt_logprobs", "prompt_token_ids", "stop_reason", "token_ids")
            assert choice == {"index": 0, "text": "x", "finish_reason": "length", **dict.fromkeys(nulls)}

    run(scenario())


@pytest.mark.parametrize(
    ("prompt", "most", "kept"),
    [("hello", 2, "lo"), ("a" * 995 + "hello", -1, "a" * 994 + "hello"), ([*b"hello"], 3, "llo")],
)
def test_nodes_are_given_what_is_kept_of_a_prompt_and_the_tokens_that_are_allowed(tmp_path, prompt, most, kept):
    async def scenario():
        async with http_cluster(tmp_path) as (c, client):
            fields = {"truncate_prompt_tokens": most, "allowed_token_ids": [120, 121]}
            call = post(client, prompt=prompt, max_tokens=1, **fields)
            attempt, job = await begin(c)
            assert bytes(job.token_ids).decode() == kept
            assert [*job.sampling_params.allowed_token_ids] == [120, 121]
            await c.nodes["p0"].send(events.first_token(events.sampled(attempt, 0, ord("x"), LENGTH)))
            await c.nodes["d0"].answer_cancel(attempt)
            assert (await call).json()["usage"]["prompt_tokens"] == len(kept)

    run(scenario())


def test_nodes_are_given_the_tokens_of_bad_words(tmp_path):
    """As they are split at a beginning and behind a space: here, byte by byte."""

    async def scenario():
        async with http_cluster(tmp_path) as (c, client):
            call = post(client, max_tokens=1, bad_words=["ab", " ab", "é"])
            attempt, job = await begin(c)
            assert [bytes(run.input_ids) for run in job.sampling_params.bad_tokens] == [
                b"ab",
                b" ab",
                b"\xc3\xa9",
                b" \xc3\xa9",
            ]
            await c.nodes["p0"].send(events.first_token(events.sampled(attempt, 0, ord("x"), LENGTH)))
            await c.nodes["d0"].answer_cancel(attempt)
            assert (await call).status_code == 200

    run(scenario())


def test_a_request_is_named_by_its_header_or_else_in_its_body(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path) as (c, client):
            for header, name in (("r", "r"), ("", "mine")):
                call = post(client, headers={"x-request-id": header}, request_id="mine", max_tokens=1)
                attempt, _ = await begin(c)
                assert attempt.request_id.startswith(f"{name}/")
                await c.nodes["p0"].send(events.first_token(events.sampled(attempt, 0, ord("x"), LENGTH)))
                await c.nodes["d0"].answer_cancel(attempt)
                assert (await call).json()["id"] == f"cmpl-{name}"
            reply = await post(client, headers={"x-request-id": ""}, request_id="no name")
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "request_id")

    run(scenario())


def test_the_load_is_the_number_of_answers_under_way(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path) as (c, client):
            assert (await client.get("/load")).json() == {"server_load": 0}
            call = post(client)
            attempt, _ = await begin(c)
            assert (await client.get("/load")).json() == {"server_load": 1}
            await transfer(c, attempt, "a")
            await step(c.nodes["d0"], attempt, 1, "b", LENGTH)
            await call
            assert (await client.get("/load")).json() == {"server_load": 0}

    run(scenario())


def test_what_the_tokenizer_is_without_places_of_files(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path, nodes=()) as (_, client):
            told = (await client.get("/tokenizer_info")).json()
            config = json.loads((tmp_path / "tokenizer_config.json").read_text())
            assert told["chat_template"] == config["chat_template"]
            assert (told["tokenizer_class"], told["bos_token"]) == ("PreTrainedTokenizerFast", config["bos_token"])
            tokenized = await client.post("/tokenize", json={"messages": [HI], "return_token_strs": True})
            assert tokenized.json()["tokens"][0] == BOS
            assert tokenized.json()["token_strs"][0] == config["bos_token"]

    run(scenario())


# ---- logprobs of prompts ----

TOP = [{"token_id": ord("e"), "logprob": -0.1}, {"token_id": ord("a"), "logprob": -3.0}]
SCORES = [{"token_id": ord("e"), "logprob": -0.1, "top": TOP}, {"token_id": ord("y"), "logprob": -9.5, "top": TOP}]


async def answered(c, **logprobs):
    """The one answer, x, to a prompt with these scores."""
    attempt, job = await begin(c)
    token = events.sampled(attempt, 0, ord("x"), LENGTH, prompt_logprobs=SCORES, **logprobs)
    await c.nodes["p0"].send(events.first_token(token))
    await c.nodes["d0"].answer_cancel(attempt)
    return job.sampling_params


def test_echo_puts_the_prompt_before_the_answer_with_its_logprobs(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path) as (c, client):
            call = post(client, prompt="hey", echo=True, logprobs=2, max_tokens=1)
            asked = await answered(c, logprob=-0.5, top=[{"token_id": ord("x"), "logprob": -0.5}])
            assert (asked.logprobs, asked.prompt_logprobs) == (2, 2)
            reply = (await call).json()
            [choice] = reply["choices"]
            assert choice["text"] == "heyx"
            top = {"e": -0.1, "a": -3.0}
            assert choice["logprobs"] == {
                "tokens": ["h", "e", "y", "x"],
                "token_logprobs": [None, pytest.approx(-0.1), -9.5, -0.5],
                "top_logprobs": [None, pytest.approx(top), pytest.approx(top | {"y": -9.5}), {"x": -0.5}],
                "text_offset": [0, 1, 2, 3],
            }
            assert choice["prompt_logprobs"] is None
            assert reply["usage"]["completion_tokens"] == 1

    run(scenario())


CHAT = "<|user|>hé"  # one token, and three bytes


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "fields", "echoed", "offsets"),
    [
        (CHAT, {}, CHAT, [0, 8, 9, 9]),
        ([USER, *b"hy", EOS], {}, "<|user|>hy<|eos|>", [0, 8, 9, 10]),
        (CHAT, {"truncate_prompt_tokens": 3}, "hé", [0, 1, 1]),
    ],
)
def test_echo_is_what_was_sent_with_its_special_tokens(tmp_path, prompt, fields, echoed, offsets, stream):
    """And the text behind it is the answer's."""

    async def scenario():
        async with http_cluster(tmp_path) as (c, client):
            call = post(client, prompt=prompt, echo=True, logprobs=0, max_tokens=1, stream=stream, **fields)
            attempt, job = await begin(c)
            scores = [{"token_id": token_id, "logprob": -1.0} for token_id in job.token_ids[1:]]
            token = events.sampled(attempt, 0, ord("x"), LENGTH, prompt_logprobs=scores, logprob=-0.5)
            await c.nodes["p0"].send(events.first_token(token))
            await c.nodes["d0"].answer_cancel(attempt)
            choice = (events_of(await call)[0] if stream else (await call).json())["choices"][0]
            assert choice["text"] == echoed + "x"
            assert choice["logprobs"]["text_offset"] == [*offsets, len(echoed)]

    run(scenario())


def test_tokens_around_a_text_have_no_characters_of_its_echo(tmp_path):
    tokenizer = read_tokenizer(write_fake_model(tmp_path))
    detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
    assert echo_of([BOS, *b"hey", EOS], detokenizer, "hey") == Echo("hey", [0, 0, 1, 2, 3])


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_but_the_scores(tmp_path, stream):
    async def scenario():
        async with http_cluster(tmp_path) as (c, client):
            usage = {"stream_options": {"include_usage": True}} if stream else {}
            call = post(client, prompt="hey", echo=True, logprobs=0, max_tokens=0, stream=stream, **usage)
            await answered(c, logprob=-0.5)
            if stream:
                first, last, usage, _ = events_of(await call)
                [choice], [end], used = first["choices"], last["choices"], usage["usage"]
            else:
                reply = (await call).json()
                [choice], used = reply["choices"], reply["usage"]
                end = choice
            assert (choice["text"], choice["logprobs"]["tokens"]) == ("hey", ["h", "e", "y"])
            assert end["finish_reason"] == "length"
            assert (used["prompt_tokens"], used["completion_tokens"]) == (3, 0)

    run(scenario())


def test_scores_that_were_aborted_say_so(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path) as (c, client):
            call = post(client, prompt="hey", echo=True, logprobs=0, max_tokens=0)
            attempt, _ = await begin(c)
            assert list((await c.stub.Abort(inference_pb2.AbortRequest(request_ids=["r"]))).aborted) == ["r"]
            for node in c.nodes.values():
                await node.answer_cancel(attempt)
            [choice] = (await call).json()["choices"]
            assert choice["finish_reason"] == "abort"

    run(scenario())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_prompt_logprobs_are_a_list_by_token_id(tmp_path, path):
    async def scenario():
        async with http_cluster(tmp_path) as (c, client):
            call = post(client, path, prompt_logprobs=2, max_tokens=1)
            asked = await answered(c)
            assert asked.prompt_logprobs == 2
            assert not asked.HasField("logprobs")
            reply = (await call).json()
            [choice] = reply["choices"]
            assert choice["logprobs"] is None
            e = {"logprob": pytest.approx(-0.1), "rank": 1, "decoded_token": "e"}
            a = {"logprob": -3.0, "rank": 2, "decoded_token": "a"}
            y = {"logprob": -9.5, "rank": None, "decoded_token": "y"}
            listed = (choice if path == "/v1/completions" else reply)["prompt_logprobs"]
            assert listed == [None, {"101": e, "97": a}, {"121": y, "101": e, "97": a}]

    run(scenario())


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (
            "/v1/completions",
            {"prompt_logprobs": 1, "stream": True},
            "prompt_logprobs is not supported in a stream",
        ),
        ("/v1/completions", {"prompt_logprobs": -1}, "prompt_logprobs (-1) are those of 260 tokens, the limit is 20"),
        ("/v1/completions", {"prompt_logprobs": 21}, "prompt_logprobs must be within [0, 20], not 21"),
        (
            "/v1/completions",
            {"prompt": ["a"] * (MAX_SCORED_PROMPTS + 1), "prompt_logprobs": 0},
            f"prompt has {MAX_SCORED_PROMPTS + 1} prompts; with their logprobs the limit is {MAX_SCORED_PROMPTS}",
        ),
        (
            "/v1/completions",
            {"prompt": [7] * 900, "prompt_logprobs": 20, "n": 2},
            f"prompt_logprobs (20) of 900 tokens in 2 sequences are 37800 logprobs, the limit is {MAX_PROMPT_LOGPROBS}",
        ),
    ],
)
@in_module_loop
async def test_what_is_refused(client, path, fields, message):
    body = {"max_tokens": 1} | ({"prompt": "hey"} if path == "/v1/completions" else {"messages": [HI]})
    reply = await client.post(path, json=body | fields)
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, message)
