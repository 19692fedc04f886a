"""Define `splitserve top`."""

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
from splitserve.commands.overview_view import OverviewView, Scroll
from splitserve.commands.server_options import Server, operator_options
from splitserve.commands.status import LEAST_WATCH_S, TIMEOUT_S
from splitserve.commands.terminal import shown, stdout

EVERY_S: Final = 1.0
MAX_BYTES: Final = 1024  # of keys, read at once
STEPS: Final = {"\x1b[A": -1, "\x1b[B": 1, "\x1b[5~": -10, "\x1b[6~": 10}  # sequences of the arrow and page keys


@click.command()
@operator_options
@click.option("--once", is_flag=True, help="Show one overview and exit.")
@click.option(
    "--every",
    "every_s",
    default=EVERY_S,
    show_default=True,
    type=click.FloatRange(min=LEAST_WATCH_S),
    metavar="SECONDS",
    help="Update the overview after this many seconds.",
)
def top(server: Server, once: bool, every_s: float) -> None:
    """Show nodes, queues, KV cache usage, rates and SLO attainment, live.

    q or Ctrl-C exits. When the screen is too low for all nodes, arrow and page keys scroll.
    """
    scroll = Scroll()
    with server.client(TIMEOUT_S) as client:
        first = client.overview()
        if once:
            stdout.print(OverviewView(first))
            return
        with shown(is_live=True, is_full=True) as show, _keys() as pressed:
            show(OverviewView(first, scroll))
            while not (keys := pressed(every_s)).lower().endswith("q"):
                scroll.first += sum(step * keys.count(key) for key, step in STEPS.items())
                show(_view(client, scroll))


def _view(client: Client, scroll: Scroll) -> RenderableType:
    try:
        return OverviewView(client.overview(), scroll)
    except ClientError as error:  # the server may come back
        return Text(f"Error: {error}")


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits a number of seconds for keys.

    The function returns the keys' characters, or "" when none was pressed or there is no keyboard.
    """
    if not sys.stdin.isatty():
        yield _no_key
        return
    import termios  # not available on every system
    import tty

    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def pressed(seconds: float) -> str:
        if not select.select([keyboard], [], [], seconds)[0]:
            return ""
        return os.read(keyboard, MAX_BYTES).decode(errors="replace") or "q"  # the terminal is gone

    try:
        tty.setcbreak(keyboard)
        yield pressed
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _no_key(seconds: float) -> str:
    time.sleep(seconds)
    return ""
