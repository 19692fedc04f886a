"""A real gRPC server whose answers the test writes, and who asks it: the commands and both clients."""

import asyncio

import pytest
from click.testing import CliRunner

from splitserve import AsyncClient, Client
from splitserve.cli import main
from tests.scripted_server import Script, serving


@pytest.fixture
def script():
    return Script()


@pytest.fixture
def target(script):
    with serving(script) as target:
        yield target


@pytest.fixture
def run(script):
    """Runs commands that ask the server."""
    with serving(script) as target:
        yield lambda *arguments, **options: CliRunner().invoke(
            main, [*arguments], env={"SPLITSERVE_SERVER": target}, **options
        )


def ask(target, prompt="hi", **options):
    with Client(target) as client:
        return list(client.generate(prompt, **options))


async def ask_async(target, prompt="hi", **options):
    async with AsyncClient(target) as client:
        return [item async for item in client.generate(prompt, **options)]


@pytest.fixture(params=["sync", "async"])
def asked(request):
    """The same question through either client."""
    if request.param == "sync":
        return ask
    return lambda *args, **options: asyncio.run(ask_async(*args, **options))
