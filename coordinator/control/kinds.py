"""Nodes whose answers may differ in bits: of unlike kernels, CPUs or ranks. They serve together all the same. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from coordinator.control.registry import Node

MAX_PAIRS: Final = 100  # that are told of: a fleet of so many kinds is known to be unlike
MAX_WORDS_CHARS: Final = 120  # of what one node has and the other has not


def num_kinds(nodes: Iterable[Node]) -> int:
    """Kinds of nodes; one that does not tell its traits is of none."""
    return len({_kind(node) for node in nodes if node.traits})


class Kinds:
    """Tells once of each pair of kinds that meet."""

    def __init__(self) -> None:
        self._told: set[frozenset[object]] = set()

    def meet(self, node: Node, nodes: Iterable[Node]) -> list[str]:
        """A sentence for each kind among these nodes that has not met the node's own before."""
        sentences = []
        for other in nodes:
            if not node.traits or not other.traits or _kind(node) == _kind(other):
                continue
            pair = frozenset((_kind(node), _kind(other)))
            if pair not in self._told and len(self._told) < MAX_PAIRS:
                self._told.add(pair)
                sentences.append(_sentence(node, other))
        return sentences


def _kind(node: Node) -> frozenset[tuple[str, str]]:
    return frozenset(node.traits.items())


def _sentence(node: Node, other: Node) -> str:
    unlike = "; ".join(_differences(node.traits, other.traits))
    return f"answers of nodes {node.name} and {other.name} may differ in bits, as the nodes differ in {unlike}"


def _differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """By trait, the words that only the one has, and those that only the other has."""
    pairs = {key: (one.get(key, "").split(), other.get(key, "").split()) for key in sorted({*one, *other})}
    return [
        f"{key} ({_words_without(ours, theirs)} / {_words_without(theirs, ours)})"
        for key, (ours, theirs) in pairs.items()
        if ours != theirs
    ]


def _words_without(words: Sequence[str], others: Sequence[str]) -> str:
    return " ".join(word for word in words if word not in others)[:MAX_WORDS_CHARS] or "-"
