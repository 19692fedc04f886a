"""Define the commands that run a whole cluster: up and demo."""

import asyncio
import dataclasses
import signal
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import click
from rich.markup import escape

from serving_core.flags import build, settings_command
from serving_core.process.extras import needs, require
from serving_core.process.interrupts import INTERRUPTED
from serving_core.process.run import check_folder
from splitserve.commands.terminal import report, stdout, timeline_view, waiting
from splitserve.launch.cluster import LOOPBACK, NO_HTTP, OWN, ClusterSettings, up_settings_class
from splitserve.launch.fork_server import ForkServer, preloading
from splitserve.launch.launcher import Cluster, free_port
from splitserve.launch.models import resolve
from splitserve.launch.preflight import check_public_ports, process_age_s
from splitserve.launch.vllm_nodes import check_given
from splitserve.signals import run_to_end, run_until_signal

DEMO_QUESTION = "What is the capital of France, and what is it known for?"
DEMO_MAX_TOKENS = 96


@needs("node")
def serve(values: Any) -> None:
    """Run the cluster until a signal; `values` is an instance of up_settings_class().

    Exits with code 130 after SIGINT. Raises SettingsError for settings that do not go together, ModelError when
    the model cannot be used, and LaunchError when a process does not start.
    """
    given = {field.name: getattr(values, field.name) for field in dataclasses.fields(values)}
    settings: ClusterSettings = build(ClusterSettings, given)
    check_folder()
    check_given(settings, given)
    check_public_ports(settings, given)  # before a model is downloaded
    with preloading(is_wanted=not settings.ray and settings.engine == OWN) as fork_server:
        number = _serve(settings, given, fork_server)
    report("Stopped.")
    if number is signal.SIGINT:
        sys.exit(INTERRUPTED)


def _serve(settings: ClusterSettings, given: dict[str, Any], fork_server: ForkServer | None) -> signal.Signals | None:
    """Run the cluster, and return the signal that has ended it."""
    if settings.http_port == 0:  # chosen here, so that it can be shown
        settings = dataclasses.replace(settings, http_port=free_port())
    model = resolve(settings.model, report)

    ready: list[Cluster] = []
    has_terminal = sys.stderr.isatty()
    has_hung_up = False  # SIGHUP before the cluster was ready

    def reread_api_keys() -> bool:
        """Handle SIGHUP: read the API keys again, unless the signal means that the terminal has closed."""
        nonlocal has_hung_up
        if not given["api_keys_file"] or (has_terminal and not sys.stderr.isatty()):
            return False
        has_hung_up = not ready
        for cluster in ready:
            cluster.reread_api_keys()
        return True

    async def work(fleet_host: str) -> None:
        async with Cluster(
            settings, given, model, report=report, fleet_host=fleet_host, fork_server=fork_server
        ) as cluster:
            nodes = ", ".join(f"{number} {role}" for role, number in cluster.num_nodes.items() if number)
            report(f"Serving {model.name}: {nodes}; logs: {cluster.log_dir}")
            for line in cluster.choices:
                report(line)
            await start(cluster)
            http = f", HTTP on {cluster.http_url}" if cluster.http_url else ""
            report(f"Ready: gRPC on {cluster.target}{http}. Ctrl-C stops everything.")
            ready.append(cluster)
            if has_hung_up:
                reread_api_keys()
            try:
                await cluster.watch()
            except asyncio.CancelledError:
                report(f"Stopping: running requests have {settings.drain_s:g} s to end; a second Ctrl-C ends them.")
                raise

    with _hosts(settings.ray) as fleet_host:
        return run_until_signal(work(fleet_host), reread_api_keys)


def _hosts(ray: str) -> AbstractContextManager[str]:
    """Return a context in which nodes can be started; it gives the address of the coordinator for the nodes."""
    if not ray:
        return nullcontext(LOOPBACK)
    require("ray")
    from splitserve.launch.ray_cluster import connected  # imports ray

    return connected(ray)


async def start(cluster: Cluster) -> None:
    """Start the cluster, and show on stderr which nodes are still loading. Raises as Cluster.start does."""
    with waiting("Starting") as show:
        await cluster.start(lambda missing: show(f"Loading: {', '.join(missing)}"))


up = settings_command(
    up_settings_class(),
    serve,
    name="up",
    help="Serve MODEL until Ctrl-C (exit code 130), SIGTERM or a hangup (0): all processes on this machine, or with "
    "--ray the nodes on the hosts of a Ray cluster.",
)


@click.command()
@click.argument("question", default=DEMO_QUESTION)
def demo(question: str) -> None:
    """Start a cluster with the demo model, ask QUESTION, show where the time went, and stop."""
    require("node")
    with preloading() as fork_server:
        model = resolve("", report)
        settings = ClusterSettings(grpc_port=free_port(), http_port=NO_HTTP)

        async def work() -> None:
            async with Cluster(settings, {}, model, report=report, fork_server=fork_server) as cluster:
                report(f"Starting a coordinator, a prefill node and a decode node; logs: {cluster.log_dir}")
                await start(cluster)
                await _show_answer(cluster, question)

        run_to_end(work())


async def _show_answer(cluster: Cluster, question: str) -> None:
    stdout.print(f"\n[bold]{escape(question)}[/]\n")
    first_token_after_s = 0.0
    async with cluster.client() as client:
        prompt = [{"role": "user", "content": question}]
        async for chunk in client.generate(prompt, temperature=0, max_tokens=DEMO_MAX_TOKENS):
            first_token_after_s = first_token_after_s or process_age_s()
            click.echo(chunk.text, nl=False)
            if chunk.completion is not None:
                click.echo("\n")
                stdout.print(timeline_view(chunk.completion, chunk.request_id))
    stdout.print(f"\nFirst token {first_token_after_s:.1f} s after this command was started.")
