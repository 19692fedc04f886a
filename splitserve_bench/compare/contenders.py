"""Who takes part: every way to use the given cores, and other servers by URL."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from serving_core.errors import SettingsError

COLOCATED, SPLIT, AUTO, PEER = "colocated", "split", "auto", "peer"
KINDS: Final = (COLOCATED, SPLIT, AUTO, PEER)
MOST_SPLITS: Final = 7
_SPLIT: Final = re.compile(r"([1-9]\d{0,2})P\+([1-9]\d{0,2})D", re.ASCII | re.IGNORECASE)
_PEER: Final = re.compile(r"([\w.+-]+)=(https?://\S+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Split:
    """So many prefill nodes and so many decode nodes."""

    prefill: int
    decode: int

    def __str__(self) -> str:
        return f"{self.prefill}P+{self.decode}D"


@dataclass(frozen=True, slots=True)
class ClusterContender:
    """A cluster of ours. Its nodes share the cores evenly."""

    name: str
    kind: str
    prefill: int
    decode: int
    both: int


@dataclass(frozen=True, slots=True)
class PeerContender:
    """A server that speaks OpenAI's completions API and runs already, on as many cores as its owner gave it."""

    name: str
    address: str
    kind: str = PEER


Contender = ClusterContender | PeerContender


def contenders(num_cores: int, splits: Sequence[Split], peers: Sequence[PeerContender]) -> list[Contender]:
    """Colocated clusters, these splits or else `splits_of(num_cores)`, the same with decode nodes that read too (auto),
    then the peers.

    Raises SettingsError when a split has more nodes than there are cores, or two contenders have one name.
    """
    for split in splits:
        if split.prefill + split.decode > num_cores:
            raise SettingsError(f"--splits {split} has more nodes than there are cores: {num_cores}")
    chosen = list(dict.fromkeys(splits)) or splits_of(num_cores)
    everyone: list[Contender] = [colocated(1, num_cores)]
    if num_cores > 1:
        everyone.append(colocated(num_cores, 1))
    everyone += [ClusterContender(f"split {split}", SPLIT, split.prefill, split.decode, 0) for split in chosen]
    everyone += [ClusterContender(f"auto {split}", AUTO, split.prefill, 0, split.decode) for split in chosen]
    everyone += peers
    if len({each.name for each in everyone}) < len(everyone):
        raise SettingsError("two peers have the same name")
    return everyone


def colocated(num_nodes: int, cores_each: int) -> ClusterContender:
    """Nodes that do both."""
    return ClusterContender(f"colocated {num_nodes}x{cores_each}", COLOCATED, 0, 0, num_nodes)


def splits_of(num_cores: int) -> list[Split]:
    """Every split into nodes of one core each, fewest prefill nodes first; of many, MOST_SPLITS evenly spread."""
    prefills = list(range(1, num_cores))
    if len(prefills) > MOST_SPLITS:
        gap = (len(prefills) - 1) / (MOST_SPLITS - 1)
        prefills = [prefills[round(i * gap)] for i in range(MOST_SPLITS)]
    return [Split(prefill, num_cores - prefill) for prefill in prefills]


def parse_split(text: str) -> Split:
    """Such as 1P+1D. Raises ValueError."""
    match = _SPLIT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not of the form 1P+1D")
    return Split(int(match[1]), int(match[2]))


def parse_peer(text: str) -> PeerContender:
    """NAME=URL; a `/v1` at the URL's end may be there or not. Raises ValueError."""
    match = _PEER.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not of the form NAME=URL, such as vllm=http://127.0.0.1:8000")
    return PeerContender(f"peer {match[1]}", match[2].rstrip("/").removesuffix("/v1"))
