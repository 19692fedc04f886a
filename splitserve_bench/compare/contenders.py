"""Define the contenders of a comparison: every way to use the given cores, and other servers by their URLs."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from serving_core.errors import SettingsError

COLOCATED, SPLIT, AUTO, CUSTOM, PEER = "colocated", "split", "auto", "custom", "peer"
KINDS: Final = (COLOCATED, SPLIT, AUTO, CUSTOM, PEER)
MAX_SPLITS: Final = 7
ALONE: Final = (("policy", "never"),)
TIMELY: Final = (("admission", "timely"),)
_SPLIT: Final = re.compile(r"([1-9]\d{0,2})P\+([1-9]\d{0,2})D", re.ASCII | re.IGNORECASE)
_NODES: Final = re.compile(r"([1-9]\d{0,2})([PDB])", re.ASCII | re.IGNORECASE)
_NAME: Final = re.compile(r"[\w.+-]+", re.ASCII)
_PEER: Final = re.compile(r"([\w.+-]+)=(https?://\S+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class ClusterContender:
    """A cluster of ours: its numbers of prefill, decode and mixed nodes, which share the cores evenly.

    `flags` of `splitserve up` are for this cluster alone.
    """

    name: str
    kind: str
    prefill: int
    decode: int
    mixed: int
    flags: tuple[tuple[str, Any], ...] = ()

    @property
    def num_nodes(self) -> int:
        """Return the number of all nodes."""
        return self.prefill + self.decode + self.mixed


@dataclass(frozen=True, slots=True)
class PeerContender:
    """Another server with OpenAI's completions API, which runs already, on whatever cores its owner gave it."""

    name: str
    address: str
    kind: str = PEER


Contender = ClusterContender | PeerContender


def contenders(
    num_cores: int,
    splits: Sequence[ClusterContender],
    peers: Sequence[PeerContender],
    customs: Sequence[ClusterContender] = (),
) -> list[Contender]:
    """Return the contenders of a comparison, in this order.

    - colocated clusters: one node of all cores, and one node a core
    - `splits`, or `splits_of(num_cores)` if empty
    - "auto": one node a core, all of which prefill and decode; the limits decide what each does, and what is refused
    - `customs`, then `peers`

    With one core there is one colocated cluster and no auto. Raises SettingsError when one has more nodes than there
    are cores, or two contenders have one name.
    """
    everyone: list[Contender] = [colocated(1, num_cores)]
    if num_cores > 1:
        everyone.append(colocated(num_cores, 1))
    everyone += list(dict.fromkeys(splits)) or splits_of(num_cores)
    if num_cores > 1:
        everyone.append(ClusterContender(f"auto {num_cores}x1", AUTO, 0, 0, num_cores, TIMELY))
    everyone += [*customs, *peers]
    for each in everyone:
        if isinstance(each, ClusterContender) and each.num_nodes > num_cores:
            raise SettingsError(f"{each.name} has more nodes than there are cores: {num_cores}")
    names = [each.name for each in everyone]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise SettingsError(f"two contenders have the name {twice}")
    return everyone


def colocated(num_nodes: int, cores_each: int) -> ClusterContender:
    """Return a cluster of mixed nodes of `cores_each` cores, each of which does all of a request itself."""
    return ClusterContender(f"colocated {num_nodes}x{cores_each}", COLOCATED, 0, 0, num_nodes, ALONE)


def split(prefill: int, decode: int) -> ClusterContender:
    """Return a cluster of so many prefill nodes and so many decode nodes."""
    return ClusterContender(f"split {prefill}P+{decode}D", SPLIT, prefill, decode, 0)


def splits_of(num_cores: int) -> list[ClusterContender]:
    """Return every split into prefill and decode nodes of one core each, fewest prefill nodes first.

    Of more than MAX_SPLITS, so many are returned, evenly spread.
    """
    prefills = list(range(1, num_cores))
    if len(prefills) > MAX_SPLITS:
        gap = (len(prefills) - 1) / (MAX_SPLITS - 1)
        prefills = [prefills[round(i * gap)] for i in range(MAX_SPLITS)]
    return [split(prefill, num_cores - prefill) for prefill in prefills]


def parse_split(text: str) -> ClusterContender:
    """Return the cluster that a text such as 1P+1D means. Raises ValueError for a text of another form."""
    match = _SPLIT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not of the form 1P+1D")
    return split(int(match[1]), int(match[2]))


def parse_custom(text: str, parse_flag: Callable[[str], tuple[str, Any]]) -> ClusterContender:
    """Return the cluster that `NAME=NODES FLAG=VALUE ...` means, with nodes such as 1P+1B and any number of flags.

    P is a prefill node, D a decode node, B a mixed one. `parse_flag` returns name and value of a flag. Raises
    ValueError for a text of another form or nodes that cannot serve, and what parse_flag raises.
    """
    first, *flags = text.split() or [""]
    name, _, nodes = first.partition("=")
    matches = [_NODES.fullmatch(part) for part in nodes.split("+")]
    counts = dict.fromkeys("PDB", 0)
    for match in matches:
        if match is not None:
            counts[match[2].upper()] += int(match[1])
    if not _NAME.fullmatch(name) or None in matches:
        raise ValueError(f"{text!r} is not of the form NAME=NODES FLAG=VALUE ..., such as sum=1P+1B policy=sum")
    if not (counts["P"] + counts["B"] and counts["D"] + counts["B"]):
        raise ValueError(f"{text!r} has no node for prefill, or none for decode")
    return ClusterContender(name, CUSTOM, counts["P"], counts["D"], counts["B"], tuple(map(parse_flag, flags)))


def parse_peer(text: str) -> PeerContender:
    """Return the server that NAME=URL means, with or without `/v1` at the end.

    Raises ValueError for a text of another form.
    """
    match = _PEER.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not of the form NAME=URL, such as vllm=http://127.0.0.1:8000")
    return PeerContender(f"peer {match[1]}", match[2].rstrip("/").removesuffix("/v1"))
