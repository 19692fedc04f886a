"""Define the commands that change a node while the cluster serves: role and drain."""

import click

from serving_core.errors import SettingsError
from serving_core.shapes import DECODE, MIXED, PREFILL, ROLES, Shape
from splitserve.client.questions import TIMEOUT_S as REQUEST_TIMEOUT_S
from splitserve.commands.server_options import Server, operator_options
from splitserve.commands.status import TIMEOUT_S
from splitserve.commands.terminal import shape_text, stdout, waiting

NUMBER = click.IntRange(min=1, max=2**32 - 1)


@click.command()
@click.argument("node")
@click.argument("role", type=click.Choice(ROLES))
@operator_options
@click.option(
    "--prompt-tokens", type=NUMBER, help="Compute at most this many prompt tokens in a step, on a node that prefills."
)
@click.option("--slots", type=NUMBER, help="Run at most this many sequences at a time, on a node that decodes.")
@click.option(
    "--accepts-transfers/--no-accepts-transfers",
    default=True,
    show_default=True,
    help="Let a node that decodes accept KV transfers from prefill nodes.",
)
def role(
    node: str,
    role: str,
    server: Server,
    prompt_tokens: int | None,
    slots: int | None,
    accepts_transfers: bool,
) -> None:
    """Make NODE a prefill node, a decode node or a mixed node, while it serves.

    Its requests finish. Without options the node takes as much work as it can; otherwise all options of the role must
    be given. Returns when the node has confirmed the change.
    """
    to: str | Shape = role
    if prompt_tokens is not None or slots is not None or not accepts_transfers:
        to = _shape(role, prompt_tokens, slots, accepts_transfers=accepts_transfers)
    with server.client(TIMEOUT_S) as client:
        load = client.set_role(node, to)
    stdout.print(f"{load.name} is {load.role} now: {shape_text(load.shape)}", markup=False, soft_wrap=True)


def _shape(role: str, prompt_tokens: int | None, slots: int | None, *, accepts_transfers: bool) -> Shape:
    """Return the shape. Raises SettingsError when a number is missing or does not belong to the role."""
    for flag, value, roles in (
        ("--prompt-tokens", prompt_tokens, (PREFILL, MIXED)),
        ("--slots", slots, (DECODE, MIXED)),
    ):
        if (value is None) == (role in roles):
            raise SettingsError(
                f"{flag} must {'be given too' if value is None else 'not be given'} for the role {role}"
            )
    return Shape(prompt_tokens or 0, slots or 0, accepts_transfers and role != PREFILL)


# ---- `splitserve drain` ----


@click.command()
@click.argument("node", required=False)
@operator_options
@click.option(
    "--all", "is_all", is_flag=True, help="Drain the whole fleet: new calls are refused until the coordinator restarts."
)
@click.option(
    "--deadline",
    "deadline_s",
    type=click.FloatRange(min=0, min_open=True),
    default=REQUEST_TIMEOUT_S,
    show_default=True,
    help="Wait this many seconds until nothing is left; the drain continues afterwards.",
)
def drain(node: str | None, server: Server, is_all: bool, deadline_s: float) -> None:
    """Drain NODE: it gets no new requests, and its running requests migrate to other nodes. With --all drain the fleet.

    Returns when nothing is left. A second drain of the same node waits for the same end.
    """
    if is_all == (node is not None):
        raise click.UsageError("give either a NODE or --all")
    name = node or "the fleet"
    with server.client() as client, waiting(f"Asking {name} to drain") as show:
        for num_left in client.drain(node, deadline_s=deadline_s):
            show(f"{name} is draining: {num_left} {'request' if num_left == 1 else 'requests'} left")
    done = "it has no part in any request" if node else "no request is left, and new calls are refused until a restart"
    stdout.print(f"{name} is drained: {done}", markup=False, soft_wrap=True)
