"""What a node can be told. The flags derive from these fields."""

import re
from dataclasses import dataclass, field, replace
from typing import Final

from kv_transfer.descriptor import KV_TRANSPORTS
from serving_core.errors import SettingsError
from serving_core.flags import flag
from serving_core.settings import QUANTIZATIONS, EngineSettings
from serving_core.shapes import BOTH, DECODE, PREFILL
from serving_node.link import LinkSettings

OFF: Final = "off"
DRAFT: Final = "draft"
SPECULATIONS: Final = (OFF, "lookup", DRAFT)
_ENDS_IN_PORT: Final = re.compile(r":\d+$", re.ASCII)
STEP_TOKENS: Final = {"cpu": 512, "cuda": 2048}
SLOTS: Final = {"cpu": 64, "cuda": 256}
"""What a node takes that is not told, by the kind of its device."""
PACKAGES: Final = {PREFILL: "prefill_node", DECODE: "decode_node", BOTH: "serving_node"}
"""What `python -m` starts a node as, by the role that it begins in."""


@dataclass(frozen=True, slots=True)
class TierSettings:
    """Where KV blocks go that the pool gives up."""

    kv_host_bytes: int = flag(
        0, "Host memory of each rank for KV blocks that its pool gives up, such as 8GiB; 0: none.", minimum=0
    )
    kv_disk_bytes: int = flag(
        0, "Size of a file of each rank for KV blocks that --kv-host-bytes has no room for; 0: none.", minimum=0
    )
    kv_disk_path: str = flag("", "Folder of that file; empty: the one for temporary files.")
    kv_read_back: str = flag(
        "measured",
        "When such blocks are read back: where that is faster than computing them, as measured, or always.",
        choices=("measured", "always"),
    )


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """The model that writes ahead with `--speculation draft`."""

    speculative_model: str = flag("", "Folder of a smaller model with the same tokens, for --speculation draft.")
    speculative_quantization: str = flag(
        "none", "Bits of its weights, made when they are loaded; none takes them as they are.", choices=QUANTIZATIONS
    )
    speculative_kv_cache_memory_bytes: int = flag(
        64 * 2**20, "Size of its own KV pool; answers that find no room there go without it.", minimum=1
    )


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """Settings of one node, whatever its role."""

    engine: EngineSettings = field(default_factory=EngineSettings)
    link: LinkSettings = field(default_factory=LinkSettings)
    tier: TierSettings = field(default_factory=TierSettings)
    drafting: DraftSettings = field(default_factory=DraftSettings)
    max_num_batched_tokens: int = flag(
        0,
        "Most tokens in one step; bounds the chunks of prompts, beside one token of each answer. 0: 512 with CPUs, "
        "2048 with CUDA.",
        minimum=0,
    )
    max_num_seqs: int = flag(
        0,
        "Most answers that hold blocks at a time: the credits. 0: 64 with CPUs, 256 with CUDA, and no more than tokens "
        "in a step.",
        minimum=0,
        maximum=1024,
    )
    max_num_queued: int = flag(
        1024,
        "Most prompts that wait to be read, and most that wait for credit; more go to other nodes, or ask again.",
        minimum=1,
    )
    speculation: str = flag(
        OFF,
        "Whether a step computes likely next tokens along: lookup takes them from the prompt and the answer so far, "
        "draft has a smaller model write them.",
        choices=SPECULATIONS,
    )
    num_speculative_tokens: int = flag(
        8, "Most tokens that a step computes behind an answer's next one.", minimum=1, maximum=32
    )
    kv_transport: str = flag("zmq", "What carries KV blocks; the same on all nodes.", choices=KV_TRANSPORTS)
    kv_bind: str = flag(
        "", "Endpoint of the data plane: tcp://HOST:PORT or ipc://PATH (zmq), dist://HOST:PORT (torch_dist)."
    )
    kv_shared_memory: bool = flag(
        True, "Send KV blocks through shared memory to nodes of this machine that do so too (zmq); else over --kv-bind."
    )
    kv_annexes: bool = flag(
        False, "Let requests that are longer than a node's pool have their oldest blocks in other nodes' pools."
    )
    overlap_min_tokens: int = flag(
        16, "Prompts with fewer tokens send their blocks at the end, not layer by layer.", minimum=0
    )
    transfer_timeout_s: float = flag(30.0, "Seconds one KV transfer may take once it has started.", minimum=0.1)
    descriptor_timeout_s: float = flag(60.0, "Seconds a finished prompt waits for its descriptor.", minimum=0.1)
    credit_timeout_s: float = flag(
        600.0, "Seconds a request waits for credit at one node, before others are asked.", minimum=0.1
    )
    stuck_exit_s: float = flag(
        60.0, "Seconds a node that is stuck in a step stays; then it exits, to be started again.", minimum=0.1
    )
    metrics_host: str = flag(
        "127.0.0.1", "Address of the node's own /metrics; off loopback everyone in reach can read its figures."
    )
    metrics_port: int = flag(-1, "Port of /metrics; 0 takes a free one, -1 none.", minimum=-1, maximum=65535)
    health_host: str = flag("127.0.0.1", "Address of the health port.")
    health_port: int = flag(
        -1,
        "Port of gRPC's health service alone, in the open and without a secret, for probes: services live and ready. 0 "
        "takes a free one, -1 none.",
        minimum=-1,
        maximum=65535,
    )
    reservation_ttl_s: float = flag(600.0, "Most seconds granted blocks wait for their KV.", minimum=0.1, maximum=86400)

    def check(self) -> None:
        """Raises SettingsError for what does not go together, whatever the role and the device."""
        if (self.tier.kv_host_bytes or self.tier.kv_disk_bytes) and not self.engine.enable_prefix_caching:
            raise SettingsError(
                "--kv-host-bytes and --kv-disk-bytes keep what --enable-prefix-caching finds, which is off"
            )
        if not _ENDS_IN_PORT.search(self.link.coordinator):
            raise SettingsError(f"--coordinator {self.link.coordinator} has no port: it must be HOST:PORT")
        if self.tier.kv_disk_path and not self.tier.kv_disk_bytes:
            raise SettingsError("--kv-disk-path is the folder of a file whose size is --kv-disk-bytes, and that is 0")
        if self.engine.weights_disk_path and not self.engine.weights_memory_bytes:
            raise SettingsError("--weights-disk-path is for what --weights-memory-bytes leaves on disk, and that is 0")

    def resolved(self, role: str, device: str) -> "NodeSettings":
        """With the sizes that were left to the device, one of this kind, `cpu` or `cuda`. Raises SettingsError for what
        does not go together."""
        self.check()
        num_tokens = self.max_num_batched_tokens or STEP_TOKENS[device]
        num_seqs = self.max_num_seqs or min(SLOTS[device], num_tokens)
        if role != PREFILL and num_tokens < num_seqs:
            raise SettingsError(
                f"max_num_batched_tokens ({num_tokens}) must be at least "
                f"max_num_seqs ({num_seqs}): every running request takes one token a step"
            )
        return replace(self, max_num_batched_tokens=num_tokens, max_num_seqs=num_seqs)
