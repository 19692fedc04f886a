"""What every node tells of itself: who it is, and how busy."""

import secrets
import time
from collections.abc import Mapping

import psutil

from engine.blocks import BlockAllocator
from engine.stepper import Stepper
from protos import inference_pb2
from protos.convert import PROTOCOL_VERSION


def new_incarnation() -> str:
    """The name of one life of a node process. Of two, that of the younger process sorts last."""
    return f"{time.time_ns():016x}-{secrets.token_hex(4)}"


def node_info(
    name: str, role: str, incarnation: str, fingerprint: Mapping[str, str], engine: Mapping[str, str]
) -> inference_pb2.NodeInfo:
    """`fingerprint` must be equal on all nodes of a fleet; `engine` describes what may differ."""
    return inference_pb2.NodeInfo(
        name=name,
        role=role,
        incarnation=incarnation,
        fingerprint={"protocol_version": PROTOCOL_VERSION, **fingerprint},
        engine=engine,
    )


def node_load(
    name: str, role: str, stepper: Stepper, allocator: BlockAllocator, *, draining: bool
) -> inference_pb2.NodeLoad:
    """The parts of a load report that do not depend on the role; the queue lengths are the caller's to fill in."""
    return inference_pb2.NodeLoad(
        name=name,
        role=role,
        state="draining" if draining else "ready",
        num_blocks=allocator.num_blocks,
        num_blocks_free=allocator.num_free,
        num_steps=stepper.num_steps,
        step_s=stepper.step_s,
        rss_bytes=psutil.Process().memory_info().rss,
    )
