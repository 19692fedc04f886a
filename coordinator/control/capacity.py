"""What the nodes that are there can be asked for. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from coordinator.control.registry import Registry
from coordinator.control.router import does
from serving_core.shapes import DECODE, PREFILL


@dataclass(frozen=True, slots=True)
class Capacity:
    """A pool is that of the largest node that reads prompts, or writes answers, with those that may hold annexes for
    it; None without any."""

    max_model_len: int | None
    prefill_pool_tokens: int | None
    decode_pool_tokens: int | None
    adapters: tuple[str, ...] | None  # None: no node has come that could tell
    own_pool_tokens: int | None = None  # of the largest pool of those that write, by itself


MAX_REMEMBERED: Final = 64  # capacities that a fleet had lately


class RecentCapacity:
    """What the fleet can be asked for, counting nodes that were there until a moment ago: they may come back while a
    request waits for them, and what is refused as too long is refused for good."""

    def __init__(self, registry: Registry, wait_s: float) -> None:
        """`wait_s`: how long requests wait for nodes."""
        self._registry = registry
        self._wait_s = wait_s
        self._seen_s: dict[Capacity, float] = {}  # when the fleet last had it, the latest at the end

    def note(self, now: float) -> None:
        """Remember the capacity of this moment. To be called some times a second."""
        there = capacity(self._registry)
        self._seen_s.pop(there, None)
        self._seen_s[there] = now
        while now - next(iter(self._seen_s.values())) > self._wait_s or len(self._seen_s) > MAX_REMEMBERED:
            del self._seen_s[next(iter(self._seen_s))]

    def at(self, now: float) -> Capacity:
        """Return the largest length and pools of late. What an answer gets that names no length is of those there."""
        there = capacity(self._registry)
        lately = [there, *(seen for seen, seen_s in self._seen_s.items() if now - seen_s <= self._wait_s)]
        return replace(
            there,
            max_model_len=_largest(seen.max_model_len for seen in lately),
            prefill_pool_tokens=_largest(seen.prefill_pool_tokens for seen in lately),
            decode_pool_tokens=_largest(seen.decode_pool_tokens for seen in lately),
        )


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def capacity(registry: Registry) -> Capacity:
    """At this moment."""
    prefill, decode = ([node for node in registry.nodes if does(node, role)] for role in (PREFILL, DECODE))
    if registry.embeds:
        decode = []
    lengths = [max(node.hello.max_model_len for node in nodes) for nodes in (prefill, decode) if nodes]
    return Capacity(
        max_model_len=min(lengths, default=None),
        prefill_pool_tokens=max((node.reach_tokens for node in prefill), default=None),
        decode_pool_tokens=max((node.reach_tokens for node in decode), default=None),
        own_pool_tokens=max((node.pool_tokens for node in decode), default=None),
        adapters=None if registry.adapters is None else tuple(registry.adapters),
    )
