"""`make compose-demo`: the compose file on this machine's container engine. Builds the image, starts the fleet, asks
it, kills a node during an answer, cuts the network of another and gives it back, drains a third, compares every answer
with one that nothing disturbed, and takes all down again.

    python deploy/compose_demo [--tls]

Needs docker, docker compose (or docker-compose 1.29), and nothing of SplitServe on this machine. Where no registry can
be reached it makes its own base image, which takes root and debootstrap. Exit code 0: nothing was lost.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from command import Failed, say
from engine_check import compose_command
from image import build
from project import Project
from story import play


def main() -> None:
    parser = argparse.ArgumentParser(prog="compose_demo", description="Try the compose file on this machine.")
    parser.add_argument("--tls", action="store_true", help="with docker-compose.tls.yml")
    arguments = parser.parse_args()
    try:
        compose = compose_command()
        image = build()
        with tempfile.TemporaryDirectory(prefix="compose-demo-") as scratch:
            project = Project(compose, image, Path(scratch), tls=arguments.tls)
            try:
                play(project)
            finally:
                project.down()
        say("nothing was lost")
    except Failed as error:
        sys.exit(f"compose-demo: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
