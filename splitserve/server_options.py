"""--server and --api-key, which mean the same wherever a command asks a running server."""

from collections.abc import Callable
from typing import Any, Final

import click

SERVER_VARIABLE: Final = "SPLITSERVE_SERVER"

Command = Callable[..., Any]

api_key_option: Final = click.option(
    "--api-key", envvar="SPLITSERVE_API_KEY", show_envvar=True, help="Secret that the server asks for."
)


def server_options(command: Command) -> Command:
    """Both, for SplitServe's own gRPC."""
    return click.option(
        "--server",
        envvar=SERVER_VARIABLE,
        show_envvar=True,
        default="localhost:50051",
        show_default=True,
        help="HOST:PORT to ask.",
    )(api_key_option(command))
