"""`splitserve top`."""

import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import click
from rich.console import RenderableType
from rich.text import Text

from splitserve.client.clients import Client
from splitserve.client.errors import ClientError
from splitserve.commands.overview_view import overview_view
from splitserve.commands.server_options import Server, operator_options
from splitserve.commands.status import LEAST_WATCH_S, TIMEOUT_S
from splitserve.commands.terminal import shown, stdout

EVERY_S: Final = 1.0
MAX_KEYS: Final = 32  # read at once


@click.command()
@operator_options
@click.option("--once", is_flag=True, help="Show it once, and end.")
@click.option(
    "--every",
    "every_s",
    default=EVERY_S,
    show_default=True,
    type=click.FloatRange(min=LEAST_WATCH_S),
    metavar="SECONDS",
    help="Time from one look to the next.",
)
def top(server: Server, once: bool, every_s: float) -> None:
    """Show what is going on, live: nodes and their shapes, queues, KV cache, rates, times against limits.

    q or Ctrl-C ends it."""
    with server.client(TIMEOUT_S) as client:
        first = overview_view(client.overview())
        if once:
            stdout.print(first)
            return
        with shown(is_live=True, is_full=True) as show, _keys() as pressed:
            show(first)
            while pressed(every_s).lower() != "q":
                show(_view(client))


def _view(client: Client) -> RenderableType:
    try:
        return overview_view(client.overview())
    except ClientError as error:  # it may come back
        return Text(f"Error: {error}")


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Gives what waits so many seconds for a key: the key, or "" where none was pressed, or there is no keyboard."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    import termios  # nor is it everywhere
    import tty

    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def pressed(seconds: float) -> str:
        if not select.select([keyboard], [], [], seconds)[0]:
            return ""
        return os.read(keyboard, MAX_KEYS).decode(errors="replace")[-1:] or "q"  # the terminal is gone

    try:
        tty.setcbreak(keyboard)
        yield pressed
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _no_key(seconds: float) -> str:
    time.sleep(seconds)
    return ""
