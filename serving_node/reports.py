"""What every node tells of itself: who it is, and how busy."""

import secrets
from collections.abc import Mapping, Sequence

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


def rank_load(*engines: Engine) -> inference_pb2.RankLoad:
    """The memory that this process takes, whose first engine is the node's."""
    return inference_pb2.RankLoad(
        rank=engines[0].group.rank,
        rss_bytes=resident_bytes(),
        kv_pool_bytes=sum(engine.kv_pool_bytes for engine in engines),
        weight_bytes=sum(engine.weight_bytes for engine in engines),
    )


def rank_loads(engines: Sequence[Engine], followers: Followers) -> list[inference_pb2.RankLoad]:
    """The memory of every rank of the node, by rank; rank 0 has these engines."""
    return [rank_load(*engines), *(followers.loads[rank] for rank in sorted(followers.loads))]
