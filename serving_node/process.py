"""Start a node process: flags, checks, CPUs. Torch-free until the node is served."""

import gc
from functools import partial

import click

from serving_core.errors import RankLost, SettingsError
from serving_core.flags import settings_command
from serving_core.process.cpus import divide_cpus, parse_cpus, pin
from serving_core.process.extras import require
from serving_core.process.run import run_process
from serving_node.ranks.leading import die
from serving_node.ranks.processes import check_world, start_followers, started_rank
from serving_node.settings import PACKAGES, NodeSettings, check_network


def node_command(role: str) -> click.Command:
    """Return the command line of a node that begins in this role."""
    help = f"Run one node that begins as {role}."
    return settings_command(NodeSettings, partial(run_node, role), name=role, help=help)


def run_node(role: str, settings: NodeSettings) -> None:
    """Run one rank of a node that begins in this role until SIGTERM, pinned to its share of the CPUs.

    Rank 0 starts the other ranks, unless all were started together, as torchrun does. Raises click.UsageError for a
    wrong RANK in the environment.
    """
    try:
        size, rank = settings.engine.num_ranks, started_rank() or 0
    except SettingsError as error:
        raise click.UsageError(str(error)) from error
    node_name = settings.link.name_for(role)
    name = f"{node_name}.{rank}" if rank else node_name

    async def ranked() -> None:
        require("node")
        check_world(settings.engine)
        check_network(settings)
        from serving_core.node.needs import check_model  # needs packages of the extra `node`
        from serving_node.draft_model import check_draft_model

        check_model(settings.engine)
        check_draft_model(settings)
        if started_rank() is None and size > 1:
            start_followers(PACKAGES[role], settings, node_name)
        if cpus := settings.engine.cpus:
            pin(divide_cpus(parse_cpus(cpus), size)[rank])
        gc.disable()
        from serving_node.serve import serve_node  # imports torch, which counts the allowed cores

        gc.freeze()  # imported modules stay: no need to scan them in each collection
        gc.enable()
        try:
            await serve_node(settings, role, name)
        except RankLost as error:
            die(error)

    run_process(role, name, settings.link.log, ranked)
