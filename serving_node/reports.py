"""Describe a node to the coordinator: identity and memory."""

import secrets
from collections.abc import Mapping, Sequence

from engine.engine import Engine
from protos import inference_pb2
from protos.convert import PROTOCOL_VERSION
from serving_core.process.memory import resident_bytes
from serving_node.ranks.leading import Followers


def new_incarnation() -> str:
    """Return a random id for one run of a node process."""
    return secrets.token_hex(16)


def node_info(
    name: str, role: str, incarnation: str, fingerprint: Mapping[str, str], engine: Engine
) -> inference_pb2.NodeInfo:
    """Return the identity of a node.

    `fingerprint` must be equal on all nodes of a fleet; the engine's description and traits may differ.
    """
    return inference_pb2.NodeInfo(
        name=name,
        role=role,
        incarnation=incarnation,
        fingerprint={"protocol_version": PROTOCOL_VERSION, **fingerprint},
        engine=engine.description,
        traits=engine.numerics_facts,
    )


def rank_load(*engines: Engine) -> inference_pb2.RankLoad:
    """Return the memory use of this process; the first engine is the node's own."""
    return inference_pb2.RankLoad(
        rank=engines[0].group.rank,
        rss_bytes=resident_bytes(),
        kv_pool_bytes=sum(engine.kv_pool_bytes for engine in engines),
        weight_bytes=sum(engine.weight_bytes for engine in engines),
    )


def rank_loads(engines: Sequence[Engine], followers: Followers) -> list[inference_pb2.RankLoad]:
    """Return the memory use of every rank of the node, by rank; `engines` are those of rank 0."""
    return [rank_load(*engines), *(followers.loads[rank] for rank in sorted(followers.loads))]
