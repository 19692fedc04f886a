"""Define the command line. Each command's code is imported when the command runs, so that help is quick."""

import importlib
import importlib.metadata
import os
from typing import Any, Final

import click

from serving_core.errors import ModelError, SettingsError, SplitServeError
from serving_core.process.interrupts import INTERRUPTED, raise_again
from serving_core.version import VERSION
from splitserve.commands.engines import with_engine
from splitserve.commands.flag_hints import explained, hinted, hinted_command

# Name: module and attribute of the click command, and the line that the overview shows. Without a module it is found by
# its entry point: nothing imports the benchmarks.
COMMANDS: Final = {
    "up": ("splitserve.commands.serve:up", "Serve a model on this machine: coordinator, prefill and decode nodes."),
    "demo": ("splitserve.commands.serve:demo", "Start a cluster, ask a question, show where the time went, stop."),
    "generate": ("splitserve.commands.ask:generate", "Generate the output for one prompt."),
    "chat": ("splitserve.commands.ask:chat", "Talk with the model."),
    "run-batch": (
        "splitserve.commands.run_batch:run_batch",
        "Run the requests of a file in the format of OpenAI's batches.",
    ),
    "status": ("splitserve.commands.status:status", "Show the model, the nodes and their load."),
    "top": ("splitserve.commands.top:top", "Show live nodes, queues, rates, and times against SLOs."),
    "role": ("splitserve.commands.role:role", "Make a node prefill, decode or mixed while the cluster serves."),
    "drain": ("splitserve.commands.role:drain", "Drain a node while the cluster serves."),
    "certs": ("splitserve.commands.certs:certs", "Make a private CA and a certificate for each role."),
    "coordinator": ("splitserve.commands.roles:coordinator", "Run the coordinator alone."),
    "api-server": ("splitserve.commands.roles:api_server", "Run one API server by itself."),
    "prefill": ("splitserve.commands.roles:prefill", "Run one prefill node."),
    "decode": ("splitserve.commands.roles:decode", "Run one decode node."),
    "mixed": ("splitserve.commands.roles:mixed", "Run one node that prefills and decodes."),
    "doctor": ("", "Measure from which lengths on this machine gains by splitting prefill and decode; or check bits."),
    "simulate": ("", "Simulate a load on a fleet, with the real schedulers and placement."),
    "plan": ("", "Find the nodes that serve the most requests within their SLO, by simulation."),
    "bench": ("", "Measure the engine, a cluster, or any server."),
}
ENTRY_POINTS: Final = "splitserve.commands"


class LazyGroup(click.Group):
    """Import each command when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        if module:
            command = getattr(importlib.import_module(module), attribute)
        else:
            found = importlib.metadata.entry_points(group=ENTRY_POINTS, name=cmd_name)
            if not found:
                raise SettingsError(f"the installation is older than its sources and lacks {cmd_name}: make setup")
            command = next(iter(found)).load()
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the name, the command and its arguments, after importing the command.

        From here on Ctrl-C raises KeyboardInterrupt, so that the command can clean up.
        """
        try:
            name, command, rest = super().resolve_command(ctx, args)
        except click.UsageError as error:
            raise hinted_command(error, args[0]) from error
        raise_again()
        if name is not None and command is not None:
            command, rest = with_engine(name, command, rest)
        from splitserve.commands.variables import unknown_variables

        if line := unknown_variables(os.environ):
            click.echo(line, err=True)
        return name, command, rest

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, and report errors that SplitServe raises on purpose in one sentence.

        The reason of a server's error, as in its API, stands behind the sentence. A SplitServeError exits with code 2
        for wrong settings or an unusable model, else 1; Ctrl-C with code 130. An unknown flag or value gets a hint at
        our name for it, if there is one; a wrong value is reported with the place where it was set.
        """
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            raise hinted(error) from error
        except click.BadParameter as error:
            raise explained(error) from error
        except KeyboardInterrupt:
            click.echo(err=True)
            ctx.exit(INTERRUPTED)
        except SplitServeError as error:
            reason = getattr(error, "reason", "")
            click.echo(f"Error: {error}" + (f" ({reason})" if reason else ""), err=True)
            ctx.exit(2 if isinstance(error, SettingsError | ModelError) else 1)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION)
def main() -> None:
    """SplitServe: one language model served by prefill nodes and decode nodes."""
