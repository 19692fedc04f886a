"""The command line: `splitserve`, or `python -m splitserve`."""

import os

import serving_core.net.grpc_environment  # noqa: F401  # before gRPC
from serving_core.process.extras import end_without_base
from serving_core.process.interrupts import end_at_once, leave_to_system


def run() -> None:
    """Run the command `splitserve`, and exit with its code.

    Sets PYTHONSAFEPATH, so that neither this process nor those that it starts import from the folder that it runs in:
    `python -m` would, and a user's folder may well have an engine.py.
    """
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    run_command()


def run_command() -> None:
    """Run the command that sys.argv names, and exit with its code."""
    end_at_once()
    end_without_base()
    from splitserve.cli import main

    try:
        main(prog_name="splitserve")
    finally:
        leave_to_system()


if __name__ == "__main__":
    run_command()
