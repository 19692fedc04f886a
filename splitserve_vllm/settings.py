"""Define the settings of a node with vLLM, from which its flags derive. vLLM's own flags follow `--`."""

from dataclasses import dataclass, field
from typing import Final

from serving_core.errors import SettingsError
from serving_core.flags import flag
from serving_node.link import LinkSettings

OWN_FLAGS: Final = ("--model", "--kv-transfer-config", "--kv-events-config", "--skip-tokenizer-init", "--tokenizer")
"""Flags of vLLM that the node sets itself."""

VLLM_ORDER: Final = "vllm"
OUR_ORDER: Final = "splitserve"
"""Orders of the values in a KV block that is sent."""


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """Settings of a node with vLLM."""

    model: str = flag("", "Folder with config.json and safetensors files.", positional=True)
    link: LinkSettings = field(default_factory=LinkSettings)
    max_num_queued: int = flag(1024, "Hold at most this many requests; further ones go to other nodes.", minimum=1)
    kv_bind: str = flag(
        "",
        "Listen for KV blocks at this endpoint: tcp://HOST:PORT or ipc://PATH. HOST may be an interface, PORT * for "
        "any free one: tcp://eth0:*. Default: within this machine.",
    )
    kv_order: str = flag(
        VLLM_ORDER,
        "Send KV blocks as vLLM has them (vllm), or, on CPUs, in the order of SplitServe's engine, with whose nodes "
        "this one then shares a fleet (splitserve).",
        choices=(VLLM_ORDER, OUR_ORDER),
    )
    kv_shared_memory: bool = flag(
        True, "Send KV blocks through shared memory to nodes of the same machine that allow it too."
    )
    transfer_timeout_s: float = flag(30.0, "Give a KV transfer this many seconds once it has started.", minimum=0.1)
    descriptor_timeout_s: float = flag(
        60.0, "Keep a prefilled prompt this many seconds for its transfer descriptor.", minimum=0.1
    )
    credit_timeout_s: float = flag(
        600.0, "Let a request wait this many seconds for blocks before other nodes are asked.", minimum=0.1
    )
    reservation_ttl_s: float = flag(
        600.0, "Keep reserved blocks at most this many seconds for their KV.", minimum=0.1, maximum=86400
    )
    step_timeout_s: float = flag(
        120.0, "Exit when vLLM, while it has requests, has given no result for this many seconds.", minimum=1.0
    )
    health_host: str = flag("127.0.0.1", "Serve gRPC's health service for probes at this address.")
    health_port: int = flag(
        -1,
        "Serve gRPC's health service for probes at this port; 0 takes a free one, -1 none.",
        minimum=-1,
        maximum=65535,
    )


def check_vllm_flags(flags: tuple[str, ...]) -> None:
    """Raise SettingsError if one of vLLM's flags is the node's to set."""
    for each in flags:
        name = each.partition("=")[0].replace("_", "-")
        if name in OWN_FLAGS:
            raise SettingsError(f"{name} is set by the node and cannot be among vLLM's flags")
