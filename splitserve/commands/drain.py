"""`splitserve drain`."""

import click

from splitserve.client.questions import TIMEOUT_S
from splitserve.commands.server_options import Server, operator_options
from splitserve.commands.terminal import stdout, waiting


@click.command()
@click.argument("node")
@operator_options
@click.option(
    "--deadline",
    "deadline_s",
    type=click.FloatRange(min=0, min_open=True),
    default=TIMEOUT_S,
    show_default=True,
    help="Seconds to wait until nothing is left; the node drains on after them.",
)
def drain(node: str, server: Server, deadline_s: float) -> None:
    """Take the work from NODE: it gets nothing new, its running answers move to other nodes. Returns when nothing is
    left. To drain it again is to wait for the same end."""
    with server.client() as client, waiting(f"Asking {node} to drain") as show:
        for num_left in client.drain(node, deadline_s=deadline_s):
            show(f"{node} is draining: {num_left} {'request' if num_left == 1 else 'requests'} left")
    stdout.print(f"{node} is drained: it has no part in any request", markup=False, soft_wrap=True)
