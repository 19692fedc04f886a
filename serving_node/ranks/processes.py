"""Determine the rank of this process, and start the other ranks.

The ranks of a node find each other as torchrun's do: by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the
environment. Without them the process is rank 0 and starts the followers on this machine.
"""

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import Any, Final

from serving_core.errors import SettingsError
from serving_core.flags import environment_of, to_argv
from serving_core.process.interrupts import INTERRUPTED
from serving_core.settings import EngineSettings
from serving_core.sharding import check_num_ranks, ranks_text
from serving_node.ranks.leading import die

LOOPBACK: Final = "127.0.0.1"

_held: Final[list[socket.socket]] = []


def started_rank() -> int | None:
    """Return the rank that RANK in the environment gives this process; None if it is not set.

    Raises SettingsError if it is no number.
    """
    rank = os.environ.get("RANK")
    if rank is not None and not rank.isdecimal():
        raise SettingsError(f"RANK must be a number, not {rank!r:.20}")
    return None if rank is None else int(rank)


def is_first_here() -> bool:
    """Return whether this process opens the ports that a machine has once: its LOCAL_RANK is 0 or not set."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def check_world(engine: EngineSettings) -> None:
    """Raise SettingsError if the number of ranks does not match the processes started together, or is too large."""
    tp_size, pp_size = engine.tensor_parallel_size, engine.pipeline_parallel_size
    check_num_ranks(tp_size, pp_size)
    if (rank := started_rank()) is None:
        return
    world_size = os.environ.get("WORLD_SIZE", str(engine.num_ranks))
    if world_size != str(engine.num_ranks):
        raise SettingsError(f"{ranks_text(tp_size, pp_size)}, and {world_size} processes were started together")
    if rank >= engine.num_ranks:
        raise SettingsError(f"RANK is {rank}, and {ranks_text(tp_size, pp_size)}")


def start_followers(package: str, settings: Any, name: str) -> None:
    """Start ranks 1, 2, ... of the node `name` as `python -m package` with the same settings; this process is rank 0.

    Sets the environment by which the ranks meet. The followers die with this process, and this process dies with any of
    them. Raises SettingsError if a process cannot be started.
    """
    settings = dataclasses.replace(settings, link=dataclasses.replace(settings.link, name=name))
    num_ranks = settings.engine.num_ranks
    os.environ |= {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(_held_port()),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, "-m", "serving_core.process.child", str(os.getpid()), sys.executable, "-m", package]
    for rank in range(1, num_ranks):
        try:
            child = subprocess.Popen(
                [*command, *to_argv(settings)],
                env={**environment_of(settings), "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
            )
        except OSError as error:
            raise SettingsError(f"rank {rank} cannot be started: {error.strerror}") from error
        threading.Thread(target=_watch, args=(rank, child), daemon=True).start()
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}


def _watch(rank: int, child: "subprocess.Popen[bytes]") -> None:
    """End this process if a follower fails, or ends by Ctrl-C, which a terminal sends to all ranks."""
    if (returncode := child.wait()) in (INTERRUPTED, -signal.SIGINT):
        os._exit(INTERRUPTED)
    if returncode:
        die(f"rank {rank} has ended with code {returncode}")


def _held_port() -> int:
    """Return a port that stays reserved while this process lives; it is bound so that rank 0 can still listen on it."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((LOOPBACK, 0))
    _held.append(held)
    port: int = held.getsockname()[1]
    return port
