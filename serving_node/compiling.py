"""Compile the grammars of requests off the event loop, before the node's logic sees the requests."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

from protos import fleet_pb2
from serving_core.errors import RequestError
from serving_core.grammars import Grammars
from serving_core.node.requests import Key
from serving_core.process.telemetry import about
from serving_core.reasons import ENGINE_ERROR
from serving_core.requests import Guide
from serving_core.tasks import Turns

logger = logging.getLogger(__name__)

CANNOT_COMPILE: Final = RequestError(ENGINE_ERROR, "the node cannot compile the grammar")

PassOn = Callable[[fleet_pb2.NodeCommand, Guide | None], None]
Refuse = Callable[[fleet_pb2.Attempt, RequestError], None]


class Compiling:
    """Pass commands to a node's logic, after their grammar is compiled.

    Later commands for the same attempt wait behind it; a cancel meanwhile drops them. Clients take turns. Belongs to
    one event loop.
    """

    def __init__(self, grammars: Grammars, pass_on: PassOn, refuse: Refuse) -> None:
        """Create the queue.

        `grammars` is used by its own thread only from then on.
        """
        self._grammars = grammars
        self._pass_on = pass_on
        self._refuse = refuse
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._turns = Turns()
        self._waiting: dict[Key, list[fleet_pb2.NodeCommand]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_idle(self) -> bool:
        """Return whether no command waits."""
        return not self._waiting

    def take(self, command: fleet_pb2.NodeCommand) -> None:
        """Pass a command on, at once or in its turn."""
        key = command.attempt.request_id, command.attempt.epoch
        job = _job_of(command)
        if key in self._waiting:
            if not command.HasField("cancel"):
                self._waiting[key].append(command)
                return
            del self._waiting[key]
        elif job.grammar:
            self._waiting[key] = [command]
            task = asyncio.create_task(self._compiled(key, job))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        self._pass_on(command, None)

    def warm_up(self) -> None:
        """Load the tokenizer, which would delay all sequences at the first grammar; nothing else runs meanwhile."""
        self._thread.submit(self._read_tokenizer)

    def _read_tokenizer(self) -> None:
        with suppress(RequestError):  # every grammar will fail with the same error
            self._grammars.load()

    def forget(self) -> None:
        """Drop all waiting commands."""
        self._waiting.clear()

    async def _compiled(self, key: Key, job: fleet_pb2.Job) -> None:
        """Compile a grammar and pass its commands on.

        Compilation is not cancelled if the commands are dropped; it is short, since the coordinator has tried the
        grammar.
        """
        guide, error = None, CANNOT_COMPILE
        try:
            async with self._turns.turn(job.asker):
                loop = asyncio.get_running_loop()
                guide = await loop.run_in_executor(self._thread, self._grammars.guide_of, job.grammar)
        except RequestError as refusal:
            error = refusal
        except Exception:
            waiting = [command.attempt.request_id for command in self._waiting.get(key, [])]
            logger.exception("a grammar was not compiled", extra=about(waiting[0]) if waiting else None)
        for command in self._waiting.pop(key, []):
            if not _job_of(command).grammar:
                self._pass_on(command, None)
            elif guide is not None:  # a duplicate too: the logic refuses it
                self._pass_on(command, guide)
            else:
                self._refuse(command.attempt, error)


def _job_of(command: fleet_pb2.NodeCommand) -> fleet_pb2.Job:
    """Return the job that a command brings; an empty job for other commands."""
    match command.WhichOneof("command"):
        case "prefill":
            return command.prefill.job
        case "reserve":
            return command.reserve.job
    return fleet_pb2.Job()
