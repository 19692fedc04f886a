"""What a node is to read, and how much of it the node holds already. Pure."""

from collections.abc import Container, Sequence
from functools import cached_property

from coordinator.control.marks import num_leading
from coordinator.control.registry import Node
from serving_core.prefix import BlockNames, child_name, hint_of, root_name


class Prompt:
    """The tokens that an attempt begins with, and the LoRA adapter that reads them, if any.

    A block is hashed once for each maker that some node may hold it of, and only when that node holds all blocks before
    it: the nodes of a fleet have one fingerprint and one block size, and so the same names for the same blocks.
    """

    def __init__(
        self, token_ids: Sequence[int], cache_salt: str = "", adapter: str = "", *, is_read_whole: bool = False
    ) -> None:
        """`is_read_whole`: every token is computed, whatever is held of it (prefill_node/reading.py)."""
        self._is_read_whole = is_read_whole
        self.token_ids = list(token_ids)
        self.cache_salt = cache_salt
        self.adapter = adapter
        self._names: BlockNames | None = None
        self._root = b""
        self._first: dict[bytes, int] = {}  # hints of what the first block may be called, by maker
        self._marks: list[int] = []

    def __len__(self) -> int:
        return len(self.token_ids)

    @cached_property
    def key(self) -> int:
        """A hash: the same for the same prompt, in this process."""
        return hash((tuple(self.token_ids), self.cache_salt, self.adapter))

    def followed_by(self, token_ids: Sequence[int]) -> "Prompt":
        """The prompt of a later attempt, which reads what was answered so far too, and scores nothing any more."""
        return Prompt([*self.token_ids, *token_ids], self.cache_salt, self.adapter) if token_ids else self

    def tokens_held(self, node: Node) -> int:
        """Leading tokens, in whole blocks, whose KV the node has said to hold. It may have dropped them since."""
        if self._is_read_whole or not node.hints:
            return 0
        block_size = node.block_size
        if len(self) < block_size:
            return 0
        if self._names is None:
            self._root = root_name(node.root_fingerprint, self.cache_salt, self.adapter)
            self._names = BlockNames(self._root, block_size)
        if not self._begins_on(node):
            return 0

        def is_held(name: bytes) -> bool:
            return hint_of(name) in node.hints

        held, _ = self._names.find(self.token_ids, len(self) // block_size, node.makers, is_held)
        return len(held) * block_size

    def _begins_on(self, node: Node) -> bool:
        """Whether the node says to hold the first block; of many nodes, most do not."""
        for maker in node.makers:
            hint = self._first.get(maker)
            if hint is None:
                name = child_name(self._root, maker, self.token_ids[: node.block_size])
                hint = self._first[maker] = hint_of(name)
            if hint in node.hints:
                return True
        return False

    def marks(self, block_size: int) -> Sequence[int]:
        """For each full block a number that stands for all tokens up to its end, within this process."""
        if not self._marks:
            mark = hash((self.cache_salt, self.adapter))
            for start in range(0, len(self) // block_size * block_size, block_size):
                mark = hash((mark, *self.token_ids[start : start + block_size]))
                self._marks.append(mark)
        return self._marks

    def marks_shared(self, block_size: int) -> Sequence[int]:
        """Of the blocks that a node which is to write the answer may have in common with other requests."""
        return () if self._is_read_whole else self.marks(block_size)

    def tokens_to_compute(self, node: Node, coming: Container[int] = ()) -> int:
        """Tokens that a node would have to compute which has the blocks of the marks `coming` by then: at least the
        last one, which gives the first token of the answer, and with it the rest of its block, since blocks are reused
        as a whole."""
        block_size = node.block_size
        num_shared = max(self.tokens_held(node), self.tokens_among(node, coming))
        return len(self) - min(num_shared, (len(self) - 1) // block_size * block_size)

    def tokens_among(self, node: Node, marks: Container[int]) -> int:
        """Leading tokens, in whole blocks, whose marks are among these of prompts of the node."""
        if self._is_read_whole or not marks or not node.shares_blocks:
            return 0
        return num_leading(self.marks(node.block_size), marks) * node.block_size
