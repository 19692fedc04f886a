"""`python -m splitserve`: the command line."""

from splitserve.cli import main

main(prog_name="splitserve")
