"""A real gRPC server whose answers the test writes, and who asks it: the commands and the client."""

import pytest
from click.testing import CliRunner

from splitserve import Client
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


@pytest.fixture
def asked():
    """What a question gives. `Client` asks by way of `AsyncClient`, so both are tried."""

    def ask(target, prompt="hi", **options):
        with Client(target) as client:
            return list(client.generate(prompt, **options))

    return ask
