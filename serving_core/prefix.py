"""What blocks of tokens are called, so that requests that begin alike can share KV. Torch-free.

A full block's name is SHA-256 over the name of the block before it and its own token ids. Before the first block stands
the root, which tells models and salts apart. So a name stands for everything that the KV in a block depends on: the
same name, the same KV.
"""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Final

NAME_BYTES: Final = 32
HINT_BYTES: Final = 8

# As long as a name and not one: what a root is made of can never be what a block's name is made of.
_ROOT_TAG: Final = b"splitserve: root of block names".ljust(NAME_BYTES, b"\0")
_LENGTH: Final = struct.Struct("<Q")


def root_name(fingerprint: Mapping[str, str], cache_salt: str) -> bytes:
    """What the first block's name builds on, 32 bytes: equal for equal fingerprints and salts only."""
    texts = [cache_salt, *(text for item in sorted(fingerprint.items()) for text in item)]
    digest = hashlib.sha256(_ROOT_TAG)
    for text in texts:
        encoded = text.encode()
        digest.update(_LENGTH.pack(len(encoded)) + encoded)
    return digest.digest()


def child_name(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The name, 32 bytes, of a block of these tokens that follows the block (or the root) called `parent`."""
    return hashlib.sha256(parent + struct.pack(f"<{len(token_ids)}I", *token_ids)).digest()


def hint_of(name: bytes) -> int:
    """A name's first 8 bytes, little-endian: enough to guess by which blocks a node holds, not to share KV by."""
    return int.from_bytes(name[:HINT_BYTES], "little")


class BlockNames:
    """Names of one request's full blocks, each worked out once."""

    def __init__(self, root: bytes, block_size: int) -> None:
        self._root = root
        self._block_size = block_size
        self._names: list[bytes] = []

    def names_of(self, token_ids: Sequence[int]) -> list[bytes]:
        """Names of all full blocks of token_ids. From call to call token_ids may only grow at its end."""
        size = self._block_size
        num_full = len(token_ids) // size
        for index in range(len(self._names), num_full):
            parent = self._names[-1] if self._names else self._root
            self._names.append(child_name(parent, token_ids[index * size : (index + 1) * size]))
        return self._names[:num_full]
