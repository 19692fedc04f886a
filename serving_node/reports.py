"""What every node tells of itself: who it is, and how busy."""

import secrets
from collections.abc import Mapping

from engine.engine import Engine
from protos import inference_pb2
from protos.convert import PROTOCOL_VERSION
from serving_core.memory import resident_bytes
from serving_node.ranks.leading import Followers


def new_incarnation() -> str:
    """The name of one life of a node process."""
    return secrets.token_hex(16)


def node_info(
    name: str, role: str, incarnation: str, fingerprint: Mapping[str, str], engine: Engine
) -> inference_pb2.NodeInfo:
    """`fingerprint` must be equal on all nodes of a fleet; what the engine says of itself may differ."""
    return inference_pb2.NodeInfo(
        name=name,
        role=role,
        incarnation=incarnation,
        fingerprint={"protocol_version": PROTOCOL_VERSION, **fingerprint},
        engine=engine.description,
        traits=engine.traits,
    )


def rank_load(engine: Engine) -> inference_pb2.RankLoad:
    """The memory that this process takes."""
    return inference_pb2.RankLoad(
        rank=engine.group.rank,
        rss_bytes=resident_bytes(),
        kv_pool_bytes=engine.kv_pool_bytes,
        weight_bytes=engine.weight_bytes,
    )


def rank_loads(engine: Engine, followers: Followers) -> list[inference_pb2.RankLoad]:
    """The memory of every rank of the node, by rank."""
    return [rank_load(engine), *(followers.loads[rank] for rank in sorted(followers.loads))]
