"""The page at /ui in a real browser, at a real cluster: an answer streams, survives the death of the node that writes
it, and its picture shows how; the node comes back."""

import asyncio
import contextlib
import http.client
import json
import os
import signal
import time

import psutil
import pytest
from tokenizers import Tokenizer

from tests.scripted_nodes import cluster, run
from tests.system.browser import EXECUTABLE, browser
from tests.system.cluster import Child, free_port, wait_until
from tests.system.oracle import fake_answer
from tests.tiny_models import ASSISTANT, BOS, EOS, USER, write_fake_model
from tests.unit.coordinator.http_kit import answer, template_cluster

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium is installed (Debian: apt-get install chromium)"),
]

START_DEADLINE_S = 240.0
DEADLINE_S = 240.0
NUM_TOKENS = 256  # what the page asks for
STEP_S = 0.06
TEXT = "document.querySelector('.message.assistant').textContent"
NODES = "[...document.querySelectorAll('#nodes th')].map((name) => name.textContent)"
ALL_NODES = ["decode-0", "decode-1", "prefill-0"]


def prompt_of(question):
    return [BOS, USER, *question.encode(), EOS, ASSISTANT]


QUESTION = next(  # whose answer is as long as can be
    question
    for question in (f"What is {number}?" for number in range(1000))
    if EOS not in fake_answer(prompt_of(question), NUM_TOKENS)
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = write_fake_model(tmp_path_factory.mktemp("model") / "fake", step_s=STEP_S)
    (folder / "generation_config.json").write_text('{"do_sample": false}')
    return folder


@pytest.fixture
def up(model, tmp_path):
    """Starts `splitserve up`; what it serves at /ui has this address."""
    port, started = free_port(), []

    def start(api_servers=1, **env):
        flags = {
            "grpc_port": free_port(),
            "http_port": port,
            "decode": 2,
            "api_server_count": api_servers,
            "log_dir": tmp_path / "logs",
        }
        child = Child("up", "splitserve", "up", str(model), flags=flags, log=tmp_path / "log", env=env)
        started.append(child)
        wait_until(lambda: "Ready" in child.output() or not child.is_running, "it serves", START_DEADLINE_S)
        assert child.is_running, child.output()
        return child, f"http://127.0.0.1:{port}"

    yield start
    for child in started:
        assert child.stop() == 0, child.output()


def pid_of(up, node):
    """Of a node's process among those that `splitserve up` has started."""
    [found] = [
        process.pid for process in psutil.Process(up.process.pid).children(recursive=True) if process.name() == node
    ]
    return found


def overviews(up, url, api_servers):
    """What the page is told by each of so many API servers; the kernel gives each connection to one of them."""
    address = url.removeprefix("http://")
    told, end_s = {}, time.monotonic() + DEADLINE_S
    while len(told) < api_servers:
        assert time.monotonic() < end_s, f"only {len(told)} of {api_servers} API servers have had a connection"
        with contextlib.closing(http.client.HTTPConnection(address, timeout=30)) as connection:
            connection.request("GET", "/ui/overview?after=0")
            answer = json.loads(connection.getresponse().read())
            told[taker(up, connection.sock.getsockname())] = answer
    return list(told.values())


def taker(up, client):
    [found] = [
        process.pid
        for process in psutil.Process(up.process.pid).children(recursive=True)
        if any("coordinator" in word for word in process.cmdline())
        and any(each.raddr == client for each in process.net_connections("tcp"))
    ]
    return found


def say(page, text):
    page.ask("document.getElementById('question').focus()")
    page.write(text)
    page.press("Enter")


@pytest.mark.parametrize("api_servers", [1, 2])
def test_a_message_streams_and_survives_the_node_that_writes_its_answer(up, model, api_servers):
    child, url = up(api_servers)
    with browser() as page:
        page.open(url)  # from which it is led to the page
        page.until(f"{NODES}.length === 3")
        assert page.ask(NODES) == ALL_NODES
        say(page, QUESTION)
        lengths = [page.until(f"{TEXT}.length > {least} && {TEXT}.length") for least in (5, 15, 25)]
        assert lengths == sorted(set(lengths))
        assert page.ask("document.getElementById('send').disabled")
        told = overviews(child, url, api_servers)
        assert [sorted(node["load"]["name"] for node in each["nodes"]) for each in told] == [ALL_NODES] * api_servers
        [writer] = {life["spans"][-1]["decode_node"] for each in told for life in each["live"]}
        assert all(each["live"] for each in told)  # whichever of them has the stream
        os.kill(pid_of(child, writer), signal.SIGKILL)
        page.until(f"!{NODES}.includes({writer!r})")
        page.until(f"{NODES}.includes({writer!r})")  # it has come back
        page.until("!document.getElementById('send').disabled")
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        assert page.ask(TEXT) == tokenizer.decode(fake_answer(prompt_of(QUESTION), NUM_TOKENS))
        # Where its seconds went: from the reader to one writer, and again from a reader to another one.
        facts = page.until("document.querySelector('.spent[data-end=length] .facts').textContent")
        assert "restarts 1" in facts
        assert page.ask("document.querySelectorAll('.spent .joint.restart').length") == 1
        way = page.until("document.querySelector('#requests td:last-child').textContent")
        assert way.startswith(f"prefill-0 → {writer} → prefill-0 → ")
        # Each life can be chosen by keyboard.
        page.ask("document.querySelector('#requests button').focus()")
        page.press("Enter")
        page.until("document.querySelector('#request svg') !== null")
        assert not page.problems


def test_answers_of_one_id_have_a_row_each(up):
    """As of a client that asks again."""
    _, url = up()
    rows = "[...document.querySelectorAll('#requests tr')].map((row) => row.dataset.sequence)"
    with browser() as page:
        page.open(f"{url}/ui")
        page.until(f"{NODES}.length === 3")
        for number in range(2):
            complete(url, "same")
            page.until(f"{rows}.length === {number + 1}")
        complete(url, "another")  # the page has asked again, more than once, when it shows that
        page.until(f"{rows}.length >= 3")
        assert sorted(page.ask(rows)) == ["another/0", "same/0", "same/0"]
        assert not page.problems


def test_nodes_and_answers_whose_names_differ_at_their_ends_are_told_apart(tmp_path):
    """As pods are, and the answers of one call."""
    names = [f"splitserve-node-of-a-fleet-7d9c6b8f5-{end}" for end in ("k9w4d", "x2lqz")]
    shown = {
        "nodes": NODES,
        "channels": "[...document.querySelectorAll('#picture .node')].map((each) => each.firstChild.data)",
        "answers": "[...document.querySelectorAll('#requests button')].map((each) => each.textContent)",
    }

    def looked_at(url):
        with browser() as page:
            page.open(f"{url}/ui")
            page.until(f"{shown['answers']}.length === 2 && {NODES}.length === 2")
            return {what: page.ask(expression) for what, expression in shown.items()}

    async def scenario():
        async with cluster(tmp_path, nodes=(), http_port=0) as c:
            for name in names:
                await c.attach(name, role="mixed")
            call = c.generate(request_id="an-id-that-a-client-has-made-up", n=2)
            seen = await asyncio.to_thread(looked_at, f"http://127.0.0.1:{c.server.http_port}")
            call.cancel()
        assert [name[-6:] for name in seen["nodes"]] == [name[-6:] for name in seen["channels"]] == ["-k9w4d", "-x2lqz"]
        assert sorted(answer[-2:] for answer in seen["answers"]) == ["/0", "/1"]

    run(scenario())


def test_code_is_shown_as_code_and_a_system_prompt_goes_before_the_conversation(tmp_path):
    text = "So:\n```python\nprint(`1`)\n\n```py\n```\nor ```x``` and\n  ``y``\n```"
    shown = "[...document.querySelectorAll('.message.assistant {0}')].map((each) => each.textContent)"

    def talk(url):
        with browser() as page:
            page.open(f"{url}/ui")
            page.until(f"{NODES}.length === 2")
            page.ask("document.getElementById('system').value = 'Be brief.'")
            say(page, "hi")
            page.until("document.querySelector('.message.assistant') && !document.getElementById('send').disabled")
            assert not page.problems
            return page.ask(TEXT), page.ask(shown.format("pre > code"))

    async def scenario():
        async with template_cluster(tmp_path) as c:
            talking = asyncio.create_task(asyncio.to_thread(talk, f"http://127.0.0.1:{c.server.http_port}"))
            prompt = await answer(c, text)
            told, code = await talking
        assert prompt == "<|system|>Be brief.hi"
        assert code == ["print(`1`)\n\n```py\n"]
        assert told == "So:\nprint(`1`)\n\n```py\nor ```x``` and\n  ``y``\n```"

    run(scenario())


def complete(url, request_id):
    with contextlib.closing(http.client.HTTPConnection(url.removeprefix("http://"), timeout=DEADLINE_S)) as connection:
        headers = {"x-request-id": request_id, "content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "a", "max_tokens": 2}), headers)
        assert connection.getresponse().status == 200


def test_the_page_asks_for_the_key_and_keeps_it_in_its_tab_alone(up):
    key = "the-key-of-this-test"
    _, url = up(SPLITSERVE_API_KEY=key)
    with browser() as page:
        page.open(f"{url}/ui", is_dark=True)
        page.until("document.getElementById('key-dialog').open")
        assert not page.ask(NODES)
        page.ask("document.getElementById('key').focus()")
        page.write("another")
        page.press("Enter")
        page.until("document.getElementById('key-problem').textContent.includes('does not know')")
        page.ask("document.getElementById('key').focus()")
        page.write(key)
        page.press("Enter")
        page.until(f"{NODES}.length === 3")
        say(page, QUESTION)
        page.until(f"{TEXT}.length > 5")
        assert page.ask("Object.values(sessionStorage)") == [key]
        assert page.ask("localStorage.length + document.cookie.length") == 0
        page.ask("document.getElementById('stop').click()")
        page.until("!document.getElementById('send').disabled")
        page.until("document.querySelector('.spent[data-end=abort]') !== null")
