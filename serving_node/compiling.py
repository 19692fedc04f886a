"""Compiles the grammars of requests off the event loop, before the node's logic hears of them."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

from protos import fleet_pb2
from serving_core.errors import RequestError
from serving_core.grammars import Grammars
from serving_core.node_requests import Key
from serving_core.reasons import ENGINE_ERROR
from serving_core.requests import Guide
from serving_core.telemetry import about
from serving_core.turns import Turns

logger = logging.getLogger(__name__)

CANNOT_COMPILE: Final = RequestError(ENGINE_ERROR, "the node cannot compile the grammar")

PassOn = Callable[[fleet_pb2.NodeCommand, Guide | None], None]
Refuse = Callable[[fleet_pb2.Attempt, RequestError], None]


class Compiling:
    """Commands on their way to a node's logic. One with a grammar is passed on when that is compiled, with its guide,
    and those for the same attempt behind it; a cancel meanwhile takes it back. Askers have their turns one after the
    other. Owned by one event loop."""

    def __init__(self, grammars: Grammars, pass_on: PassOn, refuse: Refuse) -> None:
        """`grammars` are for a thread of its own from here on."""
        self._grammars = grammars
        self._pass_on = pass_on
        self._refuse = refuse
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._turns = Turns()
        self._waiting: dict[Key, list[fleet_pb2.NodeCommand]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_idle(self) -> bool:
        """Whether no command waits."""
        return not self._waiting

    def take(self, command: fleet_pb2.NodeCommand) -> None:
        """Passes a command on, at once or when its turn has come."""
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
        """Reads the tokenizer, for which the first grammar would hold up all answers: nothing else runs meanwhile."""
        self._thread.submit(self._read_tokenizer)

    def _read_tokenizer(self) -> None:
        with suppress(RequestError):  # which every grammar will be answered by
            self._grammars.load()

    def forget(self) -> None:
        """Nobody waits for what is being compiled any more."""
        self._waiting.clear()

    async def _compiled(self, key: Key, job: fleet_pb2.Job) -> None:
        """Nobody may wait for it any more: it is soon done, since the coordinator has tried it."""
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
            elif guide is not None:  # to one that comes twice, too: that is for the logic to say
                self._pass_on(command, guide)
            else:
                self._refuse(command.attempt, error)


def _job_of(command: fleet_pb2.NodeCommand) -> fleet_pb2.Job:
    """The job that a command brings; an empty one of any other command."""
    match command.WhichOneof("command"):
        case "prefill":
            return command.prefill.job
        case "reserve":
            return command.reserve.job
    return fleet_pb2.Job()
