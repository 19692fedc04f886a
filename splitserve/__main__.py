"""The command line: `splitserve`, or `python -m splitserve`."""

import os

from serving_core.interrupts import end_at_once, leave_to_system

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read when grpc is imported: it tells of connections that idled away


def run() -> None:
    """Runs the command of sys.argv and exits with its code."""
    end_at_once()
    from splitserve.cli import main

    try:
        main(prog_name="splitserve")
    finally:
        leave_to_system()


if __name__ == "__main__":
    run()
