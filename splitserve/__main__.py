"""The command line: `splitserve`, or `python -m splitserve`."""

from splitserve.interrupts import end_at_once


def run() -> None:
    """Runs the command of sys.argv and exits with its code."""
    end_at_once()
    from splitserve.cli import main

    try:
        main(prog_name="splitserve")
    finally:
        end_at_once()


if __name__ == "__main__":
    run()
