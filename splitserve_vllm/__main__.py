"""Run a node with vLLM: `python -m splitserve_vllm prefill|decode|mixed MODEL [FLAG]... [-- VLLM_FLAG...]`."""

import sys

import click

from serving_core.shapes import ROLES
from splitserve_vllm.process import node_command

if __name__ == "__main__":
    commands = {role: node_command(role) for role in ROLES}
    click.Group(commands=commands, help=sys.modules[__name__].__doc__)()
