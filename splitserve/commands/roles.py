"""Define the commands that run one process, for clusters over several machines: coordinator, api-server, prefill,
decode, mixed."""

import os
from typing import Any

import click

from serving_core.flags import environment_of, settings_command
from serving_core.process.extras import require
from splitserve.commands.engines import ROLES, engine_option
from splitserve.commands.terminal import report
from splitserve.launch.cluster import API_SERVER, COORDINATOR, DECODE, MIXED, PREFILL, Room, command_of, flat, replaced
from splitserve.launch.models import resolve


def role_command(room: Room, help: str) -> click.Command:
    """Return a command that finds MODEL and then replaces this process by `python -m PACKAGE` with the same flags."""

    def become(settings: Any) -> None:
        if room not in (COORDINATOR, API_SERVER):
            require("node")
        values = flat(settings)
        model = resolve(values["model"], report)
        settings = replaced(
            settings, model=str(model.folder), served_model_name=values.get("served_model_name") or model.name
        )
        command = command_of(room, settings)
        os.execve(command[0], command, environment_of(settings))

    command = settings_command(room.settings_class, become, name=room.role, help=help)
    if room.role in ROLES:
        command.params.append(engine_option())
    return command


coordinator = role_command(
    COORDINATOR, "Run the coordinator: the public gRPC service, and the fleet port that nodes dial."
)
api_server = role_command(
    API_SERVER, "Run one API server by itself: its calls wait for the coordinator or its standby, and go on there."
)
prefill = role_command(PREFILL, "Run one prefill node, attached to a coordinator.")
decode = role_command(DECODE, "Run one decode node, attached to a coordinator.")
mixed = role_command(MIXED, "Run one node that prefills and decodes, attached to a coordinator.")
