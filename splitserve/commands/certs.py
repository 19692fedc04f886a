"""Define the command `splitserve certs`."""

import shlex
from pathlib import Path
from typing import Final

import click

from splitserve.commands.terminal import stdout

DAYS: Final = 365
MOST_DAYS: Final = 36_500


@click.command()
@click.option(
    "--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Write the files to this folder."
)
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="Make the coordinator's certificate for this name or address, besides localhost and those "
    "of its present one; may be repeated.",
)
@click.option(
    "--days",
    default=DAYS,
    show_default=True,
    type=click.IntRange(1, MOST_DAYS),
    help="Make certificates valid for this many days.",
)
def certs(out: Path, hosts: tuple[str, ...], days: int) -> None:
    """Create a private CA, and certificates for the coordinator, its nodes and clients.

    A CA in the folder is kept, and signs new certificates; a running coordinator loads them by itself.
    """
    from splitserve.authority import make_certificates

    is_new = make_certificates(out, hosts, days)
    folder = shlex.quote(str(out))
    authority = f"--tls-ca {folder}/ca.crt"
    lines = [
        f"{'A new CA' if is_new else 'The CA that was there'} has signed them for {days} days. Keep {out / 'ca.key'} "
        "elsewhere.",
        f"  coordinator: --tls-cert {folder}/coordinator.crt --tls-key {folder}/coordinator.key {authority}",
        f"  nodes:       --tls-cert {folder}/node.crt --tls-key {folder}/node.key {authority}",
        f"  clients:     {authority}",
    ]
    for line in lines:
        stdout.print(line, markup=False, highlight=False, soft_wrap=True)
