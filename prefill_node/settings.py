"""What a prefill node can be told. The flags derive from these fields."""

from dataclasses import dataclass, field

from engine.flags import flag
from engine.settings import EngineSettings
from protos.attach import LinkSettings


@dataclass(frozen=True, slots=True)
class PrefillSettings:
    """Settings of one prefill node."""

    engine: EngineSettings = field(default_factory=EngineSettings)
    link: LinkSettings = field(default_factory=LinkSettings)
    max_num_batched_tokens: int = flag(512, "Most prompt tokens in one step: the size of a chunk.", minimum=1)
    max_num_queued: int = flag(256, "Most requests waiting for prefill; more are refused.", minimum=1)
    transfer_timeout_s: float = flag(30.0, "Seconds one KV transfer may take once it has started.", minimum=0.1)
    ticket_timeout_s: float = flag(60.0, "Seconds a finished prompt waits for its ticket.", minimum=0.1)
