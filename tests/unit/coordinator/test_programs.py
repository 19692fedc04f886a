"""The programs that render chat templates and compile grammars: each is a process of its own, asked in turn, and begun
before it is needed."""

import asyncio
import json
import os
from collections import defaultdict

import psutil
import pytest

from coordinator.api import public
from coordinator.text import chat_template, program, structures
from coordinator.text.answering import MAX_ANSWERS, line
from coordinator.text.structures import MAX_KNOWN, Structures
from coordinator.text.tokenizer import read_tokenizer
from protos.inference_pb2 import ChatInput, ChatMessage, GenerateRequest, SamplingParams
from serving_core.errors import RequestError
from tests.schemas import product
from tests.scripted_nodes import cluster
from tests.tiny_models import EOS
from tests.unit.coordinator.http_kit import until
from tests.unit.coordinator.tokenizer_kit import ENOUGH, edit_config

RENDERING, COMPILING = chat_template.PROGRAM, structures.PROGRAM
SLOW = "start: A\nA: " + " & ".join(f"/(.*{chr(97 + each)}.{{{each + 5}}})*/" for each in range(12))  # minutes
ENDED = r"compiling it takes more than (0\.5 s of processor time|64\.0 MiB of memory)"  # whichever comes first
HI = [{"role": "user", "content": "hi"}]


class Processes:
    """The processes of programs that have been started since."""

    def __init__(self):
        self._others = frozenset(psutil.Process().children())

    def running(self):
        """Return the processes by the module."""
        found = defaultdict(set)
        for child in set(psutil.Process().children()) - self._others:
            try:
                found[child.cmdline()[-1]].add(child)
            except (psutil.NoSuchProcess, psutil.ZombieProcess, IndexError):
                continue
        return {module: found[module] for module in (RENDERING, COMPILING) if module in found}

    async def until_begun(self, *modules):
        await until(lambda: self.running().keys() == set(modules))
        return self.running()

    def kill(self, module):
        """End the module's process, and return when it has ended."""
        [killed] = self.running()[module]
        killed.kill()
        os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)  # its parent is to learn of it by itself

    def stop(self, module):
        """Keep the module's process from working until it may `go_on`."""
        for each in self._family(module):
            each.suspend()

    def go_on(self, module):
        for each in self._family(module):
            each.resume()

    def _family(self, module):
        """Return the module's process and its fork, which answers."""
        [process] = self.running()[module]
        return [process, *process.children()]


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """A machine that runs much else gives a question its processor time late."""
    monkeypatch.setattr(program, "CLOCK_PER_CPU_S", 200.0)


@pytest.fixture
def processes():
    return Processes()


# ---- chat templates ----

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


async def test_a_template_without_end_is_ended_and_keeps_nobody_up(folder, monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_CPU_S", 0.2)
    edit_config(folder, chat_template="{% if messages[0].content == 'loop' %}" + ENDLESS + "{% endif %}a")
    tokenizer = read_tokenizer(folder)
    looping, ready = (
        asyncio.create_task(tokenizer.encode_chat([{"role": "user", "content": content}], ENOUGH))
        for content in ("loop", "b")
    )
    num_turns = 0
    while not looping.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    assert num_turns > 1, "the event loop stood still"
    with pytest.raises(RequestError, match=r"fails: it takes more than 0\.2 s") as error:
        await looping
    assert error.value.reason == "ENGINE_ERROR"
    assert await ready == [97]


async def test_a_template_that_wants_more_memory_than_there_is_has_failed(folder):
    edit_config(folder, chat_template="{{ 'x' * 10**10 }}")
    with pytest.raises(RequestError, match="the model's chat template fails: MemoryError"):
        await read_tokenizer(folder).encode_chat(HI, ENOUGH)


async def test_a_process_that_has_ended_is_replaced(folder, processes):
    tokenizer = read_tokenizer(folder)
    expected = await tokenizer.encode_chat(HI, ENOUGH)
    processes.kill(RENDERING)
    assert await tokenizer.encode_chat(HI, ENOUGH) == expected


async def test_a_long_conversation_comes_through(folder):
    edit_config(folder, chat_template="{{ messages[0].content }}{{ messages[1].content }}")
    contents = ["ü\n" * 2**17, "\x00😀\u2028" * 2**10]  # more than a pipe holds
    messages = [{"role": "user", "content": content} for content in contents]
    assert await read_tokenizer(folder).encode_chat(messages, ENOUGH) == [*"".join(contents).encode()]


# ---- what they are told ----


async def test_programs_hold_no_secret_of_the_server(folder, tokenizer_folder, processes, monkeypatch):
    secrets = {
        "SPLITSERVE_API_KEY": "s1",
        "SPLITSERVE_ADMIN_KEY": "s2",
        "SPLITSERVE_FLEET_SECRET": "s3",
        "HF_TOKEN": "s4",
    }
    for name, value in {**secrets, "SPLITSERVE_API_KEY_FILE": "s5", "TZ": "UTC"}.items():
        monkeypatch.setenv(name, value)
    edit_config(folder, chat_template="a")
    tokenizer, structures = read_tokenizer(folder), Structures(tokenizer_folder, (EOS,))
    await tokenizer.encode_chat(HI, ENOUGH)
    await structures.grammar(SamplingParams(regex="a"))
    running = processes.running()
    assert running.keys() == {RENDERING, COMPILING}
    for [process] in running.values():
        environment = process.environ()  # of /proc
        assert environment["TZ"] == "UTC"
        assert not [name for name in environment if name.startswith("SPLITSERVE_") or name in secrets]


# ---- grammars: several at a time, and a busy machine ----


@pytest.fixture
def asked(monkeypatch):
    """Return a list of what programs are asked to compile, as it comes to them."""
    asked = []

    def noting(said):
        asked.extend([said["value"]] if "value" in said else [])
        return line(said)

    monkeypatch.setattr(program, "line", noting)
    return asked


@pytest.fixture
def grammars(tokenizer_folder):
    return Structures(tokenizer_folder, (EOS,))


async def test_who_asks_for_the_same_at_once_shares_one_compilation(grammars, asked):
    params = SamplingParams(regex="ab")
    waiting = [asyncio.create_task(grammars.grammar(params)) for _ in range(20)]
    await asyncio.sleep(0)
    waiting[0].cancel()  # whose leaving is nobody else's end
    first, *others = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(first, asyncio.CancelledError)
    assert (len(set(others)), asked) == (1, ["ab"])
    wrong = [grammars.grammar(SamplingParams(regex="(")) for _ in range(3)]
    assert {error.reason for error in await asyncio.gather(*wrong, return_exceptions=True)} == {"BAD_PARAM"}
    assert asked == ["ab", "("]


async def test_what_is_refused_is_not_tried_again(grammars, asked):
    endless, errors = SamplingParams(json_schema=json.dumps(product(30, 20))), []
    for params in (SamplingParams(regex="("), endless) * 3:
        with pytest.raises(RequestError) as error:
            await grammars.grammar(params)
        errors.append((error.value.reason, str(error.value), error.value.metadata["field"]))
    assert (len(asked), errors) == (2, errors[:2] * 3)


async def test_what_the_system_has_ended_is_tried_again(grammars, processes, monkeypatch):
    await grammars.grammar(SamplingParams(regex="a"))
    with monkeypatch.context() as patched:
        patched.setattr(program, "line", lambda said: [processes.kill(COMPILING), line(said)][1])  # as it is asked
        with pytest.raises(RequestError, match="takes more memory than the machine has"):
            await grammars.grammar(SamplingParams(regex="b"))
    assert await grammars.grammar(SamplingParams(regex="b"))


async def test_what_nobody_waits_for_any_more_is_not_compiled(grammars, processes, asked):
    await grammars.grammar(SamplingParams(regex="a"))
    processes.stop(COMPILING)
    first, left = (asyncio.create_task(grammars.grammar(SamplingParams(regex=each))) for each in ("b", "ab"))
    await until(lambda: asked[1:])
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    processes.go_on(COMPILING)
    assert await first
    assert await grammars.grammar(SamplingParams(regex="c"))
    assert asked == ["a", "b", "c"]


async def test_each_asker_has_a_turn_before_any_has_a_second(grammars, processes, asked):
    await grammars.grammar(SamplingParams(regex="a"))
    processes.stop(COMPILING)
    first = [asyncio.create_task(grammars.grammar(SamplingParams(regex=f"b{each}"), asker="ann")) for each in range(4)]
    await until(lambda: asked[1:])
    same = asyncio.create_task(grammars.grammar(SamplingParams(regex="b3"), asker="bob"))  # and waits for none of ann's
    last = asyncio.create_task(grammars.grammar(SamplingParams(regex="c")))
    await asyncio.sleep(0)
    processes.go_on(COMPILING)
    await asyncio.gather(*first, same, last)
    assert asked == ["a", "b0", "b1", "b3", "c", "b2", "b3"]


async def test_a_grammar_that_is_ended_costs_the_next_no_start(grammars, processes):
    await grammars.grammar(SamplingParams(regex="a"))
    begun = processes.running()
    for _ in range(2):
        with pytest.raises(RequestError, match=ENDED):
            await grammars.grammar(SamplingParams(grammar=SLOW))
        assert await grammars.grammar(SamplingParams(regex="b"))
    assert processes.running() == begun


async def test_a_grammar_that_takes_too_much_memory_is_refused(tokenizer_folder, monkeypatch):
    monkeypatch.setattr(structures, "MAX_BYTES", 2**22)
    grammars = Structures(tokenizer_folder, (EOS,))
    with pytest.raises(RequestError, match=r"compiling it takes more than 4\.0 MiB of memory"):
        await grammars.grammar(SamplingParams(json_schema=json.dumps({"enum": [str(each) for each in range(9000)]})))
    assert await grammars.grammar(SamplingParams(regex="a"))


async def test_a_fork_is_replaced_when_it_has_answered_enough(grammars, processes):
    for number in range(MAX_ANSWERS + 2):
        assert await grammars.grammar(SamplingParams(regex=f"a{number}"))
    assert len(processes.running()[COMPILING]) == 1


async def test_what_was_asked_for_last_is_known_longest(grammars, asked):
    for text in ["first", *map(str, range(MAX_KNOWN - 1)), "first", "new", "first", "0"]:
        await grammars.grammar(SamplingParams(regex=text))
    assert asked == ["first", *map(str, range(MAX_KNOWN - 1)), "new", "0"]


async def test_a_machine_that_is_too_busy_is_no_fault_of_the_grammar(grammars, processes, monkeypatch):
    await grammars.grammar(SamplingParams(regex="a"))
    processes.stop(COMPILING)
    with monkeypatch.context() as patched:
        patched.setattr(program, "CLOCK_PER_CPU_S", 0.1)
        with pytest.raises(RequestError, match="the machine is too busy: ") as error:
            await grammars.grammar(SamplingParams(regex="b"))
    assert error.value.reason == "QUEUE_FULL"
    assert await grammars.grammar(SamplingParams(regex="b"))


# ---- before they are needed ----


async def test_programs_are_begun_once_the_server_serves_and_answer_the_first_questions(
    tmp_path, processes, monkeypatch
):
    monkeypatch.setattr(public, "SETTLED_S", 0.0)
    monkeypatch.setattr(public, "WARM_S", 0.0)
    async with cluster(tmp_path, nodes=()) as c:
        await processes.until_begun(RENDERING)
        for name in ("p0", "d0"):
            await c.attach(name)
        begun = await processes.until_begun(RENDERING, COMPILING)
        chat = ChatInput(messages=[ChatMessage(role="user", content="hi")])
        c.stub.Generate(GenerateRequest(chat=chat, sampling_params=SamplingParams(regex="a")))
        await c.nodes["p0"].command("prefill")
        assert processes.running() == begun
