"""What a decode node can be told. The flags derive from these fields."""

from dataclasses import dataclass, field

from kv_transfer.endpoints import KV_TRANSPORTS
from protos.attach import LinkSettings
from serving_core.flags import flag
from serving_core.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class DecodeSettings:
    """Settings of one decode node."""

    engine: EngineSettings = field(default_factory=EngineSettings)
    link: LinkSettings = field(default_factory=LinkSettings)
    max_num_seqs: int = flag(64, "Most requests that hold blocks at a time: the credits.", minimum=1, maximum=1024)
    max_num_batched_tokens: int = flag(
        512, "Most tokens in one step; bounds the chunks of prompts computed here.", minimum=1
    )
    max_num_queued: int = flag(256, "Most reservations waiting for credit; more are refused.", minimum=1)
    kv_transport: str = flag("zmq", "What carries KV blocks; the same on all nodes.", choices=KV_TRANSPORTS)
    kv_bind: str = flag(
        "", "Endpoint of the data plane: tcp://HOST:PORT or ipc://PATH (zmq), dist://HOST:PORT (torch_dist)."
    )
    credit_timeout_s: float = flag(30.0, "Seconds a reservation waits for credit.", minimum=0.1)
    ticket_ttl_s: float = flag(
        600.0, "Most seconds a granted reservation waits for its KV blocks.", minimum=0.1, maximum=86400
    )
