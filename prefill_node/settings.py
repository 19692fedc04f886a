"""What a prefill node can be told. The flags derive from these fields."""

from dataclasses import dataclass, field

from kv_transfer.endpoints import KV_TRANSPORTS
from protos.attach import LinkSettings
from serving_core.flags import flag
from serving_core.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class PrefillSettings:
    """Settings of one prefill node."""

    engine: EngineSettings = field(default_factory=EngineSettings)
    link: LinkSettings = field(default_factory=LinkSettings)
    max_num_batched_tokens: int = flag(512, "Most prompt tokens in one step: the size of a chunk.", minimum=1)
    max_num_queued: int = flag(256, "Most requests waiting for prefill; more are refused.", minimum=1)
    kv_transport: str = flag("zmq", "What carries KV blocks; the same on all nodes.", choices=KV_TRANSPORTS)
    overlap_min_tokens: int = flag(
        16, "Prompts with fewer tokens send their blocks at the end, not layer by layer.", minimum=0
    )
    transfer_timeout_s: float = flag(30.0, "Seconds one KV transfer may take once it has started.", minimum=0.1)
    ticket_timeout_s: float = flag(60.0, "Seconds a finished prompt waits for its ticket.", minimum=0.1)
