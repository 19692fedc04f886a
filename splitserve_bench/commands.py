"""Gather the commands of `splitserve bench`.

What a command measures with is imported when it runs, so that help is quick.
"""

from typing import Final

import click

from splitserve_bench.compare.command import compare_command
from splitserve_bench.engine.command import engine_command
from splitserve_bench.serve.command import serve_command
from splitserve_bench.transfer.command import transfer_command

MAX_SENTENCE_CHARS: Final = 400


class Overview(click.Group):
    """Show in the help of a command group the whole first sentence of each command, where click would cut it off."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            commands = sorted(self.commands.items())
            formatter.write_dl([(name, each.get_short_help_str(MAX_SENTENCE_CHARS)) for name, each in commands])


@click.group(cls=Overview)
def bench() -> None:
    """Measure the engine, KV transfer, a cluster, or any server."""


for command in (engine_command, transfer_command, serve_command, compare_command):
    bench.add_command(command)
