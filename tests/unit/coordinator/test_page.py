"""The page at /ui, and what it asks for: who may have it, what a browser may do with it, and that no text leaks."""

import asyncio
import re
from html.parser import HTMLParser

import pytest

from coordinator.doors.http.page import OVERVIEW_PATH, PAGE_PATHS, ROOT_PATH
from protos import inference_pb2
from tests.scripted_nodes import run
from tests.unit.coordinator.test_http import KEY, answer_in_steps, error_of, http_cluster

BROWSERS = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
SECRET_WORDS = "a prompt that nobody else may read"


def test_the_page_needs_no_key_and_what_it_shows_does(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path, nodes=(), api_key=KEY) as (_, client):
            for path in PAGE_PATHS:
                assert (await client.get(path)).status_code == 200
            assert error_of(await client.get(OVERVIEW_PATH))[0] == 401
            reply = await client.get(OVERVIEW_PATH, headers={"Authorization": f"Bearer {KEY}"})
            assert (reply.status_code, reply.headers["cache-control"]) == (200, "no-store")
            assert reply.json()["served_model_name"] == "m"

    run(scenario())


def test_without_the_flag_there_is_no_page(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path, nodes=(), ui=False) as (_, client):
            for path in (*PAGE_PATHS, OVERVIEW_PATH, ROOT_PATH):
                assert (await client.get(path, headers=BROWSERS)).status_code == 404

    run(scenario())


def test_a_browser_that_opens_the_servers_address_gets_the_page(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path, nodes=(), api_key=KEY) as (_, client):
            reply = await client.get(ROOT_PATH, headers=BROWSERS, follow_redirects=True)
            assert (reply.status_code, reply.url.path) == (200, PAGE_PATHS[0])
            [led] = reply.history
            assert (led.status_code, led.headers["location"]) == (307, "ui")

    run(scenario())


@pytest.mark.parametrize("accept", ["*/*", "application/json", ""])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_who_probes_the_address_finds_nothing_there(tmp_path, method, accept):
    async def scenario():
        async with http_cluster(tmp_path, nodes=()) as (_, client):
            reply = await client.request(method, ROOT_PATH, headers={"accept": accept}, follow_redirects=True)
            assert (reply.status_code, reply.history) == (404, [])
            if method == "GET":
                assert reply.json()["error"]["message"] == "there is no /; there is /ui"

    run(scenario())


def test_the_page_may_do_nothing_but_run_its_own_files_and_call_its_own_server(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path, nodes=()) as (_, client):
            for path in PAGE_PATHS:
                headers = (await client.get(path)).headers
                policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
                assert policy == {
                    "default-src": "'none'",
                    "script-src": "'self'",
                    "style-src": "'self'",
                    "connect-src": "'self'",
                    "img-src": "data:",
                    "base-uri": "'none'",
                    "form-action": "'none'",
                    "frame-ancestors": "'none'",
                }
                assert headers["x-content-type-options"] == "nosniff"
                assert headers["referrer-policy"] == "no-referrer"

    run(scenario())


class Tags(HTMLParser):
    """What a page names, and what of it could be code or style in place."""

    def __init__(self):
        super().__init__()
        self.named, self.ids, self.labels, self.in_place = [], [], [], []

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name in ("src", "href"):
                self.named.append(value)
            elif name == "id":
                self.ids.append(value)
            elif name in ("for", "aria-labelledby"):
                self.labels.append(value)
            elif name == "style" or name.startswith("on"):
                self.in_place.append((tag, name))


def test_the_page_brings_all_it_needs_and_never_makes_markup_of_data(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path, nodes=()) as (_, client):
            page, style, script = [(await client.get(path)).text for path in PAGE_PATHS]
            tags = Tags()
            tags.feed(page)
            assert set(tags.named) == {"#chat", "data:,", "ui/page.css", "ui/page.js"}
            assert not tags.in_place
            assert len(set(tags.ids)) == len(tags.ids)
            assert set(tags.labels) <= set(tags.ids)
            assert set(re.findall(r'\$\("([^"]+)"\)', script)) <= set(tags.ids)
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(", script)
            assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", script)
            assert not re.search(r"url\(|@import", style)
            assert "prefers-color-scheme: dark" in style

    run(scenario())


@pytest.mark.parametrize("after", ["-1", "x", "1.5", "", "9" * 21, str(2**64), "٣"])
def test_a_number_that_is_none_is_refused(tmp_path, after):
    async def scenario():
        async with http_cluster(tmp_path, nodes=()) as (_, client):
            reply = await client.get(OVERVIEW_PATH, params={"after": after})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "after")

    run(scenario())


def test_lives_hold_no_text(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path) as (c, client):
            call = asyncio.create_task(
                client.post(
                    "/v1/completions",
                    json={"prompt": SECRET_WORDS, "max_tokens": 5, "user": "somebody"},
                    headers={"x-request-id": "mine"},
                )
            )
            await answer_in_steps(c)
            assert (await call).json()["choices"][0]["text"] == "ab"
            overview = inference_pb2.GetOverviewRequest(after=0)
            [life] = (await c.admin.GetOverview(overview)).ended
            assert (life.answer_id, life.prompt_tokens, life.completion_tokens) == ("mine/0", len(SECRET_WORDS), 3)
            reply = await client.get(OVERVIEW_PATH, params={"after": "0"})
            [told] = reply.json()["ended"]
            assert (told["answer_id"], told["end"], told["spans"][0]["prefill_node"]) == ("mine/0", "stop", "p0")
            assert SECRET_WORDS not in reply.text
            assert "somebody" not in reply.text
            words = set(re.findall(r'"([^"]*)"', reply.text))
            assert not {"prompt", "text", "content", "token_ids"} & words
            assert not (await client.get(OVERVIEW_PATH)).json()["ended"]

    run(scenario())


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000", 200),
        ("localhost:8000", "http://localhost:8000", 200),
        ("[::1]:8000", "http://[::1]:8000", 200),
        ("localhost:8000", "http://localhost:9000", 403),
        ("localhost:8000", "https://localhost:8000", 403),
        ("evil.example:8000", "http://evil.example:8000", 403),  # a name that was made to lead here
        ("localhost.evil.example:8000", "http://localhost.evil.example:8000", 403),
    ],
)
def test_the_servers_own_page_may_call_it_under_an_address_and_localhost(tmp_path, host, origin, status):
    async def scenario():
        async with http_cluster(tmp_path, nodes=()) as (_, client):
            reply = await client.post("/tokenize", json={"prompt": "a"}, headers={"host": host, "origin": origin})
            assert reply.status_code == status

    run(scenario())


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/completions/", "/v1/completions"),
        ("/v1/tokenize", "/tokenize"),
        ("/v1", ""),
        ("/v1/rerank", ""),
    ],
)
def test_a_path_that_is_not_there_names_the_one_that_was_meant(tmp_path, path, meant):
    async def scenario():
        async with http_cluster(tmp_path, nodes=()) as (_, client):
            reply = await client.post(path, json={})
            said = f"there is no {path}" + (f"; there is {meant}" if meant else "")
            assert (reply.status_code, reply.json()["error"]["message"]) == (404, said)

    run(scenario())
