"""What the nodes that are there can be asked for. Pure."""

from dataclasses import dataclass

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
