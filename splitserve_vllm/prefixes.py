"""Name the blocks in vLLM's prefix cache as our nodes do, so that the coordinator places prompts by them.

vLLM publishes what its cache stores and removes (KV events). A block's hash, as serving_core/node/prefix.py has it,
needs the tokens of the block and the hash of the block before it. Imports no vLLM.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgpack

from protos import fleet_pb2
from serving_core.node.prefix import CHUNK, child_name, hint_of, numerics_of, root_name

logger = logging.getLogger(__name__)

MAX_HINTS: Final = 2**16  # of each kind in one message


class CachedPrefixes:
    """The hashes of the blocks that vLLM has cached, as far as its events have told. Pure."""

    def __init__(self, fingerprint: Mapping[str, str], numerics: Mapping[str, str], block_size: int) -> None:
        """Create the record of an empty cache."""
        self._fingerprint, self._block_size = fingerprint, block_size
        self._numerics_id = numerics_of(numerics) + CHUNK
        self._hashes: dict[Any, bytes] = {}  # ours, by vLLM's
        self._stored: dict[int, None] = {}  # since the last report, as are the next
        self._removed: dict[int, None] = {}

    def __len__(self) -> int:
        """Return the number of blocks that are cached."""
        return len(self._hashes)

    def take(self, packed: bytes) -> None:
        """Take a batch of events. What cannot be read is left out: the record only helps to place prompts."""
        try:
            _, events, *_ = msgpack.unpackb(packed)
            for event in events:
                self._take(event)
        except (ValueError, TypeError, KeyError) as error:
            logger.warning("KV events of vLLM cannot be read: %s", error)

    def forget(self) -> None:
        """Begin again with a full report: the coordinator is a new one."""
        self._stored, self._removed = dict.fromkeys(map(hint_of, self._hashes.values())), {}

    def changes(self) -> fleet_pb2.CacheChanged | None:
        """Return the changes since the last report, MAX_HINTS of each kind at most; None if there are none."""
        if not self._stored and not self._removed:
            return None
        stored, removed = list(self._stored)[:MAX_HINTS], list(self._removed)[:MAX_HINTS]
        for reported, hints in ((self._stored, stored), (self._removed, removed)):
            for hint in hints:
                del reported[hint]
        return fleet_pb2.CacheChanged(stored=stored, removed=removed, numerics_ids=[self._numerics_id])

    def _take(self, event: Mapping[str, Any]) -> None:
        match event["type"]:
            case "BlockStored" if event["block_size"] == self._block_size:
                self._store(event)
            case "BlockRemoved":
                for each in event["block_hashes"]:
                    self._remove(each)
            case "AllBlocksCleared":
                for each in list(self._hashes):
                    self._remove(each)

    def _store(self, event: Mapping[str, Any]) -> None:
        tokens: Sequence[int] = event["token_ids"]
        parent = event["parent_block_hash"]
        ours = self._hashes.get(parent) if parent is not None else self._root_of(event)
        if ours is None:  # of a block that was removed, or whose event was lost
            return
        for index, each in enumerate(event["block_hashes"]):
            ours = child_name(
                ours, self._numerics_id, tokens[index * self._block_size : (index + 1) * self._block_size]
            )
            self._hashes[each] = ours
            self._stored[hint_of(ours)] = None
            self._removed.pop(hint_of(ours), None)

    def _root_of(self, event: Mapping[str, Any]) -> bytes:
        keys = (event.get("extra_keys") or [None])[0] or []
        return root_name(self._fingerprint, next((each for each in keys if isinstance(each, str)), ""))

    def _remove(self, each: Any) -> None:
        if (ours := self._hashes.pop(each, None)) is not None:
            self._stored.pop(hint_of(ours), None)
            self._removed[hint_of(ours)] = None
