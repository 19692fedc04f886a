"""What blocks of tokens are called, so that requests that begin alike can share KV. Torch-free.

A full block's name is SHA-256 over the name of the block before it, its maker and its own token ids. Before the first
block stands the root, which tells models, adapters and salts apart. A maker is the origin of the node that computed the
block, 8 bytes for its kernels and ranks, and whether it did so in a chunk or, the last of its tokens at least, in
decode steps; EITHER, where bits do not depend on that (Engine.is_history_free). Then the name stands for all that the
bits of the block's KV depend on, and copies in other pools have it too. (Else it leaves some of it out: where chunks
end, where in a block an answer begins, what else was in a step.)

There are blocks without one maker and one history: copies behind blocks that the node held already, which are others
than those that they were computed behind; and what a node of another origin began and this one filled. Their values are
right, their bits are their own: their maker is GRAFT, and a name with one in its history stands for the tokens alone.

KV of any maker is KV of its tokens, so a node takes what it finds, and what it computes behind that is called after it.
"""

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Final

from serving_core.adapter_names import adapter_key

NAME_BYTES: Final = 32
HINT_BYTES: Final = 8
ORIGIN_BYTES: Final = 8

CHUNK: Final = b"c"
STEP: Final = b"s"
EITHER: Final = b"e"
GRAFT: Final = bytes(ORIGIN_BYTES) + b"g"
MAKER_BYTES: Final = len(GRAFT)
MAX_MAKERS: Final = 32  # that one node tells apart

# As long as a name and not one: what a root is made of can never be what a block's name is made of.
_ROOT_TAG: Final = b"splitserve: root of block names".ljust(NAME_BYTES, b"\0")
_LENGTH: Final = struct.Struct("<Q")


def root_name(fingerprint: Mapping[str, str], cache_salt: str, adapter: str = "") -> bytes:
    """What the first block's name builds on, 32 bytes: equal for equal fingerprints, salts and contents of adapters
    only. `adapter` is the name of one in the fingerprint; empty for the model alone."""
    if adapter:
        chosen = adapter_key("")  # which is the key of none of them
        fingerprint = {**fingerprint, chosen: fingerprint.get(adapter_key(adapter), "")}
    return _digest(_ROOT_TAG, cache_salt, fingerprint)


def origin_of(facts: Mapping[str, str]) -> bytes:
    """What stands for all that a node's bits depend on beside the fingerprint: 8 bytes."""
    return _digest(b"", "", facts)[:ORIGIN_BYTES]


def child_name(parent: bytes, maker: bytes, token_ids: Sequence[int]) -> bytes:
    """The name, 32 bytes, of a block of these tokens that follows the block (or the root) called `parent`."""
    return hashlib.sha256(parent + maker + _packed(len(token_ids)).pack(*token_ids)).digest()


@lru_cache(maxsize=16)
def _packed(num_tokens: int) -> struct.Struct:
    return struct.Struct(f"<{num_tokens}I")


def num_alike(makers: Sequence[bytes]) -> int:
    """Of blocks of these makers in a row, how many leading ones have the same bits wherever there are blocks of their
    names."""
    return next((index for index, maker in enumerate(makers) if not tells_bits(maker)), len(makers))


def tells_bits(maker: bytes) -> bool:
    """Whether the names of its blocks stand for their bits, where those of the blocks before them do."""
    return maker.endswith(EITHER)


def hint_of(name: bytes) -> int:
    """A name's first 8 bytes, little-endian: enough to guess by which blocks a node holds, not to share KV by."""
    return int.from_bytes(name[:HINT_BYTES], "little")


def _digest(tag: bytes, text: str, facts: Mapping[str, str]) -> bytes:
    digest = hashlib.sha256(tag)
    for each in [text, *(each for item in sorted(facts.items()) for each in item)]:
        encoded = each.encode()
        digest.update(_LENGTH.pack(len(encoded)) + encoded)
    return digest.digest()


class BlockNames:
    """What the full blocks of one request are called, each name worked out once, and what they may be found by.

    From call to call token_ids may only grow at their end.
    """

    def __init__(self, root: bytes, block_size: int) -> None:
        self.root = root
        self._block_size = block_size
        self._tried: dict[tuple[bytes, bytes], bytes] = {}  # names by parent and maker
        self._found: tuple[list[bytes], list[bytes]] = [], []  # by the last look
        self.names: list[bytes] = []  # of the leading blocks that the request has; callers do not change them
        self.makers: list[bytes] = []  # of the same
        self.begun_by = b""  # the maker of the block after them, where a part of it came from another node

    def find(
        self, token_ids: Sequence[int], num_blocks: int, makers: Sequence[bytes], is_held: Callable[[bytes], bool]
    ) -> tuple[list[bytes], list[bytes]]:
        """Names and makers of the leading blocks, num_blocks at most, that are held: of each that by the first of
        `makers` that it is held by, unless that which was found before is still held."""
        names, found = self._found_before(num_blocks, is_held)
        parent = names[-1] if names else self.root
        for index in range(len(names), num_blocks):
            for maker in makers:
                name = self._tried.get((parent, maker)) or self._try(parent, maker, index, token_ids)
                if is_held(name):
                    break
            else:
                break
            names.append(name)
            found.append(maker)
            parent = name
        self._found = names, found
        return names, found

    def of_others(self) -> "BlockNames":
        """For blocks of the same tokens that the request does not have."""
        return BlockNames(self.root, self._block_size)

    def begin(self, names: list[bytes], makers: list[bytes]) -> None:
        """The request has got these blocks, as they were found, and nothing behind them."""
        self.names, self.makers, self.begun_by = names, makers, b""
        self._tried, self._found = {}, ([], [])

    def add(self, token_ids: Sequence[int], *makers: bytes) -> None:
        """Its next full blocks are there, of these makers."""
        names, size = self.names, self._block_size
        name, start = names[-1] if names else self.root, len(names) * size
        for maker in makers:
            name = child_name(name, maker, token_ids[start : start + size])
            names.append(name)
            start += size
        self.makers += makers
        self.begun_by = b""

    def _found_before(self, num_blocks: int, is_held: Callable[[bytes], bool]) -> tuple[list[bytes], list[bytes]]:
        names, makers = self._found
        if not names:
            return [], []
        most = min(num_blocks, len(names))
        num_held = next((index for index in range(most) if not is_held(names[index])), most)
        return names[:num_held], makers[:num_held]

    def _try(self, parent: bytes, maker: bytes, index: int, token_ids: Sequence[int]) -> bytes:
        name = self._tried[parent, maker] = child_name(parent, maker, self._tokens(index, token_ids))
        return name

    def _tokens(self, index: int, token_ids: Sequence[int]) -> Sequence[int]:
        return token_ids[index * self._block_size : (index + 1) * self._block_size]
