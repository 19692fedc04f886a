"""What clients try again by themselves: openai's own client, with the retries that it has unless told otherwise."""

import asyncio

import pytest
from openai import DEFAULT_MAX_RETRIES, APIStatusError

from tests.scripted_nodes import begin, hand_over, run, step
from tests.tiny_models import CHAT_TEMPLATE
from tests.unit.coordinator.test_http import LENGTH
from tests.unit.coordinator.test_http_tools import HI, openai_cluster


@pytest.fixture
def template(tmp_path):
    path = tmp_path / "its.jinja"
    path.write_text(CHAT_TEMPLATE)
    return str(path)


def ask(client, **fields):
    retrying = client.with_options(max_retries=DEFAULT_MAX_RETRIES)
    return asyncio.create_task(retrying.chat.completions.create(model="m", messages=[HI], **fields))


async def statuses(c, client):
    """How many calls of chats ended with which class of status."""
    text = await client.with_options(base_url=f"http://127.0.0.1:{c.server.http_port}").get("/metrics", cast_to=str)
    lines = [line for line in text.splitlines() if line.startswith("http_requests_total") and "completions" in line]
    return {line.partition('status="')[2][:3]: float(line.rpartition(" ")[2]) for line in lines}


def test_who_has_had_its_time_does_not_come_again(tmp_path, template):
    async def scenario():
        async with openai_cluster(tmp_path, template, request_timeout_s=0.1) as (c, client):
            with pytest.raises(APIStatusError) as caught:
                await ask(client)
            assert caught.value.code == "DEADLINE_EXCEEDED"
            assert await statuses(c, client) == {"5xx": 1}

    run(scenario())


def test_an_id_that_is_live_and_an_answer_that_was_aborted_do_not_come_again(tmp_path, template):
    async def scenario():
        async with openai_cluster(tmp_path, template) as (c, client):
            first = ask(client, extra_headers={"x-request-id": "r"})
            attempt, _ = await begin(c)
            with pytest.raises(APIStatusError) as caught:
                await ask(client, extra_headers={"x-request-id": "r"})
            assert caught.value.code == "DUPLICATE_REQUEST_ID"
            await hand_over(c, attempt, "a")
            await step(c.nodes["d0"], attempt, 1, "b", LENGTH)
            await first
            assert await statuses(c, client) == {"2xx": 1, "4xx": 1}

    run(scenario())


def test_who_finds_no_node_comes_again(tmp_path, template):
    async def scenario():
        async with openai_cluster(tmp_path, template) as (c, client):
            for node in c.nodes.values():
                await node.close()
            await c.until_loads(lambda loads: not loads.nodes)
            with pytest.raises(APIStatusError) as caught:
                await ask(client)
            assert caught.value.code == "NO_PREFILL_WORKER"
            assert await statuses(c, client) == {"5xx": 1 + DEFAULT_MAX_RETRIES}

    run(scenario())
