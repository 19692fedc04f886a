"""Compute block hashes, by which requests with a common prefix share KV. Torch-free.

A full block's hash (its name) is SHA-256 over the hash of the block before it, its numerics id and its own token ids.
The root stands before the first block and distinguishes models, adapters and salts. A numerics id combines the numerics
of the engine that computed the block (8 bytes for its kernels and ranks) and whether the node computed it in prefill
chunks or, at least its last token, in decode steps; EITHER if the bits do not depend on that
(Engine.is_batch_invariant). Then the hash determines all that the bits of the block's KV depend on, and copies in other
pools have it too. (Otherwise the hash omits some of it: the ends of chunks, the place in a block where the output
begins, the rest of the batch.)

Some blocks have no single numerics id: copies placed behind other blocks than those that they were computed behind, and
blocks that a node of one kind of numerics began and a node of another filled. Their values are correct, but their bits
are their own: their numerics id is MIXED_NUMERICS, and a hash with MIXED_NUMERICS in its history stands for the tokens
alone.

KV of any numerics id is valid KV of its tokens, so a node uses whatever it finds, and hashes of later blocks build on
it.
"""

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Final

from serving_core.model_files.adapter_names import adapter_key, without_adapters

NAME_BYTES: Final = 32
HINT_BYTES: Final = 8
NUMERICS_BYTES: Final = 8

_STATE_TAG: Final = b"splitserve: fixed state"
CHUNK: Final = b"c"
STEP: Final = b"s"
EITHER: Final = b"e"
MIXED_NUMERICS: Final = bytes(NUMERICS_BYTES) + b"g"
NUMERICS_ID_BYTES: Final = len(MIXED_NUMERICS)
MAX_NUMERICS_IDS: Final = 32  # numerics ids that one node distinguishes

# As long as a hash but not one: the input of a root can never be the input of a block's hash.
_ROOT_TAG: Final = b"splitserve: root of block names".ljust(NAME_BYTES, b"\0")
_LENGTH: Final = struct.Struct("<Q")


def root_name(fingerprint: Mapping[str, str], cache_salt: str, adapter: str = "") -> bytes:
    """Return the root, 32 bytes, that the hash of a request's first block builds on.

    Roots are equal only for equal fingerprints, salts and contents of `adapter`, one in the fingerprint; empty for the
    model alone. Other adapters, which come and go while a node serves, do not count.
    """
    facts = without_adapters(fingerprint)
    if adapter:
        chosen = adapter_key("")  # the key of no adapter
        facts[chosen] = fingerprint.get(adapter_key(adapter), "")
    return _digest(_ROOT_TAG, cache_salt, facts)


def numerics_of(facts: Mapping[str, str]) -> bytes:
    """Return 8 bytes that stand for all facts, beside the fingerprint, that the bits of a node's outputs depend on."""
    return _digest(b"", "", facts)[:NUMERICS_BYTES]


def child_name(parent: bytes, numerics_id: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the hash, 32 bytes, of a block of these tokens behind the block, or the root, whose hash is `parent`."""
    return hashlib.sha256(parent + numerics_id + _packed(len(token_ids)).pack(*token_ids)).digest()


def state_names(name: bytes, num_blocks: int) -> list[bytes]:
    """Return the hashes of the `num_blocks` blocks with the fixed state behind the block with hash `name`."""
    return [hashlib.sha256(_STATE_TAG + name + _LENGTH.pack(index)).digest() for index in range(num_blocks)]


@lru_cache(maxsize=16)
def _packed(num_tokens: int) -> struct.Struct:
    return struct.Struct(f"<{num_tokens}I")


def num_alike(numerics_ids: Sequence[bytes]) -> int:
    """Return how many leading blocks have the same bits wherever their hashes occur, by their numerics ids."""
    return next(
        (index for index, numerics_id in enumerate(numerics_ids) if not determines_bits(numerics_id)), len(numerics_ids)
    )


def determines_bits(numerics_id: bytes) -> bool:
    """Return whether the hash of a block with this numerics id determines its bits, given those of earlier blocks."""
    return numerics_id.endswith(EITHER)


def hint_of(name: bytes) -> int:
    """Return a hash's first 8 bytes, little-endian: enough to estimate which blocks a node holds, not to share KV."""
    return int.from_bytes(name[:HINT_BYTES], "little")


def _digest(tag: bytes, text: str, facts: Mapping[str, str]) -> bytes:
    digest = hashlib.sha256(tag)
    for each in [text, *(each for item in sorted(facts.items()) for each in item)]:
        encoded = each.encode()
        digest.update(_LENGTH.pack(len(encoded)) + encoded)
    return digest.digest()


class BlockNames:
    """Compute the hashes of one request's full blocks, each once, and those under which they may be found.

    From call to call token_ids may only grow at their end.
    """

    def __init__(self, root: bytes, block_size: int) -> None:
        self.root = root
        self._block_size = block_size
        self._tried: dict[tuple[bytes, bytes], bytes] = {}  # hashes by parent and numerics id
        self._found: tuple[list[bytes], list[bytes]] = [], []  # by the last search
        self.names: list[bytes] = []  # of the request's leading blocks; callers must not change them
        self.numerics_ids: list[bytes] = []  # of the same blocks
        self.begun_by = b""  # numerics id of the next block, if a part of it came from another node

    def find(
        self, token_ids: Sequence[int], num_blocks: int, numerics_ids: Sequence[bytes], is_held: Callable[[bytes], bool]
    ) -> tuple[list[bytes], list[bytes]]:
        """Return the hashes and numerics ids of the leading blocks, at most `num_blocks`, for which `is_held` is true.

        A block found in the last search is kept if it is still held; else the first of `numerics_ids` under which a
        block is held counts.
        """
        names, found = self._found_before(num_blocks, is_held)
        parent = names[-1] if names else self.root
        for index in range(len(names), num_blocks):
            for numerics_id in numerics_ids:
                name = self._tried.get((parent, numerics_id)) or self._try(parent, numerics_id, index, token_ids)
                if is_held(name):
                    break
            else:
                break
            names.append(name)
            found.append(numerics_id)
            parent = name
        self._found = names, found
        return names, found

    def of_others(self) -> "BlockNames":
        """Return new BlockNames for the same tokens, for blocks that the request does not have."""
        return BlockNames(self.root, self._block_size)

    def begin(self, names: list[bytes], numerics_ids: list[bytes]) -> None:
        """Set the request's leading blocks to those with these hashes and numerics ids, and forget all others."""
        self.names, self.numerics_ids, self.begun_by = names, numerics_ids, b""
        self._tried, self._found = {}, ([], [])

    def add(self, token_ids: Sequence[int], *numerics_ids: bytes) -> None:
        """Append the next full blocks of `token_ids` to the request's blocks, one for each of these numerics ids."""
        names, size = self.names, self._block_size
        name, start = names[-1] if names else self.root, len(names) * size
        for numerics_id in numerics_ids:
            name = child_name(name, numerics_id, token_ids[start : start + size])
            names.append(name)
            start += size
        self.numerics_ids += numerics_ids
        self.begun_by = b""

    def _found_before(self, num_blocks: int, is_held: Callable[[bytes], bool]) -> tuple[list[bytes], list[bytes]]:
        names, numerics_ids = self._found
        if not names:
            return [], []
        most = min(num_blocks, len(names))
        num_held = next((index for index in range(most) if not is_held(names[index])), most)
        return names[:num_held], numerics_ids[:num_held]

    def _try(self, parent: bytes, numerics_id: bytes, index: int, token_ids: Sequence[int]) -> bytes:
        name = self._tried[parent, numerics_id] = child_name(parent, numerics_id, self._tokens(index, token_ids))
        return name

    def _tokens(self, index: int, token_ids: Sequence[int]) -> Sequence[int]:
        return token_ids[index * self._block_size : (index + 1) * self._block_size]
