"""Grammars are compiled in a thread, one client's after the other's."""

import asyncio
import threading

import pytest

from serving_core.errors import RequestError
from serving_core.requests import Request, SamplingParams
from serving_node.decisions import CompileGrammar
from serving_node.grammar_compiler import GrammarCompiler

DEADLINE_S = 60.0


class World:
    """A compiler that does as the test says, and what it reports."""

    def __init__(self, error=None):
        self.compiled = []
        self.may_end = threading.Event()
        self.error = error
        self.num_asked = 0
        self.compiler = GrammarCompiler(self, lambda request, result: self.compiled.append((request, result)))

    def guide_of(self, grammar):
        assert self.may_end.wait(DEADLINE_S), "the test never let it end"
        if self.error is not None:
            raise self.error
        return grammar.upper()

    def ask(self, name, asker=""):
        self.num_asked += 1
        request = Request(name, 7, [1], 1, SamplingParams(max_tokens=1, grammar="g"))
        self.compiler.carry_out(CompileGrammar(request, asker))

    async def run(self):
        self.may_end.set()
        async with asyncio.timeout(DEADLINE_S):
            while len(self.compiled) < self.num_asked:
                await asyncio.sleep(0.001)
        return [(request.request_id, result) for request, result in self.compiled]


async def test_each_asker_has_a_turn_before_any_has_a_second():
    world = World()
    for number in range(3):
        world.ask(f"a{number}", asker="ann")
    world.ask("b", asker="bob")
    assert world.compiled == []
    assert await world.run() == [("a0", "G"), ("a1", "G"), ("b", "G"), ("a2", "G")]


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (RequestError("BAD_PARAM", "no grammar"), ("BAD_PARAM", "no grammar")),
        (ValueError("a secret"), ("ENGINE_ERROR", "the node cannot compile the grammar")),
    ],
)
async def test_an_error_is_reported(error, reported):
    world = World(error)
    world.ask("a")
    ((_, result),) = await world.run()
    assert (result.reason, str(result)) == reported
