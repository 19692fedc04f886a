"""What the first conversation and the first form would wait for is begun before they come."""

import asyncio

import psutil

from coordinator.doors import public
from protos.inference_pb2 import ChatInput, ChatMessage, GenerateRequest, SamplingParams
from tests.scripted_nodes import DEADLINE_S, cluster, run

RENDERING, COMPILING = "coordinator.text.rendering", "coordinator.text.compiling"


def programs(others=frozenset()):
    """Their processes, by the module, but for these others."""
    found = {}
    for child in set(psutil.Process().children()) - others:
        try:
            found[child.cmdline()[-1]] = child.pid
        except (psutil.NoSuchProcess, psutil.ZombieProcess, IndexError):
            continue
    return {module: pid for module, pid in found.items() if module in (RENDERING, COMPILING)}


async def until_begun(others, *modules):
    async with asyncio.timeout(DEADLINE_S):
        while programs(others).keys() != set(modules):
            await asyncio.sleep(0.01)
    return programs(others)


def test_programs_are_begun_once_the_server_serves_and_answer_the_first_questions(tmp_path, monkeypatch):
    monkeypatch.setattr(public, "SETTLED_S", 0.0)
    monkeypatch.setattr(public, "WARM_S", 0.0)

    others = frozenset(psutil.Process().children())  # of other tests

    async def scenario():
        async with cluster(tmp_path, nodes=()) as c:
            await until_begun(others, RENDERING)
            for name in ("p0", "d0"):
                await c.attach(name)
            begun = await until_begun(others, RENDERING, COMPILING)
            chat = ChatInput(messages=[ChatMessage(role="user", content="hi")])
            c.stub.Generate(GenerateRequest(chat=chat, sampling_params=SamplingParams(regex="a")))
            await c.nodes["p0"].command("prefill")
            assert programs(others) == begun

    run(scenario())
