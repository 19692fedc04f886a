"""HTTP calls are counted by endpoint, method and class of status, in words of ours alone."""

import asyncio

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from coordinator.api.http.middleware import Counting, HttpCounts


async def _fine(_):
    return Response()


async def _bad(_):
    return Response(status_code=400)


async def _broken(_):
    raise RuntimeError("a bug")


async def _stream(_):
    async def parts():
        for part in ("a", "b"):
            await asyncio.sleep(0)
            yield part

    return StreamingResponse(parts())


ROUTES = [
    Route("/v1/models/{model:path}", _fine),
    Route("/v1/stream", _stream, methods=["POST"]),
    Route("/bad", _bad),
    Route("/broken", _broken),
    Route("/health", _fine),
]


@pytest.fixture
def counted():
    counts = HttpCounts()
    app = Starlette(routes=ROUTES, middleware=[Middleware(Counting, count_call=counts.ended, routes=ROUTES)])

    async def call(*calls):
        transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://x") as client:
            for method, path in calls:
                await client.request(method, path)
        ended, seconds = counts.figures()
        assert all(value.sum > 0 for _, value in seconds.values)
        durations = {(labels["handler"], labels["method"]): sum(value.counts) for labels, value in seconds.values}
        return {tuple(labels.values()): value for labels, value in ended.values}, durations

    return call


async def test_calls_are_counted_where_they_belong(counted):
    ended, durations = await counted(("GET", "/v1/models/m"), ("GET", "/v1/models/a/b"), ("GET", "/bad"))
    assert ended == {("/v1/models/{model}", "GET", "2xx"): 2, ("/bad", "GET", "4xx"): 1}
    assert durations == {("/v1/models/{model}", "GET"): 2, ("/bad", "GET"): 1}


async def test_a_stream_counts_once_when_it_has_ended(counted):
    assert (await counted(("POST", "/v1/stream")))[0] == {("/v1/stream", "POST", "2xx"): 1}


async def test_what_breaks_is_ours(counted):
    assert (await counted(("GET", "/broken")))[0] == {("/broken", "GET", "5xx"): 1}


async def test_who_leaves_before_there_is_a_status_has_ended_the_call():
    counts = HttpCounts()

    async def nobody_is_there(_, __, ___):
        pass

    await Counting(nobody_is_there, count_call=counts.ended, routes=ROUTES)(
        {"path": "/bad", "method": "GET"}, None, None
    )
    ended, _ = counts.figures()
    assert [(labels["status"], count) for labels, count in ended.values] == [("4xx", 1)]


async def test_probes_do_not_count(counted):
    assert await counted(("GET", "/health"), ("GET", "/ready"), ("GET", "/metrics")) == ({}, {})


async def test_no_word_is_the_clients(counted):
    calls = [("BREW", "/bad"), ("GET", "/x1"), ("POST", "/x2"), ("GET", "/v1/models/"), ("GET", "/bad/../y")]
    ended, _ = await counted(*calls)
    assert ended == {
        ("/bad", "other", "4xx"): 1,
        ("/v1/models/{model}", "GET", "2xx"): 1,
        ("other", "GET", "4xx"): 2,
        ("other", "POST", "4xx"): 1,
    }
