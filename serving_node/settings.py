"""Define the settings of a node, from which its flags derive."""

import os
import re
from dataclasses import dataclass, field, replace
from typing import Final

from kv_transfer.descriptor import KV_TRANSPORTS, endpoint_of, host_of
from serving_core.errors import SettingsError
from serving_core.flags import flag
from serving_core.net.ports import Port, check_exposure, check_ports, is_loopback
from serving_core.net.tls import CLIENT, TlsError, check_open, check_purpose
from serving_core.settings import QUANTIZATIONS, EngineSettings
from serving_core.shapes import DECODE, MIXED, PREFILL
from serving_node.link import LinkSettings
from serving_node.ranks.processes import is_first_here, started_rank

OFF: Final = "off"
DRAFT: Final = "draft"
SPECULATIONS: Final = (OFF, "lookup", DRAFT)
_ENDS_IN_PORT: Final = re.compile(r":\d+$", re.ASCII)
STEP_TOKENS: Final = {"cpu": 512, "cuda": 2048}
SLOTS: Final = {"cpu": 64, "cuda": 256}
"""Defaults by the type of the device."""
PACKAGES: Final = {PREFILL: "prefill_node", DECODE: "decode_node", MIXED: "serving_node"}
"""The package that `python -m` runs, by the initial role."""


@dataclass(frozen=True, slots=True)
class TierSettings:
    """Settings of KV offload."""

    kv_host_bytes: int = flag(
        0,
        "Keep evicted KV blocks in this much host memory of each rank, such as 8GiB (KV offload); 0: none.",
        minimum=0,
    )
    kv_disk_bytes: int = flag(
        0,
        "Keep evicted KV blocks for which --kv-host-bytes has no room in a file of this size for each rank; 0: none.",
        minimum=0,
    )
    kv_disk_path: str = flag(
        "", "Put the file of --kv-disk-bytes into this folder; default: the folder for temporary files."
    )
    kv_read_back: str = flag(
        "measured",
        "Read offloaded blocks back where that is faster than computing them (measured), or always.",
        choices=("measured", "always"),
    )


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """Settings of the draft model of `--speculation draft`."""

    speculative_model: str = flag(
        "",
        "Take draft tokens from the model in this folder, smaller and with the same vocabulary, with "
        "--speculation draft.",
    )
    speculative_quantization: str = flag(
        "none",
        "Quantize the draft model's weights to these bits at load; none keeps them as they are.",
        choices=QUANTIZATIONS,
    )
    speculative_kv_cache_memory_bytes: int = flag(
        64 * 2**20,
        "Give the draft model a KV pool of this size; sequences without room there get no draft tokens.",
        minimum=1,
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
        "Compute at most this many tokens in a step: one for each running sequence, the rest for "
        "prompts; 0: 512 on CPUs, 2048 on CUDA.",
        minimum=0,
    )
    max_num_seqs: int = flag(
        0,
        "Let at most this many sequences hold blocks at a time (running slots); 0: 64 on CPUs, 256 on "
        "CUDA, and at most --max-num-batched-tokens.",
        minimum=0,
        maximum=1024,
    )
    max_num_queued: int = flag(
        1024,
        "Queue at most this many prompts for prefill, and as many requests for credit; further ones go "
        "to other nodes or are retried.",
        minimum=1,
    )
    speculation: str = flag(
        OFF,
        "Verify draft tokens in decode steps: from prompt and output (lookup), or from a smaller model (draft).",
        choices=SPECULATIONS,
    )
    num_speculative_tokens: int = flag(
        8, "Verify at most this many draft tokens of a sequence in a step.", minimum=1, maximum=32
    )
    kv_transport: str = flag(
        "zmq", "Send KV blocks by this transport, which is the same on all nodes.", choices=KV_TRANSPORTS
    )
    kv_bind: str = flag(
        "",
        "Listen for KV blocks at this endpoint: tcp://HOST:PORT or ipc://PATH (zmq), dist://HOST:PORT (torch_dist). "
        "HOST may be an interface, PORT * for any free one: tcp://eth0:*. Default: within this machine.",
    )
    kv_shared_memory: bool = flag(
        True,
        "Send KV blocks through shared memory to nodes of this machine that allow it too (zmq); "
        "otherwise over --kv-bind.",
    )
    distributed_kv: bool = flag(
        False,
        "Keep the oldest blocks of requests that are longer than a node's pool in other nodes' pools (distributed KV).",
    )
    overlap_min_tokens: int = flag(
        16,
        "Send KV blocks layer by layer from prompts of this many tokens on; those of shorter ones leave at the end.",
        minimum=0,
    )
    transfer_timeout_s: float = flag(30.0, "Give a KV transfer this many seconds once it has started.", minimum=0.1)
    descriptor_timeout_s: float = flag(
        60.0, "Keep a prefilled prompt this many seconds for its transfer descriptor.", minimum=0.1
    )
    credit_timeout_s: float = flag(
        600.0, "Let a request wait this many seconds for credit at one node before other nodes are asked.", minimum=0.1
    )
    stuck_exit_s: float = flag(
        60.0, "Exit, to be restarted, this many seconds after the node has found its step stuck.", minimum=0.1
    )
    metrics_host: str = flag(
        "127.0.0.1", "Serve the node's own /metrics at this address; off loopback, everyone in reach can read them."
    )
    metrics_port: int = flag(
        -1, "Serve the node's own /metrics at this port; 0 takes a free one, -1 none.", minimum=-1, maximum=65535
    )
    health_host: str = flag("127.0.0.1", "Serve gRPC's health service for probes at this address.")
    health_port: int = flag(
        -1,
        "Serve gRPC's health service for probes, services live and ready, at this port, without TLS or "
        "secret; 0 takes a free one, -1 none.",
        minimum=-1,
        maximum=65535,
    )
    reservation_ttl_s: float = flag(
        600.0, "Keep reserved blocks at most this many seconds for their KV.", minimum=0.1, maximum=86400
    )

    def check(self) -> None:
        """Raise SettingsError for settings that conflict, whatever the role and the device."""
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
        """Return a copy of the settings in which max_num_batched_tokens and max_num_seqs are set.

        `device` is `cpu` or `cuda`, on which the defaults depend. Raises SettingsError for settings that conflict, for
        a node that begins in this role.
        """
        self.check()
        num_tokens = self.max_num_batched_tokens or STEP_TOKENS[device]
        num_seqs = self.max_num_seqs or min(SLOTS[device], num_tokens)
        if role != PREFILL and num_tokens < num_seqs:
            raise SettingsError(
                f"max_num_batched_tokens ({num_tokens}) must be at least "
                f"max_num_seqs ({num_seqs}): every running request takes one token a step"
            )
        return replace(self, max_num_batched_tokens=num_tokens, max_num_seqs=num_seqs)


def check_network(settings: NodeSettings) -> None:
    """Raise SettingsError for unusable TLS files, ports in use, or unprotected exposure.

    Unprotected means in reach of other machines without a secret, or without TLS where TLS is set; metrics are exempt.
    """
    link, tls = settings.link, settings.link.tls
    if (tls.tls_cert or tls.tls_key) and not tls.tls_ca:
        raise TlsError("--tls-cert and --tls-key need --tls-ca, by which the coordinator's certificate is checked")
    check_purpose(tls.files, CLIENT)
    host = host_of(endpoint_of(settings.kv_transport, settings.kv_bind, 0))
    if host is not None:
        check_exposure(host, "fleet_secret", link.fleet_secret)
        if settings.kv_transport != "zmq":
            check_open(f"--kv-transport {settings.kv_transport}", host, tls)
    if settings.distributed_kv and is_encrypted(settings):
        raise SettingsError("--distributed-kv: remote KV travels in the open, and --tls-ca asks for TLS off loopback")
    check_ports(_ports(settings))
    if settings.engine.num_ranks > 1 and started_rank() is not None:
        check_open("what ranks say to each other", os.environ.get("MASTER_ADDR", "localhost"), tls)


def _ports(settings: NodeSettings) -> list[Port]:
    """Return the ports on which this process listens beside the data plane."""
    health = Port("--health-port", settings.health_host, settings.health_port)
    metrics = Port("--metrics-port", settings.metrics_host, settings.metrics_port)
    return [*([health] if is_first_here() else []), *([] if started_rank() else [metrics])]


def is_encrypted(settings: NodeSettings) -> bool:
    """Return whether KV arrives encrypted here: the node uses TLS and other machines can reach its data plane."""
    host = host_of(endpoint_of(settings.kv_transport, settings.kv_bind, 0))
    return bool(settings.link.tls.tls_ca) and host is not None and not is_loopback(host)
