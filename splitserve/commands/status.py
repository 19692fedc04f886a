"""Define `splitserve status`."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import click
from rich.console import RenderableType
from rich.text import Text

from splitserve.client.answers import Loads, ModelInfo, ServerInfo
from splitserve.client.clients import Client
from splitserve.client.errors import ClientError
from splitserve.commands.server_options import Server, server_options
from splitserve.commands.terminal import report, shown, status_view

TIMEOUT_S: Final = 10.0
WATCH_S: Final = 2.0
LEAST_WATCH_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State of a server at one time. `status --json` prints it unchanged, so its keys are stable."""

    model: ModelInfo
    server: ServerInfo
    loads: Loads

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    def to_view(self) -> RenderableType:
        return status_view(self.model, self.server, self.loads)


Show = Callable[[Snapshot | ClientError], None]


@click.command()
@server_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: model, server and loads, as in protobuf.")
@click.option(
    "--watch",
    "every_s",
    is_flag=False,
    flag_value=WATCH_S,
    type=click.FloatRange(min=LEAST_WATCH_S),
    metavar="[SECONDS]",
    help=f"Repeat every SECONDS, {WATCH_S:g} by default, until Ctrl-C.",
)
def status(server: Server, as_json: bool, every_s: float | None) -> None:
    """Show the model, the nodes of a cluster and their load."""
    with server.client(TIMEOUT_S) as client:
        first = _ask(client)
        with _json_lines() if as_json else _views(is_live=every_s is not None) as show:
            show(first)
            while every_s is not None:
                time.sleep(every_s)
                try:
                    show(_ask(client))
                except ClientError as error:  # the server may come back
                    show(error)


def _ask(client: Client) -> Snapshot:
    return Snapshot(client.model_info(), client.server_info(), client.loads())


@contextmanager
def _json_lines() -> Iterator[Show]:
    def show(news: Snapshot | ClientError) -> None:
        if isinstance(news, Snapshot):
            click.echo(news.to_json())
        else:
            report(f"Error: {news}")

    yield show


@contextmanager
def _views(*, is_live: bool) -> Iterator[Show]:
    def view_of(news: Snapshot | ClientError) -> RenderableType:
        return news.to_view() if isinstance(news, Snapshot) else Text(f"Error: {news}")

    with shown(is_live=is_live) as show:
        yield lambda news: show(view_of(news))
