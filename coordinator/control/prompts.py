"""What a node is to read, and how much of it the node holds already. Pure."""

from collections.abc import Sequence

from coordinator.control.registry import Node
from serving_core.prefix import child_name, hint_of, root_name


class Prompt:
    """The tokens that an attempt begins with.

    Each block is hashed once, and only when some node holds all blocks before it: the nodes of a fleet have one
    fingerprint and one block size, and so the same names for the same blocks.
    """

    def __init__(self, token_ids: Sequence[int], cache_salt: str = "") -> None:
        self.token_ids = list(token_ids)
        self.cache_salt = cache_salt
        self._names: list[bytes] = []  # of the leading full blocks

    def __len__(self) -> int:
        return len(self.token_ids)

    def followed_by(self, token_ids: Sequence[int]) -> "Prompt":
        """The prompt of a later attempt, which reads what was answered so far too."""
        return Prompt([*self.token_ids, *token_ids], self.cache_salt) if token_ids else self

    def tokens_held(self, node: Node) -> int:
        """Leading tokens, in whole blocks, whose KV the node has said to hold. It may have dropped them since."""
        if not node.hints:
            return 0
        num_blocks, num_full = 0, len(self) // node.hello.block_size
        while num_blocks < num_full and hint_of(self._name(num_blocks, node)) in node.hints:
            num_blocks += 1
        return num_blocks * node.hello.block_size

    def tokens_to_compute(self, node: Node) -> int:
        """Tokens that a node would have to compute: at least the last one, which gives the first token of the
        answer, and with it the rest of its block, since blocks are reused as a whole."""
        block_size = node.hello.block_size
        return len(self) - min(self.tokens_held(node), (len(self) - 1) // block_size * block_size)

    def _name(self, index: int, node: Node) -> bytes:
        """The name of a block whose predecessors were asked for before."""
        if index == len(self._names):
            parent = self._names[-1] if self._names else root_name(node.root_fingerprint, self.cache_salt)
            start = index * node.hello.block_size
            self._names.append(child_name(parent, self.token_ids[start : start + node.hello.block_size]))
        return self._names[index]
