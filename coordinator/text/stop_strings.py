"""Finds stop strings in text that comes in pieces (Aho and Corasick, 1975).

The matcher's state is a node of the trie of all stop strings: the longest tail of the text so far that begins a
stop string. Its depth is therefore exactly what must be held back, and each character costs amortised O(1).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

MAX_TRIES: Final = 32  # kept for who asks the same; one of many long strings takes 1 MiB


@dataclass(slots=True, eq=False)
class _Node:
    depth: int
    children: dict[str, "_Node"] = field(default_factory=dict)
    fallback: "_Node | None" = None  # the longest proper tail that is in the trie too; None at the root
    match: str | None = None  # the longest stop string that ends here


class StopMatcher:
    """One answer's search. The stop string that ends first wins; of those that end together, the longest."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._root = _build(tuple(stops))
        self._node = self._root
        self._ahead: _Node | None = None  # the node behind the text that `foresee` has seen
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, *, may_stop: bool = True) -> str:
        """Takes the next piece of text and returns what became certain: what no stop string can still reach back to.

        After a match, `matched` is set, and the text returned ends right before the stop string; nothing may be fed
        any more. With may_stop False, stop strings that end in this piece do not count.
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
        """Take the next piece of a text that may yet become another one, and return whether a stop string ends in it.
        `feed` forgets these pieces."""
        for char in text:
            self._ahead = self._step(self._ahead or self._node, char)
            if may_stop and self._ahead.match is not None:
                return True
        return False

    def flush(self) -> str:
        """What is held back, when no more text will come."""
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
    """The root, which all answers with these stop strings share: nothing changes after."""
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
