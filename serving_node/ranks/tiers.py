"""The second tier over all ranks of a node: rank 0 says what is copied, each rank copies its own part of it."""

from collections import Counter
from collections.abc import Callable, Sequence

from engine.cache.tier_store import TierStore
from protos import ranks_pb2
from serving_core.tiers import Copies
from serving_node.decisions import CancelLoad, Load, Spill
from serving_node.ranks.leading import Followers, Leader

TIER_COMMANDS = ("spill", "load_blocks", "cancel_load")


class NodeTier:
    """What rank 0 asks of its ranks. `on_loaded` hears of a load that all have done, and how many blocks are good on
    all; `on_lost` of slots that hold nothing on this one (what others lack shows when it is read)."""

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
        self._num_behind: Counter[int] = Counter()  # ranks that have yet to say so

    def carry_out(self, decision: Spill | Load | CancelLoad) -> None:
        """Does it on this rank, and has the others do it."""
        assert self._store is not None, "a node without a second tier has decided something about it"
        match decision:
            case Spill(copies=copies):
                self._followers.send(spill=_spill_to_wire(copies))
                self._store.spill(copies)
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
        """A rank has done its part of a load."""
        if load_id not in self._num_good:
            return  # it was given up
        self._num_good[load_id] = min(self._num_good[load_id], num_good)
        self._num_behind[load_id] -= 1
        if not self._num_behind[load_id]:
            del self._num_behind[load_id]
            self._on_loaded(load_id, self._num_good.pop(load_id))


def follow(command: ranks_pb2.RankCommand, store: TierStore, leader: Leader) -> None:
    """Does one of TIER_COMMANDS on a follower."""
    match command.WhichOneof("command"):
        case "spill":
            spill = command.spill
            demotions = list(zip(spill.demoted_from, spill.demoted_to, strict=True))
            store.spill(Copies(demotions, list(spill.block_ids), list(spill.slots)))
        case "load_blocks":
            load = command.load_blocks

            def tell(load_id: int, num_good: int) -> None:
                leader.send(loaded=ranks_pb2.Loaded(load_id=load_id, num_good=num_good))

            store.load(load.load_id, load.slots, load.block_ids, tell)
        case "cancel_load":
            store.cancel(command.cancel_load.load_id)


def _spill_to_wire(copies: Copies) -> ranks_pb2.Spill:
    sources, targets = zip(*copies.demotions, strict=True) if copies.demotions else ((), ())
    return ranks_pb2.Spill(demoted_from=sources, demoted_to=targets, block_ids=copies.block_ids, slots=copies.slots)
