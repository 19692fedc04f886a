"""Define --server, the keys and TLS flags, common to all commands that call a running server."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import click

from serving_core.flags import ENV_PREFIX, FILE, secret_file_option, secret_from
from serving_core.net.tls import TlsFiles

if TYPE_CHECKING:  # imported when a command runs, so that --help is fast
    from splitserve.client.clients import Client

SERVER_VARIABLE: Final = "SPLITSERVE_SERVER"

Command = Callable[..., Any]


def api_key_option(command: Command) -> Command:
    """Add --api-key and --api-key-file to a command, which gets `api_key`, None without a key."""
    return _secret_option(command, "api_key", "Show this secret to the server.")


def _secret_option(command: Command, secret: str, help: str) -> Command:
    """Add a flag for a secret and a flag for its file; the command gets the secret by its name."""

    @functools.wraps(command)
    def with_secret(**values: Any) -> Any:
        given = secret_from(secret, values.pop(secret), values.pop(secret + FILE))
        return command(**values, **{secret: given})

    flag = f"--{secret.replace('_', '-')}"
    asking = click.option(flag, envvar=ENV_PREFIX + secret.upper(), show_envvar=True, help=help)(with_secret)
    asking.__dict__["__click_params__"].append(secret_file_option(secret))  # as click's own decorators do
    return asking


def tls_options(command: Command) -> Command:
    """Add --tls-ca, --tls-cert and --tls-key to a command, which gets three paths, empty if not given."""
    options = (
        ("--tls-ca", "Verify the server's certificate by this CA (PEM); implies TLS."),
        ("--tls-cert", "Show this certificate (PEM) to a server that asks clients for one."),
        ("--tls-key", "Use this private key of --tls-cert (PEM)."),
    )
    for name, text in reversed(options):
        variable = f"SPLITSERVE_{name.removeprefix('--').replace('-', '_').upper()}"
        command = click.option(name, envvar=variable, default="", help=text)(command)
    return command


@dataclass(frozen=True, slots=True)
class Server:
    """The address of a running server, with the key and TLS files for it."""

    target: str
    api_key: str | None
    tls: TlsFiles

    def client(self, timeout_s: float | None = None) -> "Client":
        """Return a new client, which the caller closes.

        `timeout_s` is the deadline of its calls, by default TIMEOUT_S.
        """
        from splitserve.client.clients import Client
        from splitserve.client.questions import TIMEOUT_S

        return Client(
            self.target,
            api_key=self.api_key,
            timeout_s=TIMEOUT_S if timeout_s is None else timeout_s,
            tls_ca=self.tls.ca,
            tls_cert=self.tls.cert,
            tls_key=self.tls.key,
        )


def server_options(command: Command) -> Command:
    """Add all options of a gRPC server to a command, which gets them as one `server`, a Server."""

    @functools.wraps(command)
    def asking(*, server: str, api_key: str | None, tls_ca: str, tls_cert: str, tls_key: str, **others: Any) -> Any:
        return command(server=Server(server, api_key, TlsFiles(tls_cert, tls_key, tls_ca)), **others)

    return click.option(
        "--server",
        envvar=SERVER_VARIABLE,
        show_envvar=True,
        default="localhost:50051",
        show_default=True,
        help="Ask the server at this address: HOST:PORT, or https://HOST:PORT.",
    )(api_key_option(tls_options(asking)))


def operator_options(command: Command) -> Command:
    """Add the options of `server_options`, --admin-key and --admin-key-file to a command.

    The command gets them as one `server`, a Server; its `api_key` is the admin key if one is given.
    """

    @functools.wraps(command)
    def asking(*, server: Server, admin_key: str | None, **others: Any) -> Any:
        return command(server=replace(server, api_key=admin_key or server.api_key), **others)

    return server_options(_secret_option(asking, "admin_key", "Show this secret of operators to the server."))
