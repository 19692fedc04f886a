"""What browsers get from the HTTP API: the page at /ui and what it asks for, and what pages of others may do."""

import asyncio
import re
from html.parser import HTMLParser

import pytest

from coordinator.api.http.page import OVERVIEW_PATH, PAGE_PATHS, ROOT_PATH
from protos import inference_pb2
from tests.scripted_nodes import run
from tests.unit.coordinator.http_kit import KEY, answer_in_steps, error_of, http_cluster, in_module_loop

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
@in_module_loop
async def test_who_probes_the_address_finds_nothing_there(client, method, accept):
    reply = await client.request(method, ROOT_PATH, headers={"accept": accept}, follow_redirects=True)
    assert (reply.status_code, reply.history) == (404, [])
    if method == "GET":
        assert reply.json()["error"]["message"] == "there is no /; there is /ui"


@in_module_loop
async def test_the_page_may_do_nothing_but_run_its_own_files_and_call_its_own_server(client):
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


@in_module_loop
async def test_the_page_brings_all_it_needs_and_never_makes_markup_of_data(client):
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


@pytest.mark.parametrize("after", ["-1", "x", "1.5", "", "9" * 21, str(2**64), "٣"])
@in_module_loop
async def test_a_number_that_is_none_is_refused(client, after):
    reply = await client.get(OVERVIEW_PATH, params={"after": after})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "after")


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
            assert (life.sequence_id, life.prompt_tokens, life.completion_tokens) == ("mine/0", len(SECRET_WORDS), 3)
            reply = await client.get(OVERVIEW_PATH, params={"after": "0"})
            [told] = reply.json()["ended"]
            assert (told["sequence_id"], told["end"], told["spans"][0]["prefill_node"]) == ("mine/0", "stop", "p0")
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
@in_module_loop
async def test_the_servers_own_page_may_call_it_under_an_address_and_localhost(client, host, origin, status):
    reply = await client.post("/tokenize", json={"prompt": "a"}, headers={"host": host, "origin": origin})
    assert reply.status_code == status


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/completions/", "/v1/completions"),
        ("/v1/tokenize", "/tokenize"),
        ("/v1", ""),
        ("/v1/audio", ""),
    ],
)
@in_module_loop
async def test_a_path_that_is_not_there_names_the_one_that_was_meant(client, path, meant):
    reply = await client.post(path, json={})
    said = f"there is no {path}" + (f"; there is {meant}" if meant else "")
    assert (reply.status_code, reply.json()["error"]["message"]) == (404, said)


# ---- pages of others ----

PAGE = {"Origin": "https://page.example"}


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "text/plain; application/json",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "json",
        "",
    ],
)
@in_module_loop
async def test_a_body_that_is_not_called_json_is_not_read(client, kind):
    body, headers = b'{"prompt": "a", "tokens": [1]}', {"Content-Type": kind} if kind else {}
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        reply = await client.post(path, content=body, headers=headers)
        assert error_of(reply) == (415, "invalid_request_error", None)
        assert "send Content-Type: application/json" in reply.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"])
@in_module_loop
async def test_a_body_that_is_called_json_is_read(client, kind):
    reply = await client.post("/tokenize", content=b'{"prompt": "a"}', headers={"Content-Type": kind})
    assert reply.json()["tokens"] == [97]


@in_module_loop
async def test_without_a_key_web_pages_are_kept_out(client):
    for origin in ("https://page.example", "null", f"http://127.0.0.1:{client.base_url.port + 1}"):
        reply = await client.post("/tokenize", json={"prompt": "a"}, headers={"Origin": origin})
        assert error_of(reply) == (403, "invalid_request_error", None)
        assert origin in reply.json()["error"]["message"]
    for preflight in (await asking_ahead(client), await client.get("/version")):
        assert not [name for name in preflight.headers if name.startswith("access-control")]
    assert (await client.get("/health", headers=PAGE)).status_code == 503


def test_with_a_key_pages_that_have_it_may_call_and_may_not_read(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path, nodes=(), api_key=KEY) as (_, client):
            headers = {**PAGE, "Authorization": f"Bearer {KEY}"}
            reply = await client.post("/tokenize", json={"prompt": "a"}, headers=headers)
            assert reply.status_code == 200
            assert "access-control-allow-origin" not in reply.headers

    run(scenario())


async def asking_ahead(client, **headers):
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    return await client.options("/v1/completions", headers={**PAGE, **asked, **headers})


@pytest.mark.parametrize(
    ("flag", "told"), [("https://other.example, https://page.example", "https://page.example"), ("*", "*")]
)
@pytest.mark.parametrize("api_key", ["", KEY])
def test_pages_of_allowed_origins_may_call_and_read(tmp_path, flag, told, api_key):
    async def scenario():
        settings = {"allowed_origins": flag, "api_key": api_key, "nodes": ()}
        async with http_cluster(tmp_path, **settings) as (_, client):
            ahead = await asking_ahead(client)  # which brings no key
            assert (ahead.status_code, ahead.headers["access-control-allow-origin"]) == (200, told)
            assert "POST" in ahead.headers["access-control-allow-methods"]
            assert ahead.headers["access-control-allow-headers"] == "authorization,content-type"
            headers = {**PAGE, "Authorization": f"Bearer {KEY}"}
            for path, status in (("/tokenize", 200), ("/v1/completions", 503)):  # errors are for pages to read too
                reply = await client.post(path, json={"prompt": "a"}, headers=headers)
                assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (status, told)
            if api_key:
                reply = await client.post("/tokenize", json={"prompt": "a"}, headers=PAGE)
                assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (401, told)

    run(scenario())


def test_pages_of_other_origins_may_not(tmp_path):
    async def scenario():
        async with http_cluster(tmp_path, nodes=(), allowed_origins="https://other.example") as (_, client):
            ahead = await asking_ahead(client)
            assert (ahead.status_code, "access-control-allow-origin" in ahead.headers) == (400, False)
            reply = await client.post("/tokenize", json={"prompt": "a"}, headers=PAGE)
            assert (reply.status_code, "access-control-allow-origin" in reply.headers) == (403, False)

    run(scenario())
