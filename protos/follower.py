"""The life of a follower: it does what rank 0 says, in rank 0's order, and ends with it."""

import asyncio
import logging
import signal
from collections.abc import Sequence
from typing import Final, Protocol

from engine.stepper import Stepper
from protos import ranks_pb2
from protos.rank_stream import RankLost
from protos.ranks import Leader, die, share_from_wire
from protos.serving import SIGNALS
from serving_core.requests import OnLayer, Share
from serving_core.waiting import first_to_end

logger = logging.getLogger(__name__)

MAX_UNDONE: Final = 2**14  # commands that wait for a step to end

Epochs = Sequence[int]
"""Of the attempts that a step's shares belong to, in order."""


class FollowerRank(Protocol):
    """What a role does on each of its ranks."""

    def handle(self, command: ranks_pb2.RankCommand) -> None:
        """Does a command other than a step, at once."""

    def after_step(self, command: ranks_pb2.RankCommand) -> None:
        """Does the part of a command that has to wait for the steps announced before it."""

    def on_layer(self, epochs: Epochs, shares: Sequence[Share]) -> OnLayer | None:
        """What a step of these shares is to report to, if to anything."""


class Follower:
    """Takes commands and steps. Owned by one event loop."""

    def __init__(self, leader: Leader, stepper: Stepper[Share, None], rank: FollowerRank) -> None:
        self._leader = leader
        self._stepper = stepper
        self._rank = rank
        self._ordered: asyncio.Queue[ranks_pb2.RankCommand] = asyncio.Queue(MAX_UNDONE)

    async def run(self) -> None:
        """Returns when rank 0 says stop. Signals are rank 0's business: it drains first."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, _leave_to_rank_0, number)
        try:
            await first_to_end(self._obey(), self._work(), self._leader.beat())
        except (RankLost, asyncio.QueueFull) as error:
            die(str(error) or f"{MAX_UNDONE} commands wait for a step to end")
        finally:
            self._stepper.close()

    async def _obey(self) -> None:
        while True:
            command = await self._leader.command()
            if command.HasField("stop"):
                return
            if not command.HasField("step"):
                self._rank.handle(command)
            self._ordered.put_nowait(command)

    async def _work(self) -> None:
        while True:
            command = await self._ordered.get()
            if command.HasField("step"):
                await self._step(command.step)
            else:
                self._rank.after_step(command)

    async def _step(self, plan: ranks_pb2.StepPlan) -> None:
        shares = [share_from_wire(share) for share in plan.shares]
        epochs = [share.epoch for share in plan.shares]
        try:
            await self._stepper.step(shares, self._rank.on_layer(epochs, shares))
        except Exception as error:
            logger.exception("a step failed on a follower")
            die(error)


def _leave_to_rank_0(number: signal.Signals) -> None:
    logger.info("signal %d is left to rank 0", number)
