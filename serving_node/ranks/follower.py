"""Run a follower: carry out the commands of rank 0 in its order, and end with rank 0."""

import asyncio
import logging
import signal
from collections import deque
from typing import Final

from engine.cache.tier_store import TierStore
from engine.engine import Engine
from engine.stepper import Stepper
from protos import inference_pb2, ranks_pb2
from serving_core.errors import RankLost
from serving_core.process.memory import resident_bytes
from serving_core.process.run import ending_signals
from serving_core.requests import Share
from serving_core.tasks import first_to_end
from serving_node.adapters import FollowerAdapters
from serving_node.ranks.leading import Leader, die, share_from_wire
from serving_node.ranks.tiers import TIER_COMMANDS, follow
from serving_node.ranks.transfers import FollowerTransfers

logger = logging.getLogger(__name__)

IN_ORDER: Final = ("step", "unload_adapter")  # of which nothing is done before their turn
MAX_UNDONE: Final = 2**14  # queued commands while a step runs


class Follower:
    """Runs a rank other than 0: receives commands of rank 0 and runs its steps. Belongs to one event loop."""

    def __init__(
        self,
        leader: Leader,
        stepper: Stepper[Share, None],
        transfers: FollowerTransfers,
        store: TierStore | None = None,
        adapters: FollowerAdapters | None = None,
    ) -> None:
        """Create a follower; `store` is this rank's part of KV offload, if there is any."""
        self._leader = leader
        self._stepper = stepper
        self._transfers = transfers
        self._store = store
        self._adapters = adapters
        self._ordered: asyncio.Queue[ranks_pb2.RankCommand] = asyncio.Queue(MAX_UNDONE)
        self._num_tier_commands = 0  # queued KV offload commands; a step may still write to their blocks
        self._held_up: deque[ranks_pb2.RankCommand] = deque()  # transfer commands behind a KV offload command

    async def run(self) -> None:
        """Carry out commands until rank 0 sends stop. Ends the process if a rank is lost.

        Signals are left to rank 0, which drains first.
        """
        loop = asyncio.get_running_loop()
        for number in ending_signals():
            loop.add_signal_handler(number, _leave_to_rank_0, number)
        try:
            await first_to_end(self._obey(), self._work(), self._leader.report_load())
        except (RankLost, asyncio.QueueFull) as error:
            die(str(error) or f"{MAX_UNDONE} commands wait for a step to end")
        finally:
            self._stepper.close()

    async def _obey(self) -> None:
        while True:
            command = await self._leader.command()
            if command.HasField("stop"):
                return
            if command.HasField("load_adapter"):
                assert self._adapters is not None, "adapters on rank 0 alone"
                self._adapters.load(command.load_adapter)
                continue
            if command.WhichOneof("command") in TIER_COMMANDS:
                self._num_tier_commands += 1
            elif command.WhichOneof("command") not in IN_ORDER:
                self._hear(command)
            self._ordered.put_nowait(command)

    def _hear(self, command: ranks_pb2.RankCommand) -> None:
        """Handle a transfer command at once, unless KV offload commands are queued before it."""
        if self._num_tier_commands:
            self._held_up.append(command)
        else:
            self._transfers.handle(command)

    def _let_through(self) -> None:
        """Handle the waiting transfer commands in order, before any later command."""
        while self._held_up:
            self._transfers.handle(self._held_up.popleft())

    async def _work(self) -> None:
        while True:
            command = await self._ordered.get()
            if command.HasField("step"):
                await self._step(command.step)
            elif command.HasField("unload_adapter"):
                assert self._adapters is not None, "adapters on rank 0 alone"
                await self._adapters.unload(command.unload_adapter.name)
            elif command.WhichOneof("command") in TIER_COMMANDS:
                assert self._store is not None, "KV offload on rank 0 alone"
                follow(command, self._store, self._leader)
                self._num_tier_commands -= 1
                if not self._num_tier_commands:
                    self._let_through()
            else:
                if self._held_up and command is self._held_up[0]:  # another KV offload command follows
                    self._transfers.handle(self._held_up.popleft())
                self._transfers.after_step(command)

    async def _step(self, plan: ranks_pb2.StepPlan) -> None:
        shares = [share_from_wire(share) for share in plan.shares]
        epochs = [share.epoch for share in plan.shares]
        try:
            await self._stepper.step(shares, self._transfers.on_layer(epochs, shares))
        except RankLost as error:
            die(error)
        except Exception as error:
            logger.exception("a step failed on a follower")
            die(error)


def _leave_to_rank_0(number: signal.Signals) -> None:
    logger.info("signal %d is left to rank 0", number)


def rank_load(*engines: Engine) -> inference_pb2.RankLoad:
    """Return the memory use of this process; the first engine is the node's own, the others belong to draft models."""
    return inference_pb2.RankLoad(
        rank=engines[0].group.rank,
        rss_bytes=resident_bytes(),
        kv_pool_bytes=sum(engine.kv_pool_bytes for engine in engines),
        weight_bytes=sum(engine.weight_bytes for engine in engines),
    )
