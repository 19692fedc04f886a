"""A coordinator that a module shares, and stand-ins for the processes and threads of a coordinator's texts."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import pytest_asyncio

from coordinator.text import chat_template, structures, tokenizer
from coordinator.text.answering import line
from coordinator.text.compiling import Compiler
from coordinator.text.rendering import Renderer
from tests.tiny_models import write_tokenizer
from tests.unit.coordinator.http_kit import http_cluster

DEADLINE_S = 120.0
WORK = {chat_template.PROGRAM: Renderer, structures.PROGRAM: Compiler}


class ProgramHere:
    """A `Program` that does its work in this process, from and to the same lines of JSON."""

    def __init__(self, module, given, max_cpu_s, max_bytes):
        self._worker = WORK[module](**json.loads(line(given)))

    def begin(self):
        """Do nothing: no process is to be started."""

    async def ask(self, question, asker=""):
        await asyncio.sleep(0)
        return json.loads(self._worker.answer(json.loads(line(question))))


@pytest.fixture
def folder(tmp_path):
    """Return a folder of a model of which there is the byte-level tokenizer alone, for the test to change."""
    write_tokenizer(tmp_path)
    return tmp_path


@pytest.fixture
def programs_here(monkeypatch):
    """Have chat templates rendered and grammars compiled in this process: a process of its own takes 0.1 s."""
    for module in (chat_template, structures):
        monkeypatch.setattr(module, "Program", ProgramHere)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory):
    """Return an HTTP client of a coordinator without nodes, for tests that change nothing there."""
    async with http_cluster(tmp_path_factory.mktemp("model"), nodes=()) as (_, client):
        yield client


class TokenizerGate:
    """Keeps the threads of tokenizers from their work until it opens."""

    def __init__(self):
        self.num_submitted = 0
        self.num_begun = 0
        self.executors = []
        self._opened = threading.Event()

    def open(self):
        self._opened.set()

    def threads(self, num_threads, name):
        """Return an executor of so many threads, each of which waits here before it does anything."""
        self.executors.append(_GatedThreads(self, num_threads, name))
        return self.executors[-1]

    def pass_through(self, function, *args):
        self.num_begun += 1
        assert self._opened.wait(DEADLINE_S), "nobody has opened the gate"
        return function(*args)


class _GatedThreads(ThreadPoolExecutor):
    def __init__(self, gate, num_threads, name):
        super().__init__(num_threads, name)
        self._gate = gate

    def submit(self, function, /, *args):
        self._gate.num_submitted += 1
        return super().submit(self._gate.pass_through, function, *args)


@pytest.fixture
def gate(monkeypatch):
    """Give tokenizers that are made from now on threads behind a closed gate."""
    gate = TokenizerGate()
    monkeypatch.setattr(tokenizer, "ThreadPoolExecutor", gate.threads)
    yield gate
    gate.open()
