"""Find stop strings in text that comes in pieces (Aho and Corasick, 1975).

The matcher's state is a node of the trie of all stop strings: the longest suffix of the text that is a prefix of a stop
string. Its depth is the number of characters to hold back. Each character takes amortized O(1) time.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

MAX_TRIES: Final = 32  # cached; one of many long strings takes 1 MiB


@dataclass(slots=True, eq=False)
class _Node:
    depth: int
    children: dict[str, "_Node"] = field(default_factory=dict)
    fallback: "_Node | None" = None  # the longest proper suffix that is in the trie too; None at the root
    match: str | None = None  # the longest stop string that ends here


class StopMatcher:
    """Search the text of one output. The stop string that ends first wins; of several that end together, the
    longest."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._root = _build(tuple(stops))
        self._node = self._root
        self._ahead: _Node | None = None  # the node after the text that `foresee` has seen
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, *, may_stop: bool = True) -> str:
        """Add the next text, and return the text that is certain to come before any stop string.

        After a match, `matched` is set, the returned text ends before the stop string, and no text may follow. With
        `may_stop` False, stop strings that end in this text do not count.
        """
        assert self.matched is None, "text was fed after a match"
        self._ahead = None
        pending = self._held + text
        end = len(self._held)
        for char in text:
            self._node = self._step(self._node, char)
            end += 1
            if may_stop and self._node.match is not None:
                self.matched = self._node.match
                return pending[: end - len(self.matched)]
        certain = len(pending) - self._node.depth
        self._held = pending[certain:]
        return pending[:certain]

    def foresee(self, text: str, *, may_stop: bool) -> bool:
        """Add a text that may still change, and return whether a stop string ends in it.

        The next `feed` forgets such texts. With `may_stop` False, always returns False.
        """
        for char in text:
            self._ahead = self._step(self._ahead or self._node, char)
            if may_stop and self._ahead.match is not None:
                return True
        return False

    def flush(self) -> str:
        """Return the text held back, when the text has ended."""
        held, self._held = self._held, ""
        return held

    def _step(self, at: _Node, char: str) -> _Node:
        node: _Node | None = at
        while node is not None:
            if child := node.children.get(char):
                return child
            node = node.fallback
        return self._root


@lru_cache(MAX_TRIES)
def _build(stops: tuple[str, ...]) -> _Node:
    """Return the root of the trie, which is cached and must not be changed."""
    root = _Node(depth=0)
    for stop in stops:
        node = root
        for char in stop:
            node = node.children.setdefault(char, _Node(depth=node.depth + 1))
        node.match = stop
    queue = deque([root])
    while queue:  # breadth first: a fallback is shallower, so it is complete already
        node = queue.popleft()
        for char, child in node.children.items():
            child.fallback = _fallback(node, char, root)
            child.match = child.match or child.fallback.match
            queue.append(child)
    return root


def _fallback(parent: _Node, char: str, root: _Node) -> _Node:
    node = parent.fallback
    while node is not None:
        if child := node.children.get(char):
            return child
        node = node.fallback
    return root
