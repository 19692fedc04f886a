"""Run KV offload over all ranks of a node: rank 0 decides the copies, each rank copies its part."""

from collections import Counter
from collections.abc import Callable, Sequence

from engine.cache.tier_store import TierStore
from protos import ranks_pb2
from serving_core.node.tiers import Copies
from serving_node.decisions import CancelLoad, Load, Offload
from serving_node.ranks.leading import Followers, Leader

TIER_COMMANDS = ("offload", "load_blocks", "cancel_load")


class NodeTier:
    """Carries out KV offload decisions on all ranks.

    `on_loaded` receives a load that all ranks have finished, with the number of blocks that are good on all. `on_lost`
    receives slots of this rank that hold nothing; losses on other ranks show when a slot is read.
    """

    def __init__(
        self,
        store: TierStore | None,
        followers: Followers,
        on_loaded: Callable[[int, int], None],
        on_lost: Callable[[Sequence[int]], None],
    ) -> None:
        self._store = store
        if store is not None:
            store.on_lost = on_lost
        self._followers = followers
        self._on_loaded = on_loaded
        followers.on_loaded = self.loaded
        self._num_good: dict[int, int] = {}  # by load
        self._num_behind: Counter[int] = Counter()  # ranks that have not reported

    def carry_out(self, decision: Offload | Load | CancelLoad) -> None:
        """Carry out a decision on this rank, and send it to the followers, which carry it out too."""
        assert self._store is not None, "a node without KV offload has decided to offload"
        match decision:
            case Offload(copies=copies):
                self._followers.send(offload=_offload_to_wire(copies))
                self._store.offload(copies)
            case Load(load_id=load_id, slots=slots, block_ids=block_ids):
                self._num_behind[load_id], self._num_good[load_id] = 1 + len(self._followers), len(slots)
                load = ranks_pb2.LoadBlocks(load_id=load_id, slots=slots, block_ids=block_ids)
                self._followers.send(load_blocks=load)
                self._store.load(load_id, slots, block_ids, self.loaded)
            case CancelLoad(load_id=load_id):
                self._followers.send(cancel_load=ranks_pb2.CancelLoad(load_id=load_id))
                self._store.cancel(load_id)
                self._num_behind.pop(load_id, None)
                self._num_good.pop(load_id, None)

    def loaded(self, load_id: int, num_good: int) -> None:
        """Record that one rank has finished its part of a load, with `num_good` leading blocks.

        After the last rank, `on_loaded` gets the number that all ranks have. A load that was given up is ignored.
        """
        if load_id not in self._num_good:
            return  # the load was given up
        self._num_good[load_id] = min(self._num_good[load_id], num_good)
        self._num_behind[load_id] -= 1
        if not self._num_behind[load_id]:
            del self._num_behind[load_id]
            self._on_loaded(load_id, self._num_good.pop(load_id))


def follow(command: ranks_pb2.RankCommand, store: TierStore, leader: Leader) -> None:
    """Carry out one of TIER_COMMANDS on a follower's `store`; the end of a load is reported to `leader`."""
    match command.WhichOneof("command"):
        case "offload":
            offload = command.offload
            demotions = list(zip(offload.demoted_from, offload.demoted_to, strict=True))
            store.offload(Copies(demotions, list(offload.block_ids), list(offload.slots)))
        case "load_blocks":
            load = command.load_blocks

            def tell(load_id: int, num_good: int) -> None:
                leader.send(loaded=ranks_pb2.Loaded(load_id=load_id, num_good=num_good))

            store.load(load.load_id, load.slots, load.block_ids, tell)
        case "cancel_load":
            store.cancel(command.cancel_load.load_id)


def _offload_to_wire(copies: Copies) -> ranks_pb2.Offload:
    sources, targets = zip(*copies.demotions, strict=True) if copies.demotions else ((), ())
    return ranks_pb2.Offload(demoted_from=sources, demoted_to=targets, block_ids=copies.block_ids, slots=copies.slots)
