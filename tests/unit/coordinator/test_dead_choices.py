"""What becomes of the answers of one call when one of them fails at what it was asked for, over gRPC and HTTP."""

import json

import pytest

from protos import inference_pb2
from tests import fleet_events as events
from tests.scripted_nodes import begin, cluster, read_to_end, refusal_of, run
from tests.unit.coordinator.http_kit import error_of, events_of, http_cluster, post, post_broken_off

LENGTH, ABORT = events.LENGTH, inference_pb2.FINISH_REASON_ABORT
WHY = "the grammar goes no further after 1 tokens"


async def fail(c, attempt, letter):
    """Have an answer fail behind its first token."""
    await c.nodes["p0"].send(events.first_token(events.sampled(attempt, 0, ord(letter))))
    assert (await c.nodes["d0"].command("begun")).attempt == attempt
    await c.nodes["d0"].send(events.failed(attempt, "BAD_PARAM", WHY))
    await c.nodes["p0"].answer_cancel(attempt)


async def end_well(c, attempt, letter):
    """Have an answer end with its first token."""
    await c.nodes["p0"].send(events.first_token(events.sampled(attempt, 0, ord(letter), LENGTH)))
    await c.nodes["d0"].answer_cancel(attempt)


@pytest.mark.parametrize("fails_first", [True, False])
def test_the_others_go_on(tmp_path, fails_first):
    async def scenario():
        async with cluster(tmp_path) as c:
            call = c.generate(n=2, max_tokens=5, seed=5)
            (dead, _), (good, _) = await begin(c), await begin(c)
            if fails_first:
                await fail(c, dead, "a")
                await end_well(c, good, "b")
            else:
                await end_well(c, good, "b")
                await fail(c, dead, "a")
            told = await read_to_end(call)
            ends = {each.index: each.complete for each in told if each.HasField("complete")}
            assert {each.index: each.chunk.text for each in told if each.HasField("chunk")} == {0: "a", 1: "b"}
            assert (ends[0].finish_reason, ends[0].error, ends[0].completion_tokens) == (ABORT, WHY, 1)
            assert (ends[1].finish_reason, ends[1].error) == (LENGTH, "")
            await c.until_nothing_is_live()

    run(scenario())


def test_a_call_of_which_all_fail_fails(tmp_path):
    async def scenario():
        async with cluster(tmp_path) as c:
            call = c.generate(n=2, max_tokens=5, seed=5)
            for letter, (attempt, _) in zip("ab", [await begin(c), await begin(c)], strict=True):
                await fail(c, attempt, letter)
            _, info, message = await refusal_of(call)
            assert (info.reason, message) == ("BAD_PARAM", WHY)

    run(scenario())


@pytest.mark.parametrize("stream", [True, False])
def test_the_choice_of_an_http_response_says_why(tmp_path, stream):
    async def scenario():
        async with http_cluster(tmp_path) as (c, client):
            call = post(client, n=2, seed=5, stream=stream)
            (dead, _), (good, _) = await begin(c), await begin(c)
            await fail(c, dead, "a")
            await end_well(c, good, "b")
            reply = await call
            assert reply.status_code == 200
            bodies = [each for each in events_of(reply) if each != "[DONE]"] if stream else [reply.json()]
            choices = [each for body in bodies for each in body["choices"] if each["finish_reason"] is not None]
            told = {each["index"]: (each["finish_reason"], each.get("error")) for each in choices}
            assert told == {0: ("abort", {"message": WHY}), 1: ("length", None)}

    run(scenario())


def test_one_answer_alone_is_an_error(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path) as (c, client):
            call = post(client)
            await fail(c, (await begin(c))[0], "a")
            assert error_of(await call) == (400, "invalid_request_error", "BAD_PARAM")
            call = post_broken_off(client)
            await fail(c, (await begin(c))[0], "a")
            error = json.loads((await call).text.split("data: ")[-1])["error"]
            assert (error["message"], error["code"]) == (WHY, "BAD_PARAM")

    run(scenario())
