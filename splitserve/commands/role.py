"""Commands that change a node while the cluster serves: role, drain."""

import click

from serving_core.errors import SettingsError
from serving_core.shapes import BOTH, DECODE, PREFILL, ROLES, Shape
from splitserve.client.questions import TIMEOUT_S as REQUEST_TIMEOUT_S
from splitserve.commands.server_options import Server, operator_options
from splitserve.commands.status import TIMEOUT_S
from splitserve.commands.terminal import shape_text, stdout, waiting

NUMBER = click.IntRange(min=1, max=2**32 - 1)


@click.command()
@click.argument("node")
@click.argument("role", type=click.Choice(ROLES))
@operator_options
@click.option("--prompt-tokens", type=NUMBER, help="Most tokens of prompts in one step, for a node that reads.")
@click.option("--slots", type=NUMBER, help="Most answers at a time, for a node that writes.")
@click.option(
    "--takes-handovers/--no-takes-handovers",
    default=True,
    show_default=True,
    help="Whether a node that writes takes prompts that others read.",
)
def role(
    node: str,
    role: str,
    server: Server,
    prompt_tokens: int | None,
    slots: int | None,
    takes_handovers: bool,
) -> None:
    """Make NODE prefill (it reads prompts), decode (it writes answers) or both, while it serves.

    What it has it finishes. Without further options it does as much as it can; else all that belong to the role must be
    given. Returns when the node has confirmed it."""
    to: str | Shape = role
    if prompt_tokens is not None or slots is not None or not takes_handovers:
        to = _shape(role, prompt_tokens, slots, takes_handovers=takes_handovers)
    with server.client(TIMEOUT_S) as client:
        load = client.set_role(node, to)
    stdout.print(f"{load.name} is {load.role} now: {shape_text(load.shape)}", markup=False, soft_wrap=True)


def _shape(role: str, prompt_tokens: int | None, slots: int | None, *, takes_handovers: bool) -> Shape:
    """Raises SettingsError when a number is missing, or does not belong to the role."""
    for flag, value, roles in (
        ("--prompt-tokens", prompt_tokens, (PREFILL, BOTH)),
        ("--slots", slots, (DECODE, BOTH)),
    ):
        if (value is None) == (role in roles):
            raise SettingsError(
                f"{flag} must {'be given too' if value is None else 'not be given'} for the role {role}"
            )
    return Shape(prompt_tokens or 0, slots or 0, takes_handovers and role != PREFILL)


# ---- `splitserve drain` ----


@click.command()
@click.argument("node")
@operator_options
@click.option(
    "--deadline",
    "deadline_s",
    type=click.FloatRange(min=0, min_open=True),
    default=REQUEST_TIMEOUT_S,
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
