"""What fields do to the responses of the HTTP door, and its smaller endpoints, with nodes that the test speaks for."""

import json

import pytest

from tests import fleet_events as events
from tests.scripted_nodes import begin, hand_over, run, step
from tests.tiny_models import BOS
from tests.unit.coordinator.test_http import HI, events_of, http_cluster, post

LENGTH = events.LENGTH
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
            attempt, _ = await begin(c)
            await hand_over(c, attempt, "a", num_cached_tokens=4)
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
                await hand_over(c, attempt, text[0], num_cached_tokens=num_cached)
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
            await hand_over(c, attempt, "a")
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
